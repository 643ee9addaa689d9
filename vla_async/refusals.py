"""What is said to somebody whose command line or configuration is wrong: the key, its value, and the choices."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from vla_async.commands import COMMANDS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_SECTIONS = ("trainer", "model", "env")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true, false", "str": "a text", "Sequence": "a list"}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ELSEWHERE = {"seed_everything": "trainer.seed", "data": "env", "policy": "model", "trainer.logger": "trainer.loggers"}


class ConfigError(ValueError):
    """A command line or a configuration that cannot be carried out. The message is for the user."""


def check_command_line(args: Sequence[str]) -> None:
    """Refuse what can be seen without importing anything that takes time.

    Raises:
        ConfigError: for a subcommand that is missing or unknown, or a configuration file that is missing or no YAML mapping.
    """
    if not args:
        raise ConfigError(
            f"no subcommand; choose {_listed(COMMANDS)}, for example: vla-async fit --config recipes/toy_ppo.yaml"
        )
    if args[0] not in COMMANDS:
        if args[0].startswith("-"):
            raise ConfigError(f"the subcommand comes first ({_listed(COMMANDS)}), and {args[0]} after it")
        raise ConfigError(f"there is no subcommand {args[0]!r}{_closest(args[0], COMMANDS)}; choose {_listed(COMMANDS)}")
    for position, arg in enumerate(args):
        name, is_joined, value = arg.partition("=")
        if name in ("-c", "--config"):
            if not is_joined and position + 1 == len(args):
                raise ConfigError(f"{name} needs a file")
            _check_config_file(Path(value if is_joined else args[position + 1]))


def _check_config_file(path: Path) -> None:
    import yaml

    if not path.is_file():
        there = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError(
            f"--config {path}: there is no such file{_closest(str(path), there)}{_choices('files there', there)}"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold the sections {_listed(_SECTIONS, 'and')}, but is {content!r:.60}")
    for section in _SECTIONS:
        if not isinstance(content.get(section, {}), (dict, str)):
            value = yaml.safe_dump(content[section]).splitlines()[0]
            raise ConfigError(f"--config {path}: {section}={value} must hold settings; fill the section or leave it out")


def explain(message: str, parser: ArgumentParser) -> str:
    """Turn what jsonargparse reports, a tree of all types that it tried, into the one problem and its remedy.

    Args:
        message: the report.
        parser: the parser of the subcommand, which knows the settings.

    Returns:
        The explanation, or the report itself where it is of no known kind.
    """
    if found := re.search(r"unrecognized arguments: (.+)", message):
        name = re.split(r"[\s=]", found[1])[0]
        return _unknown_key(name[2:].rstrip("+"), parser) if name.startswith("--") else f"nothing is expected at {name!r}"
    if found := re.search(r"does not accept option '([^']+)'", message):
        return _unknown_key(found[1], parser)
    leaves = _leaves(message)
    for explained in (_unknown_setting, _missing_setting, _unknown_class, _wrong_value):
        for leaf in leaves:
            if text := explained(leaf):
                return text
    others = [f"{leaf.key}: {leaf.text}" for leaf in leaves if leaf.key and not leaf.text.startswith("Expected a ")]
    return "\n".join(others) or message


def check_nulls(key: str, section: Any) -> None:
    """Refuse null where a class's setting must have a value; jsonargparse lets that pass.

    Args:
        key: where ``section`` stands in the configuration.
        section: a value of the configuration: a mapping with class_path and init_args, or a list of them, or a plain value.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(section, list):
        for item in section:
            check_nulls(key, item)
    if not hasattr(section, "init_args"):
        return
    parameters = inspect.signature(_imported(section.class_path)).parameters
    for name, value in vars(section.init_args).items():
        kind = str(parameters[name].annotation) if name in parameters else "Any"
        if value is None and not any(word in kind for word in ("None", "Optional", "Any", "empty")):
            choices = _choices_of(kind, _imported(section.class_path))
            raise ConfigError(f"{key}.{name}=null must be {_listed(choices) if choices else _KINDS.get(kind, kind)}")
        check_nulls(f"{key}.{name}", value)


