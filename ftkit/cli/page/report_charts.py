"""Charts of report.html."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.cli.page.charts import Line, LineChart, bar_chart, bars_height, draw_lines, timeline
from ftkit.cli.terminal.format import count
from ftkit.runs.gpu_samples import gpu_curve
from ftkit.runs.spans import merge_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.planning.plan import RunPlan
    from ftkit.runs.gpu_samples import NodeSample
    from ftkit.runs.history import History
    from ftkit.runs.records import StepRecord
    from ftkit.runs.spans import Span

_NARROWEST = 1 / 600
"""Smallest visible fraction of a run's time on the timeline."""


@dataclass(frozen=True)
class Chart:
    """A drawn chart with its heading."""

    title: str
    svg: str
    is_wide: bool = False


def draw_charts(plan: RunPlan | None, history: History, gpus: Sequence[NodeSample]) -> list[Chart]:
    """Draw the charts that a run has data for."""
    on_gpus = plan is not None and plan.placement.device == "cuda"
    device = "GPU" if on_gpus else "process"
    speed = LineChart(
        "speed", f"Tokens per second per {device}", f"tokens/s per {device}",
        [Line("measured", *history.speed_curve, is_raw=True, color=4)],
        expected=plan.speed.tokens_per_second / plan.placement.world_size if plan and plan.speed else None,
        form=count, from_zero=True, height=bars_height(len(history.memory)),
    )  # fmt: skip
    memory = bar_chart(
        "memory", "Peak memory of each stage, maximum over all processes",
        [(each.stage, each.largest_peak_gib) for each in history.memory],
        marks=[("plan", plan.memory.total)] if plan else [],
    )  # fmt: skip
    kinds = ", ".join(dict.fromkeys(span.kind for span in history.spans))
    charts = [
        Chart("Loss", draw_lines(_losses(history), is_wide=True), is_wide=True),
        Chart("Learning rate", _over_tokens("learning rate", history, lambda each: each.learning_rate, 2)),
        Chart("Gradient norm", _over_tokens("gradient norm", history, lambda each: each.grad_norm, 3, is_raw=True)),
        Chart("Throughput", draw_lines(speed)),
        Chart("Memory by stage", memory),
        Chart("Load of the busiest expert", _draw_experts(history)),
        *_gpu_charts(gpus, history),
        Chart("Timeline", timeline("time", f"Time by activity: {kinds}", _visible(history)), is_wide=True),
    ]
    return [chart for chart in charts if chart.svg]


def _losses(history: History) -> LineChart:
    steps, last = list(history.steps.values()), history.last_step
    description = (
        f"Training loss from {steps[0].loss:.4g} to {last.loss:.4g} over {count(last.tokens)} tokens" if last else ""
    )
    validation = history.evaluations
    lines = [
        Line("training", [each.tokens for each in steps], [each.loss for each in steps], is_raw=True),
        Line("validation", [history.tokens_at(each.step) for each in validation], [each.loss for each in validation],
             has_points=True, color=1),
    ]  # fmt: skip
    return LineChart("loss", description, "loss", lines)


def _over_tokens(
    title: str, history: History, value: Callable[[StepRecord], float], color: int, *, is_raw: bool = False
) -> str:
    steps = list(history.steps.values())
    line = Line(title, [each.tokens for each in steps], [value(each) for each in steps], is_raw=is_raw, color=color)
    return draw_lines(LineChart(title.replace(" ", "-"), f"{title} by tokens", title, [line], from_zero=True))


def _gpu_charts(samples: Sequence[NodeSample], history: History) -> list[Chart]:
    """Return charts of utilization and power over time: the mean of the GPUs, and the range from lowest to highest."""
    begin = history.spans[0].begin if history.spans else None
    several = len({(sample.host, gpu.index) for sample in samples for gpu in sample.gpus}) > 1
    shown = "mean; area: lowest to highest GPU" if several else "mean"
    charts = []
    for title, unit, color, limit, value in (
        ("GPU utilization", "%", 2, 104.0, lambda gpu: gpu.utilization),
        ("GPU power", "W", 1, None, lambda gpu: gpu.power),
    ):
        curve = gpu_curve(samples, value, begin)
        line = Line(shown, curve.seconds, curve.mean, color=color, band=(curve.lowest, curve.highest))
        chart = LineChart(
            title.replace(" ", "-").lower(), f"{title} over time: {shown}", f"{unit} ({shown})", [line],
            form="{:,.0f}".format, from_zero=True, is_over_time=True, limit=limit,
        )  # fmt: skip
        charts.append(Chart(title, draw_lines(chart)))
    return [chart for chart in charts if chart.svg]


def _visible(history: History) -> list[Span]:
    """Return spans that are wide enough to be visible."""
    if not history.spans:
        return []
    return merge_spans(history.spans, (history.spans[-1].end - history.spans[0].begin) * _NARROWEST)


def _draw_experts(history: History) -> str:
    """Draw the load of the busiest experts by tokens; nothing for a dense model."""
    tokens, routers = [], []
    for step in history.steps.values():
        if step.routers is not None:
            tokens.append(step.tokens)
            routers.append(step.routers)
    if not routers:
        return ""
    unit = "× the mean load of its layer"
    lines = [
        Line("of all layers", tokens, [each.max_utilization for each in routers], color=1),
        Line("mean over the layers", tokens, [each.mean_max_utilization for each in routers]),
    ]
    return draw_lines(LineChart("experts", f"Busiest expert, {unit}, by tokens", unit, lines, from_zero=True))
