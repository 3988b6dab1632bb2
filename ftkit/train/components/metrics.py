"""Metrics of the steps: reduced over the ranks and written to metrics.jsonl without stalling the device."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ftkit.errors import one_line
from ftkit.runs.metrics_file import RecordTail, append_record, read_job_evaluations
from ftkit.runs.records import EndRecord, Record, RouterStats, SourceLoss, StartRecord, StepRecord
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import StepBatch
from ftkit.train.memory.host_memory import empty_pinned_like
from ftkit.train.model.routers import RouterSums, router_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.checkpoints import TrainState
    from ftkit.train.components.mfu import MfuMeter
    from ftkit.train.memory.trace import MemoryTrace
    from ftkit.train.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutcome:
    """A step of this rank.

    Attributes:
        loss: summed over the targets of this rank, on the device.
        source_losses: of this rank, on the device.
        router_sums: of this rank, on the device.
        grad_norm: L2 norm of the whole gradient, over all ranks, on the device.
        learning_rate: of the optimizer step.
    """

    loss: torch.Tensor
    source_losses: SourceLosses
    router_sums: RouterSums
    grad_norm: torch.Tensor
    learning_rate: float


class Recorder:
    """Appends records to metrics.jsonl on rank 0, and sends them to the trackers; other ranks write nothing.

    While the file can't be written (disk full, file system unreachable), records are kept, and written with the next.

    Jobs that evaluate checkpoints write a separate file (`RunLayout.evaluations`). Its records are copied here, so that
    metrics.jsonl and the trackers have one writer.
    """

    def __init__(self, layout: RunLayout, world: World, send: Callable[[Record], None]) -> None:
        self._path = layout.metrics if world.is_first else None
        self._send = send
        self._waiting: deque[Record] = deque()
        self._has_failed = False
        self._evaluations = RecordTail(layout.evaluations, skips_old=True)
        self._unread_evaluations = read_job_evaluations(layout.metrics, layout.evaluations) if world.is_first else []

    def write(self, record: Record) -> None:
        """Append a record, and send it.

        Raises:
            OSError: it is the run's last record, and can't be written.
        """
        if self._path is None:
            return
        if isinstance(record, EndRecord):  # nothing follows it
            self._copy_evaluations(self._path)
        self._append(record, self._path)
        if isinstance(record, StartRecord | StepRecord):  # trackers are open
            self._copy_evaluations(self._path)

    def _copy_evaluations(self, path: Path) -> None:
        """Copy new evaluations of other jobs."""
        for evaluation in (*self._unread_evaluations, *self._evaluations.read_new()):
            self._append(evaluation, path)
        self._unread_evaluations = []

    def _append(self, record: Record, path: Path) -> None:
        self._waiting.append(record)
        try:
            while self._waiting:
                append_record(path, self._waiting[0], begins_line=self._has_failed)
                self._has_failed = False
                self._waiting.popleft()
        except OSError as error:
            if isinstance(record, EndRecord):
                raise
            if not self._has_failed:
                log.error("%s can't be written: %s; its records are kept in memory", path, one_line(error))  # noqa: TRY400
            self._has_failed = True
        self._send(record)


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step on the host's clock.

    The host runs ahead of a GPU by a step at most, so over several steps these are the GPU's seconds too.

    Attributes:
        seconds: the step, without checkpoints and evaluations.
        work_seconds: forward, backward and optimizer.
        wait_seconds: waiting for a batch.
    """

    seconds: float
    work_seconds: float
    wait_seconds: float


class Stopwatch:
    """Measures a step's time: forward, backward and optimizer; waiting for a batch; and in total."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._work = 0.0
        self._wait = 0.0
        self._paused = 0.0
        self.waits_for_batch = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count the block as forward, backward and optimizer."""
        begin = time.perf_counter()
        yield
        self._work += time.perf_counter() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for a batch."""
        begin = time.perf_counter()
        self.waits_for_batch = True
        yield
        self.waits_for_batch = False
        self._wait += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block: checkpoints and evaluations report their own time."""
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def take(self) -> StepTiming:
        """Return the times since the last call, and reset them."""
        now = time.perf_counter()
        timing = StepTiming(now - self._begin - self._paused, self._work, self._wait)
        self._begin, self._work, self._wait, self._paused = now, 0.0, 0.0, 0.0
        return timing


@dataclass(frozen=True)
class StepResult:
    """A step, reduced over all ranks; `loss` is the mean over its targets, `sources` has that of each source."""

    step: int
    batch: StepBatch
    loss: float
    sources: dict[str, SourceLoss]
    grad_norm: float
    learning_rate: float
    stop_requested: bool
    timing: StepTiming
    routers: RouterStats | None = None


@dataclass(frozen=True)
class _Pending:
    step: int
    batch: StepBatch
    learning_rate: float
    numbers: torch.Tensor
    """Loss, stop requests, sums by source, those of routers, and gradient norm; on the host once `copied` is done."""
    copied: torch.cuda.Event | None
    timing: StepTiming


