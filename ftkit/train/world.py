"""The process group of a run, the rank and device of this process, and dtypes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ftkit.errors import TrainingError, plural
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from ftkit.config.training import Precision
    from ftkit.planning.plan import PlacementPlan

T = TypeVar("T")
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""A recipe's precisions as torch dtypes."""
CHECKPOINT_GROUP = "checkpoint"  # description of the process group that writes checkpoints during training
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for other ranks before the run fails instead of hanging."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that divide the tokens of the same packs; by default, one rank has all tokens.

    Tensor parallelism all-gathers the tokens of `num_gathered` consecutive ranks for attention, which needs the
    positions of all of them.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    num_gathered: int = 1

    def part(self, length: int) -> slice:
        """Return this process's range of a pack's `length` tokens; all ranks have ranges of the same size."""
        tokens = length // self.size
        return slice(self.rank * tokens, (self.rank + 1) * tokens)

    def gathered_part(self, length: int) -> slice:
        """Return the range of a pack's `length` tokens that is all-gathered for this process's attention."""
        tokens = length // self.size * self.num_gathered
        first = self.rank // self.num_gathered * tokens
        return slice(first, first + tokens)


@dataclass(frozen=True)
class World:
    """This process among the `size` processes of a run.

    Attributes:
        mesh: the mesh that shards the model, [shards] or [replicas, shards]; `host_mesh` is for tensors in host memory.
        context: the group of consecutive ranks that divides packs, by context or tensor parallelism.
        exchange: the context-parallel group, which exchanges tokens for heads. With tensor parallelism, its ranks have
            the same part of the layers, so they are not consecutive.
        tensor_mesh: the mesh of decoder layers with tensor parallelism, [shards, tensor]; None without.
    """

    rank: int
    size: int
    num_hosts: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    host_mesh: DeviceMesh
    context: ContextGroup = ContextGroup()
    exchange: ContextGroup = ContextGroup()
    tensor_mesh: DeviceMesh | None = None
    host_tensor_mesh: DeviceMesh | None = None

    @property
    def num_replicas(self) -> int:
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    @property
    def num_shards(self) -> int:
        return self.size // self.num_replicas

    @property
    def layer_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards a decoder layer, or with tensor parallelism, this process's part of it."""
        return self.mesh if self.tensor_mesh is None else self.tensor_mesh["shard"]

    def on_host(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh with the same processes, for tensors in host memory."""
        if self.host_tensor_mesh is not None and mesh == self.tensor_mesh:
            return self.host_tensor_mesh
        return self.host_mesh

    @property
    def tensor_parallel(self) -> int:
        return 1 if self.tensor_mesh is None else self.tensor_mesh.size(1)

    @property
    def num_layer_shards(self) -> int:
        return self.num_shards // self.tensor_parallel

    @property
    def num_layer_ranks(self) -> int:
        """Number of processes with the same part of the layers' matrices; without tensor parallelism, all of them."""
        return self.size // self.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Index of this process's part of a batch's packs, out of `data_size` parts."""
        return self.rank // self.context.size

    @property
    def data_size(self) -> int:
        return self.size // self.context.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only rank that writes files of the whole run."""
        return self.rank == 0

    def barrier(self) -> None:
        dist.barrier()

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def context_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the processes that work on the same packs."""
        total = value.clone()
        if self.context.group is not None:
            dist.all_reduce(total, group=self.context.group)
        return total

    def sum(self, values: list[float]) -> list[float]:
        """Return element-wise sums over all ranks. A host sync."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return [float(total) for total in totals.tolist()]


@contextmanager
def init_world(placement: PlacementPlan, context_parallel: int = 1, num_replicas: int = 1) -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and destroy it at the end.

    `context_parallel` processes divide the tokens of a pack. Each replica of the model is on consecutive ranks.
    """
    size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if size != placement.world_size:
        raise TrainingError(
            f"the plan is for {plural(placement.world_size, 'process')}, but {size} were started",
            fix="start the job script as it was rendered, or plan the run again",
        )
    if placement.device == "cpu":
        device, num_threads = torch.device("cpu"), placement.threads_per_process
    else:
        device, num_threads = _gpu(placement, local_rank), _num_threads(placement, local_rank)
    torch.set_num_threads(num_threads)
    # fp32 must mean fp32 in every image: NVIDIA's set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which rounds to TF32.
    torch.set_float32_matmul_precision("highest")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        dimensions = {"replicate": num_replicas, "shard": size // num_replicas}
        if num_replicas == 1:
            del dimensions["replicate"]
        shape, names = tuple(dimensions.values()), tuple(dimensions)
        mesh, host_mesh = (init_device_mesh(kind, shape, mesh_dim_names=names) for kind in (device.type, "cpu"))
        context = _group_of(device, size, context_parallel)
        yield World(dist.get_rank(), size, placement.num_nodes, local_rank, device, mesh, host_mesh, context, context)
    finally:
        dist.destroy_process_group()


def with_tensor_parallel(world: World, size: int) -> World:
    """Return a world in which groups of `size` processes divide the matrices of decoder layers. Collective."""
    if size == 1:
        return world
    shape, names = (world.size // size, size), ("shard", "tensor")
    mesh, host_mesh = (init_device_mesh(kind, shape, mesh_dim_names=names) for kind in (world.device.type, "cpu"))
    context = replace(_group_of(world.device, world.size, world.exchange.size * size), num_gathered=size)
    exchange = _group_of(world.device, world.size, world.exchange.size, distance=size)
    return replace(world, context=context, exchange=exchange, tensor_mesh=mesh, host_tensor_mesh=host_mesh)


def _group_of(device: torch.device, num_processes: int, size: int, distance: int = 1) -> ContextGroup:
    """Return this process's group of `size` ranks with stride `distance`."""
    if size == 1:
        return ContextGroup()
    dimensions = {"data": num_processes // (size * distance), "context": size, "tensor": distance}
    if distance == 1:
        del dimensions["tensor"]
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    return ContextGroup(mesh.get_local_rank("context"), size, mesh.get_group("context"))


def _num_threads(placement: PlacementPlan, local_rank: int) -> int:
    """Bind this rank to the CPUs of its GPU's NUMA node, and return its number of threads.

    The plan has one thread per process if the cluster profile does not set the number of CPUs of a node.
    """
    gpus: list[Any] = [torch.cuda.get_device_properties(index) for index in range(placement.processes_per_node)]
    if not all(hasattr(gpu, "pci_domain_id") for gpu in gpus):  # an older torch
        return placement.threads_per_process
    bus_ids = [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in gpus]
    return max(placement.threads_per_process, bind_to_gpu(bus_ids, local_rank))


def _gpu(placement: PlacementPlan, local_rank: int) -> torch.device:
    """Return this rank's GPU. A plan for GPUs never falls back to CPUs, where the run would take weeks."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= visible:
        raise TrainingError(
            f"the plan needs {plural(placement.processes_per_node, 'GPU')} on each node, but torch sees {visible}",
            meaning="the job was not given its GPUs, the container lacks the driver, or torch has no CUDA",
            fix="run 'nvidia-smi' in the same job; to train on CPUs, use a cluster profile with device: cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# --- CPUs of a rank ------------------------------------------------------------------------------


def bind_to_gpu(bus_ids: Sequence[str], local_rank: int, root: Path = Path("/")) -> int:
    """Bind this process to the CPUs of its GPU's NUMA node; return its share of them as a number of threads.

    Memory allocated afterwards is on the same NUMA node, which matters for pinned copies to the GPU. CPUs that Slurm or
    a container excludes stay excluded. If the topology can't be read, the process is not bound. `bus_ids` are the PCI
    addresses of the GPUs of all ranks on this node, by local rank; `root` contains /sys.
    """
    near = [_cpus_near(bus_id, root) for bus_id in bus_ids]
    allowed = os.sched_getaffinity(0) & near[local_rank]
    if not allowed:
        return max(1, num_usable_cpus() // len(bus_ids))
    os.sched_setaffinity(0, allowed)
    return max(1, len(allowed) // near.count(near[local_rank]))


def _cpus_near(bus_id: str, root: Path) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node, read from a list such as `0-3,8`; none if unknown or -1."""
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text(encoding="ascii"))
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        ranges = [part.partition("-") for part in text.strip().split(",") if part]
        return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
