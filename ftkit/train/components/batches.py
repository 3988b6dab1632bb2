"""Assign packs to steps and processes, and prefetch their batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ftkit.data.packing import (
    IGNORED,
    REJECTED,
    document_begins,
    find_padding,
    mismatch_completions,
    pack_at,
    row_width,
    visible_until,
)
from ftkit.data.prepared_data import PackStore
from ftkit.planning.plan import BatchPlan
from ftkit.runs.checkpoints import TrainState
from ftkit.train.causal_lm import MicroBatch
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.model.adapted_linear import token_keys
from ftkit.train.world import ContextGroup

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan
    from ftkit.train.world import World

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
HOST = torch.device("cpu")
ALONE = ContextGroup()
START = TrainState(0, "")
NUM_AHEAD = 2  # batches that are ready or being built; a second one covers a slow read of the disk


@dataclass(frozen=True)
class StepBatch:
    """A step: this process's micro-batches, and totals of the step over all processes."""

    micro_batches: list[MicroBatch]
    num_targets: int  # tokens in the loss
    document_lengths: NDArray[np.int64]  # [documents], without padding
    document_starts: NDArray[np.int64]  # [documents], tokens before these that documents share
    num_rated: int = 0  # pairs, or completions with a label, of an objective on preferences
    mismatched: Sequence[MicroBatch] = ()  # of objective kto: prompts with the completions of others

    @property
    def num_tokens(self) -> int:
        return int(self.document_lengths.sum())

    @property
    def num_samples(self) -> int:
        """Number of samples that the loss averages: pairs, completions with a label, or tokens."""
        return self.num_rated or self.num_targets

    def each(self, change: Callable[[MicroBatch], MicroBatch]) -> StepBatch:
        micro_batches, mismatched = (list(map(change, both)) for both in (self.micro_batches, self.mismatched))
        return replace(self, micro_batches=micro_batches, mismatched=mismatched)


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Assign packs to steps, processes and micro-batches.

    The i-th pack of a run depends only on the seed and i. A resumed run begins with the pack after those of its
    checkpoint, whose last step may have had fewer. After `num_packs_in_run`, packs are empty and have no targets, so
    that every process takes part in every collective.
    """

    store: PackStore
    plan: BatchPlan
    seed: int
    num_packs_in_run: int | None
    rank: int  # index of this process's part of a batch, out of `size`
    size: int
    is_packed: bool = True
    is_mixed: bool = False
    marks_padding: bool = True
    completions_per_sample: int = 0  # of an objective on preferences
    is_mismatched: bool = False  # each prompt has the completion of another (`mismatch_completions`)
    reference: NDArray[np.float32] | None = None  # as in `References`
    teacher: Callable[[Sequence[int]], NDArray[np.int32]] | None = None  # reads `MicroBatch.teacher` of packs
    pictures: PictureFeed | None = None  # of a model that sees them
    context: ContextGroup = ALONE
    state: TrainState = START  # of the checkpoint that the run resumes from

    @classmethod
    def outside(cls, training: TrainingPlan, store: PackStore, world: World, **settings: Any) -> Self:
        """Return a schedule for `in_turn`, outside of training."""
        micro, size = training.micro_batch_size, world.data_size
        return cls(
            store=store, plan=BatchPlan(micro, 1, micro * size), seed=0, num_packs_in_run=None, rank=world.data_rank,
            size=size, completions_per_sample=training.completions_per_sample, context=world.context, **settings,
        )  # fmt: skip

    def in_turn(self, packs: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield this process's part of packs, padded with empty packs to the same number on each process."""
        for first in range(0, len(packs), self.plan.global_batch_size):
            yield from self.micro_batches(packs[first : first + self.plan.global_batch_size], 0)

    def packs_of_step(self, step: int) -> list[int]:
        """Return the packs of a step over all processes; fewer than a full batch at the end of the last epoch."""
        indices = range(self.num_packs_before(step), self.num_packs_before(step + 1))
        return [pack_at(index, len(self.store), self.seed) for index in indices]

    def num_packs_before(self, step: int) -> int:
        num = self.state.num_packs + (step - self.state.step) * self.plan.global_batch_size
        return num if self.num_packs_in_run is None else min(num, self.num_packs_in_run)

    def count_steps(self) -> int | None:
        """Count the steps to the end of the last epoch, earlier ones included; None if there is no end."""
        if self.num_packs_in_run is None:
            return None
        return self.state.step - (self.state.num_packs - self.num_packs_in_run) // self.plan.global_batch_size

    def epoch_of_step(self, step: int) -> float:
        return self.num_packs_before(step) / len(self.store)

    def step(self, step: int) -> StepBatch:
        """Return this process's part of a step, counted from 0, in host memory."""
        packs = self.packs_of_step(step)
        num_targets, lengths = int(self.store.num_targets[packs].sum()), self.store.document_lengths(packs)
        starts = self.store.document_starts(packs)
        num_rated = len(lengths) // self.completions_per_sample if self.completions_per_sample else 0
        first_token = self.num_packs_before(step) * self.store.sequence_length
        mismatched = []
        if self.completions_per_sample == 1:
            mismatched = replace(self, is_mismatched=True).micro_batches(packs, first_token)
        return StepBatch(self.micro_batches(packs, first_token), num_targets, lengths, starts, num_rated, mismatched)

    def micro_batches(self, packs: Sequence[int], first_token: int) -> list[MicroBatch]:
        """Return this process's micro-batches of packs; `first_token` is the number of their first token."""
        micro, length, num = self.plan.micro_batch_size, self.store.sequence_length, self.completions_per_sample
        if not self.is_packed:
            rows = pad_documents(self._read(packs), micro * length, self.size)[self.rank :: self.size]
            padded = [to_padded_micro_batch(each, HOST, first_token, is_mixed=self.is_mixed) for each in rows]
            return [with_completions(batch, each.values, num) for batch, each in zip(padded, rows, strict=True)]
        micro_batches = []
        for accumulation in range(self.plan.accumulation_steps):
            begin = (accumulation * self.size + self.rank) * micro
            chosen = packs[begin : begin + micro]
            read = self._read(chosen)
            if len(chosen) < micro:
                token = int(self.store.read(packs[:1])[0, 0, 0])
                read = np.concatenate([read, _empty_packs(micro - len(chosen), length, token)])
            batch = to_micro_batch(
                read,
                HOST,
                first_token + length * np.arange(begin, begin + micro),
                is_mixed=self.is_mixed,
                marks_padding=self.marks_padding,
                context=self.context,
            )
            stored = None
            if self.reference is not None:
                stored = self.reference[int(self.is_mismatched), self.store.documents(chosen)]
            batch = with_completions(batch, read, num, stored)
            if self.store.shares_prompts:
                batch = with_shared_prompts(batch, read)
            if self.teacher is not None:
                batch = replace(batch, teacher=torch.from_numpy(self.teacher(chosen)))
            if self.pictures is not None:
                batch = self.pictures.add(batch, read, self.store.pictures(chosen))
            micro_batches.append(batch)
        return micro_batches

    def _read(self, packs: Sequence[int]) -> NDArray[np.int32]:
        read = self.store.read(packs)
        return mismatch_completions(read) if self.is_mismatched else read


