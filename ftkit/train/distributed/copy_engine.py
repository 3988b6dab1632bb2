"""Collectives of FSDP2 by a GPU's copy engines, between GPUs of one host that reach each other's memory.

NCCL's collectives run on the processors that compute: matrix products beside them take up to 39 % longer
(docs/reference/benchmarks.md). Here weights and gradients are copied by engines that do nothing else, and gradients
travel in the precision in which they were computed, whatever the precision in which they are summed: each rank adds up
the copies of its own shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from ftkit.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHARED_BYTES = 2**28
"""What each rank shares with its peers for a collective. What is larger goes through it piece by piece."""


class PeerMemory(Protocol):
    """So many bytes on each of `size` ranks that all of them can read and write."""

    num_bytes: int
    rank: int
    size: int

    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's memory from an offset on, counted in elements."""
        ...

    def barrier(self) -> None:
        """Let no rank's later copies overtake another's earlier ones."""
        ...


class SymmetricMemory:
    """Memory of the device that its peers have mapped."""

    num_bytes = SHARED_BYTES

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._memory = symmetric_memory.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self._memory, group)
        self.rank, self.size = group.rank(), group.size()

    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `PeerMemory.of`."""
        peer: torch.Tensor = self._handle.get_buffer(rank, (numel,), dtype, offset)
        return peer

    def barrier(self) -> None:
        """See `PeerMemory.barrier`. On the current stream: the host does not wait."""
        self._handle.barrier()


class AllGather:
    """An all-gather for FSDP2: each rank shows its shard, and copies those of the others."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's interface
    ) -> None:
        """Fill `output_tensor` [ranks × n] with all ranks' `input_tensor` [n], the rank's own part of it."""
        del group, async_op
        memory, dtype = self._memory, input_tensor.dtype
        whole = output_tensor.view(memory.size, -1)
        for start, stop in _pieces(input_tensor.numel(), memory.num_bytes // dtype.itemsize):
            memory.of(memory.rank, 0, stop - start, dtype).copy_(input_tensor[start:stop])
            memory.barrier()
            for peer in _others_first(memory)[:-1]:
                whole[peer, start:stop].copy_(memory.of(peer, 0, stop - start, dtype))
            memory.barrier()


class ReduceScatter:
    """A reduce-scatter for FSDP2: each rank copies its gradients into the memory of whose they are, who averages them.

    FSDP2 believes that gradients are averaged in the precision in which they were computed, and goes on with the
    output in whichever precision it finds it.
    """

    def __init__(self, memory: PeerMemory, averaged_in: torch.dtype) -> None:
        self._memory, self._averaged_in = memory, averaged_in
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the input, then the output."""
        tensor = torch.empty(*size, dtype=self._averaged_in if self._has_input else dtype, device=device)
        self._has_input = not self._has_input
        return tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's interface
    ) -> None:
        """Fill `output_tensor` [n] with the mean over the ranks of this rank's part of `input_tensor` [ranks × n].

        Raises:
            TrainingError: FSDP2 asks for something else.
        """
        del group, async_op
        if op != dist.ReduceOp.AVG or output_tensor.dtype != self._averaged_in:
            raise TrainingError(
                f"FSDP2 of torch {torch.__version__} reduces gradients in a way that copy engines were not taught",
                fix="set training.collectives=nccl",
            )
        memory, dtype = self._memory, input_tensor.dtype
        whole = input_tensor.view(memory.size, -1)
        for start, stop in _pieces(output_tensor.numel(), memory.num_bytes // dtype.itemsize // memory.size):
            numel = stop - start
            memory.barrier()
            for peer in _others_first(memory):
                memory.of(peer, memory.rank * numel, numel, dtype).copy_(whole[peer, start:stop])
            memory.barrier()
            received = memory.of(memory.rank, 0, memory.size * numel, dtype).view(memory.size, numel)
            torch.mean(received, dim=0, dtype=self._averaged_in, out=output_tensor[start:stop])


def _pieces(numel: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, most):
        yield start, min(start + most, numel)


def _others_first(memory: PeerMemory) -> list[int]:
    """Return all ranks, each rank beginning with another one, and itself last."""
    return [(memory.rank + step) % memory.size for step in range(1, memory.size + 1)]
