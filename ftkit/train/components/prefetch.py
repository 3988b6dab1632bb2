"""Prefetch batches: a thread builds those of the next steps while the device works on this one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftkit.train.components.batches import StepBatch

NUM_AHEAD = 2
"""Batches that are ready or being built; a second one covers a slow read of the disk."""


@contextmanager
def prefetched(
    build: Callable[[int], StepBatch], steps: Iterable[int], device: torch.device
) -> Iterator[Iterator[StepBatch]]:
    """Yield an iterator over the batches of `steps`, on `device`.

    A thread calls `build`, which returns a batch in host memory. An exception in `build` is raised where its batch is
    requested. The thread ends with the block.
    """
    builder = ThreadPoolExecutor(1, "batches", _start_thread, (device,))
    try:
        yield _in_order(builder, build, iter(steps), device)
    finally:
        builder.shutdown(cancel_futures=True)


def _start_thread(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread starts on GPU 0, where pinning would use another rank's memory


def _in_order(
    builder: ThreadPoolExecutor, build: Callable[[int], StepBatch], steps: Iterator[int], device: torch.device
) -> Iterator[StepBatch]:
    def build_on_host(step: int) -> StepBatch:
        batch = build(step)
        return batch.pinned() if device.type == "cuda" else batch

    ahead: deque[Future[StepBatch]] = deque(builder.submit(build_on_host, step) for step in islice(steps, NUM_AHEAD))
    while ahead:
        batch = ahead.popleft().result()
        ahead.extend(builder.submit(build_on_host, step) for step in islice(steps, 1))
        # This only queues the copies, since the batch is pinned; on the compute stream, they need no events.
        yield batch.on(device)