def to_micro_batch(
    packs: NDArray[np.int32],
    device: torch.device,
    first_tokens: NDArray[np.int64] | None = None,
    *,
    is_mixed: bool = False,
    marks_padding: bool = True,
    context: ContextGroup = ALONE,
) -> MicroBatch:
    """Convert packs, as `PackStore.read` returns them, int32 [packs, 4, length], to a micro-batch on a device.

    `first_tokens`, int64 [packs], has the number of each pack's first token in the data. `marks_padding` finds the
    padding, for the routers of a mixture of experts. `context` selects this process's part of each pack.
    """
    num_packs, _, length = packs.shape
    positions, local, gathered = packs[:, 2], packs[:, :, context.part(length)], context.gathered_part(length)
    labels = local[:, 1].reshape(-1)
    index = np.flatnonzero(labels != IGNORED)
    first = length * np.arange(num_packs) if first_tokens is None else first_tokens
    numbers = first[:, None] + np.arange(length)

    def tensor(values: NDArray[np.integer], dtype: type[np.integer] = np.int64) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype))

    batch = MicroBatch(
        input_ids=tensor(local[:, 0]),
        position_ids=tensor(positions[:, gathered]),
        label_index=tensor(index),
        labels=tensor(labels[index]),
        cu_seqlens=tensor(np.append(np.flatnonzero(positions == 0), positions.size), np.int32),
        max_seqlen=length,  # the same bound for all batches, because kernels are compiled for it
        is_token=torch.from_numpy(~find_padding(packs)[:, context.part(length)]) if marks_padding else None,
        label_sources=tensor(local[:, 3].reshape(-1)[index]) if is_mixed else None,
        token_keys=tensor(token_keys(numbers[:, gathered])),
    )
    return batch.on(device)


