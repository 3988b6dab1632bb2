"""Trained weights that FSDP2 all-gathers in FP8: half the bytes of bf16, on the network and in memory.

Each rank rounds its shard, in fp32, with the scale of the whole weight. What arrives are the factors of FP8 matmuls, as
a single process would round them. FSDP2 calls the methods of a shard before and after its all-gather (its extension for
tensor subclasses, torch 2.6 and newer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from ftkit.train.gpu_kernels import round_shard
from ftkit.train.private_apis.torch import make_wrapper, map_instances

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
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
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
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
        inner: dict[str, torch.Tensor], dtype: torch.dtype, outer_size: Any, outer_stride: Any
    ) -> Fp8Weight:
        """Make the weight of its inner tensors."""
        del outer_size, outer_stride
        return Fp8Weight(inner["numbers"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is of a function
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute on the dequantized weight."""
        if function in _OF_WEIGHTS:
            weight, *others = args
            return cls(function(weight.numbers, *others, **(kwargs or {})), weight.scale, weight.dtype)
        plain, named = map_instances(cls, _dequantize, (args, kwargs or {}))
        return function(*plain, **named)


def _dequantize(weight: Fp8Weight) -> torch.Tensor:
    return (weight.numbers.float() * weight.scale).to(weight.dtype)
