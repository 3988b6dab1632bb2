"""Whatever is in a run's folder, the listings list it: run folders are shared, copied in part and edited by hand."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.records import EvaluationRecord, RankError, Sample, StageRecord, StartRecord, write_rank_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakePrograms, Result, RunMaker

    from ftkit.launch.submission import SubmittedRun

ODD_VALUES: tuple[Any, ...] = (
    None, True, "", "text", "\x1b[2J\n", "\ud800", -1, 0, 2**63, 10**400, 1e308, float("nan"), float("inf"),
    [], [[]], {}, {"a": [1]}, ["1"] * 5,
)  # fmt: skip


@pytest.fixture
def run(make_run: RunMaker, programs: FakePrograms, records: Any, sacct_line: Any) -> SubmittedRun:
    """A run with every file that a run can have, beside a good one."""
    records.write(make_run("good"), records.step(7))
    made = make_run("victim", job_id="4711")
    start = StartRecord(1.0, 400, 0, 2, "fsdp2", "cpu", 951680, {"torch": "2"})
    samples = (Sample("q", "a", "a", True), Sample("q", "a", "b", False))
    evaluation = EvaluationRecord(2.0, 0, "before", 6.0, 812.5, 0.0, samples)
    after = EvaluationRecord(3.0, 400, "after", 6.0, 812.5, 0.0, samples)
    records.write(
        made, StageRecord(0.0, "s"), start, evaluation, records.step(1), records.step(400), after, records.end()
    )
    write_rank_error(made.layout.rank_error(1), RankError(2e9, 1, "n", "ValueError", "no", "Traceback", 9))
    made.layout.exit_code.write_text("1")
    observed = {"job_id": "4711", "observed": 4e9, "state": "failed", "is_final": True, "exit_code": 1, "ended": 5.0}
    made.layout.state.write_text(json.dumps(observed))
    made.layout.job_log.write_text("words\n")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(made, "FAILED"))
    return made


def odd_json(random_: random.Random, value: Any) -> Any:
    """Put an odd value somewhere into a JSON value."""
    if isinstance(value, dict) and value and random_.random() < 0.8:
        key = random_.choice(list(value))
        if random_.random() < 0.2:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: odd_json(random_, value[key])}
    return random_.choice(ODD_VALUES)


def damage(random_: random.Random, content: bytes) -> bytes:
    """Damage a file's content in one of many ways."""
    match random_.randrange(6):
        case 0:
            return content[: random_.randrange(len(content))]
        case 1:
            at = random_.randrange(len(content))
            return content[:at] + random_.randbytes(random_.randrange(1, 9)) + content[at + 1 :]
        case 2:
            return random_.choice((b"[", b'{"a":', b'{"event": "step", "step":')) * 50_000
        case 3:
            return random_.choice((b"", b"\xff\xfe", b"\0" * 999, b"9" * 5000, b"null", b"\n\n"))
        case _:
            try:
                lines = [json.loads(content)]
            except ValueError:
                lines = [json.loads(line) for line in content.splitlines() if line.startswith(b"{")] or [{}]
            index = random_.randrange(len(lines))
            lines[index] = odd_json(random_, lines[index])
            return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("seed", range(50))
def test_a_run_folder_with_anything_in_it_breaks_no_listing(
    ftkit: Callable[..., Result], run: SubmittedRun, seed: int
) -> None:
    random_ = random.Random(seed)
    layout = run.layout
    files = (layout.plan, layout.submission, layout.state, layout.metrics, layout.rank_error(1), layout.exit_code)
    for path in random_.sample(files, random_.choice((1, 1, 2))):
        path.write_bytes(damage(random_, path.read_bytes()))
    for words in (("runs",), ("runs", "--json"), ("status", run.id), ("status", run.id, "--json"), ("gc", "--dry-run")):
        result = ftkit(*words)
        assert result.code == 0, (words, result.err)
    good = next(listed for listed in json.loads(ftkit("runs", "--json").out) if listed["name"] == "good")
    assert good["step"] == 7
    assert ftkit("logs", run.id).out == "words\n"


def test_a_damaged_run_is_listed_with_what_is_wrong(
    ftkit: Callable[..., Result], run: SubmittedRun, tmp_path: Path
) -> None:
    run.layout.plan.write_text('{"cluster": {"name": 7}}')
    result = ftkit("runs")
    assert f"warning: {run.id} is damaged: plan.json can't be read: cluster.name: " in result.err
    assert ["victim", run.id, "damaged"] in [line.split()[:3] for line in result.out.splitlines()]
    listed = json.loads(ftkit("runs", "--json").out)[0]
    assert (listed["state"], listed["cluster"], listed["job_id"]) == ("damaged", None, "4711")
    shown = ftkit("status", "victim")
    assert "damaged: plan.json can't be read" in " ".join(shown.out.split())
    assert "400/400" in shown.out
    assert ftkit("resume", "victim").code == 3
    assert str(tmp_path) in ftkit("resume", "victim").err


def test_an_unusable_workspace_is_said_to_be_so(
    ftkit: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no runs yet in " in ftkit("runs").err
    (tmp_path / "file").touch()
    monkeypatch.setenv("FTKIT_WORKSPACE", str(tmp_path / "file"))
    result = ftkit("runs")
    assert result.code == 5
    assert f"the workspace {tmp_path / 'file'} can't be used" in result.err
