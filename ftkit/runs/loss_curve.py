"""The loss curve of a run as an SVG without scripts or fonts, for a model card."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Point = tuple[float, float]

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_MAX_POINTS = 400
_NUM_TICKS = 5
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.grid{stroke:#d0d7de;stroke-width:1}"
    ".train{fill:none;stroke:#0969da;stroke-width:1.5}.valid{fill:none;stroke:#bc4c00;stroke-width:1.5}"
    ".dot{fill:#bc4c00}"
    "@media(prefers-color-scheme:dark){text{fill:#8d96a0}.grid{stroke:#30363d}}"
)


def loss_curve(metrics: Path, last_step: int) -> str | None:
    """Draw the loss of training and of validation by step; None if fewer than two steps were recorded.

    Args:
        metrics: the records of the run.
        last_step: later steps are not drawn: the exported checkpoint does not include them.
    """
    trained: dict[float, float] = {}
    validated: dict[float, float] = {}
    for record in read_records(metrics):  # the last record of a step that was repeated after a restart
        if not isinstance(record, StepRecord | EvaluationRecord) or record.step > last_step:
            continue
        if math.isfinite(record.loss):
            (trained if isinstance(record, StepRecord) else validated)[record.step] = record.loss
    if len(trained) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    return _draw(_averaged(sorted(trained.items())), sorted(validated.items()))


def _averaged(points: Sequence[Point]) -> list[Point]:
    """Downsample to the resolution of the picture; each point is the mean of its neighbors."""
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _draw(trained: Sequence[Point], validated: Sequence[Point]) -> str:
    steps = [x for x, _ in (*trained, *validated)]
    losses = [y for _, y in (*trained, *validated)]
    rows, columns = ticks(min(losses), max(losses)), ticks(min(steps), max(steps))
    low, high = min(rows[0], *losses), max(rows[-1], *losses)
    first, last = min(steps), max(*steps, min(steps) + 1)

    def place(point: Point) -> Point:
        x = _LEFT + (point[0] - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - point[1]) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    parts = []
    for value in rows:
        y = place((first, value))[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in columns:
        x = place((value, low))[0]
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    parts.append(_line("train", map(place, trained)))
    parts.append(_legend(_LEFT, "train", "training loss"))
    if validated:
        parts.append(_line("valid", map(place, validated)))
        parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(place, validated)]
        parts.append(_legend(_LEFT + 130, "valid", "validation loss"))
    label = f"training loss {trained[0][1]:.3g} to {trained[-1][1]:.3g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>" + "".join(parts) + "</svg>\n"
    )


def _line(kind: str, points: Iterable[Point]) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _legend(x: int, kind: str, text: str) -> str:
    return f'<path class="{kind}" d="M{x} 16h18"/><text x="{x + 24}" y="20">{text}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers between two numbers, including these if they are round."""
    span = max(high - low, 1e-6 * max(1.0, abs(high)))
    unit = 10 ** math.floor(math.log10(span / _NUM_TICKS))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= _NUM_TICKS)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]
