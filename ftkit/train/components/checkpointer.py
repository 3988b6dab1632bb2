"""Saving checkpoints while training goes on."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ftkit.errors import TrainingError
from ftkit.planning.estimates.memory import GIB
from ftkit.runs.records import CheckpointRecord
from ftkit.train.components.checkpoint import (
    Marker,
    TrainState,
    begin,
    complete,
    delete_oldest,
    describe,
    remove_leftovers,
    temporary_of,
)
from ftkit.train.components.checkpoint_reader import INDEX
from ftkit.train.memory.host_memory import available_bytes
from ftkit.train.memory.host_staging import HostSnapshot, state_bytes
from ftkit.train.world import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from types import TracebackType

    from ftkit.planning.plan import RunPlan
    from ftkit.train.components.metrics import Recorder
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Save:
    """A checkpoint on its way; the future gives the time at which it was complete."""

    step: int
    began: float
    resumed: float | None
    """When training went on; None if it waits."""
    ended: Future[float]


class Checkpointer:
    """Writes one checkpoint at a time, in a thread that talks to the other ranks through a group of its own.

    Training waits for the copy to main memory alone, unless there is no room for a copy. On the way out, whatever
    the reason, a checkpoint that is being written is completed first.
    """

    def __init__(self, plan: RunPlan, world: World, recorder: Recorder) -> None:
        self._plan = plan
        self._world = world
        self._recorder = recorder
        # Collectives of two threads in one group could meet in another order on another rank.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_take_device, initargs=(world.device,))
        self._copy = HostSnapshot(world.host_mesh)
        self._has_room: bool | None = None
        self._save: _Save | None = None

    def __enter__(self) -> Self:
        if self._world.is_first:
            remove_leftovers(self._plan.layout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as second:
            if error is None:
                raise
            log.error("%s", second)  # noqa: TRY400 - the run has an error already
        finally:
            self._thread.shutdown()

    def save(self, engine: Engine, progress: TrainState, *, in_background: bool) -> None:
        """Write a checkpoint once the one before it is complete. Every rank must call it.

        Raises:
            TrainingError: this one, or the one before it, can't be written.
        """
        began = time.perf_counter()
        self.wait()
        state = engine.state()
        copies = in_background and self._room_for(state)
        if copies:
            state = self._copy.take(state)
        elif self._world.device.type == "cuda":
            torch.cuda.synchronize()  # host sync: another thread reads what this one's kernels write
        ended = self._thread.submit(self._write, state, progress)
        self._save = _Save(progress.step, began, time.perf_counter() if copies else None, ended)
        if not copies:
            self.wait()

    def report_ended(self) -> None:
        """Report a checkpoint that is complete by now, or raise what kept it from being so."""
        if self._save is not None and self._save.ended.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint on its way, if there is one, is complete, and report it.

        Raises:
            TrainingError: it can't be written.
        """
        save, self._save = self._save, None
        if save is None:
            return
        folder = self._plan.layout.checkpoint(save.step)
        try:
            ended = save.ended.result()
        except (OSError, CheckpointException) as error:
            raise TrainingError(
                f"the checkpoint of step {save.step} can't be written: {str(error).strip()}",
                meaning="the file system is full, over quota or out of reach; older checkpoints are as they were",
                fix=f"make room in {folder.parent}, then: ftkit resume {self._plan.id}",
            ) from error
        stalled = (save.resumed or ended) - save.began
        self._recorder.write(CheckpointRecord(time.time(), save.step, str(folder), ended - save.began, stalled))
        log.info("checkpoint of step %d complete: %.1f s, training waited %.1f s",
                 save.step, ended - save.began, stalled)  # fmt: skip

    def _room_for(self, state: dict[str, Any]) -> bool:
        """Tell whether main memory has room for the copies of all processes of this node; asked once."""
        if self._has_room is None:
            needed = state_bytes(state) * self._plan.placement.processes_per_node
            available = available_bytes()
            self._world.barrier()  # one rank's copy must not count against another's
            self._has_room = 1.1 * needed <= available
            if not self._has_room:
                log.warning(
                    "training waits for its checkpoints: a copy takes %.1f GiB a node, %.1f GiB are free",
                    needed / GIB, available / GIB,
                )  # fmt: skip
        return self._has_room

    def _write(self, state: dict[str, Any], progress: TrainState) -> float:
        """Write a checkpoint, in the thread; return when it was complete."""
        final = self._plan.layout.checkpoint(progress.step)
        if self._world.is_first:
            begin(final)
        dist.barrier(self._group)
        folder = temporary_of(final)
        # Looking ahead, the writer would wait for the stream that training queues its steps on, every few megabytes.
        writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        state_dict_saver.save(state, storage_writer=writer, process_group=self._group)
        own = {path.name: describe(path) for path in sorted(folder.glob(f"__{self._world.rank}_*"))}
        parts: list[Any] = [None] * self._world.size
        dist.all_gather_object(parts, own, group=self._group)
        if self._world.is_first:
            parts.append({INDEX: describe(folder / INDEX)})
            files = {name: file for part in parts for name, file in part.items()}
            complete(final, Marker(progress, self._world.size, files))
            delete_oldest(self._plan.layout, progress.step, self._plan.recipe.training.keep_checkpoints)
        dist.barrier(self._group)
        return time.perf_counter()


def _take_device(device: torch.device) -> None:
    """Keep the thread off the first GPU, which is every new thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
