"""`python -m ftkit.train.script_process PLAN [RESTARTS]`: one process of a run that executes a user's script.

torchrun starts it. It sets accelerate's environment variables, then runs the unchanged script as `__main__` in this
process. Before the first optimizer step, it checks and reports the sharding of the model. With `--prove`, it also
checks the first steps for training mistakes.
"""

from __future__ import annotations

import gc
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ftkit import process
from ftkit.errors import FtkitError, TrainingError, plural
from ftkit.files import parse_json, write_json
from ftkit.planning.layout import SCRIPT_CODE, RunLayout
from ftkit.planning.plan import RUN_FOLDER, ScriptPlan, read_job_plan
from ftkit.runs.failure import RankError, write_rank_error
from ftkit.runs.metrics_file import append_record
from ftkit.runs.records import EndRecord, Record, ScriptStepRecord, ShardingRecord
from ftkit.runs.script_checks import judge
from ftkit.runs.script_facts import RankFacts
from ftkit.train.heartbeats import NODES
from ftkit.train.launcher import RunRank

if TYPE_CHECKING:
    from torch import nn

    from ftkit.train.step_watch import StepWatch

Sharding = Literal["fsdp2", "fsdp1", "zero3", "ddp", "none"]

_POLL_SECONDS: Final = 2.0
_SECONDS_BETWEEN_RECORDS: Final = 20.0
_SECONDS_FOR_RANKS: Final = 60.0
_MIN_UNITS: Final = 3  # two decoder layers and the rest: with fewer, the model is all-gathered in one piece


@dataclass(frozen=True)
class FoundSharding:
    sharding: Sharding
    num_units: int  # modules whose parameters are sharded together
    num_parameters: int  # elements of all parameters, unsharded
    num_held: int  # elements in this process's memory
    world_size: int
    is_connected: bool  # whether torch.distributed is initialized

    def explain_missing(self, *, was_asked: bool, device: str) -> str:
        """Return the problem, or an empty text. `was_asked` tells whether accelerate is configured to shard."""
        if self.world_size == 1:
            return ""
        if not self.is_connected:
            return (
                "the processes do not train together: torch.distributed is not initialized, so each of the "
                f"{self.world_size} trains a separate model. Use accelerate or the Trainer, or call "
                "torch.distributed.init_process_group()"
            )
        if self.sharding in {"ddp", "none"}:
            copies = "nothing wraps them"
            if self.sharding == "ddp":
                copies = "DistributedDataParallel averages their gradients"
            reason = ". To shard the model, give a recipe or --accelerate-config FILE"
            if was_asked and device == "cpu":
                reason = ". accelerate does not shard on CPUs; on GPUs this run is refused"
            elif was_asked:
                reason = ", although accelerate.json enables it: the script does not prepare its model with accelerate"
            return (
                f"FSDP is not on: each of the {self.world_size} processes holds all {self.num_parameters:,} parameters "
                f"({copies}){reason}"
            )
        if self.sharding != "zero3" and self.num_units < _MIN_UNITS:
            return (
                f"FSDP is on, but the model is {plural(self.num_units, 'unit')}: all {self.num_parameters:,} "
                "parameters are all-gathered in one piece. Check the wrap policy of accelerate's configuration"
            )
        return ""


