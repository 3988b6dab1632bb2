"""`ftkit runs`, `ftkit status`, `ftkit logs`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from ftkit.cli.follow import LiveView, PlainView
from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import run_page
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import age, count, duration, gib, short_path
from ftkit.cli.terminal.run_view import _show_samples, choose_samples
from ftkit.errors import EXIT_CODES, DiskFullError, TrainingError, as_user_error, plural
from ftkit.files import write_json
from ftkit.runs.failure import RankError, record_rank_error, write_rank_error
from ftkit.runs.job import Job, RunState
from ftkit.runs.records import (
    CheckpointRecord,
    EvaluationRecord,
    MemoryRecord,
    RouterStats,
    Sample,
    StageRecord,
    StartRecord,
)
from ftkit.runs.script_checks import Finding, Verdict
from ftkit.runs.slow_ranks import RankTiming

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakePrograms, Result, RunMaker

    from ftkit.runs.job import SubmittedRun


def finish(run: SubmittedRun, records: Any) -> None:
    records.write(run, records.step(1, 6.5), records.step(400, 0.5), records.end())
    run.layout.export.mkdir()
    run.layout.job_exit_code(run.job_id).write_text("0\n")


def screen(width: int = 80) -> tuple[Terminal, StringIO]:
    """A terminal of a given width, and its output."""
    terminal, output = Terminal(), StringIO()
    console = Console(file=output, force_terminal=True, width=width, highlight=False, markup=False)
    terminal.talk = terminal._out = console
    return terminal, output


def test_runs_are_listed_newest_first(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, records: Any, squeue_line: Any
) -> None:
    done, waiting = make_run("done"), make_run("waiting", job_id="4711")
    finish(done, records)
    programs.answer("squeue", squeue_line(waiting, "PENDING", "Resources"))
    lines = [line.split() for line in ftkit("runs").out.splitlines()]
    assert lines[0] == ["NAME", "ID", "STATE", "STEP", "LOSS", "CLUSTER", "JOB", "AGE"]
    assert lines[1][:7] == ["waiting", waiting.id, "pending", "0/400", "-", "local", "4711"]
    assert lines[2][:5] == ["done", done.id, "completed", "400/400", "0.5000"]
    assert len(programs.calls()) == 1
    listed = json.loads(ftkit("runs", "--json").out)
    assert [run["state"] for run in listed] == ["pending", "completed"]
    assert listed[1]["loss"] == 0.5


def test_a_run_in_training_shows_its_last_evaluation(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    run = make_run("evaluated")
    evaluations = [
        EvaluationRecord(2.0, step, when, 6.0, perplexity, ())
        for step, when, perplexity in ((0, "before", 812.5), (100, "during", 40.0), (200, "during", 20.0))
    ]
    records.write(run, evaluations[0])
    (line,) = [line for line in ftkit("status", run.id).out.splitlines() if "validation" in line]
    assert line.split()[1:] == ["perplexity", "812.5"]
    records.write(run, evaluations[0], records.step(1, 6.5), *evaluations[1:], records.step(210, 3.0))
    (line,) = [line for line in ftkit("status", run.id).out.splitlines() if "validation" in line]
    assert line.split()[1:] == ["perplexity", "812.5", "→", "perplexity", "20", "at", "step", "200"]


@pytest.mark.parametrize("has_validation", [True, False])
def test_eval_comes_next_only_if_there_are_rows_to_evaluate_on(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any, *, has_validation: bool
) -> None:
    run = make_run()
    finish(run, records)
    if has_validation:
        records.write(run, EvaluationRecord(2.0, 400, "after", 6.0, 400.0, ()), records.end())
    commands = json.loads(ftkit("status", run.id, "--json").out)["next"]
    words = ["chat", *["eval"] * has_validation, "export", "status"]
    assert commands == [f"ftkit {word} {run.id}" for word in words]


def test_a_slow_node_is_reported(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    run = make_run("slow")
    finish(run, records)
    run.layout.logs.mkdir(exist_ok=True)
    for rank, seconds in enumerate((1.0, 1.0, 1.14, 1.0)):
        timing = RankTiming(rank, f"h{16 + rank // 2}", "cuda", 400, 100, 2.0, seconds)
        write_json(run.layout.rank_timing(rank), timing)
    assert "node h17 is 14% slower" in ftkit("status", run.id).out
    (found,) = json.loads(ftkit("status", run.id, "--json").out)["stragglers"]
    assert (found["host"], found["ranks"]) == ("h17", [2])


def test_the_time_of_a_resumed_run_is_said_to_be_that_since_its_checkpoint(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    resumed, whole = make_run("resumed"), make_run("whole")
    for run, step in ((resumed, 300), (whole, 0)):
        damaged = (320, 340) if step else ()
        records.write(run, StartRecord(1.0, 400, step, 2, "fsdp2", "cpu", 1000, {}, damaged))
        finish(run, records)
    told = " ".join(ftkit("status", resumed.id).out.split())
    assert "since step 300" in told
    assert "damaged checkpoint of step 320 and 340" in told
    assert "since step" not in ftkit("status", whole.id).out


@pytest.mark.usefixtures("undrawn")
def test_the_load_of_experts_is_shown_for_mixtures_only(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    routed = replace(records.step(2, 0.5), routers=RouterStats(2.5, 1.5, 0.25, 0.9, 8.125))
    mixture, dense = make_run("mixture"), make_run("dense")
    records.write(mixture, records.step(1, 6.5), routed)
    finish(dense, records)
    seen = " ".join(ftkit("status", mixture.id).out.split())
    assert "experts busiest 2.50 ×" in seen
    assert "load-balancing loss 8.125" in seen
    assert "busiest" not in ftkit("status", dense.id).out
    pages = [run_page(read_report(run.layout, "completed")) for run in (mixture, dense)]
    assert ["Busiest expert" in page for page in pages] == [True, False]


def test_runs_can_be_listed_without_slurm(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    make_run()
    result = ftkit("runs")
    assert result.code == 0
    assert "unknown" in result.out
    assert "to Slurm" in result.err
    assert programs.calls() == []


def test_a_nan_loss_is_null_in_json(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, records: Any
) -> None:
    programs.answer("squeue")
    records.write(make_run(), records.step(1, float("nan")))
    assert json.loads(ftkit("runs", "--json").out)[0]["loss"] is None
    assert json.loads(ftkit("status", "last", "--json").out)["last_step"]["loss"] is None


def test_the_status_of_a_run_that_was_never_submitted_says_how_to_submit_it(
    ftkit: Callable[..., Result], make_run: RunMaker
) -> None:
    run = make_run()
    run.layout.submission.unlink()
    out = ftkit("status", "last").out
    assert f"ftkit resume {run.id}" in out
    assert "--follow" not in out


def test_the_status_lists_the_profilers_traces(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    run = make_run()
    finish(run, records)
    assert "profile" not in ftkit("status", "last").out
    run.layout.profile.mkdir()
    run.layout.profile_trace(0, 0).touch()
    assert f"1 trace in {short_path(run.layout.profile)}" in " ".join(ftkit("status", "last").out.split())


def test_the_status_of_a_completed_run_is_complete(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    folder = run.layout.checkpoint(400)
    folder.mkdir(parents=True)
    records.write(run, CheckpointRecord(1.0, 400, str(folder), 0.5, 0.1))
    finish(run, records)
    result = ftkit("status", "last")
    for part in (run.id, "completed", "6.5000 → 0.5000", "step-000400 in ", "local, 1 × 2 processes (cpu), fsdp2"):
        assert part in result.out
    told = json.loads(ftkit("status", "last", "--json").out)
    assert told["checkpoints"] == [{"step": 400, "path": str(folder)}]
    assert told["end"]["export"] == str(run.layout.export)
    assert (told["is_final"], told["error"], told["exit_code"]) == (True, None, 0)


def fail_with(run: SubmittedRun, code: int, *, can_resume: bool = False) -> None:
    error = RankError(2e9, 3, "n2", "OddError", "the message", "Traceback\nOddError: the message", code, can_resume)
    write_rank_error(run.layout.rank_error(3), error)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("code", [3, 8, 9, 11])
def test_every_command_reports_the_same_exit_code_and_advice_for_a_failure(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any, code: int
) -> None:
    run = make_run()
    run.layout.manifest.write_text(json.dumps({"command": ["ftkit", "run", "my recipe.yaml"]}))
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED", "1:0"))
    fail_with(run, code)
    status, followed = ftkit("status", "last"), ftkit("status", "last", "--follow")
    assert (status.code, followed.code, ftkit("logs", "last", "-f").code) == (0, code, code)
    for told in (status.out, followed.err):
        assert "first: OddError\nthe message\n" in told
        assert "Traceback" not in told
        assert "ftkit run 'my recipe.yaml'" in told
        assert "ftkit resume" not in told
    assert f"exit code {code}: {EXIT_CODES[code]}" in " ".join(status.out.split())
    told = json.loads(ftkit("status", "last", "--json").out)
    assert (told["exit_code"], told["error"]["rank"], told["next"]) == (code, 3, ["ftkit run 'my recipe.yaml'"])


@pytest.mark.usefixtures("quick")
def test_a_failure_outside_of_the_recipe_suggests_resuming_after_a_fix(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any
) -> None:
    run = make_run()
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED", "1:0"))
    fail_with(run, 5, can_resume=True)
    result = ftkit("status", "last", "--follow")
    assert result.code == 5
    assert f": ftkit resume {run.id}" in result.err


@pytest.mark.usefixtures("quick")
def test_an_unexpected_training_error_is_shown_with_its_traceback_and_not_as_a_bug_of_ftkit(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any
) -> None:
    run = make_run()
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED", "1:0"))
    fail_with(run, 1, can_resume=True)
    status, followed = ftkit("status", "last"), ftkit("status", "last", "--follow")
    assert followed.code == 7
    for told in (status.out, followed.err):
        assert "Traceback\nOddError: the message" in told
        assert f"ftkit resume {run.id}" in told
    assert "1 (of the job)" in " ".join(status.out.split())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize("state", ["FAILED", "PREEMPTED"])
def test_an_exception_of_the_users_code_is_not_answered_with_the_runs_copy_of_it(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any, state: str, *,
    is_script: bool,
) -> None:  # fmt: skip
    run = make_run()
    run.layout.manifest.write_text(json.dumps({"command": ["ftkit", "run", "my recipe.yaml"]}))
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, state, "1:0"))
    traceback = f'Traceback\n  File "{run.layout.code}/with-mine/loss.py", line 3, in <module>\nValueError'
    if is_script:
        (run.layout.code / "script").mkdir(parents=True)
        traceback = "Traceback\nValueError"
    write_rank_error(run.layout.rank_error(3), RankError(2e9, 3, "n2", "ValueError", "bad", traceback, 1))
    shown = json.loads(ftkit("status", "last", "--json").out)["next"]
    if state == "FAILED":
        assert shown == ["ftkit run 'my recipe.yaml'", f"ftkit resume {run.id} --allow code"]
        assert "correct the code" in ftkit("status", "last", "--follow").err
    else:
        assert shown == [f"ftkit resume {run.id}"]


@pytest.mark.usefixtures("quick")
def test_following_a_script_shows_what_it_prints_and_listings_show_its_steps(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any
) -> None:
    run = make_run()
    (run.layout.code / "script").mkdir(parents=True)
    run.layout.logs.mkdir(exist_ok=True)
    bars = [f"\r {step}%|█   | {step}/100 [00:10<01:15,  1.17it/s]" for step in (11, 12)]
    run.layout.job_log.write_text(f"hello\n{''.join(bars)}\r   \r{{'loss': '1.25', 'learning_rate': '1e-4'}}\n")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "COMPLETED", "0:0"))
    followed = ftkit("status", "last", "--follow").err.splitlines()
    assert followed[:2] == ["hello", "{'loss': '1.25', 'learning_rate': '1e-4'}"]
    assert "step 12/100, loss 1.2500, learning rate 1.00e-04" in " ".join(ftkit("status", "last").out.split())
    listed = json.loads(ftkit("runs", "--json").out)[0]
    assert (listed["step"], listed["num_steps"], listed["loss"]) == (12, 100, 1.25)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("checks", [[], ["modes", "shift", "shift"]])
def test_following_a_script_fails_if_prove_has_findings(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any, checks: list[str]
) -> None:
    run = make_run()
    (run.layout.code / "script").mkdir(parents=True)
    write_json(run.layout.proof, Verdict([Finding(check, "wrong", "repair it") for check in checks], [], {}, 0.1))
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "COMPLETED", "0:0"))
    followed = ftkit("status", "last", "--follow")
    assert followed.code == (TrainingError.exit_code if checks else 0)
    assert ("--prove has 3 findings: modes, shift\n" in followed.err) == bool(checks)
    write_json(run.layout.proof, Verdict([], [], {"shift": "the watch failed: ValueError"}, 0.1))
    followed = ftkit("status", "last", "--follow")
    assert followed.code == TrainingError.exit_code
    assert "could check nothing: the watch failed: ValueError" in followed.err


@pytest.mark.usefixtures("quick")
def test_a_failed_preflight_is_no_full_disk(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any
) -> None:
    run = make_run()
    run.layout.logs.mkdir(exist_ok=True)
    run.layout.job_log.write_text("ftkit: error: passes the preflight\n")
    run.layout.job_exit_code(run.job_id).write_text("12")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED", "12:0"))
    followed = ftkit("status", "last", "--follow")
    assert (followed.code, "disk" in followed.err) == (12, False)
    assert "passes the preflight" in followed.err


@pytest.mark.usefixtures("quick")
def test_a_run_killed_by_slurm_for_memory_has_the_memory_exit_code(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any
) -> None:
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(make_run(), "OUT_OF_MEMORY", "0:125"))
    assert ftkit("status", "last", "--follow").code == 11


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_full_disk_is_reported_even_if_no_error_could_be_written(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, sacct_line: Any, scheduler: str
) -> None:
    run = make_run(scheduler=scheduler, job_id="4194305")  # above the largest pid of Linux
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(run, "FAILED", "1:0"))
    run.layout.rank_error(0).symlink_to("/dev/full")
    error = as_user_error(TrainingError(f"the checkpoint can't be written: {OSError(28, os.strerror(28))}"))
    assert record_rank_error(error, run.layout.rank_error(0), run.layout.disk_full, rank=0) == DiskFullError.exit_code
    followed = ftkit("status", "last", "--follow")
    assert followed.code == DiskFullError.exit_code
    assert f"failed: {EXIT_CODES[13]}" in followed.err
    assert f"ftkit resume {run.id}" in followed.err
    assert f"exit code 13: {EXIT_CODES[13]}" in " ".join(ftkit("status", "last").out.split())


def test_the_status_reports_a_run_that_was_never_submitted(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    make_run().layout.submission.unlink()
    assert "never submitted" in ftkit("status", "last").out
    assert "never submitted" in ftkit("runs", "--json").out
    assert ftkit("cancel", "last").code == 4


def test_an_unknown_run_is_reported_with_the_closest(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    make_run("olmo3")
    result = ftkit("status", "olmo4")
    assert result.code == 4
    assert "closest: olmo3" in result.err


def test_logs_are_printed_unchanged_in_a_pipe(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run()
    run.layout.job_log.write_text("one\n\x1b[31mtwo\x1b[0m\nthree")
    run.layout.rank_log(3).write_text("rank three\n")
    assert ftkit("logs", "last").out == "one\n\x1b[31mtwo\x1b[0m\nthree"
    assert ftkit("logs", "last", "--rank", "3").out == "rank three\n"


def test_a_missing_log_is_reported_with_the_existing_ones(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run()
    result = ftkit("logs", "last")
    assert result.code == 4
    assert "has not started" in result.err
    run.layout.job_log.touch()
    assert "job.log" in ftkit("logs", "last", "--rank", "9").err


@pytest.mark.usefixtures("quick")
def test_following_a_log_ends_with_the_run_and_its_exit_code(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, records: Any, sacct_line: Any
) -> None:
    good, bad = make_run("good"), make_run("bad")
    finish(good, records)
    good.layout.job_log.write_text("all is well\n")
    assert (ftkit("logs", "good", "-f").code, ftkit("logs", "good", "-f").out) == (0, "all is well\n")
    programs.answer("squeue")
    programs.answer("sacct", sacct_line(bad, "TIMEOUT"))
    result = ftkit("logs", "bad", "-f")
    assert result.code == 7
    assert "timed-out" in result.err


@pytest.mark.usefixtures("quick")
def test_following_a_run_that_slurm_lost_ends(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    programs.answer("squeue")
    monkeypatch.setattr("ftkit.cli.follow._LOST_SECONDS", 0.01)
    result = ftkit("status", "last", "--follow")
    assert result.code == 7
    assert "lost track of" in result.err


def test_only_shrinkable_columns_are_truncated_on_a_narrow_screen() -> None:
    terminal, output = screen(40)
    terminal.table(("NAME…", "ID"), [("a-very-long-name-for-a-run-of-ours", "0123456789abcdef")])
    lines = output.getvalue().splitlines()
    assert "0123456789abcdef" in lines[1]
    assert "…" in lines[1]
    assert len(lines) == 2


def test_a_terminal_shows_a_progress_bar_for_steps_and_lines_for_other_records(records: Any) -> None:
    terminal, output = screen()
    view = LiveView(terminal)
    view.state(Job("7", RunState.PENDING, reason="Resources"))
    view._progress.refresh()
    view.state(Job("7", RunState.RUNNING))
    view.record(StageRecord(1.0, "packing"))
    view.record(StageRecord(4.0, "building the model"))
    view.record(records.step(100, 1.25, time=9.0))
    view._progress.refresh()
    view.record(records.end())
    view.close()
    shown = output.getvalue()
    for part in (
        "pending: Resources",
        "packing (3 s)",
        "building the model (5 s)",
        "100/400 loss 1.250 12.3 k tok/s in total 2 min 30 s left",
        "completed after 400 steps, 1 min 15 s of training",
    ):
        assert part in shown


def test_no_time_left_is_predicted_from_the_first_record_of_a_start(records: Any) -> None:
    """It includes compiling."""
    terminal, output = screen()
    view = LiveView(terminal)
    view.state(Job("7", RunState.RUNNING))
    view.record(StartRecord(1.0, 400, 0, 2, "fsdp2", "cpu", 1000, {}))
    for number, is_shown in ((1, False), (10, True)):
        view.record(records.step(number))
        view._progress.refresh()
        assert (" left" in output.getvalue()) == is_shown
    view.close()


def test_a_log_gets_few_lines_for_a_long_run(records: Any) -> None:
    terminal, output = screen()
    view = PlainView(terminal)
    view.state(Job("7", RunState.RUNNING))
    view.record(MemoryRecord(0.0, "loading", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    for number in range(1, 101):
        view.record(records.step(number, time=float(number), num_steps=100))
    view.state(Job("7", RunState.COMPLETED, is_final=True))
    view.close()
    steps = [line.split()[1] for line in output.getvalue().splitlines() if "loss" in line]
    assert steps == ["1/100", "31/100", "61/100", "91/100", "100/100"]
    assert "memory" not in output.getvalue()
    assert "completed" not in output.getvalue()


def test_a_correct_and_a_wrong_sample_are_shown_if_both_exist() -> None:
    right, wrong = Sample("q", "a", "a", True), Sample("q", "a", "b", False)
    assert choose_samples((right, right, wrong)) == [right, wrong]
    assert choose_samples((wrong, wrong, wrong)) == [wrong, wrong]
    assert choose_samples((right,)) == [right]
    assert choose_samples(()) == []


@pytest.mark.parametrize("reference", ["SELECT 2", ""])
def test_a_wrong_sample_has_the_expected_answer_if_it_is_known(
    reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Sample("q", reference, "SELECT 1", False)
    _show_samples(EvaluationRecord(0.0, 1, "after", 1.0, 2.7, (sample,)), Terminal(), is_data=True)
    assert ("expected" in capsys.readouterr().out) == bool(reference)


def test_escape_sequences_of_models_and_logs_do_not_reach_the_terminal() -> None:
    terminal, output = screen()
    terminal.say("a\x1b[31mb\x1b[0m \x1b[2J\x07c\nd")
    terminal.table(("NAME",), [["a\x1b]0;title\x07b\nc"]])
    assert "a\\x1b[31mb\\x1b[0m \\x1b[2J\\x07c\nd" in output.getvalue()
    assert "a\\x1b]0;title\\x07b c" in output.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (12, "12"),
        (999.4, "999"),
        (999.6, "1 k"),
        (951680, "952 k"),
        (999.9e6, "1 B"),
        (70.55e9, "70.6 B"),
        (0.5, "0.5"),
    ],
)
def test_large_numbers_are_abbreviated(number: float, text: str) -> None:
    assert count(number) == text


def test_durations_are_formatted_for_people() -> None:
    assert [duration(seconds) for seconds in (0, 59.4, 200, 7500, 273600)] == [
        "0 s", "59 s", "3 min 20 s", "2 h 05 min", "3 d 4 h",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (1e300, float("inf"), float("nan"))] == ["ages"] * 3
    assert [age(seconds) for seconds in (-5, 30, 90, 7200, 200000)] == ["0 s", "30 s", "1 min", "2 h", "2 d"]


def test_sizes_words_and_paths_are_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert (gib(0.05), gib(12.34)) == ("51 MiB", "12.3 GiB")
    assert (plural(1, "node"), plural(2, "process")) == ("1 node", "2 processes")
    paths = [tmp_path / "a" / "b", tmp_path.parent / "c"]
    assert [short_path(path) for path in paths] == ["a/b", str(tmp_path.parent / "c")]
