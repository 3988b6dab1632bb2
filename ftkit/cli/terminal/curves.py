"""Draw a loss curve in characters: in braille, each of which has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
"""Places, such as steps, in ascending order, with the value at each."""
LOG_FROM = 30
"""Ratio of the highest to the lowest value from which a loss is drawn on a logarithmic axis."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_LABEL = 10  # width of the labels of the axis


@dataclass(frozen=True)
class Scale:
    """Limits of the axes, so that several curves can be compared."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def of(cls, curves: Iterable[Points]) -> Scale | None:
        """Return limits that contain the finite values of all curves; None if these are at fewer than two places."""
        found = [(place, value) for points in curves for place, value in points if math.isfinite(value)]
        if len({place for place, _ in found}) < 2:  # noqa: PLR2004 - a line has two ends
            return None
        places, values = zip(*found, strict=True)
        return cls(min(places), max(places), min(values), max(values))

    def column(self, place: float, num_columns: int) -> int:
        """Return the column of dots of a place, from the left."""
        return round((place - self.first) / (self.last - self.first) * (num_columns - 1))

    def row(self, value: float, num_rows: int) -> int:
        """Return the row of dots of a value, from the top."""
        low, high = self.low, self.high
        if low > 0 and high / low >= LOG_FROM:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round((high - value) / ((high - low) or 1) * (num_rows - 1))


def draw_curve(points: Points, scale: Scale, width: int, height: int) -> str:
    """Return `height` lines of at most `width` characters, with the limits of the vertical axis at the left."""
    num_columns, num_rows = 2 * max(1, width - _LABEL), 4 * height
    found: dict[int, list[float]] = {}
    for place, value in points:
        if math.isfinite(value):
            found.setdefault(scale.column(place, num_columns), []).append(value)
    cells = [[_BRAILLE] * (num_columns // 2) for _ in range(height)]
    before: tuple[int, int] | None = None
    for column, values in sorted(found.items()):
        row = scale.row(sum(values) / len(values), num_rows)
        left, start = before or (column, row)
        for place in range(left, column + 1):  # a line from the point before
            part = (place - left) / max(1, column - left)
            end = round(start + part * (row - start))
            begin = end if place == left else round(start + (place - 1 - left) / (column - left) * (row - start))
            for each in range(min(begin, end), max(begin, end) + 1):
                cells[each // 4][place // 2] |= _DOTS[each % 4][place % 2]
        before = column, row
    labels = [""] * height
    labels[-1], labels[0] = f"{scale.low:.3g}", f"{scale.high:.3g}"
    lines = (f"{label:>{_LABEL - 1}} {''.join(map(chr, row))}" for label, row in zip(labels, cells, strict=True))
    return "\n".join(line.rstrip(chr(_BRAILLE)) for line in lines)
