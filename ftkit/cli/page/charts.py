"""Charts as inline SVG, drawn by matplotlib in the colors and fonts of their page.

matplotlib draws with placeholder colors, which become CSS variables: one SVG works in light, dark and print. Text stays
text, so it can be read aloud, searched and copied. Libraries that draw in the browser would add 0.8 to 4.8 MB of
scripts to each page, which mail programs and CI servers refuse.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ftkit.cli.terminal.curves import LOG_FROM
from ftkit.cli.terminal.format import count, duration, gib
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from ftkit.runs.spans import Span

MAX_POINTS = 600  # maximum points of a line: more can't be told apart, and make the page slow
_SMOOTH_OVER = 0.02  # window of a moving mean, as a fraction of the curve
_SMOOTH_FROM = 60  # number of points from which a curve is smoothed
_WIDE, _NARROW, _HEIGHT = 1040, 460, 250
_DOTS = 72
_MAX_TICKS = 6
SERIES = tuple(f"#0101{index:02x}" for index in range(1, 9))
INK, MUTED, GRID, SURFACE = "#0102f1", "#0102f2", "#0102f3", "#0102f4"
SPAN_COLORS = {
    "training": "#0103f1", "repeated": "#0103f2", "evaluation": "#0103f3", "checkpoint": "#0103f4",
    "start-up": "#0103f5", "other": "#0103f6", "down": "#0103f7", "data wait": "#0103f8",
}  # fmt: skip
_VARIABLES = {
    **{color: f"var(--series-{index})" for index, color in enumerate(SERIES, start=1)},
    INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", SURFACE: "var(--surface)",
    **{color: f"var(--{kind.replace(' ', '-')})" for kind, color in SPAN_COLORS.items()},
}  # fmt: skip
_STYLE: dict[str, object] = {
    "svg.fonttype": "none", "font.size": 11, "text.color": INK, "axes.edgecolor": GRID, "axes.labelcolor": MUTED,
    "xtick.color": MUTED, "ytick.color": MUTED, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "xtick.major.size": 3, "ytick.major.size": 0, "ytick.minor.size": 0, "lines.linewidth": 2,
    "lines.solid_capstyle": "round", "figure.facecolor": "none",
    "axes.facecolor": "none", "path.simplify": True, "axes.unicode_minus": False,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of a chart; `is_raw` draws it thin under its moving mean; `band` is an area from lowest to highest."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    is_raw: bool = False
    has_points: bool = False
    color: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None


def require_matplotlib() -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PrerequisiteError(
            "a report needs the package matplotlib",
            meaning="ftkit was installed without it; no run needs it",
            fix="pip install 'ftkit[report]'",
        ) from error
    mpl.use("svg")


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    is_wide: bool = False


def draw_lines(  # noqa: PLR0913 - properties of a chart
    name: str, description: str, y: str, lines: Sequence[Line], *, expected: float | None = None,
    form: Callable[[float], str] | None = None, from_zero: bool = False, height: int = _HEIGHT - 40,
    is_over_time: bool = False, limit: float | None = None, is_wide: bool = False,
) -> str:  # fmt: skip
    """Draw lines over the tokens of a run, or over its time in seconds; empty if they have no finite value.

    `name` begins the chart's ids on the page; `description` is its alternative text, `y` the title above the vertical
    axis, and `form` formats its values. `expected` is drawn as a dashed line. A wide chart is drawn twice, for wide
    and for narrow screens, of which the page shows one; `height`, in pixels, is for the others.
    """
    lines = [line for line in lines if any(map(math.isfinite, line.y))]
    values = [value for line in lines for value in line.y if math.isfinite(value)]
    if not values:
        return ""

    def draw(axes: Axes) -> None:
        for line in lines:
            _draw_line(axes, line, SERIES[line.color % len(SERIES)])
        if expected is not None:
            axes.axhline(expected, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="plan")
        axes.set_xlabel("time" if is_over_time else "tokens")
        axes.set_title(y, loc="left", fontsize=11, color=MUTED, pad=8)
        axes.margins(x=0.01, y=0.08)
        if from_zero:
            axes.set_ylim(0, limit)
        elif min(values) > 0 and max(values) > LOG_FROM * min(values):
            axes.set_yscale("log")
        if is_over_time:
            _format_time(axes, max(line.x[-1] for line in lines))
        else:
            _format(axes.xaxis, count)
        _format(axes.yaxis, form or _short)
        if len(lines) > 1 or expected is not None:
            place = "lower right" if from_zero else "upper right"
            axes.legend(loc=place, frameon=False, fontsize=10, ncols=min(3, len(lines) + 1), labelcolor=INK)

    if is_wide:
        return _wide_and_narrow(name, description, draw)
    return _svg(name, description, draw, _NARROW, max(height, _HEIGHT - 40))


def _wide_and_narrow(name: str, description: str, draw: Callable[[Axes], None], height: int = _HEIGHT) -> str:
    wide = _svg(f"{name}-wide", description, draw, _WIDE, height + 30)
    return f'<div class="wide">{wide}</div><div class="narrow">{_svg(name, description, draw, _NARROW, height)}</div>'


def _draw_line(axes: Axes, line: Line, color: str) -> None:
    x, y = list(line.x), list(line.y)
    if line.band:
        axes.fill_between(x, *line.band, color=color, alpha=0.18, linewidth=0)
    if line.has_points:
        axes.plot(x, y, color=color, marker="o", markersize=6, label=line.name, linewidth=1.2, linestyle=":")
    elif line.is_raw and len(y) >= _SMOOTH_FROM:
        axes.plot(*_downsampled(x, y), color=color, alpha=0.35, linewidth=0.9)
        axes.plot(*_downsampled(x, _smooth(y)), color=color, label=line.name)
    else:
        axes.plot(*_downsampled(x, y), color=color, label=line.name)


def _smooth(values: Sequence[float]) -> list[float]:
    radius = max(1, round(len(values) * _SMOOTH_OVER))
    windows = (values[max(0, index - radius) : index + radius + 1] for index in range(len(values)))
    finite = ([each for each in window if math.isfinite(each)] for window in windows)
    return [sum(near) / len(near) if near else math.nan for near in finite]


def _downsampled(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Downsample to the lowest and highest value of each part, in order, so that peaks remain visible."""
    if len(x) <= MAX_POINTS:
        return list(x), list(y)
    size = math.ceil(len(x) / (MAX_POINTS // 2))
    kept: list[int] = []
    for begin in range(0, len(x), size):
        finite = [index for index in range(begin, min(begin + size, len(x))) if math.isfinite(y[index])] or [begin]
        kept += sorted({min(finite, key=lambda index: y[index]), max(finite, key=lambda index: y[index])})
    return [x[index] for index in kept], [y[index] for index in kept]


def bars_height(num_bars: int) -> int:
    return 36 * num_bars + 32


def memory_chart(bars: Sequence[tuple[str, float]], marks: Sequence[tuple[str, float]]) -> str:
    """Draw peaks of stages in GiB as horizontal bars, with vertical lines at `marks`; empty without bars."""
    if not bars:
        return ""

    def draw(axes: Axes) -> None:
        names, values = zip(*bars, strict=True)
        drawn = axes.barh(range(len(bars)), values, color=SERIES[0], height=0.36)
        axes.bar_label(drawn, [gib(value) for value in values], padding=4, fontsize=10, color=INK)
        for index, text in enumerate(names):
            axes.text(0, index - 0.36, text, fontsize=10.5, color=MUTED, va="center")
        for text, value in marks:
            axes.axvline(value, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.text(value, -0.95, f"{text} ", fontsize=10, color=MUTED, ha="right")
        axes.set_ylim(len(bars) - 0.5, -1.2)
        axes.set_xlim(0, max([*values, *(value for _, value in marks)]) * 1.14 or 1)
        axes.set_axis_off()

    description = "Peak memory of each stage, maximum over all processes"
    return _svg("memory", description, draw, _NARROW, bars_height(len(bars)))


def timeline(description: str, spans: Sequence[Span]) -> str:
    if not spans:
        return ""
    begin, end = spans[0].begin, spans[-1].end

    def draw(axes: Axes) -> None:
        for span in spans:
            axes.barh(0, span.seconds, left=span.begin - begin, height=1, color=SPAN_COLORS[span.kind], linewidth=0)
        axes.set_ylim(-0.5, 0.5)
        axes.set_xlim(0, max(end - begin, 1e-3))
        axes.grid(visible=False)
        axes.set_yticks([])
        _format_time(axes, end - begin)

    return _wide_and_narrow("time", description, draw, 70)


def _format_time(axes: Axes, total: float) -> None:
    """Format the horizontal axis as a time axis of `total` seconds, with ticks at round times."""
    from matplotlib.ticker import MultipleLocator

    def form(value: float, _: float) -> str:
        return duration(value).removesuffix(" 00 s").removesuffix(" 00 min") if value else "0"

    round_times = sorted(factor * unit for unit in (1, 60, 3600, 86400) for factor in (1, 2, 5, 10, 15, 30))
    interval = next((each for each in round_times if total / each <= _MAX_TICKS), total / _MAX_TICKS)
    axes.xaxis.set_major_formatter(form)
    axes.xaxis.set_major_locator(MultipleLocator(interval))


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e4 else count(value)  # noqa: PLR2004 - readable without separator


def _format(axis: Axis, form: Callable[[float], str]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else f"-{form(-value)}" if value < 0 else form(value))
    if axis.get_scale() == "linear":
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


def _svg(name: str, description: str, draw: Callable[[Axes], None], width: int, height: int) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), io.StringIO() as file:
        figure = Figure(figsize=(width / _DOTS, height / _DOTS), dpi=_DOTS, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = file.getvalue()
    text = text[text.index("<svg") :]
    unneeded = r"<metadata>.*?</metadata>|<style.*?</style>| font-family: [^;\"]*;|(?<=<g) id=\"[^\"]*\""
    text = re.sub(unneeded, "", text, flags=re.DOTALL)
    text = re.sub(r"#010[123]\w{2}", lambda match: _VARIABLES[match[0]], text)
    head = f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {width} {height}"'
    return re.sub(r"<svg[^>]*>", f'{head} xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1)
