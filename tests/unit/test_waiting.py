"""Test results do not depend on how busy the machine is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import waiting
from hypothesis import HealthCheck, settings
from waiting import wait_until

TESTS = Path(__file__).parents[1]
OWN_LIMIT = re.compile(r"\btimeout=[0-9]|\bdeadline=(?!None)|monotonic\(\) \+ [0-9]|\bwait\([0-9]")


def test_property_tests_have_no_deadline() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_no_test_has_its_own_time_limit() -> None:
    own = [
        f"{path.relative_to(TESTS)}:{number}: {line.strip()}"
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if OWN_LIMIT.search(line)
    ]
    assert own == [], "use waiting.PATIENCE_SECONDS or wait_until"


def test_wait_until_fails_with_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0)
    with pytest.raises(AssertionError, match="no reason"):
        wait_until(lambda: False, lambda: "no reason")
    wait_until(lambda: True)
