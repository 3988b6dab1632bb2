"""Fuzzed checkpoints, and the corpus of earlier failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzzing.area import read_case
from fuzzing.campaign import load_area, make_case, try_case

if TYPE_CHECKING:
    import pytest

NUM_CASES = 40


def test_fuzzed_checkpoints_are_loaded_or_rejected_and_execute_no_code(caplog: pytest.LogCaptureFixture) -> None:
    area = load_area("checkpoints")
    cases = [make_case(area, 0, number) for number in range(NUM_CASES)] + [read_case(folder) for folder in area.corpus]
    with caplog.at_level("ERROR"):
        results = [try_case(area, case) for case in cases]
    assert [text for outcome, text in results if outcome not in ("accepted", "refused")] == []
    assert {outcome for outcome, _ in results} == {"accepted", "refused"}
