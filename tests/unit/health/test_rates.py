"""Processes that measure devices."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

from ftkit.health.rates import DeviceProcesses, MeasureError


def test_a_process_that_dies_is_reported_at_once_and_the_others_are_ended() -> None:
    def kill_second() -> None:
        while len(started := multiprocessing.active_children()) < 2:
            time.sleep(0.01)
        max(started, key=lambda each: each.pid or 0).kill()

    processes = DeviceProcesses("cpu", 2)
    start = time.monotonic()
    threading.Thread(target=kill_second, daemon=True).start()
    try:
        with pytest.raises(MeasureError, match="1"):
            processes.rates(is_short=True)
    finally:
        processes.close()
    assert time.monotonic() - start < 30  # the time limit is 90 s
    assert not multiprocessing.active_children()
