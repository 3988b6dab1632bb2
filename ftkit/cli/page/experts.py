"""The chart of how a run's tokens were spread over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.cli.page.charts import Line, LineChart, draw_lines

if TYPE_CHECKING:
    from ftkit.runs.history import History


def draw_experts(history: History) -> str:
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
