"""What a terminal shows while a run is followed, and the loss curve that it draws."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from waiting import wait_until

from ftkit.cli.follow import LiveView
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.curves import Scale, draw_curve

CURVE = re.compile("[\u2800-\u28ff]{2,}")


def screen(height: int = 40) -> tuple[Terminal, io.StringIO]:
    """Return a terminal of 80 columns that can be redrawn, and what is written to it."""
    terminal, written = Terminal(), io.StringIO()
    terminal.talk = Console(file=written, force_terminal=True, width=80, height=height, highlight=False)
    return terminal, written


@pytest.mark.parametrize(("height", "is_drawn"), [(40, True), (10, False)])
def test_a_terminal_with_room_shows_the_loss_curve_and_every_terminal_keeps_it(
    height: int, is_drawn: bool, records: Any
) -> None:
    terminal, written = screen(height)
    view = LiveView(terminal)
    for number in range(1, 40):
        view.record(records.step(number, 8 / number))
    wait_until(lambda: "39/400" in written.getvalue())
    assert bool(CURVE.search(written.getvalue())) is is_drawn
    view.close()
    kept = written.getvalue().rpartition("\x1b")[2]
    assert len(CURVE.findall(kept)) == 6
    assert (" 8 " in kept, "0.205 " in kept) == (True, True)


def test_a_restart_replaces_the_steps_that_it_repeats(records: Any) -> None:
    terminal, written = screen()
    view = LiveView(terminal)
    for number, loss in ((1, 4.0), (2, 3.0), (3, 900.0), (2, 2.0), (3, 1.0)):
        view.record(records.step(number, loss))
    view.close()
    assert "900" not in written.getvalue().rpartition("\x1b")[2]


@given(st.lists(st.floats(allow_nan=True, width=32), min_size=2, max_size=300), st.integers(1, 120), st.integers(1, 12))
def test_a_curve_never_exceeds_its_size(values: list[float], width: int, height: int) -> None:
    points = list(enumerate(values))
    scale = Scale.of([points])
    if scale is None:
        return
    lines = draw_curve(points, scale, width, height).split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= max(width, 11)


@pytest.mark.parametrize(("high", "middle"), [(2.0, 0.5), (1000.0, 1 / 3)])
def test_a_wide_range_is_drawn_on_a_logarithmic_axis(high: float, middle: float) -> None:
    low = high / 1000 if high == 1000.0 else 0.0
    value = high / 10 if low else high / 2
    scale = Scale(0, 1, low, high)
    assert scale.row(value, 301) == pytest.approx(300 * middle, abs=1)
