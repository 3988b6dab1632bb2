"""`python -m ftkit.train.script_process PLAN [RESTARTS]`: one process of a run that executes a user's script.

torchrun starts it. It sets accelerate's environment variables, then runs the unchanged script as `__main__` in this
process. Before the script's first optimizer step, it checks how the model is sharded, and reports it.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from ftkit.errors import FtkitError, TrainingError
from ftkit.planning.layout import SCRIPT_CODE, RunLayout
from ftkit.planning.plan import RUN_FOLDER, ScriptPlan, read_job_plan
from ftkit.runs.failure import RankError, write_rank_error
from ftkit.runs.metrics_file import append_record
from ftkit.runs.records import EndRecord, Record, ScriptStepRecord, ShardingRecord
from ftkit.train.launcher import RunRank, end_with_launcher

_POLL_SECONDS: Final = 2.0
_SECONDS_BETWEEN_RECORDS: Final = 20.0


class ScriptRank:
    """One process of the run: its records, and its stop requests."""

    def __init__(self, plan: ScriptPlan) -> None:
        self.plan = plan
        self.rank = int(os.environ["RANK"])
        self.num_steps = 0
        self.began = time.time()
        self.is_stop_requested = False
        self._next_record = 0.0
        self._is_checked = False

    def record(self, record: Record) -> None:
        """Append a record to the run's metrics, on rank 0."""
        if self.rank == 0:
            with suppress(OSError):  # a full disk must not end the script
                append_record(self.plan.layout.metrics, record)

    def record_end(self) -> None:
        """Record the script's number of steps and its time."""
        outcome: Literal["completed", "stopped"] = "stopped" if self.is_stop_requested else "completed"
        seconds = time.time() - self.began
        self.record(EndRecord(time.time(), outcome, self.num_steps, seconds, None, has_checkpoint=False))

    def watch_optimizer(self) -> None:
        """Check the sharding before this process's first optimizer step, and count the steps."""
        # The import can fail: it comes after the logs are set up.
        from torch.optim import optimizer as torch_optimizer  # noqa: PLC0415

        def after(*_: object) -> None:
            self.num_steps += 1
            if time.time() >= self._next_record:
                self._next_record = time.time() + _SECONDS_BETWEEN_RECORDS
                self.record(ScriptStepRecord(time.time(), self.num_steps))

        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: self.check_sharding())
        torch_optimizer.register_optimizer_step_post_hook(after)

    def check_sharding(self) -> None:
        """Record how the model is sharded, once."""
        if self._is_checked:
            return
        self._is_checked = True
        from ftkit.train.distributed.found_sharding import find_sharding, live_modules  # noqa: PLC0415 - as above

        script, place = self.plan.script, self.plan.placement
        found = find_sharding(live_modules(), place.world_size)
        warning = found.explain_missing(was_asked=script.asks_for_sharding, device=place.device)
        self.record(
            ShardingRecord(
                time.time(), found.sharding, found.num_units, found.num_parameters, found.num_held, place.world_size,
                warning,
            )
        )  # fmt: skip
        if warning and self.rank == 0:
            say(f"warning: {warning}")
        if found.sharding in {"ddp", "none"} and script.asks_for_sharding and warning and place.device == "cuda":
            raise TrainingError(
                warning, fix="see accelerate.json in the run's folder; without a recipe, ftkit requests no sharding"
            )

    def watch_stop_file(self) -> None:
        """Pass a stop request on to the script, as a signal to this process."""
        threading.Thread(target=self._wait_for_stop, name="stop-request", daemon=True).start()

    def _wait_for_stop(self) -> None:
        path = Path(os.environ["FTKIT_STOP_FILE"])
        while not path.exists():
            time.sleep(_POLL_SECONDS)
        self.is_stop_requested = True
        number = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}.get(self.plan.script.stop_signal)
        if number is None:
            return
        if self.rank == 0:
            say(f"stop requested: sending {number.name} to the script")
        self.record_end()  # a script that does not handle the signal ends with it
        os.kill(os.getpid(), number)

    def run(self) -> int:
        """Run the script as `__main__`; return its exit code."""
        script = self.plan.script
        path = self.plan.layout.code / SCRIPT_CODE / script.path
        os.chdir(script.folder)
        sys.argv = [str(path), *(word.replace(RUN_FOLDER, str(self.plan.layout.root)) for word in script.args)]
        sys.path[0] = str(path.parent)  # as Python does, instead of the folder that -m puts there
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            say(str(end.code))
            return 1
        finally:
            distributed = sys.modules["torch.distributed"]
            if distributed.is_available() and distributed.is_initialized():
                # Most scripts leave their process group open: gloo's threads can abort at exit then.
                with suppress(RuntimeError):
                    distributed.destroy_process_group()
        return 0


def say(text: str) -> None:
    """Write a line to the job's log."""
    sys.stderr.write(f"ftkit: {text}\n")
    sys.stderr.flush()


def main(plan_path: Path, num_restarts: int = 0) -> int:
    """Run the script in this process; write its error beside its log, for `ftkit status`."""
    layout = RunLayout(plan_path.parent)

    def report(reason: Exception) -> None:
        if isinstance(reason, FtkitError):
            say(f"error: {reason}")
        else:
            sys.excepthook(type(reason), reason, reason.__traceback__)

    # The script gets signals as if started from a shell, not those that the launcher handles.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_launcher()
    plan = read_job_plan(layout)
    if not isinstance(plan, ScriptPlan):
        raise TypeError("the job script starts this module only for scripts")
    rank = RunRank(layout, say, report)
    script = ScriptRank(plan)
    logging.captureWarnings(False)  # noqa: FBT003 - the script decides
    rank.redirect_output()
    try:
        rank.take_run(num_restarts)
        rank.sample_gpus(plan.placement)
        with rank.at_end:
            rank.clear_error()
            _set_environment(plan)
            script.watch_optimizer()
            script.watch_stop_file()
            code = script.run()
    except Exception as error:  # noqa: BLE001 - any error is recorded for `ftkit status`
        return rank.fail(error)
    if code == 0:
        script.record_end()
    elif not script.is_stop_requested:
        with suppress(OSError):
            exit_error = SystemExit(f"the script exited with code {code}")
            write_rank_error(layout.rank_error(rank.rank), RankError.from_exception(exit_error, rank=rank.rank))
    return code


def _set_environment(plan: ScriptPlan) -> None:
    """Set the variables that accelerate's own launcher would set, and the run's folder."""
    os.environ["FTKIT_RUN_DIR"] = str(plan.layout.root)
    variables = {}
    if plan.script.accelerate is not None:
        from ftkit.train.private_apis.libraries import accelerate_environment  # noqa: PLC0415 - a script may not need it

        variables = accelerate_environment(plan.layout.accelerate_config)
    if plan.placement.device == "cpu":  # on CPUs, accelerate refuses or silently ignores FSDP
        is_fsdp = {"ACCELERATE_USE_FSDP", *(name for name in variables if name.startswith("FSDP_"))}
        variables = {name: value for name, value in variables.items() if name not in is_fsdp}
        variables["ACCELERATE_USE_CPU"] = "true"
    os.environ.update(variables)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