def _choices_of(kind: str, owner: type) -> list[str]:
    """The choices of an annotation that is a Literal, or the name of one where a class, or one it derives from, stands."""
    if "Literal[" in kind:
        return re.findall(r"'([^']+)'", kind)
    meant = (getattr(sys.modules[base.__module__], kind, None) for base in owner.__mro__)
    return next(([str(choice) for choice in get_args(alias)] for alias in meant if get_origin(alias) is Literal), [])


@dataclass
class _Leaf:
    """One line of the report that says what is wrong, and where in the tree it stands."""

    text: str
    key: str
    class_path: str | None
    types: str
    siblings: list[str] = field(default_factory=list)
    given: str | None = None


def _leaves(message: str) -> list[_Leaf]:
    """The problems that the report names, the outermost first."""
    where: list[tuple[int, str, str]] = []  # (indentation, kind, value) of the branches that lead to the line
    leaves: list[_Leaf] = []
    for line in filter(str.strip, message.splitlines()):
        text = line.strip().removeprefix("- ")
        indent = len(line) - len(line.lstrip()) + (2 if line.strip().startswith("- ") else 0)
        kind, value = _branch(text)
        # a line is inside the branches that are indented less; a list of types belongs to its whole block
        where = [
            entry for entry in where if entry[0] < indent or (entry[1] == "types" and entry[0] == indent and kind != "types")
        ]
        if kind == "given":
            for leaf in leaves:
                leaf.given = leaf.given or value
        elif kind in ("key", "class", "types"):
            where.append((indent, kind, value))
        rest = value if kind == "leaf" else text.partition('": ')[2] if kind == "key" else ""
        if rest:
            keys = [position for position, entry in enumerate(where) if entry[1] == "key"]
            last = {kind: value for _, kind, value in where[keys[-1] if keys else 0 :]}
            key = ".".join(where[position][2] for position in keys)
            leaves.append(_Leaf(rest, key, last.get("class"), last.get("types", "")))
    for leaf in leaves:
        leaf.siblings = [other.text for other in leaves if other.key == leaf.key]
    return leaves


def _branch(text: str) -> tuple[str, str]:
    """What a line of the report is: a kind and its value."""
    patterns = {
        "key": r'Parser key "([^"]+)":',
        "class": r"Problem with given class_path '([^']+)'",
        "types": r"Subtypes: \[(.+)\]",
        "given": r"Given value: (.*)",
        "skip": r"(Does not validate|Errors:$|Given value type|Expected a path but|Expected a <class 'NoneType'>|$)",
    }
    for kind, pattern in patterns.items():
        if found := re.match(pattern, text):
            return kind, found[1]
    return "leaf", text


def _unknown_key(key: str, parser: ArgumentParser) -> str:
    known = [action.dest for action in parser._actions if not action.dest.endswith("help")]
    section, _, name = key.partition(".")
    for name_elsewhere in (key, section):
        if name_elsewhere in _ELSEWHERE:
            return f"{name_elsewhere} is no setting here; use {_ELSEWHERE[name_elsewhere]}"
    if section not in _SECTIONS or not name:
        roots = list(dict.fromkeys(dest.partition(".")[0] for dest in known))
        return f"there is no {section!r} here{_closest(section, roots)}{_choices('choices', roots)}"
    names = [dest.partition(".")[2] for dest in known if dest.startswith(f"{section}.")]
    return f"{key} is no setting{_closest(name, names, prefix=section)}{_choices(f'settings of {section}', names)}"


def _unknown_setting(leaf: _Leaf) -> str | None:
    found = re.match(r"Option '([^']+)' is not accepted", leaf.text)
    if not found or leaf.class_path is None:
        return None
    owner = leaf.class_path.rpartition(".")[2]
    names = _settings(_imported(leaf.class_path))
    text = f"{leaf.key}.{found[1]} is no setting of {owner}{_closest(found[1], names, prefix=leaf.key)}"
    return text + _choices(f"settings of {owner}", names)


