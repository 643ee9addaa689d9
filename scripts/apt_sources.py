"""Where apt gets Debian from on this machine, and a source for the release's backports on the same mirror."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Archive:
    """Debian's main archive as apt is configured here.

    Attributes:
        mirror: its address.
        codename: of the release, for example ``bookworm``.
        sources_file: the file that names the mirror.
        has_backports: whether the release's backports are configured too.
    """

    mirror: str
    codename: str
    sources_file: Path
    has_backports: bool

    @property
    def backports(self) -> str:
        """The suite of the release's backports."""
        return f"{self.codename}-backports"


def stanzas(text: str) -> list[dict[str, str]]:
    """The stanzas of a deb822 text, without comments; a continued value keeps its line breaks."""
    found: list[dict[str, str]] = []
    for block in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields:
            found.append(fields)
    return found


def main_archive(index_targets: str) -> Archive | None:
    """Read what ``apt-get indextargets`` prints; None unless a released Debian's main archive is configured."""
    targets = [target for target in stanzas(index_targets) if target.get("Created-By") == "Packages"]
    codenames = {target.get("Codename", "") for target in targets}
    for target in targets:
        codename = target.get("Codename", "")
        is_main = (target.get("Origin"), target.get("Label"), target.get("Component")) == ("Debian", "Debian", "main")
        if is_main and codename.isalpha() and codename != "sid":
            file = Path(target["Sourcesentry"].rpartition(":")[0])
            return Archive(target["Repo-URI"], codename, file, f"{codename}-backports" in codenames)
    return None


def signed_by(sources: str, mirror: str) -> str | None:
    """The keyring (or the key itself) that a sources text names for a mirror; None if it names none.

    Args:
        sources: in apt's deb822 form, or with one source per line.
        mirror: the mirror's address.
    """
    address = mirror.rstrip("/")
    for stanza in stanzas(sources):
        if address in (uri.rstrip("/") for uri in stanza.get("URIs", "").split()):
            return stanza.get("Signed-By")
    for line in sources.splitlines():
        match = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)", line.strip())
        if match and match[2].rstrip("/") == address:
            option = re.search(r"signed-by=(\S+)", match[1] or "")
            return option[1] if option else None
    return None


def backports_source(archive: Archive, sources: str) -> str:
    """The text of a ``.sources`` file for the release's backports.

    Args:
        archive: the main archive.
        sources: the text of ``archive.sources_file``.
    """
    lines = ["Types: deb", f"URIs: {archive.mirror}", f"Suites: {archive.backports}", "Components: main"]
    keyring = signed_by(sources, archive.mirror)
    if keyring:
        lines.append(f"Signed-By: {keyring}" if not keyring.startswith("\n") else f"Signed-By:{keyring}")
    return "\n".join(lines) + "\n"
