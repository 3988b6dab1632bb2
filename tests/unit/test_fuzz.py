"""Fuzzing: a few cases of each area, regression cases, and the campaign itself.

For longer campaigns: scripts/fuzz
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import pytest
from fuzzing import campaign
from fuzzing.area import CORPUS, Area, read_case
from fuzzing.campaign import AREAS, load_area, main, make_case, replay, try_case

if TYPE_CHECKING:
    from pathlib import Path

NAMES = sorted(AREAS.keys() - {"checkpoints"})
"""Those need torch: tests/train/test_fuzz_checkpoints.py"""
NUM_CASES = 10


@pytest.mark.parametrize("name", NAMES)
def test_fuzzed_input_is_accepted_or_rejected(name: str) -> None:
    area = load_area(name)
    results = [try_case(area, make_case(area, 0, number)) for number in range(NUM_CASES)]
    assert [text for outcome, text in results if outcome not in ("accepted", "refused")] == []
    assert {outcome for outcome, _ in results} == {"accepted", "refused"}


@pytest.mark.parametrize(
    ("name", "case"), [(folder.parent.name, folder.name) for folder in sorted(CORPUS.glob("*/*")) if folder.is_dir()]
)
def test_regression_cases_are_accepted_or_rejected(name: str, case: str) -> None:
    if name in NAMES:
        replay(load_area(name), CORPUS / name / case)


def test_a_case_depends_only_on_its_seed_and_number() -> None:
    area = load_area("data")
    assert make_case(area, 1, 2) == make_case(area, 1, 2)
    assert make_case(area, 1, 2) != make_case(area, 1, 3)
    assert make_case(area, 1, 2) != make_case(area, 2, 2)


def test_a_case_that_does_not_end_is_reported_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> bool:
        while True:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001, S112 - a handler must not catch it
                continue

    monkeypatch.setattr(campaign, "CPU_SECONDS", 0.05)
    outcome, text = try_case(Area("endless", lambda _: {}, run), {})
    assert outcome == "hang"
    assert "more than 0.05 s" in text


DOOMED = """
import os
from fuzzing.area import Area

def make(rng):
    return {"input": rng.randbytes(8)}

count = 0

def run(case, folder):
    global count
    count += 1
    match count:
        case 1: return True
        case 2: raise KeyError("found")
        case 3: return bytearray(1 << 40) == b""
        case 4: os._exit(5)

DOOMED = Area("doomed", make, run)
"""


def test_failures_of_any_kind_are_counted_saved_and_replayable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doomed.py").write_text(DOOMED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(AREAS, "doomed", "doomed:DOOMED")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["doomed", "--cases", "5", "--seed", "7", "--corpus", str(tmp_path / "corpus")]) == 1
    row = [cell.strip() for cell in out.getvalue().splitlines()[-1].split("|")]
    assert row[1:7] == ["doomed", "5", "2", "0", "3", "0"]
    for told in (
        "KeyError: 'found'",
        "MemoryError",
        "the process ended with 5",
        "scripts/fuzz doomed --seed 7 --case 3",
    ):
        assert told in err.getvalue()
    kept = sorted((tmp_path / "corpus" / "doomed").iterdir())
    assert [folder.name for folder in kept] == [f"seed-7-case-{number}" for number in (1, 2, 3)]
    assert read_case(kept[0]) == make_case(load_area("doomed"), 7, 1)
