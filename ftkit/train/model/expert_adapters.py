"""Adapters of routed experts, whose matrices transformers 5 stacks in one parameter per layer.

For the tokens x that are routed to expert e, y = x W^T + s (x A^T) B^T with the expert's own W, A and B, as grouped
matmuls. peft computes the same with W + s B A, which reads and writes the weights of all experts in each forward pass.
The parts of a joined parameter, such as gate and up, share an adapter with the sum of their ranks, as in peft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from ftkit.config.execution import GROUPED_MULTIPLE
from ftkit.errors import TrainingError
from ftkit.models.architecture import ExpertMatrix
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.private_apis.transformers import (
    WeightConversions,
    apply_gate,
    computes_experts_one_by_one,
    grouped_mm,
    is_experts,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.models.adapters import LoraSpec
    from ftkit.train.model.adapted_linear import Dropout, TokenKeys
    from ftkit.train.model.linears import WeightLayout

    LayoutOf = Callable[[int, int], WeightLayout | None]

_KEY_OF_EXPERT = 0x9E3779B97F4A7C15 - 2**64
"""An odd number. Its product with the expert's index is added to token keys, so that masks differ between experts."""


def experts_in_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with stacked experts in each decoder layer, with their names in the layer.

    These are the classes of transformers that use grouped matmuls; others can't be adapted.
    """
    for layer in find_decoder_layers(model):
        yield from _experts_in(layer)


def _experts_in(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in layer.named_modules() if is_experts(each)]


def expert_matrices(model: PreTrainedModel) -> tuple[ExpertMatrix, ...]:
    """Return the matrices of a model's routed experts that can get adapters."""
    found = Counter(
        ExpertMatrix(name, _parts(model, f"{path}.{name}"), *sizes, 1)
        for path, experts in experts_in_layers(model)
        for name, sizes in expert_sizes(experts).items()
    )
    return tuple(replace(matrix, count=count) for matrix, count in found.items())


def expert_sizes(experts: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of experts, inputs and outputs of each stacked matrix, in peft's order of wrapping them."""
    if isinstance(experts, GroupedExperts):
        return experts.sizes
    found = {}
    for name, each in experts.named_parameters(recurse=False):
        if each.ndim == 3:  # noqa: PLR2004
            num, rows, columns = each.shape
            found[name] = (num, rows, columns) if experts.is_transposed else (num, columns, rows)
    return found


def transposed_experts(model: nn.Module) -> frozenset[str]:
    """Return the names of the stacked matrices of a model without adapters that are [experts, inputs, outputs]."""
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if is_experts(module) and module.is_transposed is True
        for name in expert_sizes(module)
    )


def _parts(model: PreTrainedModel, parameter: str) -> tuple[str, ...]:
    """Return the names in files of the matrices that transformers joins to a stacked parameter."""
    for converter in WeightConversions.of(model).converters:
        targets = [pattern.strip("$^").removesuffix(".weight") for pattern in converter.target_patterns]
        if any(f".{parameter}".endswith(f".{target.lstrip('.')}") for target in targets):
            patterns = [pattern.strip("$^").removesuffix(".weight") for pattern in converter.source_patterns]
            parts = tuple(pattern.rpartition(".")[2] for pattern in patterns)
            if all(part.isidentifier() for part in parts):
                return parts
    return ()


def check_expert_targets(matrices: Collection[ExpertMatrix], lora: LoraSpec) -> None:
    for matrix in matrices:
        if missing := matrix.missing_parts(lora.targets):
            raise TrainingError(
                f"training.lora.targets: without {', '.join(missing)}, the experts can't be adapted",
                meaning=f"{' and '.join(matrix.parts)} of all experts of a layer are one parameter with one adapter",
                fix=f"name all of them, or leave out {' and '.join(set(matrix.parts) - set(missing))}",
            )
        if lora.use_dora and matrix.num_ranks(lora.targets):
            raise TrainingError(
                f"training.lora.use_dora: {matrix.name} of the experts has no DoRA",
                meaning="neither ftkit nor peft trains the magnitudes of stacked experts",
                fix="set training.lora.use_dora=false, or name other layers in training.lora.targets",
            )


def prepare_experts(
    model: nn.Module, lora: LoraSpec, tokens: TokenKeys, effect: torch.Tensor, layout_of: LayoutOf | None = None
) -> None:
    """Add fp32 adapters to the stacked experts that are targets, and quantize frozen weights if `layout_of` is set.

    `layout_of` returns the layout of a matrix from its numbers of inputs and outputs, or None to keep the matrix.
    """
    ranks = {each.name: each.num_ranks(lora.targets) for each in expert_matrices(model)}
    if not any(ranks.values()) and layout_of is None:
        return
    for index, layer in enumerate(find_decoder_layers(model)):
        for name, experts in _experts_in(layer):
            drawn = {each: tokens.dropout_of(f"{index}.{name}.{each}") for each, rank in ranks.items() if rank}
            grouped_class = _grouped_class(type(experts))  # type: ignore[arg-type] # a class can be hashed
            layer.set_submodule(name, grouped_class(experts, lora, ranks, effect, drawn, layout_of))


class _Routing(NamedTuple):
    """The assignment of T tokens to K experts each: S = T K rows, sorted by expert."""

    experts: torch.Tensor  # [S], the expert of each row, in ascending order
    ends: torch.Tensor  # [E], the index after the last row of each expert
    tokens: torch.Tensor  # [S], the token of each row