def find_sharding(modules: Sequence[nn.Module], world_size: int) -> FoundSharding:
    """Determine how the parameters of a model that ftkit did not build are sharded; `modules` lists submodules too."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415 - after the logs are set up
    from torch.distributed.tensor import DTensor  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    parameters = {id(each): each for module in modules for each in module.parameters(recurse=False)}.values()
    units = sum(isinstance(each, FSDPModule) for each in modules)
    flat_units = sum(isinstance(each, FullyShardedDataParallel) for each in modules)
    sharding: Sharding = "none"
    if units:
        sharding = "fsdp2"
    elif flat_units:
        sharding = "fsdp1"
    elif any(hasattr(each, "ds_tensor") for each in parameters):  # DeepSpeed's
        sharding = "zero3"
    elif any(isinstance(each, DistributedDataParallel) for each in modules):
        sharding = "ddp"
    total = sum(int(getattr(each, "ds_numel", each.numel())) for each in parameters)
    parts = (each.to_local() if isinstance(each, DTensor) else getattr(each, "ds_tensor", each) for each in parameters)
    held = sum(part.numel() for part in parts)
    if sharding == "fsdp1":  # flat parameters are one shard each
        total = held * world_size
    return FoundSharding(
        sharding, units or flat_units, total, held, world_size, sys.modules["torch.distributed"].is_initialized()
    )


class ScriptRank:
    """One process of the run: its records, and its stop requests."""

    def __init__(self, plan: ScriptPlan) -> None:
        self.plan = plan
        self.rank = int(os.environ["RANK"])
        self.step = 0
        self.began = time.time()
        self.is_stop_requested = False
        self._watch: StepWatch | None = None
        self._next_record = 0.0
        self._is_checked = False

    def record(self, record: Record) -> None:
        if self.rank == 0:
            with suppress(OSError):  # a full disk must not end the script
                append_record(self.plan.layout.metrics, record)

    def record_end(self) -> None:
        outcome: Literal["completed", "stopped"] = "stopped" if self.is_stop_requested else "completed"
        seconds = time.time() - self.began
        self.record(EndRecord(time.time(), outcome, self.step, seconds, None, has_checkpoint=False))

    def watch_optimizer(self) -> None:
        # These imports can fail, so they come after the setup of the logs.
        from torch.optim import optimizer as torch_optimizer  # noqa: PLC0415

        from ftkit.train.watchdog import Watchdog  # noqa: PLC0415

        local_size, (_, *nodes) = int(os.environ["LOCAL_WORLD_SIZE"]), os.environ.get(NODES, "start").split()
        processes = [(host, 0) for host in nodes or [socket.gethostname()] for _ in range(local_size)]
        timeout = self.plan.resources.hang_timeout_seconds
        watchdog = Watchdog(self.plan.layout, self.rank, processes, lambda: self.step, timeout)
        watchdog.start()

        def after(*_: object) -> None:
            self.step += 1
            watchdog.end_step()
            if time.time() >= self._next_record:
                self._next_record = time.time() + _SECONDS_BETWEEN_RECORDS
                self.record(ScriptStepRecord(time.time(), self.step))

        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: self.check_sharding())
        torch_optimizer.register_optimizer_step_post_hook(after)
        if self.plan.script.is_proved:
            from ftkit.train.step_watch import StepWatch  # noqa: PLC0415 - as above

            self.plan.layout.rank_steps(self.rank).unlink(missing_ok=True)  # of an earlier start
            if self.rank == 0:
                self.plan.layout.proof.unlink(missing_ok=True)
            self._watch = StepWatch(self.rank, self.plan.placement.world_size, self.report_steps)
            self._watch.start()

    def report_steps(self, facts: RankFacts) -> None:
        """Write this rank's observations; rank 0 then checks those of all ranks in a thread."""
        try:
            write_json(self.plan.layout.rank_steps(self.rank), facts)
        except OSError as error:  # a full disk must not end the script
            say(f"prove: nothing is checked: {error}")
            return
        if self.rank == 0:
            threading.Thread(target=self.prove, args=(facts,), name="prove").start()

    def prove(self, facts: RankFacts) -> None:
        """Check the first steps of all ranks that report within a minute; print and write the verdict."""
        paths = [self.plan.layout.rank_steps(rank) for rank in range(1, self.plan.placement.world_size)]
        deadline = time.monotonic() + _SECONDS_FOR_RANKS
        while time.monotonic() < deadline and not all(path.exists() for path in paths):
            time.sleep(_POLL_SECONDS / 10)
        verdict = judge([facts, *(parse_json(path.read_bytes(), RankFacts) for path in paths if path.exists())])
        for finding in verdict.findings:
            say(f"prove: {finding.check}: {finding.what} {finding.fix}")
        for name, reason in verdict.not_checked.items():
            say(f"prove: not checked: {name}: {reason}")
        counts = f"{plural(len(verdict.findings), 'finding')}, {len(verdict.passed)} checks passed"
        say(f"prove: {counts}: {', '.join(verdict.passed)} ({verdict.seconds:.1f} s)")
        with suppress(OSError):
            write_json(self.plan.layout.proof, verdict)

    def check_sharding(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        # By type: `isinstance` would make lazy objects of libraries import their modules.
        modules = [each for each in gc.get_objects() if issubclass(type(each), sys.modules["torch.nn"].Module)]
        script, place = self.plan.script, self.plan.placement
        found = find_sharding(modules, place.world_size)
        warning = found.explain_missing(was_asked=script.asks_for_sharding, device=place.device)
        sizes = found.num_units, found.num_parameters, found.num_held
        self.record(ShardingRecord(time.time(), found.sharding, *sizes, place.world_size, warning))
        if warning and self.rank == 0:
            say(f"warning: {warning}")
        if found.sharding in {"ddp", "none"} and script.asks_for_sharding and warning and place.device == "cuda":
            raise TrainingError(
                warning, fix="see accelerate.json in the run's folder; without a recipe, ftkit requests no sharding"
            )

    def wait_for_stop(self) -> None:
        """Wait for a stop request, and pass it to the script as a signal to this process."""
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
        script = self.plan.script
        path = self.plan.layout.code / SCRIPT_CODE / script.path
        os.chdir(script.folder)
        sys.argv = [str(path), *(word.replace(RUN_FOLDER, str(self.plan.layout.root)) for word in script.args)]
        sys.path[0] = str(path.parent)  # as Python does for a script; -m puts the working folder there
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            say(str(end.code))
            return 1
        finally:
            if self._watch:
                self._watch.finish(can_replay=self.plan.placement.world_size == 1)  # another rank may have failed
            distributed = sys.modules["torch.distributed"]
            if distributed.is_available() and distributed.is_initialized():
                # Most scripts don't destroy their process group; gloo's threads can then abort at exit.
                with suppress(RuntimeError):
                    distributed.destroy_process_group()
        return 0


def say(text: str) -> None:
    sys.stderr.write(f"ftkit: {text}\n")
    sys.stderr.flush()


def main(plan_path: Path, num_restarts: int = 0) -> int:
    """Run the script in this process; write its error next to its log, for `ftkit status`."""
    layout = RunLayout(plan_path.parent)

    def report(reason: Exception) -> None:
        if isinstance(reason, FtkitError):
            say(f"error: {reason}")
        else:
            sys.excepthook(type(reason), reason, reason.__traceback__)

    # Reset the launcher's signal handling: the script gets signals as if started from a shell.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    process.die_with_parent(os.getppid())
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
            threading.Thread(target=script.wait_for_stop, name="stop-request", daemon=True).start()
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
    """Set the environment variables of accelerate's own launcher, and the run's folder."""
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
