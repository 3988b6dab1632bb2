"""`python -m ftkit.train.launcher ...`: run torchrun for a job script, and end each rank with its torchrun.

Slurm may send a stop request (before preemption, or by `scancel --signal`) as a signal to every process of a job. The
task's shell creates the stop file, and the ranks write a checkpoint. torchrun would end all ranks, so it ignores the
signal. A rank obeys SIGTERM only if its torchrun sent it.

A rank that a signal kills can't record its error, so the launcher does.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.data.imports import UNUSED as OF_TRANSFORMERS
from ftkit.data.imports import keep_bytecode, without_packages
from ftkit.data.staging import STAGED, stage_weights
from ftkit.errors import FtkitError, MemoryExhaustedError, as_user_error, one_line
from ftkit.health.node import find_fault
from ftkit.health.sampler import sampling
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import PlacementPlan, RunPlan, ScriptPlan, read_job_plan
from ftkit.runs.failure import RankError, read_rank_error, record_rank_error, write_rank_error
from ftkit.runs.lease import FolderHeldError, held_lease, is_held_by_another_job, revoke_if_dead
from ftkit.runs.manifest import record_start
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord
from ftkit.train.heartbeats import watch_nodes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


log = logging.getLogger(__name__)

UNUSED = (*OF_TRANSFORMERS, "bitsandbytes", "boto3", "torchao", "torchvision", "transformer_engine")
"""Packages that transformers, accelerate and peft import if they are installed, for models, layers and services that
ftkit does not use. sklearn also imports pandas and pyarrow; bitsandbytes imports torch's Inductor."""
TERMINATED = 128 + signal.SIGTERM  # exit code of a rank that its torchrun ended, as in a shell
_LAUNCHED = "FTKIT_LAUNCHED"  # environment variable: start time of the launcher