class GroupedExperts(nn.Module):
    """Frozen experts with adapters, quantized weights, or both.

    This is mixed into the class of a layer's experts, so that their parameter names don't change. The adapters of a
    matrix, such as `down_proj`, are the parameters `lora_A_down_proj`, [E, R, inputs], and `lora_B_down_proj`,
    [E, outputs, R].

    Attributes:
        sizes: the number of experts, inputs and outputs of each matrix, by name.
        layouts: the layouts of quantized matrices, by name; each row of such a parameter is an expert.
        dropouts: the dropout of adapters' inputs, by the names of their matrices; empty without dropout.
    """

    num_experts: int  # transformers' class sets this and the attributes below
    is_transposed: bool
    act_fn: nn.Module
    post_expert_norm: nn.Module
    config: PretrainedConfig

    def __init__(
        self,
        experts: nn.Module,
        lora: LoraSpec,
        ranks: dict[str, int],
        effect: torch.Tensor,
        dropouts: dict[str, Dropout | None],
        layout_of: LayoutOf | None,
    ) -> None:
        """Adopt the experts' parameters, submodules and attributes.

        `ranks` has each matrix's adapter rank in multiples of `lora.rank`, or 0. `effect` is that of `AdaptedLinear`.
        """
        sizes = expert_sizes(experts)
        vars(self).update(vars(experts))
        self.sizes = sizes
        self.effect = effect
        self.layouts: dict[str, WeightLayout] = {}
        self._scaling = {name: lora.scaling_of(ranks[name]) for name in sizes if ranks[name]}
        self.dropouts = nn.ModuleDict({name: each for name, each in dropouts.items() if each is not None})
        for name, (num, inputs, outputs) in sizes.items():
            weight = getattr(self, name)
            if ranks[name]:
                rank, device = ranks[name] * lora.rank, weight.device
                self.register_parameter(f"lora_A_{name}", nn.Parameter(torch.empty(num, rank, inputs, device=device)))
                self.register_parameter(f"lora_B_{name}", nn.Parameter(torch.empty(num, outputs, rank, device=device)))
            layout = None if layout_of is None else layout_of(inputs, outputs)
            if layout is not None:
                self.layouts[name] = layout
                stored = torch.empty(num, layout.num_stored, dtype=layout.storage, device=weight.device)
                if not weight.is_meta:
                    stored.copy_(layout.quantize(weight.data.mT if self.is_transposed else weight.data))
                setattr(self, name, nn.Parameter(stored, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the outputs of each token's experts, [T, H]; indices and weights are [T, K]."""
        experts, order = top_k_index.flatten().sort()
        every = torch.arange(self.num_experts, device=order.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        routing = _Routing(experts, ends, order // top_k_index.shape[-1])
        rows = hidden_states[routing.tokens]
        if getattr(self, "has_gate", True):
            inner = apply_gate(self, self._multiply("gate_up_proj", rows, routing))
        else:
            inner = self.act_fn(self._multiply("up_proj", rows, routing))
        outputs = self._multiply("down_proj", inner, routing)
        if getattr(self, "has_post_expert_norm", False):
            outputs = self.post_expert_norm(outputs)
        outputs = outputs * top_k_weights.flatten()[order, None]
        sums: torch.Tensor = outputs[order.argsort()].view(*top_k_index.shape, -1).sum(dim=1)
        return sums.to(hidden_states.dtype)

    def _multiply(self, name: str, rows: torch.Tensor, routing: _Routing) -> torch.Tensor:
        """Multiply rows, [S, inputs], sorted by expert, by their experts' matrix and its adapters."""
        weight = getattr(self, name)
        rows = rows.to(weight.dtype)
        if (layout := self.layouts.get(name)) is not None:
            product = layout.multiply_grouped(rows, weight, routing.experts, routing.ends)
        else:
            product = self._grouped(rows, weight if self.is_transposed else weight.mT, routing.ends)
        if getattr(self, "has_bias", False):
            product = product + getattr(self, f"{name}_bias")[routing.experts]
        if name not in self._scaling:
            return product
        down, up = (getattr(self, f"lora_{factor}_{name}").to(rows.dtype) for factor in "AB")
        if missing := -down.shape[1] % GROUPED_MULTIPLE:
            down, up = functional.pad(down, (0, 0, 0, missing)), functional.pad(up, (0, missing))
        if self.training and name in self.dropouts:
            dropout = cast("Dropout", self.dropouts[name])
            keys = dropout.tokens.keys.flatten()[routing.tokens] + routing.experts * _KEY_OF_EXPERT
            rows = dropout.draw(rows, keys=keys).drop(rows)
        narrow = self._grouped(rows, down.mT, routing.ends)
        return product + self._grouped(narrow * (self.effect * self._scaling[name]), up.mT, routing.ends)

    def _grouped(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply each row, [S, I], by its expert's matrix, of [E, I, O]; expert e has the rows before ends[e]."""
        multiply = _multiply_one_by_one if computes_experts_one_by_one(self.config) else grouped_mm
        return multiply(rows, matrices, ends)


@torch.compiler.disable  # type: ignore[untyped-decorator] # Inductor's code fails: it does not know these sizes
def _multiply_one_by_one(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([rows[first:end] @ matrix for (first, end), matrix in zip(bounds, matrices, strict=True)])


@cache
def _grouped_class(experts_class: type[nn.Module]) -> type[GroupedExperts]:
    return type(f"Grouped{experts_class.__name__}", (GroupedExperts, experts_class), {})