def with_completions(
    batch: MicroBatch, packs: NDArray[np.int32], num: int, reference: NDArray[np.float32] | None = None
) -> MicroBatch:
    """Return the micro-batch of whole packs, int32 [packs, 4, length], with the labels of each document.

    `num` is the number of completions per sample; 0 returns the micro-batch unchanged. With several sources,
    `label_sources` become those of the samples. `reference`, [C], has the reference's log-probabilities of completions.
    """
    if not num:
        return batch
    begins = np.flatnonzero(document_begins(packs[:, 2]))
    index = np.flatnonzero(packs[:, 1] != IGNORED)
    documents, counts = np.unique(np.searchsorted(begins, index, side="right") - 1, return_counts=True)
    sources = packs[:, 3].reshape(-1)[begins[documents[::num]]].astype(np.int64)
    return replace(
        batch,
        completion_lengths=torch.from_numpy(counts),
        label_sources=None if batch.label_sources is None else torch.from_numpy(sources & ~np.int64(REJECTED)),
        is_desirable=torch.from_numpy(sources < REJECTED) if num == 1 else None,
        reference_bits=None if reference is None else torch.from_numpy(reference.view(np.int32)),
    ).on(batch.labels.device)


def with_shared_prompts(batch: MicroBatch, packs: NDArray[np.int32]) -> MicroBatch:
    """Return the micro-batch of whole packs with the mask of documents that share prompts."""
    return replace(batch, visible_until=torch.from_numpy(visible_until(packs[:, 2])).to(batch.labels.device))


def to_padded_micro_batch(
    rows: PaddedRows, device: torch.device, first_token: int = 0, *, is_mixed: bool = False
) -> MicroBatch:
    batch = to_micro_batch(rows.values, HOST, first_token + rows.offsets, is_mixed=is_mixed, marks_padding=False)
    # Attention needs at least one token, also in a row without a document.
    place, lengths = np.arange(rows.values.shape[2]), rows.lengths[:, None]
    mask = torch.from_numpy((place < np.maximum(1, lengths)).astype(np.int64))
    return replace(batch, attention_mask=mask, is_token=torch.from_numpy(place < lengths)).on(device)


def _empty_packs(num: int, length: int, token: int, num_rows: int = 4) -> NDArray[np.int32]:
    packs = np.zeros((num, num_rows, length), dtype=np.int32)
    packs[:, 0], packs[:, 1] = token, IGNORED
    packs[:, 2] = np.arange(length)
    return packs


# --- Padded rows ---------------------------------------------------------------------------------
#
# For models that can't isolate packed documents. A step has the same packs either way, and its loss is a sum over the
# same tokens, so order, resuming and world size don't depend on padding. Each document becomes one row, padded on the
# right to the width of its micro-batch. Within a step, documents are sorted by length, so rows have similar lengths.