class StepReducer:
    """Sums losses and stop requests over the ranks, one step behind.

    A GPU runs behind the host. The sums of a step are read once the next step is queued, by waiting for the copy of
    the sums and not for the queue, so that the device never idles. All ranks read the same numbers, so they stop after
    the same step.
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Take the names of the sources of a mixture."""
        self._sources = sources
        self._pending: _Pending | None = None
        self._buffer: torch.Tensor | None = None

    def push(self, step: int, batch: StepBatch, outcome: StepOutcome, timing: StepTiming, *, stop: bool) -> None:
        """Start the sums of a step. Collective; the step before must have been popped."""
        stop_requests = torch.full_like(outcome.loss, float(stop))
        local = [
            torch.stack([outcome.loss, stop_requests]), outcome.source_losses.sums.flatten(), outcome.router_sums.values
        ]  # fmt: skip
        sums = torch.cat(local)
        dist.all_reduce(sums)
        *others, routers = sums.split([part.numel() for part in local])  # type: ignore[no-untyped-call]
        numbers = torch.cat([*others, outcome.router_sums.summarize(routers), outcome.grad_norm.to(sums).reshape(1)])
        copied = None
        if numbers.is_cuda:
            if self._buffer is None:
                self._buffer = empty_pinned_like(numbers)
            numbers = self._buffer.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._pending = _Pending(step, replace(batch, micro_batches=[]), outcome.learning_rate, numbers, copied, timing)

    @property
    def is_done(self) -> bool:
        """Whether `pop` would return a step without waiting."""
        if self._pending is None:
            return False
        return self._pending.copied is None or bool(self._pending.copied.query())  # type: ignore[no-untyped-call]

    def pop(self) -> StepResult | None:
        """Wait for the last pushed step, and return it; None if it was already popped."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.copied is not None:
            pending.copied.synchronize()  # host sync: on a step that completes while the next one is queued
        loss, stop, *others, grad_norm = pending.numbers.tolist()
        num_by_source = 2 * len(self._sources)
        return StepResult(
            pending.step,
            pending.batch,
            loss / pending.batch.num_targets,
            mean_losses(self._sources, others[:num_by_source]),
            grad_norm,
            pending.learning_rate,
            stop > 0,
            pending.timing,
            router_stats(others[num_by_source:], pending.batch.num_targets),
        )


def mean_losses(sources: tuple[str, ...], sums: list[float]) -> dict[str, SourceLoss]:
    """Return the losses of the sources that have targets.

    Args:
        sources: their names.
        sums: `SourceLosses.sums` over all ranks, flattened: the losses of each source, then its numbers of targets.
    """
    losses, counts = sums[: len(sources)], sums[len(sources) :]
    return {
        name: SourceLoss(loss / count, int(count))
        for name, loss, count in zip(sources, losses, counts, strict=True)
        if count
    }


class StepReporter:
    """Writes a record every few steps, with the throughput since the last record."""

    def __init__(
        self, recorder: Recorder, trace: MemoryTrace, mfu_meter: MfuMeter, num_steps: int, state: TrainState
    ) -> None:
        """Start with no steps; `state` has the tokens before them."""
        self._recorder = recorder
        self._trace = trace
        self._mfu_meter = mfu_meter
        self._num_steps = num_steps
        self._num_tokens, self._num_targets = state.num_tokens, state.num_targets
        self._results: list[StepResult] = []

    def count(self, result: StepResult) -> None:
        """Add a step to the next record."""
        self._results.append(result)
        self._num_tokens += result.batch.num_tokens
        self._num_targets += result.batch.num_targets

    def report(self, result: StepResult, epoch: float) -> None:
        """Write the record of the last added step; `epoch` is the number of epochs so far."""
        results, self._results = self._results, []
        seconds = sum(each.timing.seconds for each in results)
        work = sum(each.timing.work_seconds for each in results)
        wait = sum(each.timing.wait_seconds for each in results)
        lengths = np.concatenate([each.batch.document_lengths for each in results])
        record = StepRecord(
            time=time.time(),
            step=result.step,
            num_steps=self._num_steps,
            epoch=round(epoch, 4),
            loss=result.loss,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            tokens=self._num_tokens,
            targets=self._num_targets,
            tokens_per_second=int(lengths.sum()) / seconds,
            step_seconds=seconds / len(results),
            overhead_ratio=1 - work / seconds,
            data_wait_ratio=wait / seconds,
            mfu=self._mfu_meter.mfu(lengths, sum(each.batch.num_targets for each in results), seconds),
            memory_gib=self._trace.peak_gib(),
            sources=result.sources,
            routers=result.routers,
        )
        self._recorder.write(record)
        log.info(
            "step %d/%d: loss %.4f, lr %.2e, grad norm %.2f, %.0f tokens/s%s",
            record.step, record.num_steps, record.loss, record.learning_rate, record.grad_norm,
            record.tokens_per_second,
            "" if record.mfu is None else f" ({record.mfu:.1%} MFU)",
        )  # fmt: skip
