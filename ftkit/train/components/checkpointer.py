"""Save checkpoints while training continues, and load the newest complete one."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ftkit.config.execution import GIB
from ftkit.errors import TrainingError, one_line
from ftkit.files import remove
from ftkit.runs.checkpoints import DamagedCheckpointError, Marker, SavedFile, TrainState, find_damage, read_marker
from ftkit.runs.records import CheckpointRecord, FailedCheckpointRecord
from ftkit.train.components.checkpoint import (
    INDEX,
    ForeignCheckpointError,
    begin,
    check_index,
    complete,
    delete_oldest,
    remove_leftovers,
    temporary_of,
)
from ftkit.train.memory.host_memory import available_bytes
from ftkit.train.memory.host_snapshot import HostSnapshot, state_bytes
from ftkit.train.world import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import RunPlan
    from ftkit.train.components.metrics import Recorder
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is being written.

    Attributes:
        step: number of completed steps.
        began: when training stopped for it (`time.perf_counter`).
        resumed: when training continued; None if it waits.
        ended: gives the time at which the checkpoint was complete.
        may_fail: whether training continues without it.
    """

    step: int
    began: float
    resumed: float | None
    ended: Future[float]
    may_fail: bool


class _SaveError(Exception):
    """A checkpoint can't be written; raised on all ranks, with the reason of the first rank that failed."""


class Checkpointer:
    """Write one checkpoint at a time, in a thread with a separate process group.

    A failed write is reported, and training continues, unless more than `max_failed_checkpoints` fail in a row.
    Training waits only for the copy to host memory or, without room for a copy, for the whole checkpoint. The end of
    the context, even after an error, waits until the current checkpoint is complete.
    """

    def __init__(self, plan: RunPlan, world: World, recorder: Recorder) -> None:
        self._plan = plan
        self._world = world
        self._recorder = recorder
        # The order of two threads' collectives in one group could differ between ranks.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_set_device, initargs=(world.device,))
        self._snapshot = HostSnapshot(world)
        self._has_room: bool | None = None
        self._save: _Save | None = None
        self._num_failed = 0

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
        """Start to write a checkpoint once the previous one is complete. Collective: every rank must call it.

        Raises:
            TrainingError: this one, or the previous one, can't be written.
        """
        began = time.perf_counter()
        self.wait()
        state = engine.state()
        copies = in_background and self._room_for(state)
        if copies:
            state = self._snapshot.take(state)
        elif self._world.device.type == "cuda":
            torch.cuda.synchronize()  # host sync: another thread reads what this one's kernels write
        ended = self._thread.submit(self._write, state, progress)
        resumed = time.perf_counter() if copies else None
        self._save = _Save(progress.step, began, resumed, ended, may_fail=in_background)
        if not copies:
            self.wait()

    def report_ended(self) -> None:
        """Report the current checkpoint if it is complete.

        Raises:
            TrainingError: it can't be written.
        """
        if self._save is not None and self._save.ended.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current checkpoint, if there is one, and report it.

        Raises:
            TrainingError: it can't be written.
        """
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
            log.error("%s; training continues without it", failure.what)  # noqa: TRY400 - it says all
            self._recorder.write(FailedCheckpointRecord(time.time(), save.step, str(error), self._num_failed))
            return
        self._num_failed = 0
        stalled = (save.resumed or ended) - save.began
        self._recorder.write(CheckpointRecord(time.time(), save.step, str(folder), ended - save.began, stalled))
        log.info("checkpoint of step %d complete: %.1f s, training waited %.1f s",
                 save.step, ended - save.began, stalled)  # fmt: skip

    def _room_for(self, state: dict[str, Any]) -> bool:
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

    def _write(self, state: dict[str, Any], progress: TrainState) -> float:
        """Write a checkpoint, in the thread; return the time at which it was complete.

        Raises:
            _SaveError: on all ranks.
        """
        final = self._plan.layout.checkpoint(progress.step)
        folder = temporary_of(final)
        # With look-ahead, the writer would wait for training's stream every few megabytes.
        writer = partial(FileSystemWriter, folder, per_thread_copy_ahead=0)
        save = state_dict_saver.save
        try:
            self._on_first_rank(lambda: begin(final))
            self._on_all_ranks(lambda: save(state, storage_writer=writer(), process_group=self._group))
            parts = self._on_all_ranks(
                lambda: {path.name: SavedFile.of(path) for path in sorted(folder.glob(f"__{self._world.rank}_*"))}
            )
            self._on_first_rank(lambda: self._complete(final, progress, parts))
        except _SaveError:
            if self._world.is_first:
                with suppress(OSError):
                    remove(folder)  # the partial checkpoint may be what fills the disk
            raise
        return time.perf_counter()

    def _complete(self, final: Path, progress: TrainState, parts: list[dict[str, SavedFile]]) -> None:
        parts = [*parts, {INDEX: SavedFile.of(temporary_of(final) / INDEX)}]
        files = {name: file for part in parts for name, file in part.items()}
        complete(final, Marker(progress, self._world.size, files))
        training, best = self._plan.recipe.training, progress.best.step if progress.best else None
        try:
            delete_oldest(
                self._plan.layout,
                progress.step,
                training.keep_checkpoints,
                keep_every=training.keep_every_steps,
                best=best,
            )
        except OSError as error:
            log.warning("an older checkpoint can't be deleted: %s", error)

    def _on_first_rank(self, action: Callable[[], object]) -> None:
        self._on_all_ranks(lambda: action() if self._world.is_first else None)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run one stage of a save; return its results on all ranks. Collective.

        Raises:
            _SaveError: on all ranks, if it failed on one.
        """
        value, reason = None, ""
        try:
            value = action()
        except (OSError, CheckpointException) as error:
            log.warning("a checkpoint can't be written", exc_info=error)
            reason = _describe(error)
        outcomes: list[Any] = [None] * self._world.size
        dist.all_gather_object(outcomes, (value, reason), group=self._group)
        if reasons := [reason for _, reason in outcomes if reason]:
            raise _SaveError(reasons[0])
        return [value for value, _ in outcomes]