def main(arguments: list[str]) -> int:
    """Run torchrun; return 1 if a rank failed. Ignore stop signals unless the first argument is --heed-signals."""
    os.environ[_LAUNCHED] = str(time.time())
    num_oom_kills = _count_oom_kills()
    if arguments[0] == "--heed-signals":
        arguments = arguments[1:]
    else:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so torchrun's handler never runs
    layout = RunLayout(Path(arguments[arguments.index("-m") + 2]).parent)
    plan, core_dumps = None, ""
    with suppress(FtkitError):  # the ranks report the error
        plan = read_job_plan(layout)
        core_dumps = _place_core_dumps(plan)
    cache = os.environ.get("FTKIT_CACHE_DIR")
    if cache and isinstance(plan, RunPlan):
        staged = stage_weights(plan, Path(cache), lambda text: sys.stderr.write(f"stage: {text}\n"))
        if staged is not None:
            os.environ[STAGED] = str(staged)
    if folder := keep_bytecode():
        sys.stderr.write(f"ftkit: torch was installed without bytecode: it is kept in {folder}\n")
    with faster_imports():  # after the mask, because threads inherit it
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
        from torch.distributed.run import main as torchrun  # noqa: PLC0415

    values = dict(word.removeprefix("--").split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    beats = None
    if "master-port" in values:
        beats = watch_nodes(layout, int(values["node-rank"]), int(values["master-port"]))
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        if _were_asked_to_stop(layout, error):
            revoke_if_dead(layout)
            return 0
        sys.stderr.write(f"{error}\n")
        _record_deaths(layout, error, num_oom_kills, core_dumps)
        _record_fault(layout, error)
        revoke_if_dead(layout)
        errors = [_recorded_error(layout, rank) for rank in error.failures]
        if beats and any(each and each.reports_lost_peer for each in errors):
            beats.settle()  # srun would wait a minute for the task of a lost node
        return 1
    if {"--standalone", "--node-rank=0"} & set(arguments):
        _write_report(layout)
    return 0


def launch_time() -> float:
    return float(os.environ.get(_LAUNCHED, time.time()))


def _write_report(layout: RunLayout) -> None:
    """Write the HTML report of a completed run if matplotlib is installed. Errors don't fail the run."""
    last = read_last_record(layout.metrics)
    is_wanted = os.environ.get("FTKIT_REPORT", "1") != "0" and find_spec("matplotlib") is not None
    if not (is_wanted and isinstance(last, EndRecord) and last.outcome == "completed"):
        return
    environment = {**os.environ, "FTKIT_WORKSPACE": str(layout.root.parents[1])}
    try:
        command = [sys.executable, "-m", "ftkit", "report", layout.root.name]
        done = process.run(command, timeout_seconds=120, environment=environment)
        failure = "" if done.returncode == 0 else done.stderr
    except FtkitError as error:
        failure = str(error)
    if failure:
        sys.stderr.write(f"ftkit: no report was written: {one_line(failure)}\n")


def _place_core_dumps(plan: RunPlan | ScriptPlan) -> str:
    """Disable core dumps unless the plan enables them, as they are as large as a rank's memory; return their location.

    It is the working directory unless the administrator configured another path, or a program (core(5)).
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most if plan.resources.core_dumps else 0, most))
    if not plan.resources.core_dumps:
        return ""
    if isinstance(plan, ScriptPlan):
        folder = Path(plan.script.folder)
    else:
        folder = Path(os.environ.get("FTKIT_CACHE_DIR", gettempdir())) / "core-dumps"
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    pattern = Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8").strip()
    return f"passed to {pattern[1:]}" if pattern.startswith("|") else str(folder / pattern)


def _were_asked_to_stop(layout: RunLayout, error: ChildFailedError) -> bool:
    """Return whether ranks ended because ftkit sent a stop signal to a script that does not handle it."""
    last = read_last_record(layout.metrics)
    is_stopped = isinstance(last, EndRecord) and last.outcome == "stopped" and not last.has_checkpoint
    stop_signals = {-signal.SIGTERM, -signal.SIGUSR1}
    return is_stopped and all(failure.exitcode in stop_signals for failure in error.failures.values())


def _count_oom_kills() -> int | None:
    """Return the number of OOM kills in this cgroup (v2); None if unknown."""
    with suppress(OSError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next(line.removeprefix("0::") for line in groups if line.startswith("0::"))
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in events if line.startswith("oom_kill "))
    return None


def _explain_kill(num_before: int | None) -> tuple[str, int]:
    now = _count_oom_kills()
    if now is None or num_before is None:
        return ": the node's log (dmesg) tells whether by the kernel's OOM killer", 1
    if now > num_before:
        return ": by the kernel's OOM killer, for lack of host memory", MemoryExhaustedError.exit_code
    return ": by another process, not by the kernel's OOM killer", 1


def _record_deaths(layout: RunLayout, error: ChildFailedError, num_oom_kills: int | None, core_dumps: str = "") -> None:
    """Write an error for each rank that a signal killed, with the location of its core dump, or that left no error."""
    for rank, failure in error.failures.items():
        if failure.exitcode in {-signal.SIGTERM, TERMINATED} and len(error.failures) > 1:
            continue  # torchrun ended it after another rank had failed
        if failure.exitcode >= 0 and (is_held_by_another_job(layout) or _recorded_error(layout, rank)):
            continue
        name, meaning, code = failure.signal_name(), "", 1
        if failure.exitcode >= 0:
            name, meaning = "exit", f" code {failure.exitcode}, and left no error"
        elif name == "SIGBUS":
            meaning = ": a memory-mapped file can't be read; usually its file system is full or unreachable"
        elif name == "SIGKILL":
            meaning, code = _explain_kill(num_oom_kills)
        elif core_dumps:
            meaning = f"; its core dump on {socket.gethostname()}: {core_dumps}"
        message = f"rank {rank} {'ended by' if name == 'exit' else 'was killed by'} {name}{meaning}"
        # The timestamp is rounded down to seconds, so it precedes the errors of ranks that failed because of this one.
        died = RankError(float(failure.timestamp), rank, socket.gethostname(), name, message, "", code, code == 1)
        with suppress(OSError):
            write_rank_error(layout.rank_error(rank), died)


def _recorded_error(layout: RunLayout, rank: int) -> RankError | None:
    """Return the error that a rank wrote in this start; None if there is none, or it is from an earlier start."""
    error = read_rank_error(layout.rank_error(rank))
    return error if error and error.time >= int(launch_time()) else None


def _record_fault(layout: RunLayout, error: ChildFailedError) -> None:
    """Add the fault of this node, if one is known, to the errors of its ranks."""
    if fault := find_fault(launch_time()):
        sys.stderr.write(f"ftkit: {socket.gethostname()}: {fault}\n")
        for rank in error.failures:
            if recorded := _recorded_error(layout, rank):
                with suppress(OSError):
                    write_rank_error(layout.rank_error(rank), replace(recorded, cause=fault))


@contextmanager
def faster_imports() -> Iterator[None]:
    """Hide the `UNUSED` packages from imports in the block, and pause garbage collection.

    Each of the two saves a tenth of the CPU time of the imports, or more.
    """
    with without_packages(*(name for name in UNUSED if name not in sys.modules)):
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()  # imported objects stay alive: later collections skip them
            gc.enable()


# --- Ranks ---------------------------------------------------------------------------------------


def follow_launcher(on_end: Callable[[], None]) -> None:
    """End this process with its parent. At the parent's SIGTERM, call `on_end` in another thread, then end.

    torchrun starts its ranks in new sessions, so they would continue to train if it is killed. Call this before
    starting threads.
    """
    launcher = os.getppid()
    process.die_with_parent(launcher)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_sigterm() -> None:
        while (received := signal.sigwaitinfo({signal.SIGTERM})).si_pid != launcher:
            log.warning("SIGTERM from process %d ignored: a rank ends by the stop file, or by its torchrun's SIGTERM",
                        received.si_pid)  # fmt: skip
        on_end()
        os._exit(TERMINATED)

    threading.Thread(target=wait_for_sigterm, name="sigterm", daemon=True).start()


class RunRank:
    """A rank of ftkit's trainer or of a user's script: its log, the run's lease, GPU samples, and its error.

    `say` writes a line to the log, `report` an error. `at_end` is closed at the end of the run, or at torchrun's
    SIGTERM.
    """

    def __init__(self, layout: RunLayout, say: Callable[[str], None], report: Callable[[Exception], None]) -> None:
        self._layout = layout
        self._say = say
        self._report = report
        self.rank = int(os.environ["RANK"])
        self.at_end = ExitStack()

    def take_run(self, num_restarts: int) -> None:
        """Take the run's lease on rank 0 before changing its files; exit immediately if another job takes it over."""
        if self.rank == 0:
            held = held_lease(self._layout, say=self._say, on_loss=lambda error: os._exit(self.fail(error)))
            self.at_end.enter_context(held)
            record_start(self._layout.manifest, num_restarts=num_restarts, launched=launch_time())

    def sample_gpus(self, placement: PlacementPlan) -> None:
        """On the first rank of each node, sample its GPUs until the end of the run."""
        if placement.device == "cuda" and os.environ["LOCAL_RANK"] == "0":
            self.at_end.enter_context(sampling(self._layout))

    def clear_error(self) -> None:
        """Delete the error of an earlier start."""
        self._layout.rank_error(self.rank).unlink(missing_ok=True)

    def redirect_output(self) -> None:
        """Append the output of this process to its rank's log. Rank 0 writes to the job's log."""
        self._layout.logs.mkdir(parents=True, exist_ok=True)
        if self.rank:
            with self._layout.rank_log(self.rank).open("ab") as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
                os.dup2(file.fileno(), sys.stderr.fileno())

    def fail(self, error: Exception) -> int:
        """Report the error that ended this rank, and record it unless another job has the run; return the exit code."""
        reason = as_user_error(error)
        self._report(reason)
        if isinstance(reason, FtkitError) and (path := os.environ.get("FTKIT_NO_RESTART_FILE")):  # it would recur
            with suppress(OSError):
                Path(path).touch()
        if isinstance(reason, FolderHeldError) or is_held_by_another_job(self._layout):
            return reason.exit_code if isinstance(reason, FtkitError) else 1
        return record_rank_error(reason, self._layout.rank_error(self.rank), self._layout.disk_full, rank=self.rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
