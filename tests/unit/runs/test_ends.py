"""Why a start ended: Slurm's words in the job's log, notes of the job script, and what earlier versions recorded."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from ftkit.planning.layout import RunLayout
from ftkit.runs.ends import End, find_end, find_slurms_words, note_end
from ftkit.runs.history import read_history
from ftkit.runs.job import CAUSES, FAILURES, STATES, Cause, RunState

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = datetime(2026, 11, 23, 22, 10, tzinfo=UTC).timestamp()
START = """2026-11-23T22:{0}9:49Z ftkit: job 2 on n[1-2], restart {0}
2026-11-23T22:{0}9:49Z ftkit: training
2026-11-23 22:58:23,474 rank 0 INFO ftkit.train.observers.step_metrics: step 334/1000000: loss 5.5711
"""
JOB = "slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-23T22:58:16{} ***\n"
STEP = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-23T22:58:16{} ***\n"
NEW = "[2026-11-26T21:09:23.012] error: *** JOB 2 ON n1 CANCELLED AT 2026-11-26T21:09:23{} ***\n"  # Slurm 26.05
LOST = "srun: error: Node failure on n2\n" + JOB.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run's folder with an empty log."""
    layout = RunLayout(tmp_path)
    layout.logs.mkdir()
    return layout


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (JOB.format(" DUE TO PREEMPTION"), End(Cause.PREEMPTED)),
        (STEP.format(" DUE TO PREEMPTION"), End(Cause.PREEMPTED)),
        (NEW.format(" DUE TO PREEMPTION"), End(Cause.PREEMPTED)),
        (NEW.format(" DUE TO TIME LIMIT"), End(Cause.TIME_LIMIT)),
        (JOB.format(" DUE TO TIME LIMIT"), End(Cause.TIME_LIMIT)),
        (LOST, End(Cause.NODE_FAILURE, "n2")),
        (JOB.format(" DUE TO JOB REQUEUE"), End(Cause.REQUEUED)),
        (JOB.format(""), End(Cause.CANCELED)),
        (JOB.format(" DUE TO PREEMPTION") + JOB.format(" DUE TO JOB REQUEUE"), End(Cause.PREEMPTED)),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=2.0. Some of the step tasks have been OOM Killed.\n",
         End(Cause.OUT_OF_MEMORY)),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=2.batch.\n", End(Cause.OUT_OF_MEMORY)),
        ("srun: error: n1: task 0: Out Of Memory\n", End(Cause.OUT_OF_MEMORY)),
        ("slurmstepd-n1: error: Step 2.0 exceeded memory limit (9 > 8), being killed\n", End(Cause.OUT_OF_MEMORY)),
        (STEP.format(""), None),  # srun ends the other tasks after one has failed
        ("the text that a user prints: CANCELLED AT noon DUE TO PREEMPTION\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_end_of_a_start_is_read_from_slurms_words(words: str, end: End | None, layout: RunLayout) -> None:
    layout.job_log.write_text(START.format(0) + words)
    assert find_slurms_words(layout) == end
    assert find_slurms_words(layout, job_id="2") == end
    if "JOB 2" in words or "STEP 2" in words:
        assert find_slurms_words(layout, job_id="1") is None
    layout.job_log.write_text(START.format(0) + words + START.format(1))
    assert find_slurms_words(layout, since=BEGAN) == end
    assert find_slurms_words(layout) is None, "the start after it has not ended"


def test_words_about_another_start_than_the_recorded_one_do_not_count(layout: RunLayout) -> None:
    preempted, lost = JOB.format(" DUE TO PREEMPTION"), JOB.format(" DUE TO NODE FAILURE")
    layout.job_log.write_text(START.format(0) + preempted + START.format(1) + lost + START.format(2))
    # The second one ended before it recorded itself.
    assert [find_slurms_words(layout, since=BEGAN + 600 * n) for n in (0, 1)] == [
        End(Cause.PREEMPTED), End(Cause.NODE_FAILURE),
    ]  # fmt: skip
    layout.job_log.write_text(START.format(0) + preempted + START.format(1) + START.format(2))
    assert find_end(layout, BEGAN + 600)[0].cause is Cause.UNKNOWN


def test_words_about_an_earlier_job_do_not_count_for_one_that_ended_before_training(layout: RunLayout) -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=2.0.\n"
    for words in (JOB.format(" DUE TO PREEMPTION"), killed):
        layout.job_log.write_text(START.format(0) + words + START.format(1).partition("\n")[0] + "\n")
        assert find_slurms_words(layout, job_id="2") is None
        layout.job_log.write_text(START.format(0) + words)  # the next job did not even log that it began
        assert find_slurms_words(layout, job_id="3") is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("error: training ended with exit code 137 (resources.max_restarts is 0)", Cause.KILLED),
        ("training ended with exit code 137: restart 1 of at most 3", Cause.KILLED),
        ("training ended with exit code 1: restart 1 of at most 3", Cause.UNKNOWN),
    ],
)
def test_a_killed_launcher_is_known_from_the_exit_code_in_the_jobs_log(
    line: str, cause: Cause, layout: RunLayout
) -> None:
    layout.job_log.write_text(f"{START.format(0)}2026-01-01T00:00:09Z ftkit: {line}\n{START.format(1)}")
    end, error = find_end(layout, BEGAN)
    assert (end.cause, error) == (cause, None)
    assert "9" in end.detail or "exit code 1" in end.detail
    assert find_end(layout, BEGAN + 600)[0].cause is Cause.UNKNOWN, "the start after it has not ended"


def test_a_note_precedes_the_words_that_follow_from_it(layout: RunLayout) -> None:
    note_end(layout, End(Cause.TIME_LIMIT))  # by the job script, which then requeues its job
    layout.job_log.write_text(START.format(0) + JOB.format(" DUE TO JOB REQUEUE") + START.format(1))
    assert find_end(layout, BEGAN) == (End(Cause.TIME_LIMIT), None)
    layout.job_log.write_text(START.format(0) + JOB.format(" DUE TO PREEMPTION") + START.format(1))
    assert find_end(layout, BEGAN) == (End(Cause.PREEMPTED), None)


def test_a_damaged_reason_is_unknown(layout: RunLayout) -> None:
    starts = [{"time": 1.0, "after": after} for after in (None, "canceled", {"cause": [7]}, {"cause": "canceled"})]
    layout.manifest.write_text(json.dumps({"starts": starts}))
    assert [each.reason for each in read_history(layout).restarts] == [None, End(Cause.UNKNOWN), End(Cause.CANCELED)]


def test_each_state_that_only_the_scheduler_knows_has_one_cause() -> None:
    assert set(CAUSES) == {RunState.CANCELED, *FAILURES} - {RunState.FAILED}
    assert {state: cause for cause, state in STATES.items()} == CAUSES