@dataclass(frozen=True)
class PaddedRows:
    """Rows of one document each, padded on the right with a token of the data, as in packs."""

    values: NDArray[np.int32]  # [B, R, T], the rows of packs: tokens, labels, positions, ...
    lengths: NDArray[np.int64]  # [B], tokens of each row's document; 0 for a row without one
    offsets: NDArray[np.int64]  # [B], offset of each row's first token in the concatenated packs


def pad_documents(packs: NDArray[np.int32], tokens_per_micro_batch: int, num_ranks: int) -> list[PaddedRows]:
    """Divide the documents of the packs of all ranks, int32 [P, R, T], into micro-batches of padded rows.

    Widths are the packs' length, half of it, a quarter and so on, so that only a few shapes are compiled; rows times
    width is at most `tokens_per_micro_batch`, which is T or more. The number of micro-batches is a multiple of
    `num_ranks`, at least one each; the last ones may be empty.
    """
    is_padding, longest = find_padding(packs), packs.shape[2]
    documents = []
    for pack, positions in enumerate(packs[:, 2]):
        starts = [*np.flatnonzero(positions == 0).tolist(), longest]
        documents += [(pack, begin, end) for begin, end in pairwise(starts) if not is_padding[pack, begin]]
    documents.sort(key=lambda each: (each[1] - each[2], each))  # longest first
    groups: list[PaddedRows] = []
    while documents or not groups or len(groups) % num_ranks:
        length = documents[0][2] - documents[0][1] if documents else 1
        width = row_width(length, longest)
        num_rows = tokens_per_micro_batch // width
        values = _empty_packs(num_rows, width, packs[0, 0, 0], packs.shape[1])
        lengths, offsets = np.zeros((2, num_rows), dtype=np.int64)
        for row, (pack, begin, end) in enumerate(documents[:num_rows]):
            values[row, :, : end - begin] = packs[pack, :, begin:end]
            lengths[row] = end - begin
            offsets[row] = pack * longest + begin
        groups.append(PaddedRows(values, lengths, offsets))
        documents = documents[num_rows:]
    return groups


# --- Prefetching ---------------------------------------------------------------------------------


@contextmanager
def prefetched(
    build: Callable[[int], StepBatch], steps: Iterable[int], device: torch.device
) -> Iterator[Iterator[StepBatch]]:
    """Yield an iterator over the batches of `steps` on `device`; a thread calls `build` to build them in host memory.

    An exception in `build` is raised when its batch is requested. The thread ends with the block.
    """
    is_cuda = device.type == "cuda"

    def build_on_host(step: int) -> StepBatch:
        if is_cuda:
            torch.cuda.set_device(device)  # a new thread starts on GPU 0: pinning would use another rank's memory
        batch = build(step)
        return batch.each(lambda micro: micro.each(torch.Tensor.pin_memory)) if is_cuda else batch

    builder = ThreadPoolExecutor(1, "batches")
    try:
        # `on` only queues the copies, because the batch is pinned. On the compute stream, they need no events.
        built = computed_ahead(builder, build_on_host, steps, NUM_AHEAD)
        yield (batch.each(lambda micro: micro.on(device)) for batch in built)
    finally:
        builder.shutdown(cancel_futures=True)


def computed_ahead(
    executor: Executor, compute: Callable[[ItemT], ResultT], items: Iterable[ItemT], num_ahead: int
) -> Iterator[ResultT]:
    """Yield the results of items in order, and compute the next `num_ahead` ones in advance."""
    left = iter(items)
    ahead = deque(executor.submit(compute, item) for item in islice(left, num_ahead))
    while ahead:
        result = ahead.popleft().result()
        ahead.extend(executor.submit(compute, item) for item in islice(left, 1))
        yield result
