"""Listings include damaged runs: run folders are shared, partially copied and edited manually."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from ftkit import __version__
from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import run_page
from ftkit.runs.failure import RankError, write_rank_error
from ftkit.runs.metrics_file import scan_records
from ftkit.runs.records import EvaluationRecord, Sample, StageRecord, StartRecord, to_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakePrograms, Result, RunMaker

    from ftkit.runs.job import SubmittedRun


@pytest.fixture
def run(make_run: RunMaker, programs: FakePrograms, records: Any, sacct_line: Any) -> SubmittedRun:
    """A run with every kind of file, and an intact second run."""
    records.write(make_run("good"), records.step(7))
    made = make_run("victim", job_id="4711")
    start = StartRecord(1.0, 400, 0, 2, "fsdp2", "cpu", 951680, {"torch": "2"})
    samples = (Sample("q", "a", "a", True), Sample("q", "a", "b", False))
    evaluation = EvaluationRecord(2.0, 0, "before", 6.0, 812.5, samples)
    after = EvaluationRecord(3.0, 400, "after", 6.0, 812.5, samples)
    records.write(
        made, StageRecord(0.0, "s"), start, evaluation, records.step(1), records.step(400), after, records.end()
    )
    write_rank_error(made.layout.rank_error(1), RankError(2e9, 1, "n", "ValueError", "no", "Traceback", 9))
    made.layout.job_exit_code(made.submission.job_id).write_text("1")
    job = {"id": "4711", "state": "failed", "is_final": True, "exit_code": 1, "ended": 5.0}
    made.layout.state.write_text(json.dumps({"observed": 4e9, "job": job}))
    made.layout.job_log.write_text("words\n")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(made, "FAILED"))
    return made


def test_a_damaged_run_is_listed_with_its_damage(
    ftkit: Callable[..., Result], run: SubmittedRun, tmp_path: Path
) -> None:
    run.layout.plan.write_text('{"cluster": {"name": 7}}')
    result = ftkit("runs")
    assert f"warning: {run.id} is damaged: plan.json " in result.err
    assert ["victim", run.id, "damaged"] in [line.split()[:3] for line in result.out.splitlines()]
    listed = json.loads(ftkit("runs", "--json").out)[0]
    assert (listed["state"], listed["cluster"], listed["job_id"]) == ("damaged", None, "4711")
    shown = ftkit("status", "victim")
    assert "damaged: plan.json" in " ".join(shown.out.split())
    assert "400/400" in shown.out
    assert ftkit("resume", "victim").code == 15
    assert str(tmp_path) in ftkit("resume", "victim").err


@pytest.mark.usefixtures("no_privileges")
def test_a_private_run_of_another_user_is_listed_as_unreadable_and_not_as_damaged(
    ftkit: Callable[..., Result], run: SubmittedRun
) -> None:
    run.layout.root.chmod(0)
    try:
        result = ftkit("runs")
        assert [line.split()[2] for line in result.out.splitlines()[1:]] == ["unreadable", "unknown"]
        assert f"warning: {run.id} is unreadable: plan.json " in result.err
        assert "damaged" not in result.err
        assert ftkit("rm", "--unused", "--dry-run").code == 0
        for command in (
            ["status"],
            ["resume"],
            ["report"],
            ["compare", "good"],
            ["runs", "checkpoints"],
            ["rm", "--yes"],
        ):
            refused = ftkit(*command, "victim")
            assert refused.code == 5, refused.err
            assert "it belongs to" in refused.err
        run.layout.root.chmod(0o700)
        run.layout.plan.chmod(0)
        assert "no permission" in ftkit("status", "victim").err
    finally:
        run.layout.root.chmod(0o700)


FILES_TWICE_HELD_OUT = {"kind": "files", "train": "/a.jsonl", "heldout": "/b.jsonl", "num_heldout": 3}
REFUSED_BY_NOW = {
    "num_heldout (3) has no effect with heldout": ("source", FILES_TWICE_HELD_OUT),
    "{q:>3} is not a column name": ("format", {"kind": "prompt-completion", "prompt": "{q:>3}", "completion": "{a}"}),
}


@pytest.mark.parametrize("reason", REFUSED_BY_NOW)
def test_a_run_of_an_older_ftkit_is_shown_although_its_plan_is_invalid_now(
    reason: str, ftkit: Callable[..., Result], run: SubmittedRun
) -> None:
    plan = json.loads(run.layout.plan.read_text())
    key, value = REFUSED_BY_NOW[reason]
    plan["recipe"]["data"][key] = value
    run.layout.plan.write_text(json.dumps({**plan, "ftkit_version": "0.0.9"}))

    assert ["victim", run.id, "failed"] in [line.split()[:3] for line in ftkit("runs").out.splitlines()]
    assert "words" in ftkit("logs", "victim").out
    assert json.loads(ftkit("status", "victim", "--json").out)["state"] == "failed"
    shown = " ".join(ftkit("status", "victim").out.split())
    assert "damaged" not in shown
    assert reason in shown
    refused = ftkit("resume", "victim")
    assert refused.code == 15
    for part in (reason, "ftkit 0.0.9 wrote it", "use the ftkit that submitted it; or correct these keys"):
        assert part in " ".join(refused.err.split())

    run.layout.plan.write_text(json.dumps({**plan, "ftkit_version": __version__}))
    assert f"another commit of ftkit {__version__} wrote it" in ftkit("resume", "victim").err


def test_a_copied_run_is_not_resumed_in_place_of_the_original(ftkit: Callable[..., Result], run: SubmittedRun) -> None:
    copied = run.layout.root.with_name("victim-20270102T030405Z-ffff")
    shutil.copytree(run.layout.root, copied)
    result = ftkit("resume", copied.name)
    assert result.code == 15
    assert f"the run in {run.layout.root}" in result.err
    assert run.layout.job_exit_code(run.job_id).exists()
    assert ftkit("status", copied.name).code == 0


def test_an_unusable_workspace_is_reported(
    ftkit: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no runs yet" in ftkit("runs").err
    (tmp_path / "file").touch()
    monkeypatch.setenv("FTKIT_WORKSPACE", str(tmp_path / "file"))
    result = ftkit("runs")
    assert result.code == 5
    assert f"the workspace {tmp_path / 'file'} can't be used" in result.err


def make_private(metrics: Path) -> None:
    metrics.chmod(0)


def replace_with_folder(metrics: Path) -> None:
    metrics.unlink()
    metrics.mkdir()


def damage_lines(metrics: Path) -> None:
    metrics.write_bytes(b'{"event": "st\n[]\n\0\0\0\n{"event": "of another version"}\n\n{"event": "being writ')


@pytest.mark.usefixtures("no_privileges")
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (make_private, "metrics.jsonl can't be read: you have no permission"),
        (replace_with_folder, "metrics.jsonl can't be read: it is not a regular file"),
        (damage_lines, "metrics.jsonl has 3 damaged lines"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_run_whose_records_cannot_be_read_does_not_look_like_one_without_records(
    damage: Callable[[Path], None], problem: str, ftkit: Callable[..., Result], run: SubmittedRun
) -> None:
    damage(run.layout.metrics)
    result = ftkit("runs")
    assert result.code == 0
    assert f"warning: {run.id}: {problem}" in result.err
    assert [line.split()[3:5] for line in result.out.splitlines()[1:]] == [["?/400", "?"], ["7/400", "1.5000"]]
    bad, good = json.loads(ftkit("runs", "--json").out)
    assert bad["metrics_problem"].startswith(problem)
    assert (bad["step"], good["metrics_problem"]) == (None, None)

    assert problem in " ".join(ftkit("status", "victim").out.split())
    assert json.loads(ftkit("status", "victim", "--json").out)["metrics_problem"].startswith(problem)
    assert json.loads(ftkit("status", "good", "--json").out)["metrics_problem"] is None
    assert f"A: {problem}" in " ".join(ftkit("compare", "victim", "good").out.split())
    compared = json.loads(ftkit("compare", "victim", "good", "--json").out)
    assert list(compared["metrics_problems"]) == [run.id]
    assert problem in " ".join(ftkit("report", "victim").err.split())
    page = run_page(read_report(run.layout, "failed"))
    assert problem.replace("'", "&#39;") in page
    assert "step was recorded" not in page


def test_a_listing_looks_for_damage_only_near_the_end_of_the_records(tmp_path: Path, records: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("damaged\n" + "".join(to_line(records.step(number)) + "\n" for number in range(100)))
    assert scan_records(path) == "metrics.jsonl has 1 damaged line"
    assert scan_records(path, tail_bytes=1000) == ""
    with path.open("a") as file:
        file.write("damaged\n")
    assert scan_records(path, tail_bytes=1000).startswith("metrics.jsonl has 1 damaged line")
    assert scan_records(tmp_path / "none") == ""
