"""A rank's shard of a parameter, for any engine; the norm of gradients; weights that FSDP2 all-gathers in FP8.

FP8 takes half the bytes of bf16, on the network and in memory. Each rank rounds its shard, in fp32, with the scale of
the whole weight, so the all-gathered factors of FP8 matmuls equal those of a single process. FSDP2 calls the methods of
a shard before and after its all-gather (its extension for tensor subclasses, torch 2.6 and newer).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ftkit.train.gpu_kernels import round_shard
from ftkit.train.private_apis.deepspeed import zero3_partition
from ftkit.train.private_apis.torch import find_norms, make_wrapper, map_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


_ELEMENTS_PER_READ = 2**27
"""Elements of a tensor that are read at a time: 0.5 GiB in fp32."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other as it is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.master if isinstance(local, Fp8Shard) else local


def with_ordinary_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory whose part on this rank, if it is sharded, is an ordinary tensor."""
    if not (isinstance(tensor, DTensor) and isinstance(tensor.to_local(), Fp8Shard)):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    local = local_tensor(tensor)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def rows_per_read(shape: Sequence[int]) -> int:
    """Return how many rows of a tensor to read at a time."""
    return max(1, _ELEMENTS_PER_READ // max(1, math.prod(shape[1:])))


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard of a parameter: elements `begin` to `end` of the flattened parameter, or of some of its columns.

    Attributes:
        shape: shape of the unsharded parameter.
        values: flat view of the shard; writing to it changes the parameter.
        begin: offset of the shard's first element.
        columns: the columns that the shard has rows of. All if None.
    """

    shape: torch.Size
    values: torch.Tensor
    begin: int
    columns: range | None = None

    @property
    def end(self) -> int:
        """Offset after the shard's last element."""
        return self.begin + self.values.numel()

    @torch.no_grad()
    def copy_from(self, unsharded: torch.Tensor) -> None:
        """Copy this shard from an unsharded tensor."""
        self.values.copy_(self._local_columns(unsharded).reshape(-1)[self.begin : self.end])

    @torch.no_grad()
    def copy_rows(self, read: Callable[[int, int], torch.Tensor]) -> None:
        """Copy this shard from a tensor, a few rows at a time; `read(first, last)` returns a range of its rows."""
        width = self.shape[1:].numel() if self.columns is None else len(self.columns)
        first, last = self.begin // width, -(-self.end // width)
        step = rows_per_read(self.shape)
        for top, bottom in pairwise([first, *range((first // step + 1) * step, last, step), last]):
            begin, end = max(self.begin, top * width), min(self.end, bottom * width)
            rows = self._local_columns(read(top, bottom)).reshape(-1)[begin - top * width : end - top * width]
            self.values[begin - self.begin : end - self.begin].copy_(rows)

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
    """Return the rows and columns of this rank's shard; None for all columns.

    Tensor parallelism divides rows or columns, then FSDP2 divides the rows.
    """
    mesh, rows, columns = parameter.device_mesh, range(parameter.shape[0]), None
    dimension = mesh.ndim - 1  # that FSDP2 shards over: replicas are before it, tensor parallelism after it
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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients, sharded in one or several ways: a scalar on the device. Collective.

    DTensor's own norm plans collectives in time quadratic in the number of gradients: a second in step 1 of 48 layers.
    """
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in (each.grad for each in parameters if each.grad is not None):
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups[layout].append(gradient if layout is None else local_tensor(gradient))
    norms = []
    for layout, group in groups.items():
        norm = torch.linalg.vector_norm(torch.stack(find_norms(group, 2.0)))
        if layout is not None:
            mesh, placements = layout
            norm.square_()
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(norm, group=mesh.get_group(dimension))
            norm.sqrt_()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


FP8 = torch.float8_e4m3fn

_aten = torch.ops.aten
_OF_SHARDS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}
"""What FSDP2 and `Module.to_empty` make a shard with. All other operations return ordinary tensors."""
_OF_WEIGHTS = {_aten.alias.default, _aten.as_strided.default, _aten.detach.default}
"""What FSDP2 makes an unsharded parameter with. All other operations take the dequantized weight."""


class Fp8Shard(torch.Tensor):
    """A rank's shard of a weight, in fp32, or the whole weight before it is sharded.

    Attributes:
        master: the shard as an ordinary tensor, [rows, inputs].
        scale: fp32 [], of the whole weight; all shards and views of the weight share it.
    """

    master: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], master: torch.Tensor, scale: torch.Tensor) -> Self:
        shard: Self = make_wrapper(cls, master, master.dtype)
        shard.master, shard.scale = master, scale
        return shard

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape."""
        return f"Fp8Shard({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is of a function
        cls, function: OpOverload, _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the shard."""
        plain, named = map_instances(cls, lambda shard: shard.master, (args, kwargs or {}))
        result = function(*plain, **named)
        if isinstance(args[0], cls) and result is plain[0]:  # in place
            return args[0]
        if function not in _OF_SHARDS:
            return result
        return map_instances(torch.Tensor, lambda master: cls(master, args[0].scale), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """Return the shard rounded, as bytes, padded to the number of rows that all ranks send; and the scale."""
        del outer_stride, module, mp_policy
        num_rows = -(-outer_size[0] // mesh.size())
        sent = self.master.new_empty(num_rows, *outer_size[1:], dtype=torch.uint8)
        round_shard(self.master, self.scale, sent[: len(self.master)].view(FP8))
        return (sent,), self.scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[torch.Tensor],
        metadata: torch.Tensor,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the weight, whose memory FSDP2 frees and fills again; nothing if it exists."""
        (received,) = all_gather_outputs
        return None if out is not None else (Fp8Weight(received.view(FP8), metadata, param_dtype), ())


class Fp8Weight(torch.Tensor):
    """An unsharded weight in e4m3, for autograd a tensor in the compute dtype.

    Attributes:
        numbers: e4m3, [outputs, inputs].
        scale: what they are multiplied by, fp32 [].
    """

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Self:
        weight: Self = make_wrapper(cls, numbers, dtype)
        weight.numbers, weight.scale = numbers, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape; the compiler prints tensors that have no numbers yet."""
        return f"Fp8Weight({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Return the names of the inner tensors for torch's compiler, and what else makes up the weight."""
        return ["numbers", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, outer_size: object, outer_stride: object
    ) -> Fp8Weight:
        """Make the weight of its inner tensors."""
        del outer_size, outer_stride
        return Fp8Weight(inner["numbers"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is of a function
        cls, function: OpOverload, _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the dequantized weight."""
        if function in _OF_WEIGHTS:
            weight, *others = args
            return cls(function(weight.numbers, *others, **(kwargs or {})), weight.scale, weight.dtype)
        plain, named = map_instances(cls, _dequantize, (args, kwargs or {}))
        return function(*plain, **named)


def _dequantize(weight: Fp8Weight) -> torch.Tensor:
    return (weight.numbers.float() * weight.scale).to(weight.dtype)
