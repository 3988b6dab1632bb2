"""Metrics of the steps: timed, reduced over the ranks without stalling the device, and written to metrics.jsonl."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist

from ftkit.errors import TrainingError
from ftkit.models.parameters import count_model
from ftkit.planning.flops import token_flops
from ftkit.planning.training_setup import gpu_of_device
from ftkit.runs.records import AnomalyRecord, StepRecord
from ftkit.train.components.batches import StepBatch
from ftkit.train.components.evaluate import mean_losses, mean_metrics
from ftkit.train.components.recorder import Recorder
from ftkit.train.loop import Observer, Progress, StepOutcome, StepResult, StepTiming
from ftkit.train.memory.usage import MemoryTrace, empty_pinned_like
from ftkit.train.model.routers import router_stats
from ftkit.train.world import World

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.config.recipe import RecipePlan
    from ftkit.config.training import OnNonfinite, TrainingSpec
    from ftkit.models.architecture import ArchitectureSpec

log = logging.getLogger(__name__)


@dataclass(eq=False)
class StepMetrics(Observer):
    """Sums losses and stop requests over the ranks, and records the results of steps, one step behind.

    A step's sums are read once the next step is queued. The host waits only for their copy, not for the queue, so the
    device never idles. All ranks read the same values, so they stop after the same step.
    """

    progress: Progress
    world: World
    stopwatch: Stopwatch
    recorder: Recorder
    trace: MemoryTrace
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        self._peak_flops = find_peak_flops(self.progress.plan.recipe, self.world)
        self._num_tokens = self.progress.state.num_tokens
        self._num_targets = self.progress.state.num_targets
        self._results: list[StepResult] = []  # since the last record
        self._metric_names = self.progress.plan.recipe.training.metric_names
        self._pending: _Pending | None = None
        self._buffer: torch.Tensor | None = None
        self.is_behind = self.world.device.type == "cuda"

    def reduce(self, outcome: StepOutcome) -> Iterator[StepResult]:
        previous = self._take_pending()  # host sync: on the previous step, while the device computes this one
        self._sum_over_ranks(outcome)
        if previous is not None:
            yield previous
        if (not self.is_behind or self.progress.has_host_sync) and (result := self._take_pending()):
            yield result

    def _sum_over_ranks(self, outcome: StepOutcome) -> None:
        # A stop may be requested for the run, or for this Slurm job.
        requests = [str(self.progress.plan.layout.stop_request), os.environ.get("FTKIT_STOP_FILE", "")]
        stop = torch.full_like(outcome.loss, self.world.is_first and any(map(os.path.exists, requests)))
        local = [torch.stack([outcome.loss, stop]), outcome.source_losses.flatten(), outcome.router_sums.values]
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
        batch, timing = replace(outcome.batch, micro_batches=[]), self.stopwatch.take()
        self._pending = _Pending(self.progress.step, batch, outcome.learning_rate, numbers, copied, timing)

    def _take_pending(self) -> StepResult | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.copied is not None:
            pending.copied.synchronize()  # host sync: on a step that completes while the next one is queued
        loss, stop, *others, grad_norm = pending.numbers.tolist()
        self.progress.is_stopped |= stop > 0
        num_by_source, num_samples = 2 * len(self.sources), pending.batch.num_samples
        num_sums = num_by_source + len(self._metric_names)
        return StepResult(
            pending.step,
            pending.batch,
            loss / num_samples,
            mean_losses(self.sources, others[:num_by_source]),
            grad_norm,
            pending.learning_rate,
            stop > 0,
            pending.timing,
            router_stats(others[num_sums:], pending.batch.num_targets),
            mean_metrics(self._metric_names, others[num_by_source:num_sums], num_samples),
        )

    def report(self, result: StepResult) -> None:
        self._results.append(result)
        self._num_tokens += result.batch.num_tokens
        self._num_targets += result.batch.num_targets
        every, num_steps = self.progress.plan.recipe.training.log_every_steps, self.progress.num_steps
        if result.step % every == 0 or result.step in {1, num_steps} or result.stop_requested:
            self._write()

    def _write(self) -> None:
        """Write a record of the last step, with the speed since the record before."""
        results, self._results = self._results, []
        result, num_steps = results[-1], self.progress.num_steps
        seconds = sum(each.timing.seconds for each in results)
        work = sum(each.timing.work_seconds for each in results)
        wait = sum(each.timing.wait_seconds for each in results)
        lengths = np.concatenate([each.batch.document_lengths for each in results])
        starts = np.concatenate([each.batch.document_starts for each in results])
        mfu = None
        if self._peak_flops is not None:
            recipe, num_targets = self.progress.plan.recipe, sum(each.batch.num_targets for each in results)
            flops = count_flops(recipe.model.architecture, recipe.training, lengths, num_targets, starts)
            mfu = flops / seconds / self._peak_flops  # Chowdhery et al. 2022, appendix B
        record = StepRecord(
            time=time.time(),
            step=result.step,
            num_steps=num_steps,
            epoch=round(self.progress.batches.epoch_of_step(result.step), 4),
            loss=result.loss,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            tokens=self._num_tokens,
            targets=self._num_targets,
            tokens_per_second=int(lengths.sum()) / seconds,
            step_seconds=seconds / len(results),
            overhead_ratio=max(wait, seconds - work) / seconds,  # rounding must not make it less than the wait
            data_wait_ratio=wait / seconds,
            mfu=mfu,
            memory_gib=self.trace.peak_gib(),
            sources=result.sources,
            scores=result.scores,
            routers=result.routers,
        )
        self.recorder.write(record)
        log.info(
            "step %d/%d: loss %.4f, lr %.2e, grad norm %.2f, %.0f tokens/s in total%s",
            record.step, record.num_steps, record.loss, record.learning_rate, record.grad_norm,
            record.tokens_per_second,
            "" if record.mfu is None else f" ({record.mfu:.1%} MFU)",
        )  # fmt: skip

    def close(self) -> None:
        """Report the last step even if the run fails or stops early, unless the device might never finish it."""
        copied = None if self._pending is None else self._pending.copied
        is_done = copied is None or copied.query()  # type: ignore[no-untyped-call]
        if is_done and (result := self._take_pending()):
            self.report(result)
        if self._results:
            self._write()


@dataclass(frozen=True)
class _Pending:
    """A step whose sums are being copied to the host; `numbers` are valid once `copied` is done."""

    step: int
    batch: StepBatch
    learning_rate: float
    numbers: torch.Tensor
    copied: torch.cuda.Event | None
    timing: StepTiming


class Stopwatch(Observer):
    """Measure a step's time without the observers after this one: checkpoints and evaluations report their own."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase = "pause"
        self._began = time.perf_counter()

    def begin(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._began
        self._phase, self._began = phase, now

    def end_step(self) -> None:
        self.begin("pause")

    def take(self) -> StepTiming:
        self.begin("report")
        seconds, self._seconds = self._seconds, defaultdict(float)
        work = sum(seconds[phase] for phase in ("forward", "backward", "update", "reduce"))
        return StepTiming(sum(seconds.values()) - seconds["pause"], work, seconds["batch"])


def count_flops(
    shape: ArchitectureSpec,
    training: TrainingSpec,
    lengths: NDArray[np.int64],
    num_targets: int,
    starts: NDArray[np.int64] | int = 0,
) -> float:
    """Count the FLOPs of documents, forward and backward; recomputation and padding are not counted.

    A token attends only to its own document, and the output projection is computed only for targets. `lengths` are the
    tokens of each document, int64 [documents], at least one, after the `starts` that it shares with another.
    """
    num_tokens, ends = int(lengths.sum()), lengths + starts

    def keys_of(window: int | None) -> float:
        """Return the mean number of keys per token."""
        both = ((end, np.minimum(end, window or end)) for end in (ends, ends - lengths))
        after, before = (seen * (end - (seen - 1) / 2) for end, seen in both)
        return float((after - before).sum()) / num_tokens

    keys, in_window = keys_of(None), keys_of(shape.sliding_window)
    return num_tokens * token_flops(shape, training, keys, in_window, num_targets / num_tokens).total


def find_peak_flops(recipe: RecipePlan, world: World) -> float | None:
    """Return the peak FLOP/s of all GPUs; None if the GPU is unknown, or the model's FLOPs are an estimate."""
    if world.device.type != "cuda" or not count_model(recipe.model.architecture).is_exact:
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(world.device))
    return None if gpu is None else world.size * gpu.peak_flops(recipe.training.compute_precision)


