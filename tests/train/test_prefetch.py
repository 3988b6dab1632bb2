from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from waiting import PATIENCE_SECONDS

from ftkit.runs.records import StepRecord
from ftkit.train.components.batches import HOST, NUM_AHEAD, StepBatch, prefetched, to_micro_batch

if TYPE_CHECKING:
    from typing import Any


NO_DOCUMENTS = np.empty(0, np.int64)


def batch_of(step: int) -> StepBatch:
    return StepBatch([], step, NO_DOCUMENTS, NO_DOCUMENTS)


def threads_that_build() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_batches_are_yielded_in_order() -> None:
    with prefetched(batch_of, range(3, 9), HOST) as batches:
        assert [batch.num_targets for batch in batches] == [3, 4, 5, 6, 7, 8]
    with prefetched(batch_of, range(4, 4), HOST) as batches:
        assert list(batches) == []


def test_a_limited_number_of_batches_is_prefetched() -> None:
    built: list[int] = []
    both = threading.Event()

    def build(step: int) -> StepBatch:
        built.append(step)
        if len(built) == 1 + NUM_AHEAD:
            both.set()
        return batch_of(step)

    with prefetched(build, range(100), HOST) as batches:
        assert next(batches).num_targets == 0
        assert both.wait(timeout=PATIENCE_SECONDS)
    assert built == list(range(1 + NUM_AHEAD))


def test_an_error_of_the_thread_is_raised_in_place_of_its_batch() -> None:
    def build(step: int) -> StepBatch:
        if step == 2:
            raise OSError("the disk is gone")
        return batch_of(step)

    with prefetched(build, range(9), HOST) as batches:
        assert [next(batches).num_targets for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="disk"):
            next(batches)
    assert threads_that_build() == []


def test_the_thread_ends_if_the_block_raises() -> None:
    def fail() -> None:
        with prefetched(batch_of, range(9), HOST) as batches:
            next(batches)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert threads_that_build() == []


def test_a_run_records_how_long_it_waited_for_data(finished_run: Any) -> None:
    for record in finished_run.records(StepRecord):
        assert 0 <= record.data_wait_ratio <= record.overhead_ratio < 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_reach_a_gpu_from_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    packs = np.arange(3 * 3 * 64, dtype=np.int32).reshape(3, 3, 64)
    host = StepBatch([to_micro_batch(packs, HOST)], 1, NO_DOCUMENTS, NO_DOCUMENTS)
    pinned = host.each(lambda micro: micro.each(torch.Tensor.pin_memory))
    assert pinned.micro_batches[0].input_ids.is_pinned()
    with prefetched(lambda _: host, range(3), device) as batches:
        for batch in batches:
            moved, wanted = vars(batch.micro_batches[0]), vars(host.micro_batches[0])
            for name, value in wanted.items():
                same = (
                    torch.equal(moved[name].cpu(), value) if isinstance(value, torch.Tensor) else moved[name] == value
                )
                assert same, name