def _describe(error: OSError | CheckpointException) -> str:
    """Return the reason on one line: that of the first rank that failed."""
    if isinstance(error, CheckpointException):
        return next(iter(one_line(cause) for cause, _ in error.failures.values()), one_line(error))
    return str(error)


def _set_device(device: torch.device) -> None:
    """Set the thread's GPU: every new thread starts on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


# --- Loading -------------------------------------------------------------------------------------


def load_newest(engine: Engine, layout: RunLayout, world: World, data: str) -> TrainState | None:
    """Load the newest undamaged checkpoint; None if there is no checkpoint. Collective: every rank must call it.

    `data` is the fingerprint of the prepared data.

    Raises:
        TrainingError: all checkpoints are damaged, or the newest undamaged one belongs to other data.
    """
    damaged = []
    for step, folder in reversed(_list_on_first_rank(layout, world)):
        marker, damage = _check(step, folder, world)
        if marker is None:
            log.warning("checkpoint %s is damaged (%s): trying the one before it", folder.name, damage)
            damaged.append(f"{folder.name} ({damage})")
            continue
        if marker.progress.fingerprint != data:
            raise TrainingError(
                f"{folder} was trained on data {marker.progress.fingerprint}, but the prepared data is {data}",
                meaning="another version of ftkit prepared the data again, and packs it differently",
                fix="resume with the version of ftkit that started the run, or start a new run",
            )
        _load(engine, folder)
        return marker.progress
    if damaged:
        raise TrainingError(
            f"every checkpoint in {layout.checkpoints} is damaged: {', '.join(damaged)}",
            meaning="the file system lost data, files were changed or moved, or this user may not read them",
            fix=f"restore one of them, then: ftkit resume {layout.root.name}; or start a new run. Nothing was deleted",
        )
    return None


def load_best(engine: Engine, layout: RunLayout, world: World, step: int) -> bool:
    """Load the checkpoint of the best evaluation; return False if it is damaged. Collective.

    Raises:
        TrainingError: it belongs to another model.
    """
    folder = layout.checkpoint(step)
    marker, damage = _check(step, folder, world)
    if marker is None:
        log.warning("the best checkpoint, %s, is damaged (%s): exporting the last one", folder.name, damage)
        return False
    _load(engine, folder)
    return True


def _list_on_first_rank(layout: RunLayout, world: World) -> list[tuple[int, Path]]:
    """Return rank 0's list of checkpoints: a shared file system may show other ranks an older state."""
    found: list[tuple[int, Path]] = []
    if world.is_first:
        try:
            found = layout.list_checkpoints()
        except OSError as error:
            raise TrainingError(
                f"the checkpoints of this run can't be listed: {error}",
                meaning="you lack permission to read them, or the file system is unreachable",
                fix=f"make {layout.checkpoints} readable, then: ftkit resume {layout.root.name}",
            ) from error
    listed: list[tuple[int, Path]] = world.gather_objects(found)[0]
    return listed


def _check(step: int, folder: Path, world: World) -> tuple[Marker | None, str]:
    """Return the marker of an undamaged checkpoint, or the damage; the same on all ranks.

    Each rank reads its share of the files.
    """
    try:
        marker = read_marker(folder, step)
        own = find_damage(folder, marker, sorted(marker.files)[world.rank :: world.size])
        if not own and world.is_first:
            check_index(folder, marker)
    except DamagedCheckpointError as error:
        own = [str(error)]
    damage = sorted(set().union(*world.gather_objects(own)))
    return (None, ", ".join(damage)) if damage else (marker, "")


def _load(engine: Engine, folder: Path) -> None:
    try:
        engine.load(folder)
    except (CheckpointException, ForeignCheckpointError) as error:  # torch's is no Exception: no caller would catch it
        reason = _describe(error) if isinstance(error, CheckpointException) else str(error)
        raise TrainingError(
            f"{folder} can't be loaded: {reason}",
            meaning="its files are undamaged, but belong to another model, method or engine",
            fix="resume with the ftkit that started the run, or start a new run",
        ) from error