_WINDOW, _MIN_STEPS, _SIGMAS = 128, 32, 6.0
"""A spike is 6 standard deviations above the mean of the last 128 steps, and needs 32 of them (OLMo-core's
SkipStepOptimizer). Logarithms are compared: losses and gradient norms are positive and skewed, and single batches often
multiply a norm near zero."""
_FLOOR = 1e-3  # lower bound of compared values: a multiple of a negligible loss is negligible too
_MIN_RISE = math.log(1.1)
"""A spike is at least 10% above the mean: if steps hardly differ, their deviation is rounding."""
_MAX_SKIPPED = 10  # after this many consecutive steps, single batches are not the cause
_MAX_SHOWN = 8


class AnomalyWatch(Observer):
    """Check each step's loss and gradient norm, which are equal on all ranks after the reduction.

    The engine skips a step whose gradient is not finite; the host detects it one step later, without a sync.
    """

    def __init__(
        self, run_id: str, policy: OnNonfinite, recorder: Recorder, packs_of_step: Callable[[int], list[int]]
    ) -> None:
        self._run_id = run_id
        self._policy = policy
        self._recorder = recorder
        self._packs_of_step = packs_of_step
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._num_skipped = 0

    def report(self, result: StepResult) -> None:
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._report_nonfinite(result)
            return
        self._num_skipped = 0
        if _is_spike(result.loss, self._losses) or _is_spike(result.grad_norm, self._norms):
            log.warning(
                "step %d spikes: loss %.4f (mean %.4f), grad norm %.2f (mean %.2f); packs %s",
                result.step, result.loss, fmean(self._losses), result.grad_norm, fmean(self._norms),
                self._record(result, "spike"),
            )  # fmt: skip
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)

    def _report_nonfinite(self, result: StepResult) -> None:
        packs = self._record(result, "nonfinite")
        self._num_skipped += 1
        what = f"step {result.step}: loss {result.loss:.4f}, grad norm {result.grad_norm:.2f}; its update was skipped"
        if self._policy == "skip" and self._num_skipped < _MAX_SKIPPED:
            log.warning("%s; packs %s", what, packs)
            return
        resume = f"ftkit resume {self._run_id}"
        raise TrainingError(
            what if self._policy == "stop" else f"{what}, as were the {_MAX_SKIPPED - 1} before it",
            meaning="broken examples, a learning rate that is too high, or a precision that is too low; "
            "the newest checkpoint is intact",
            fix=f"inspect its packs: ftkit data show --packs {packs.removesuffix(',…')} {self._run_id}; "
            + (f"to skip such steps: {resume} training.on_nonfinite=skip" if self._policy == "stop" else resume),
        )

    def _record(self, result: StepResult, kind: Literal["nonfinite", "spike"]) -> str:
        """Write a record; return the first packs of the step as text."""
        packs = self._packs_of_step(result.step - 1)
        self._recorder.write(AnomalyRecord(time.time(), result.step, kind, result.loss, result.grad_norm, tuple(packs)))
        return ",".join(map(str, packs[:_MAX_SHOWN])) + (",…" if len(packs) > _MAX_SHOWN else "")


def _is_spike(value: float, before: deque[float]) -> bool:
    if len(before) < _MIN_STEPS:
        return False
    usual = [math.log(max(each, _FLOOR)) for each in before]
    return math.log(max(value, _FLOOR)) > fmean(usual) + max(_SIGMAS * pstdev(usual), _MIN_RISE)
