"""Content of the comparison page: differences and results of runs, and their curves by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.cli.page.charts import Line, LineChart, draw_lines
from ftkit.cli.page.report_charts import Chart
from ftkit.cli.terminal.format import count
from ftkit.runs.gpu_samples import gpu_curve, read_samples
from ftkit.runs.history import read_history

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.planning.layout import RunLayout


@dataclass(frozen=True)
class ComparisonReport:
    """Content of the comparison page.

    Attributes:
        names: names of the runs in tables: A, B, and so on.
        ids: ids of the runs.
        results: values of each run, by row title.
        differences: title and a value for each run.
        verdicts: comparison of each run's losses with the first run's.
    """

    names: list[str]
    ids: list[str]
    results: list[dict[str, str]]
    differences: list[tuple[str, list[str]]]
    verdicts: list[str]
    charts: list[Chart]


def draw_comparison(layouts: Sequence[RunLayout], names: Sequence[str]) -> list[Chart]:
    """Draw the curves of runs, by tokens. Colors repeat after eight runs."""
    histories = [read_history(layout) for layout in layouts]
    pairs = list(enumerate(zip(names, histories, strict=True)))
    losses = [
        Line(name, [each.tokens for each in found.steps.values()], [each.loss for each in found.steps.values()],
             is_raw=True, color=index)
        for index, (name, found) in pairs
    ]  # fmt: skip
    validation = [
        Line(name, [found.tokens_at(each.step) for each in found.evaluations],
             [each.loss for each in found.evaluations], has_points=True, color=index)
        for index, (name, found) in pairs
    ]  # fmt: skip
    speeds = [
        Line(name, *found.speed_curve, is_raw=True, color=index)
        for index, (name, found) in pairs
    ]  # fmt: skip
    power = [
        Line(name, curve.seconds, curve.mean, color=index)
        for index, (name, layout) in enumerate(zip(names, layouts, strict=True))
        if (curve := gpu_curve(read_samples(layout), lambda gpu: gpu.power)).seconds
    ]
    listed = ", ".join(names)
    charts = [
        Chart("Loss", draw_lines(LineChart("losses", f"Training loss of {listed}", "loss", losses), is_wide=True),
              is_wide=True),
        Chart("Validation loss", draw_lines(LineChart("validation", f"Validation loss of {listed}", "loss",
                                                      validation))),
        Chart("Throughput", draw_lines(LineChart("speeds", f"Throughput of {listed}", "tokens/s per process", speeds,
                                                 form=count, from_zero=True))),
        Chart("GPU power", draw_lines(LineChart("power", f"Mean power per GPU of {listed}", "W per GPU", power,
                                                form="{:,.0f}".format, from_zero=True, is_over_time=True))),
    ]  # fmt: skip
    return [chart for chart in charts if chart.svg]
