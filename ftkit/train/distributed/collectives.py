"""Collectives of FSDP2: NCCL's, or copies between GPUs of one host with their copy engines.

NCCL kernels occupy SMs that matmuls could use: a matmul that overlaps with them takes up to 39% longer
(docs/adr/0051). Copy engines need no SMs. Gradients are sent in the dtype in which they were computed, whatever the
dtype of the sum: each rank averages the copies of its shard that it receives.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ftkit.errors import TrainingError, one_line
from ftkit.train.gpu_kernels import average_rows
from ftkit.train.private_apis.torch import CUSTOM_COLLECTIVES, symmetric_memory
from ftkit.train.world import DTYPES, World

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan

log = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver's API


class PeerMemory:
    """A buffer of `num_bytes` on each of `size` GPUs, mapped on all of them (torch's symmetric memory)."""

    num_bytes = 2**28  # larger tensors are sent in pieces

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        memory = symmetric_memory.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._memory, self._handle = memory, symmetric_memory.rendezvous(memory, group)
        self.rank, self.size = group.rank(), group.size()

    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view, [numel], of a rank's buffer from `offset` on, in elements."""
        peer: torch.Tensor = self._handle.get_buffer(rank, (numel,), dtype, offset)
        return peer

    def barrier(self) -> None:
        """Wait for all ranks on the current stream, so that no later copy overtakes another rank's earlier one."""
        self._handle.barrier()


class AllGather:
    """An all-gather for FSDP2: each rank publishes its shard, and copies the other ranks' shards."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's interface
    ) -> None:
        """Fill `output_tensor` [ranks × n] with the `input_tensor` [n] of all ranks; it already has this rank's."""
        del group, async_op
        memory, dtype = self._memory, input_tensor.dtype
        shards = output_tensor.view(memory.size, -1)
        for start, stop in _pieces(input_tensor.numel(), memory.num_bytes // dtype.itemsize):
            memory.of(memory.rank, 0, stop - start, dtype).copy_(input_tensor[start:stop])
            memory.barrier()
            for peer in _others_first(memory)[:-1]:
                shards[peer, start:stop].copy_(memory.of(peer, 0, stop - start, dtype))
            memory.barrier()


class ReduceScatter:
    """A reduce-scatter for FSDP2: each rank copies gradients to the rank that owns them, which averages them."""

    def __init__(self, memory: PeerMemory, averaged_in: torch.dtype) -> None:
        self._memory, self._averaged_in = memory, averaged_in
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the input at the first call and the output at the second, alternately."""
        tensor = torch.empty(*size, dtype=self._averaged_in if self._has_input else dtype, device=device)
        self._has_input = not self._has_input
        return tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's interface
    ) -> None:
        """Average this rank's part of each rank's `input_tensor` [ranks × n] into `output_tensor` [n]."""
        del group, async_op
        if op != dist.ReduceOp.AVG or output_tensor.dtype != self._averaged_in:
            raise TrainingError(
                f"FSDP2 of torch {torch.__version__} reduces gradients in a way that ftkit's collectives don't support",
                fix="set training.collectives=nccl",
            )
        memory, dtype = self._memory, input_tensor.dtype
        shards = input_tensor.view(memory.size, -1)
        for start, stop in _pieces(output_tensor.numel(), memory.num_bytes // dtype.itemsize // memory.size):
            numel = stop - start
            memory.barrier()
            for peer in _others_first(memory):
                memory.of(peer, memory.rank * numel, numel, dtype).copy_(shards[peer, start:stop])
            memory.barrier()
            received = memory.of(memory.rank, 0, memory.size * numel, dtype).view(memory.size, numel)
            average_rows(received, output_tensor[start:stop])


def _pieces(numel: int, max_numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, max_numel):
        yield start, min(start + max_numel, numel)


def _others_first(memory: PeerMemory) -> list[int]:
    """Return all ranks, from the one after this one on, so that each rank starts with a different peer."""
    return [(memory.rank + step) % memory.size for step in range(1, memory.size + 1)]


def find_error(gather: AllGather, reduce: ReduceScatter, world: World) -> str:
    """All-gather and average known numbers; return the error, or an empty string. Collective."""
    numel, group, precision = 1024, world.mesh.get_group(), torch.bfloat16
    ranks = torch.arange(1, world.size + 1, dtype=precision, device=world.device).repeat_interleave(numel)
    gathered = ranks.where(ranks == world.rank + 1, 0)
    gather(gathered, gathered.view(world.size, numel)[world.rank], group)
    gradients = reduce.allocate(ranks.shape, dtype=precision, device=world.device).copy_(ranks * (world.rank + 1))
    averaged = reduce.allocate((numel,), dtype=precision, device=world.device)
    reduce(averaged, gradients, group, dist.ReduceOp.AVG)
    expected = torch.full_like(averaged, (world.rank + 1) * (world.size + 1) / 2)
    is_right = torch.equal(gathered, ranks) and torch.equal(averaged, expected)  # host sync, before training
    return "" if is_right else "copies of known numbers were wrong"


def choose_collectives(training: TrainingPlan, world: World) -> tuple[AllGather, ReduceScatter] | None:
    """Return the copy engines' collectives if the recipe allows them and they work here, or None. Collective.

    The two run concurrently, so each has its own buffers. The `reduce_dtype` of a module that uses them must be its
    compute dtype.
    """
    is_required = training.collectives == "copy_engine"
    if world.size == 1 or training.collectives == "nccl" or (world.device.type == "cpu" and not is_required):
        return None
    collectives, reason = None, _reason_against(training, world)
    if not reason:
        group, problem = world.mesh.get_group(), ""
        try:
            gathered, reduced = PeerMemory(group, world.device), PeerMemory(group, world.device)
            collectives = AllGather(gathered), ReduceScatter(reduced, DTYPES[training.reduce_precision])
            problem = find_error(*collectives, world)
        except RuntimeError as error:
            problem = one_line(error)
        reason = next(filter(None, world.gather_objects(problem)), "")
    if reason and is_required:
        raise TrainingError(f"copy engines can't run the collectives: {reason}", fix="set training.collectives=auto")
    log.info("collectives: %s", f"NCCL ({reason})" if reason else f"copy engines ({world.size} GPUs of one host)")
    return None if reason else collectives


def _reason_against(training: TrainingPlan, world: World) -> str:
    against = {
        "there are no GPUs": world.device.type != "cuda",
        f"the processes are on {world.num_hosts} hosts": world.num_hosts > 1,
        f"there are {world.num_replicas} replicas of the model": world.num_replicas > 1,
        "decoder layers are divided by tensor parallelism": world.tensor_parallel > 1,
        "gradients are reduced once a step": training.sync_gradients == "last_micro_batch",
        "weights are offloaded to host memory": training.offload == "all",
        f"torch {torch.__version__} is older than 2.11": not CUSTOM_COLLECTIVES,
    }
    if reason := next((reason for reason, is_so in against.items() if is_so), ""):
        return reason
    others = set(range(world.size)) - {world.local_rank}
    cut_off = [other for other in others if not reaches(world.local_rank, other)]
    return "no NVLink between the GPUs" if world.sum([len(cut_off)])[0] else ""


def reaches(device: int, peer: int) -> bool:
    """Return whether a GPU can access another's memory with atomics, as over NVLink; torch has no query for it.

    Without atomics, as over most PCIe links, ranks can copy, but can't wait for each other.
    """
    if not torch.cuda.can_device_access_peer(device, peer):
        return False
    driver, first, second, value = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    statuses = [
        driver.cuDeviceGet(ctypes.byref(first), device),
        driver.cuDeviceGet(ctypes.byref(second), peer),
        driver.cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, first, second),
    ]
    return not any(statuses) and value.value == 1
