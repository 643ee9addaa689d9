"""``write_report``: one HTML file about one or several runs, with all that it needs inside."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from vla_async import __version__
from vla_async.monitor import metric_table as m
from vla_async.report.chart_table import SECTIONS
from vla_async.report.charts import COLOURS, Card, ChartData, cards
from vla_async.report.columns import SampledRun, sampled
from vla_async.report.differences import SettingRow, setting_rows
from vla_async.report.findings import Finding, find
from vla_async.report.gantt import update_card
from vla_async.report.media import gallery
from vla_async.report.run_data import RunData
from vla_async.report.summary import Figure, TaskRow, key_figures, task_rows

MAX_RUNS = COLOURS
MAX_VIDEO_BYTES = 20e6


@dataclass(frozen=True)
class RunPart:
    """What the page says of one run beside its charts."""

    label: str
    path: Path
    began: str
    command: str
    config_text: str
    figures: list[Figure]
    findings: list[Finding]
    tasks: list[TaskRow]
    notes: list[str]


@dataclass(frozen=True)
class SectionPart:
    """A section of charts; ``missing`` are the titles of those for which nothing was logged."""

    anchor: str
    title: str
    about: str
    cards: list[Card]
    missing: list[str]


def write_report(runs: Sequence[RunData], output: Path, max_video_bytes: float = MAX_VIDEO_BYTES) -> Path:
    """Write the report; an existing one is replaced only by a complete one.

    Args:
        runs: what it is about; several are drawn into the same charts.
        output: the file.
        max_video_bytes: what videos may add to it.

    Returns:
        ``output``.

    Raises:
        ValueError: for no run, or more than can be told apart.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(
            f"a report is about 1 to {MAX_RUNS} runs, whose colours can be told apart, but there are {len(runs)}"
        )
    text = _render(sampled(runs), max_video_bytes)
    unfinished = output.with_name(f".unfinished-{output.name}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, output)
    return output


def _render(runs: Sequence[SampledRun], max_video_bytes: float) -> str:
    import jinja2
    from plotly.offline import get_plotlyjs

    assets = resources.files("vla_async.report") / "assets"
    style, script, theme = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js", "theme.js"))
    plotly = get_plotlyjs()
    sections, model = _charts(runs)
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    return page.from_string((assets / "report.html").read_text("utf-8")).render(
        policy=content_policy(theme, plotly, script),
        scripts={"theme": theme, "plotly": plotly, "report": script},
        style=style,
        model=model,
        runs=[_part(run) for run in runs],
        sections=sections,
        gallery=gallery(runs, max_video_bytes),
        settings=_settings([run.run.config for run in runs]),
        environment=_settings([run.run.environment for run in runs]),
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )


def content_policy(*scripts: str) -> str:
    """A content security policy under which a browser runs these scripts and no others, and fetches nothing."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; media-src data:"


def _charts(runs: Sequence[SampledRun]) -> tuple[list[SectionPart], dict[str, Any]]:
    """The sections with their cards, and what the script needs for them."""
    data = ChartData(runs)
    sections = []
    for section in SECTIONS:
        made, missing = cards(section, data)
        sections.append(SectionPart(section.anchor, section.title, section.about, made, missing))
    sections.insert(2, _update_section(runs))
    x = m.ENV_STEPS if any(run.run.last(m.ENV_STEPS) > 0 for run in runs) else m.STEP
    specs = [card.spec for section in sections for card in section.cards]
    return sections, {"runs": data.plain(), "charts": specs, "x": str(x)}


def _update_section(runs: Sequence[SampledRun]) -> SectionPart:
    """What happened in one update of each run that has recorded a timeline."""
    about = "Who did what, when, in a typical update. A gap is time in which somebody waited."
    made = []
    for run in runs:
        card = update_card(run.run.timeline) if run.run.timeline is not None else None
        if card is not None:
            title = f"{card.title}: {run.label}" if len(runs) > 1 else card.title
            made.append(Card(title, card.about, card.spec, card.legend, card.note))
    missing = [] if made else ["who did what, when (record it with --trainer.timeline true)"]
    return SectionPart("update", "One update", about, made, missing)


def _part(run: SampledRun) -> RunPart:
    notes = [
        f"Each point of a chart stands for {columns.lines_per_point} {what}: their mean, and of maxima the largest."
        for what, columns in (("updates", run.updates), ("evaluations", run.evaluations))
        if columns.lines_per_point > 1
    ]
    return RunPart(
        label=run.label,
        path=run.run.path,
        began=run.run.path.resolve().name.replace("_", " ", 1),
        command=run.run.command,
        config_text=run.run.config_text,
        figures=key_figures(run.run),
        findings=find(run.run),
        tasks=task_rows(run.run),
        notes=notes,
    )


def _settings(contents: Sequence[dict[str, Any]]) -> list[SettingRow]:
    """Those of all runs, the different ones first."""
    return sorted(setting_rows(contents), key=lambda row: not row.differs)
