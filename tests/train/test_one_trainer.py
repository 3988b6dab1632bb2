"""Only one trainer at a time runs in a run folder; signals and failures that end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import PATIENCE_SECONDS

from ftkit import process
from ftkit.planning.plan import plan_to_json
from ftkit.runs.failure import RankError, read_rank_error, write_rank_error
from ftkit.runs.lease import current_holder
from ftkit.runs.metrics_file import read_last_step
from ftkit.runs.records import EndRecord, FirstStepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOR_LONG = ("training.max_steps=100000", "training.checkpoint_every_steps=100000", "evaluation.generation=null")


@contextmanager
def training(run: Any, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Train in the background, as job scripts do; yield the launcher once training steps run."""
    run.layout.root.mkdir(parents=True, exist_ok=True)
    run.layout.plan.write_text(plan_to_json(run.plan))
    launcher = [sys.executable, "-m", "ftkit.train.launcher", *options]
    command = [*launcher, "--standalone", "--nproc-per-node=2", "-m", "ftkit.train"]
    with (
        (run.layout.root / "output").open("wb") as output,
        subprocess.Popen(
            [*command, str(run.layout.plan)],
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as started,
    ):
        try:
            wait_until(lambda: read_last_step(run.layout.metrics), run, started)
            yield started
        finally:
            process.signal_group(started.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], run: Any, launcher: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for a condition; fail if `launcher` ends before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        ended = time.monotonic() > deadline or (launcher and launcher.poll() is not None)
        assert not ended, (run.layout.root / "output").read_text()
        time.sleep(0.05)


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split()
    assert len(pids) == 2
    return [int(pid) for pid in pids]


def test_no_rank_outlives_a_killed_launcher(make_run: Callable[..., Any]) -> None:
    run = make_run("launcher-killed", *FOR_LONG)
    with training(run, "--heed-signals") as launcher:
        ranks = ranks_of(launcher)
        launcher.kill()
        wait_until(lambda: not any(process.start_time(rank) for rank in ranks), run)
    assert current_holder(run.layout) is None


def test_a_second_job_in_the_folder_is_rejected_and_the_first_continues(make_run: Callable[..., Any]) -> None:
    run = make_run("twice", *FOR_LONG)
    with training(run, "--heed-signals") as launcher:
        holder = current_holder(run.layout)
        assert holder is not None
        assert holder.pid == ranks_of(launcher)[0]
        before = read_last_step(run.layout.metrics).step
        kept = RankError(2e9, 0, "n1", "ValueError", "the first job's own", "Traceback", 1)
        write_rank_error(run.layout.rank_error(0), kept)
        said = run.train(expect=9)
        assert str(holder) in said
        assert read_rank_error(run.layout.rank_error(0)) == kept
        assert launcher.poll() is None
        run.layout.stop_request.touch()
        assert launcher.wait(PATIENCE_SECONDS) == 0
    assert [record.outcome for record in run.records(EndRecord)] == ["stopped"]
    assert run.records(EndRecord)[0].step > before
    assert current_holder(run.layout) is None


def test_slurm_signals_to_all_processes_end_none(make_run: Callable[..., Any]) -> None:
    run = make_run("signalled", *FOR_LONG)
    with training(run) as launcher:
        for pid in (*ranks_of(launcher), launcher.pid):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGTERM)
        before = read_last_step(run.layout.metrics).step
        wait_until(lambda: read_last_step(run.layout.metrics).step >= before + 3, run, launcher)
        run.layout.stop_request.touch()
        assert launcher.wait(PATIENCE_SECONDS) == 0
    assert [record.outcome for record in run.records(EndRecord)] == ["stopped"]
    (first,) = run.records(FirstStepRecord)
    assert first.phases["starting the ranks"] > 0


def test_a_hanging_rank_is_reported_and_ends_the_run(make_run: Callable[..., Any]) -> None:
    run = make_run("hangs", *FOR_LONG, "resources.hang_timeout_seconds=5")
    with training(run, "--heed-signals") as launcher:
        wait_until(lambda: read_last_step(run.layout.metrics).step > 10, run, launcher)
        os.kill(ranks_of(launcher)[1], signal.SIGSTOP)
        wait_until(run.layout.rank_error(0).exists, run, launcher)
        error = read_rank_error(run.layout.rank_error(0))
        assert error is not None
        assert "rank 1" in error.message
        assert error.exit_code == 1  # so that training may start again
        assert " in train\n" in run.layout.stacks(0).read_text()
        assert run.layout.collectives(0).stat().st_size


def test_sigterm_to_torchrun_ends_its_ranks_and_releases_the_folder(make_run: Callable[..., Any]) -> None:
    run = make_run("terminated", *FOR_LONG)
    with training(run, "--heed-signals") as launcher:
        ranks = ranks_of(launcher)
        launcher.terminate()
        launcher.wait(PATIENCE_SECONDS)
        assert not any(process.start_time(rank) for rank in ranks)
    (lease,) = run.layout.leases.glob("*.json")
    assert "is_released" in lease.read_text(encoding="utf-8")
