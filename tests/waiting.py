"""Waiting for conditions, independent of how busy the machine is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS = 900
"""How long a test waits for what must happen. Only a broken test waits so long: no result depends on the clock."""


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "it never came to be so") -> None:
    """Return once a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.01)
