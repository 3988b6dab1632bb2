"""Save checkpoints while training continues.

Every rank writes its shards into a folder with a temporary name. Rank 0 adds a marker with the size and digest of each
file, and renames the folder to its final name, which makes it a complete checkpoint (`RunLayout.list_checkpoints`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from ftkit.config.execution import GIB
from ftkit.errors import TrainingError
from ftkit.files import publish, remove, write_json
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.runs.records import CheckpointRecord, FailedCheckpointRecord, Record
from ftkit.train.checkpoint.loading import INDEX, reason_of
from ftkit.train.memory.usage import available_bytes, empty_pinned_like
from ftkit.train.model.local_shard import local_tensor
from ftkit.train.private_apis.torch import find_tensors, map_instances
from ftkit.train.world import CHECKPOINT_GROUP, COLLECTIVE_TIMEOUT, World

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan
    from ftkit.train.engine import Engine, State

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is being written; times are from `time.perf_counter`."""

    step: int
    began: float  # when training paused for it
    resumed: float | None  # when training continued; None if it waits
    ended: Future[float]  # the time at which the checkpoint was complete
    may_fail: bool  # whether training continues without it


class _SaveError(Exception):
    """A checkpoint can't be written; raised on all ranks with the reason of the first rank that failed."""


class Checkpointer:
    """Write one checkpoint at a time, in a thread with a separate process group.

    Training waits only for the copy to host memory; without room for a copy, it waits for the whole checkpoint. It
    continues after a failed write, unless more than `max_failed_checkpoints` fail in a row.
    """

    def __init__(self, plan: RunPlan, world: World, write: Callable[[Record], None]) -> None:
        self._plan = plan
        self._world = world
        self._write_record = write
        # In a shared group, the order of two threads' collectives could differ between ranks.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc=CHECKPOINT_GROUP)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._snapshot = HostSnapshot(world)
        self._has_room: bool | None = None
        self._save: _Save | None = None
        self._num_failed = 0

    def __enter__(self) -> Self:
        if self._world.is_first:  # partial checkpoints of a job that was killed while writing or deleting them
            for folder in self._plan.layout.checkpoints.glob(".step-*"):
                remove(folder)
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
        """Start to write a checkpoint once the previous one is complete. Collective: every rank must call it."""
        began = time.perf_counter()
        self.wait()
        state = engine.state()
        copies = in_background and self._room_for(state)
        if copies:
            state = self._snapshot.take(state)
        elif self._world.device.type == "cuda":
            torch.cuda.synchronize()  # host sync: another thread reads the tensors that queued kernels write
        ended = self._thread.submit(self._write, state, progress)
        resumed = time.perf_counter() if copies else None
        self._save = _Save(progress.step, began, resumed, ended, may_fail=in_background)
        if not copies:
            self.wait()

    def report_ended(self) -> None:
        if self._save is not None and self._save.ended.done():
            self.wait()

    def wait(self) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        folder = self._plan.layout.checkpoint(save.step)
        try:
            ended = save.ended.result()
        except _SaveError as error:
            self._num_failed += 1
            failure = TrainingError(
                f"the checkpoint of step {save.step} can't be written: {error}",
                meaning="the file system is full, over quota or unreachable; older checkpoints are unchanged",
                fix=f"free space in {folder.parent}, then: ftkit resume {self._plan.id}",
            )
            if not save.may_fail or self._num_failed > self._plan.recipe.training.max_failed_checkpoints:
                raise failure from error
            log.error("%s; training continues without it", failure.what)  # noqa: TRY400 - the message has the cause
            self._write_record(FailedCheckpointRecord(time.time(), save.step, str(error), self._num_failed))
            return
        self._num_failed = 0
        seconds, stalled = ended - save.began, (save.resumed or ended) - save.began
        self._write_record(CheckpointRecord(time.time(), save.step, str(folder), seconds, stalled))
        log.info("checkpoint of step %d complete: %.1f s, training waited %.1f s", save.step, seconds, stalled)

    def _room_for(self, state: State) -> bool:
        """Return whether host memory has room for the copies of all processes of this node; measured once."""
        if self._has_room is None:
            needed = state_bytes(state) * self._plan.placement.processes_per_node
            available = available_bytes()
            self._world.barrier()  # one rank's copy must not count against another's
            self._has_room = 1.1 * needed <= available
            if not self._has_room:
                log.warning(
                    "training waits while checkpoints are written: a copy needs %.1f GiB of a node's memory, "
                    "%.1f GiB is free",
                    needed / GIB, available / GIB,
                )  # fmt: skip
        return self._has_room

    def _write(self, state: State, progress: TrainState) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)  # a new thread starts on the first device
        is_first, final = self._world.is_first, self._plan.layout.checkpoint(progress.step)
        folder = final.with_name(f".{final.name}.partial")
        # With look-ahead, the writer would wait for training's stream every few megabytes.
        writer = partial(FileSystemWriter, folder, per_thread_copy_ahead=0)
        save = state_dict_saver.save
        try:
            self._on_all_ranks(lambda: _make_empty(folder) if is_first else None)
            self._on_all_ranks(lambda: save(state, storage_writer=writer(), process_group=self._group))
            parts = self._on_all_ranks(
                lambda: {path.name: SavedFile.of(path) for path in sorted(folder.glob(f"__{self._world.rank}_*"))}
            )
            self._on_all_ranks(lambda: self._complete(folder, final, progress, parts) if is_first else None)
        except _SaveError:
            if is_first:
                with suppress(OSError):
                    remove(folder)  # the partial checkpoint may be what fills the disk
            raise
        return time.perf_counter()

    def _complete(self, folder: Path, final: Path, progress: TrainState, parts: list[dict[str, SavedFile]]) -> None:
        files = {INDEX: SavedFile.of(folder / INDEX)} | {name: file for part in parts for name, file in part.items()}
        write_json(folder / MARKER, Marker(FORMAT_VERSION, progress, self._world.size, files))
        publish(folder, final)  # a damaged one of the same step is replaced
        training, best = self._plan.recipe.training, progress.best.step if progress.best else None
        try:
            delete_oldest(
                self._plan.layout, progress.step, training.keep_checkpoints,
                keep_every=training.keep_every_steps, best=best,
            )  # fmt: skip
        except OSError as error:
            log.warning("an older checkpoint can't be deleted: %s", error)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run one stage of a save; return its results on all ranks. Collective."""
        value, reason = None, ""
        try:
            value = action()
        except (OSError, CheckpointException) as error:
            log.warning("a checkpoint can't be written", exc_info=error)
            reason = reason_of(error)
        outcomes: list[tuple[T, str]] = [(cast("T", None), "")] * self._world.size
        dist.all_gather_object(outcomes, (value, reason), group=self._group)
        if reasons := [reason for _, reason in outcomes if reason]:
            raise _SaveError(reasons[0])
        return [value for value, _ in outcomes]


def _make_empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def delete_oldest(
    layout: RunLayout, step: int, keep: int, *, keep_every: int | None = None, best: int | None = None
) -> None:
    """Delete checkpoints up to a step except the `keep` newest, the best, and those at multiples of `keep_every`."""
    # Ignore later checkpoints: they are damaged, or training would have resumed from them.
    for old, folder in [found for found in layout.list_checkpoints() if found[0] <= step][:-keep]:
        if old == best or (keep_every is not None and old % keep_every == 0):
            continue
        doomed = folder.with_name(f".{folder.name}.{time.time_ns()}.deleted")
        folder.rename(doomed)  # hides it from readers
        remove(doomed)


class HostSnapshot:
    """Copy sharded state to reused host buffers, which training cannot modify while they are being written."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, state: State) -> State:
        tensors = [local_tensor(tensor) for tensor in find_tensors(state)]
        # A parameter that never got a gradient has no optimizer state yet, so later states may have more tensors.
        if [(each.shape, each.dtype) for each in tensors] != [(each.shape, each.dtype) for each in self._buffers]:
            self._buffers = [empty_pinned_like(tensor) for tensor in tensors]
        buffers = iter(self._buffers)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            host = next(buffers).copy_(local_tensor(tensor), non_blocking=True)
            if not isinstance(tensor, DTensor):
                return host
            mesh, shape, stride = self._world.on_host(tensor.device_mesh), tensor.shape, tensor.stride()
            return DTensor.from_local(host, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

        copied: State = map_instances(torch.Tensor, copy, state)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()  # host sync: the next step would change tensors during their copy
        return copied


def state_bytes(state: State) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in find_tensors(state))
