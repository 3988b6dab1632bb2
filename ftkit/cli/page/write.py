"""Render each page as one file, with its style and charts, that loads nothing from the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ftkit import __version__
from ftkit.cli.page.charts import Chart, Line, draw_lines
from ftkit.cli.terminal.comparison_view import compare_runs
from ftkit.cli.terminal.format import count, printable
from ftkit.errors import PrerequisiteError, one_line
from ftkit.files import output_file
from ftkit.runs.compare import comparable_losses, read_run
from ftkit.runs.gpu_samples import gpu_curve, read_samples
from ftkit.runs.history import read_history

if TYPE_CHECKING:
    from ftkit.data.inspection import Piece, Sample
    from ftkit.planning.layout import RunLayout

    Turns = Sequence[tuple[str, Sequence[Piece]]]

_FOLDER = Path(__file__).parent


def run_page(report: dict[str, object], *, refresh_seconds: int | None = None) -> str:
    """Return the page of one run; browsers reload it every `refresh_seconds`, if set."""
    return _render("report.html.j2", run=report, refresh_seconds=refresh_seconds)


def comparison_page(layouts: Sequence[RunLayout], *, refresh_seconds: int | None = None) -> str:
    runs = [read_run(layout) for layout in layouts]
    found = compare_runs(runs)
    charts = _draw_comparison(layouts, found.names, comparable_losses(runs))
    return _render("comparison.html.j2", report=found, charts=charts, refresh_seconds=refresh_seconds)


def samples_page(title: str, notes: Sequence[str], samples: Sequence[tuple[Sample, Turns]]) -> str:
    return _render("samples.html.j2", title=title, notes=notes, samples=samples, refresh_seconds=None)


def save_page(page: str, path: Path, option: str = "--output") -> None:
    try:
        with output_file(path) as temporary:
            temporary.write_bytes(page.encode())
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {one_line(error)}",
            meaning="the folder does not exist, its disk is full, or you lack write permission",
            fix=f"write it to another file: {option} FILE",
        ) from error


def _draw_comparison(
    layouts: Sequence[RunLayout], names: Sequence[str], comparable: Sequence[Sequence[int]]
) -> list[Chart]:
    """Draw the curves of runs, by tokens, those of comparable losses together. Colors repeat after eight runs."""
    losses, validation, speeds, power = [], [], [], []
    for color, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        history = read_history(layout)
        steps, evaluated = list(history.steps.values()), history.evaluations
        tokens, values = [each.tokens for each in steps], [each.loss for each in steps]
        losses.append(Line(name, tokens, values, is_raw=True, color=color))
        places, values = [history.tokens_at(each.step) for each in evaluated], [each.loss for each in evaluated]
        validation.append(Line(name, places, values, has_points=True, color=color))
        speeds.append(Line(name, *history.speed_curve, is_raw=True, color=color))
        curve = gpu_curve(read_samples(layout), lambda gpu: gpu.power)
        if curve.seconds:
            power.append(Line(name, curve.seconds, curve.mean, color=color))
    of, charts = f"of {', '.join(names)}", []
    for group in comparable:
        of_group = f"of {', '.join(names[number] for number in group)}"
        added = f" {of_group}" if len(comparable) > 1 else ""
        for kind, lines, is_wide in (("Loss", losses, True), ("Validation loss", validation, False)):
            chosen = [lines[number] for number in group]
            drawn = draw_lines(f"{kind[:4]}{group[0]}", f"{kind} {of_group}", "loss", chosen, is_wide=is_wide)
            charts.append(Chart(f"{kind}{added}", drawn, is_wide=is_wide))
    charts += [
        Chart("Throughput", draw_lines("speeds", f"Throughput {of}", "tokens/s per process", speeds, form=count,
                                       from_zero=True)),
        Chart("GPU power", draw_lines("power", f"Mean power per GPU {of}", "W per GPU", power, form="{:,.0f}".format,
                                      from_zero=True, is_over_time=True)),
    ]  # fmt: skip
    return [chart for chart in charts if chart.svg]


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"clock": _clock, "printable": printable}
    environment.globals["zip"] = zip
    css = (_FOLDER / "page.css").read_text(encoding="utf-8")
    values |= {"css": css, "version": __version__, "written": _clock(time.time())}
    return environment.get_template(template).render(values)


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