def _settings(owner: type) -> list[str]:
    """The names that a class's ``__init__`` takes, its own first, then those that it passes on as ``**options``."""
    names: list[str] = []
    for base in owner.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(dict.fromkeys(names))


def _missing_setting(leaf: _Leaf) -> str | None:
    found = re.match(r"the following arguments are required: (.+)", leaf.text)
    return f"{leaf.key} needs {found[1]}, which has no default; set {leaf.key}.{found[1].split(', ')[0]}" if found else None


def _unknown_class(leaf: _Leaf) -> str | None:
    patterns = {
        r"Expected a dot import path string: (.+)": "is no class that is known here",
        r"module '\S+' has no attribute '(\S+)'": "does not exist",
        r"No module named '(\S+)'": "cannot be imported",
        r"Import path (\S+) does not correspond to a subclass": "is no {base}",
        r"Expected an instantiatable class, but (\S+) is abstract": "is abstract",
    }
    for pattern, problem in patterns.items():
        if found := re.match(pattern, leaf.text):
            name = leaf.class_path or found[1]
            kinds = re.findall(r"[\w.]+\.[A-Z]\w+", leaf.types)
            loop = re.search(r"(\w+)_loop$", leaf.key)
            names = subclass_names(_imported(kinds[0]), loop[1] if loop else None) if kinds else []
            text = f"{leaf.key}: {name} {problem.format(base=kinds[0].rpartition('.')[2] if kinds else 'such class')}"
            remedy = _closest(name.rpartition(".")[2], names) + _choices("choices", names)
            return text + remedy + (" (or the class_path of your own)" if names else "")
    return None


def _wrong_value(leaf: _Leaf) -> str | None:
    if found := re.match(r"Not a valid subclass of (\w+)", leaf.text):
        return f"{leaf.key}={leaf.given} must hold settings of {found[1]}, or class_path and init_args"
    if not (found := re.match(r"Expected a (.+?)(?:\. Got value: (.*))?$", leaf.text)):
        return None
    expected = [kind[1] for text in leaf.siblings if (kind := re.match(r"Expected a (.+?)(?:\. Got value: .*)?$", text))]
    choices = [choice for kind in expected if "Literal" in kind for choice in re.findall(r"'([^']+)'", kind)]
    types = [re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind) for kind in expected if "Literal" not in kind]
    wanted = [*(_KINDS.get(kind, kind) for kind in dict.fromkeys(types)), *choices, *["null"] * ("NoneType" in leaf.types)]
    value = found[2] if found[2] is not None else leaf.given
    return f"{leaf.key}={value} must be {_listed(wanted)}{_closest(str(value), choices)}"


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def subclass_names(base: type, stage: str | None = None) -> list[str]:
    """Names of the importable classes that can stand for ``base``; of loops, those for ``stage`` if one is given."""
    found: list[str] = []
    subclasses: list[type] = base.__subclasses__()
    for derived in subclasses:
        fits = stage is None or getattr(derived, "stage", stage) == stage
        if fits and not inspect.isabstract(derived) and not derived.__name__.startswith("_"):
            found.append(derived.__name__)
        found += subclass_names(derived, stage)
    return sorted(dict.fromkeys(found))


def _closest(name: str, choices: Sequence[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name, choices, n=5)
    # of equally close ones the one that begins alike: few mistype the first letter
    best = max(found, key=lambda it: (difflib.SequenceMatcher(None, it, name).ratio(), it[:1] == name[:1]), default=None)
    return f"; did you mean {prefix}{'.' if prefix else ''}{best}?" if best else ""


def _choices(what: str, names: Sequence[str]) -> str:
    return f"\n  {what}: {', '.join(names)}" if names else ""


def _listed(names: Iterable[str], word: str = "or") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last
