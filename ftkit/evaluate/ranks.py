"""Share an evaluation among processes of one node: each has a full copy of the model, and some of the examples."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ftkit.errors import PrerequisiteError
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` processes that share the work; by default there is only one."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[ItemT]) -> list[ItemT]:
        """Return this rank's share of the items."""
        return list(items[self.rank :: self.size])

    def exchange(self, value: ItemT) -> list[ItemT]:
        """Return the values of all ranks, rank 0's first. Collective."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def merge(self, own: Sequence[ItemT]) -> list[ItemT]:
        """Return the results of all ranks in the order of the shared items. Collective."""
        parts = self.exchange(list(own))
        return [parts[number % self.size][number // self.size] for number in range(sum(map(len, parts)))]


def is_a_rank() -> bool:
    """Return whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started; without torchrun, this is the only one."""
    if not is_a_rank():
        yield Ranks()
        return
    dist.init_process_group("gloo")  # only Python objects are exchanged
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, words: Sequence[str]) -> int:
    """Run a command of ftkit in several processes, of which the first one prints; return its exit code.

    Args:
        size: number of processes; with GPUs, each has one.
        words: the command line without the program.

    Raises:
        PrerequisiteError: this machine has fewer GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and size > num_gpus:
        raise PrerequisiteError(f"--gpus {size}: torch sees {num_gpus} here", fix=f"give at most --gpus {num_gpus}")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415 - a second
    from torch.distributed.run import main as torchrun  # noqa: PLC0415

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the command reports why it failed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cpus() // size)))
    options = ["--standalone", f"--nproc-per-node={size}", "--local-ranks-filter=0"]
    try:
        torchrun([*options, "-m", "ftkit", *words])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
