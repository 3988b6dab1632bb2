"""A rank's shard of a parameter, for any engine, and the norm of gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ftkit.train.private_apis.libraries import zero3_partition
from ftkit.train.private_apis.torch import find_norms

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


_ELEMENTS_PER_READ = 2**27  # elements of a tensor that are read at a time: 0.5 GiB in fp32


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; other tensors are returned unchanged."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    ordinary: torch.Tensor = getattr(local, "master", local)  # of a `Fp8Shard`
    return ordinary


def with_ordinary_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares memory, and whose local shard, if any, is an ordinary tensor."""
    if not isinstance(tensor, DTensor) or not hasattr(tensor.to_local(), "master"):
        return tensor
    mesh, placements, local = tensor.device_mesh, tensor.placements, local_tensor(tensor)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def rows_per_read(shape: Sequence[int]) -> int:
    return max(1, _ELEMENTS_PER_READ // max(1, math.prod(shape[1:])))


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard of a parameter: elements `begin` to `end` of the flattened parameter, or of some of its columns.

    `shape` is that of the unsharded parameter. `values` are a flat view: writing to it changes the parameter.
    """

    shape: torch.Size
    values: torch.Tensor
    begin: int
    columns: range | None = None

    @property
    def end(self) -> int:
        return self.begin + self.values.numel()

    @torch.no_grad()
    def copy_from(self, unsharded: torch.Tensor) -> None:
        self.values.copy_(self._local_columns(unsharded).reshape(-1)[self.begin : self.end])

    @torch.no_grad()
    def copy_rows(self, read: Callable[[int, int], torch.Tensor], step: int | None = None) -> None:
        """Copy this shard from a tensor, `step` rows at a time; `read(first, last)` returns a range of its rows."""
        if self.begin == self.end:  # there are more ranks than rows, such as experts
            return
        width = self.shape[1:].numel() if self.columns is None else len(self.columns)
        first, last = self.begin // width, -(-self.end // width)
        step = step or rows_per_read(self.shape)
        for top, bottom in pairwise([first, *range((first // step + 1) * step, last, step), last]):
            begin, end = max(self.begin, top * width), min(self.end, bottom * width)
            rows = self._local_columns(read(top, bottom)).reshape(-1)[begin - top * width : end - top * width]
            self.values[begin - self.begin : end - self.begin].copy_(rows)
            del rows  # freed before the next are read

    def _local_columns(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.columns is None else rows[:, self.columns.start : self.columns.stop]


def local_shard(parameter: torch.Tensor) -> LocalShard:
    """Return this rank's shard of a parameter, which may be sharded by FSDP2, by ZeRO-3 or not at all."""
    if isinstance(parameter, DTensor):
        rows, columns = _local_part(parameter)
        width = parameter.shape[1:].numel() if columns is None else len(columns)
        local = local_tensor(parameter).detach().view(-1)
        return LocalShard(parameter.shape, local[: len(rows) * width], rows.start * width, columns)
    if (partition := zero3_partition(parameter)) is not None:
        # ZeRO-3 partitions the flattened elements evenly, and pads the last partitions.
        share, total = partition.values.numel(), partition.shape.numel()
        begin = min(dist.get_rank() * share, total)
        return LocalShard(partition.shape, partition.values.detach()[: min(share, total - begin)], begin)
    return LocalShard(parameter.shape, parameter.detach().view(-1), 0)


def _local_part(parameter: DTensor) -> tuple[range, range | None]:
    """Return the rows and columns of a shard, None for all: tensor parallelism divides either, then FSDP2 the rows."""
    mesh, rows, columns = parameter.device_mesh, range(parameter.shape[0]), None
    dimension = mesh.ndim - 1  # FSDP2 shards over it: replicas come before, tensor parallelism after
    if "tensor" in (mesh.mesh_dim_names or ()):
        dimension -= 1
        placement, rank, size = parameter.placements[-1], mesh.get_local_rank("tensor"), mesh.size(mesh.ndim - 1)
        if placement.is_shard(0):
            rows = _chunk(rows, rank, size)
        elif placement.is_shard(1):
            columns = _chunk(range(parameter.shape[1]), rank, size)
    return _chunk(rows, mesh.get_local_rank(dimension), mesh.size(dimension)), columns


def _chunk(indices: range, rank: int, size: int) -> range:
    """Return a rank's chunk of a range, divided as `torch.chunk` does."""
    share = -(-len(indices) // size)
    return indices[min(rank * share, len(indices)) : min((rank + 1) * share, len(indices))]


def gradient_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, with any mix of shardings, as an fp32 scalar on the device. Collective.

    DTensor's own norm plans collectives in time quadratic in the number of gradients: a second in step 1 of 48 layers.
    """
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups[layout].append(gradient if layout is None else local_tensor(gradient))
    norms = []
    for layout, group in groups.items():
        norm = torch.linalg.vector_norm(torch.stack(find_norms(group, 2.0, torch.float32)))
        if layout is not None:
            mesh, placements = layout
            norm.square_()
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(norm, group=mesh.get_group(dimension))
            norm.sqrt_()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
