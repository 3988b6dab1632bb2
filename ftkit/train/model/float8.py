"""FP8 matmuls (Micikevicius et al. 2022) with trained weights, and with frozen weights stored in FP8.

Weights and activations are e4m3, gradients of trained layers e5m2, as in torchao's tensorwise recipe.
`torch._scaled_mm` returns the compute dtype. `torch._scaled_grouped_mm` multiplies frozen experts, with a scale per
row. CPUs have no such matmuls: factors are cast to FP8 and multiplied in fp32.

FSDP2 also all-gathers trained weights in FP8, which takes half the bytes of bf16, on the network and in memory. Each
rank casts its fp32 shard with the scale of the whole weight, so the all-gathered weights equal those of a single
process. FSDP2 calls the shard's methods before and after the all-gather (its extension for tensor subclasses).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from ftkit.config.execution import FP8_MULTIPLE, ROUTERS, is_gathered_in_fp8
from ftkit.errors import PrerequisiteError
from ftkit.train.gpu_kernels import round_and_transpose, round_shard, transpose
from ftkit.train.model.linears import WeightLayout, opaque_zero
from ftkit.train.model.local_shard import local_tensor
from ftkit.train.private_apis import torch as torch_apis
from ftkit.train.private_apis.transformers import grouped_mm

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh

    from ftkit.config.training import TrainingPlan
    from ftkit.train.private_apis.torch import Ctx
    from ftkit.train.world import World

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_SMALLEST_MAXIMUM = 1e-12  # lower bound of an amax: otherwise a row of zeros is divided by a scale of 0
_SCALE_STRIDE = 4
"""Stride of the scales of all-gathered matrices, in elements: cuBLAS needs scales at multiples of 16 bytes."""


def check_fp8(device: torch.device, *, has_experts: bool = False) -> None:
    """Raise unless a device has FP8 matmuls (with `has_experts`, also grouped ones); CPUs emulate them."""
    if device.type != "cuda":
        return
    first, gpus, factors = ((9, 0), "Hopper", " experts") if has_experts else ((8, 9), "Ada, Hopper", "")
    if torch.cuda.get_device_capability(device) < first:
        raise PrerequisiteError(
            f"{torch.cuda.get_device_name(device)} does not multiply{factors} in FP8",
            meaning=f"{gpus} and newer GPUs do",
            fix="set training.precision=bf16 and leave out training.base_precision; or use method 'qlora' for memory",
        )


def convert_linears(layers: Iterable[nn.Module]) -> None:
    """Run the forward and backward matmuls of linear layers in decoder layers in FP8, with one scale per factor.

    Weights, their names and their gradients don't change. Routers, and matrices whose sizes FP8 matmuls don't support,
    keep the compute dtype.
    """
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, module in parent.named_children():
            if type(module) is not nn.Linear or name in ROUTERS:
                continue
            if module.in_features % FP8_MULTIPLE == 0 and module.out_features % FP8_MULTIPLE == 0:
                setattr(parent, name, Fp8Linear(module))


class Fp8Linear(nn.Linear):
    """A trained linear layer with its three matmuls, forward and backward, in FP8."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Multiply by the matrix; inputs, matrix and gradients are cast with one scale each."""
        rows, weight = input.flatten(0, -2), self.weight
        gathered = (weight.numbers, weight.scale) if isinstance(weight, Fp8Weight) else (None, None)
        product: torch.Tensor = _TrainedProduct.apply(rows, weight, *gathered)  # type: ignore[no-untyped-call]
        output = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class _TrainedProduct(torch.autograd.Function):
    """A matmul with a trained matrix, computed with its all-gathered FP8 values, if any. The matrix gets the gradient.

    Saving these values takes no memory: FSDP2 owns their storage, and may free it until the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Ctx, inputs: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        if numbers is None or scale is None:
            ctx.save_for_backward(inputs, weight)
            return _multiply(_round(inputs), _round(weight), inputs.dtype)
        ctx.save_for_backward(inputs, numbers, scale)
        return _multiply(_round(inputs), Scaled(numbers, scale), inputs.dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        inputs, *saved = ctx.saved_tensors
        weight = _round(*saved) if len(saved) == 1 else Scaled(*saved)
        scale = _scale_for(gradient.abs().amax(), torch.float8_e5m2)
        rows, columns = (Scaled(each, scale) for each in round_and_transpose(gradient, scale, torch.float8_e5m2))
        weight_columns = _transpose(weight, after=gradient)
        input_columns = _transpose(_round(inputs), after=gradient, is_fusible=False)
        of_inputs = _multiply(rows, weight_columns, gradient.dtype, is_fast=False)
        of_weight = _multiply(columns, input_columns, gradient.dtype, is_fast=False)
        return of_inputs, of_weight, None, None


class _FrozenProduct(torch.autograd.Function):
    """A matmul with a frozen matrix, or with experts' matrices given `experts` and `ends` of `multiply_grouped`.

    Autograd saves the parameter instead of views of it, because an engine may free its storage.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        rows: torch.Tensor,
        stored: torch.Tensor,
        layout: Fp8Layout,
        experts: torch.Tensor | None,
        ends: torch.Tensor | None,
    ) -> torch.Tensor:
        routing = () if experts is None or ends is None else (experts, ends)
        ctx.save_for_backward(stored, *routing)
        ctx.layout = layout
        return _multiply_rows(_round(rows, by_row=True), layout.parts(stored), routing, rows.dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        stored, *routing = ctx.saved_tensors
        weight = ctx.layout.parts(stored)
        # The product sums over the rows of the matrix, so the scales of the rows are applied to the gradient.
        scales = weight.scale[routing[0], :, 0] if routing else weight.scale.mT
        rounded = _round(gradient * scales, by_row=True)
        ones = torch.ones(*weight.numbers.shape[:-2], weight.numbers.shape[-1], 1, device=gradient.device)
        turned = _transpose(Scaled(weight.numbers, ones), after=gradient)
        return _multiply_rows(rounded, turned, routing, gradient.dtype), None, None, None, None


class Scaled(NamedTuple):
    """FP8 matrices, [..., M, K], with fp32 scales: one per matrix, [], or one per row, [..., M, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor


def _round(matrix: torch.Tensor, *, by_row: bool = False) -> Scaled:
    """Cast a matrix to e4m3, with one scale, or with one per row."""
    scale = _scale_for(matrix.abs().amax(dim=-1, keepdim=True) if by_row else matrix.abs().amax(), FP8)
    return Scaled((matrix.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale)


def _scale_for(maximum: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return maximum.float().clamp_min(_SMALLEST_MAXIMUM) / torch.finfo(dtype).max


def _transpose(matrix: Scaled, *, after: torch.Tensor, is_fusible: bool = True) -> Scaled:
    """Transpose matrices with a copy: FP8 matmuls on GPUs reduce only along the last dimension of both factors.

    A compiler sees forward and backward together. It would transpose in the forward pass and save the copies, unless
    they depend on a tensor of the backward pass, `after`. `is_fusible` lets it fuse the copy with other operations on
    the values that the matrix was cast from.
    """
    numbers = matrix.numbers.view(torch.uint8) | opaque_zero(after)
    transposed = numbers.mT.contiguous() if is_fusible else transpose(numbers)
    return Scaled(transposed.view(matrix.numbers.dtype), matrix.scale)


def _multiply(left: Scaled, right: Scaled, dtype: torch.dtype, *, is_fast: bool = True) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K]; without `is_fast`, accumulation is more precise."""
    scales = left.scale, right.scale.t()
    if left.numbers.device.type == "cpu":
        product = left.numbers.float() @ right.numbers.float().t()
        return (product * scales[0] * scales[1]).to(dtype)
    return torch_apis.scaled_mm(left.numbers, right.numbers.t(), *scales, out_dtype=dtype, use_fast_accum=is_fast)


def _multiply_rows(rows: Scaled, weight: Scaled, routing: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Multiply rows, [S, K], by the transpose of a matrix, [N, K]; with routing, of their experts', [E, N, K]."""
    if not routing:
        return _multiply(rows, weight, dtype)
    experts, ends = routing
    if rows.numbers.device.type == "cpu":
        product = grouped_mm(rows.numbers.float(), weight.numbers.float().mT, ends)
        return (product * rows.scale * weight.scale[experts, :, 0]).to(dtype)
    scales = rows.scale[:, 0], weight.scale[..., 0]
    return torch_apis.scaled_grouped_mm(rows.numbers, weight.numbers.mT, *scales, ends, dtype)


class Fp8Layout(WeightLayout):
    """e4m3 weights, then an fp32 scale per row. The flat forms of stacked experts are rows of one tensor."""

    kind = "fp8"

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        rounded = _round(weight.to(self.storage).contiguous(), by_row=True)
        return torch.cat([part.view(torch.uint8).flatten(-2) for part in rounded], dim=-1).view(self.storage)

    def dequantize(self, flat: torch.Tensor) -> torch.Tensor:
        weight = self.parts(flat)
        return (weight.numbers.float() * weight.scale).to(self.storage)

    def multiply(self, inputs: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Multiply by the matrix; each token's inputs are cast with a separate scale."""
        rows = inputs.flatten(0, -2)
        product: torch.Tensor = _FrozenProduct.apply(rows, flat, self, None, None)  # type: ignore[no-untyped-call]
        return product.view(*inputs.shape[:-1], self.num_outputs)

    def multiply_grouped(
        self, rows: torch.Tensor, stored: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows by the matrices of their experts; each row is cast with a separate scale."""
        product: torch.Tensor = _FrozenProduct.apply(rows, stored, self, experts, ends)  # type: ignore[no-untyped-call]
        return product

    def parts(self, flat: torch.Tensor) -> Scaled:
        """Return the matrices of flat forms, with a scale per row."""
        sizes = [self.num_weights, torch.float32.itemsize * self.num_outputs]
        numbers, scales = torch.split(flat.detach().view(torch.uint8), sizes, dim=-1)
        matrices = numbers.view(FP8).view(*flat.shape[:-1], self.num_outputs, self.num_inputs)
        return Scaled(matrices, scales.contiguous().view(torch.float32)[..., None])


# --- All-gathers in FP8 --------------------------------------------------------------------------


class GatheredScales:
    """Scales of the trained matrices that FSDP2 all-gathers in FP8: one per matrix, the same on all ranks."""

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Prepare the matrices of converted layers, before they are sharded."""
        self._linears = [
            module
            for layer in layers
            for name, module in layer.named_modules()
            if isinstance(module, Fp8Linear)
            and is_gathered_in_fp8(name.rpartition(".")[2], module.in_features, module.out_features)
        ]
        self._scales = torch.ones(len(self._linears), _SCALE_STRIDE, device=device)[:, 0]
        for linear, scale in zip(self._linears, self._scales, strict=True):
            linear.weight = nn.Parameter(Fp8Shard(linear.weight.detach(), scale))

    @classmethod
    def of(cls, layers: Iterable[nn.Module], training: TrainingPlan, world: World) -> GatheredScales | None:
        """Return the scales if weights are all-gathered in FP8; log the decision and its reason."""
        if not training.sends_fp8:
            return None
        reason = ""
        if world.num_layer_shards == 1:
            reason = "there is one shard"
        elif not torch_apis.FSDP2_EXTENDS_ALL_GATHERS:
            reason = f"torch {torch.__version__} is older than 2.8"
        log.info("weights are%s all-gathered in FP8%s", " not" if reason else "", reason and f": {reason}")
        return None if reason else cls(layers, world.device)

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup) -> None:
        """Compute the scales from the sharded matrices. Collective, without a host sync."""
        if not self._linears:  # no layer has both sizes divisible by `FP8_MULTIPLE`
            return
        shards = [local_tensor(linear.weight) for linear in self._linears]
        filled = [shard if shard.numel() else self._scales.new_zeros(1) for shard in shards]
        maxima = torch.stack(torch_apis.find_norms(filled, math.inf))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        self._scales.copy_(_scale_for(maxima.bfloat16(), FP8))  # a single process computes the amax in bf16


_aten = torch.ops.aten
_OF_WEIGHTS = {_aten.alias.default, _aten.as_strided.default, _aten.detach.default}
"""Operations with which FSDP2 creates an unsharded parameter. All others take the dequantized weight."""
_OF_SHARDS = _OF_WEIGHTS | {
    _aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default, _aten.slice.Tensor,
    _aten.split.Tensor, _aten.view.default,
}  # fmt: skip
"""Operations with which FSDP2 and `Module.to_empty` create a shard. All others return ordinary tensors."""


class Fp8Shard(torch.Tensor):
    """A rank's fp32 shard of a weight, or the whole weight before sharding.

    Attributes:
        master: the shard as an ordinary tensor, [rows, inputs].
        scale: fp32 [], of the whole weight; all shards and views of the weight share it.
    """

    master: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], master: torch.Tensor, scale: torch.Tensor) -> Self:
        shard: Self = torch_apis.make_wrapper(cls, master, master.dtype)
        shard.master, shard.scale = master, scale
        return shard

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fp8Shard({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is of a function
        cls, function: OpOverload, _: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        plain, named = torch_apis.map_instances(cls, lambda shard: shard.master, (args, kwargs or {}))
        result = function(*plain, **named)
        if isinstance(args[0], cls) and result is plain[0]:  # in place
            return args[0]
        if function not in _OF_SHARDS:
            return result
        return torch_apis.map_instances(torch.Tensor, lambda master: cls(master, args[0].scale), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """Return the shard in FP8 as bytes, padded to the number of rows that each rank sends, and the scale."""
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
        """Return the unsharded weight, or None if it exists: FSDP2 frees its memory and fills it again."""
        (received,) = all_gather_outputs
        return None if out is not None else (Fp8Weight(received.view(FP8), metadata, param_dtype), ())


class Fp8Weight(torch.Tensor):
    """An unsharded weight: e4m3 `numbers`, [outputs, inputs], times the fp32 `scale`, []. Autograd sees `dtype`."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Self:
        weight: Self = torch_apis.make_wrapper(cls, numbers, dtype)
        weight.numbers, weight.scale = numbers, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fp8Weight({tuple(self.shape)})"  # the compiler prints tensors before they have `numbers`

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, outer_size: object, outer_stride: object
    ) -> Fp8Weight:
        del outer_size, outer_stride
        return Fp8Weight(inner["numbers"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is of a function
        cls, function: OpOverload, _: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function in _OF_WEIGHTS:
            weight, *others = args
            return cls(function(weight.numbers, *others, **(kwargs or {})), weight.scale, weight.dtype)
        plain, named = torch_apis.map_instances(cls, cls._dequantize, (args, kwargs or {}))
        return function(*plain, **named)

    def _dequantize(self) -> torch.Tensor:
        return (self.numbers.float() * self.scale).to(self.dtype)
