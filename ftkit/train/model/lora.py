"""LoRA: add peft's layers to the model, and freeze everything else in the compute dtype."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from ftkit.errors import TrainingError
from ftkit.models.folder import ADAPTER_FILE, check_adapters
from ftkit.train.model.adapted_linear import ADAPTER, AdaptedLinear, TokenKeys
from ftkit.train.model.expert_adapters import (
    GroupedExperts,
    check_expert_targets,
    expert_matrices,
    expert_sizes,
    experts_in_layers,
    prepare_experts,
)
from ftkit.train.model.float8 import Fp8Layout, check_fp8, convert_linears
from ftkit.train.model.hf_model import TextPlace, find_decoder_layers, find_text
from ftkit.train.model.linears import (
    Nf4Layout,
    QuantizedLinear,
    WeightLayout,
    linears_in_layers,
    owner_of_target,
    quantize_linears,
    transposed_weights,
)
from ftkit.train.model.local_shard import local_shard
from ftkit.train.model.vision import train_vision
from ftkit.train.model.weight_conversion import LazyTensors, name_for_peft
from ftkit.train.private_apis.libraries import adapts_experts, import_peft
from ftkit.train.private_apis.transformers import is_experts
from ftkit.train.world import DTYPES

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.config.training import Quantization, TrainingPlan
    from ftkit.models.adapters import LoraSpec
    from ftkit.train.private_apis.torch import Ctx

_ADAPTER_OF_EXPERTS = re.compile(r"(?P<experts>.+)\.lora_(?P<factor>[AB])_(?P<matrix>\w+)")
_SEPARATE_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYOUTS: dict[Quantization, type[WeightLayout]] = {"fp8": Fp8Layout, "nf4": Nf4Layout}
DORA_MAGNITUDE = f"lora_magnitude_vector.{ADAPTER}.weight"


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def saved_parameters(model: nn.Module, training: TrainingPlan) -> dict[str, nn.Parameter]:
    """Return the parameters that checkpoints and exports save, by name; a tied one only under its first name.

    Without adapters, these are all: a class may freeze some, such as router biases, that belong to the trained model.
    """
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad or training.adapters is None}


def prepare_method(model: PreTrainedModel, training: TrainingPlan, device: torch.device) -> None:
    """Prepare an unsharded model for its training method: freeze, quantize and add adapters, or train in FP8.

    Parameters may be on the meta device; `init_adapters` initializes adapters later.
    """
    if training.multiplies_in_fp8:
        check_fp8(device)
    lora = training.adapters
    if lora is None:
        if training.precision == "fp8":
            convert_linears(find_decoder_layers(model))
        train_vision(model, training)
        return
    precision = DTYPES[training.compute_precision]
    freeze(model, precision)
    layout_of_experts = None
    if (layout := _LAYOUTS.get(training.quantization)) is not None:
        quantize_linears(find_decoder_layers(model), partial(layout.of, precision))
        layout_of_experts = partial(layout.of_experts, precision)
    tokens, effect = TokenKeys(lora.dropout, training.seed), torch.ones((), device=device)
    _inject(model, lora, tokens, effect)
    prepare_experts(model, lora, tokens, effect, layout_of_experts)
    experts = (module for module in model.modules() if isinstance(module, GroupedExperts))
    if training.quantization == "fp8" and any(each.layouts for each in experts):
        check_fp8(device, has_experts=True)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()  # peft created it in the dtype of the layer
    train_vision(model, training)


def freeze(model: PreTrainedModel, precision: torch.dtype) -> None:
    """Freeze all parameters in this dtype. The first layer's input still requires gradients when they are enabled."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # noqa: FBT003
        parameter.data = parameter.data.to(precision)
    model.get_input_embeddings().register_forward_hook(_require_gradient)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable adapters and dropout in the block: the model computes as the frozen model in evaluation mode."""
    effect = next(each.effect for each in model.modules() if isinstance(each, AdaptedLinear | GroupedExperts))
    was_training = model.training
    model.eval()
    effect.zero_()
    try:
        yield
    finally:
        effect.fill_(1.0)
        model.train(was_training)


class _Needed(torch.autograd.Function):
    """Let a tensor require a gradient, which is dropped. As a leaf, it would be in memory until the backward ends."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, _leaf: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)  # the same tensor, not a view: some families scale embeddings in place
        return tensor

    @staticmethod
    def backward(_: Ctx, _gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def _require_gradient(_: nn.Module, __: object, embedded: torch.Tensor) -> torch.Tensor:
    """Make the first layer compute its input's gradient, as all others do, so that all layers share one graph."""
    if not torch.is_grad_enabled() or embedded.requires_grad:
        return embedded
    leaf = torch.empty((), device=embedded.device, requires_grad=True)
    needed: torch.Tensor = _Needed.apply(embedded, leaf)  # type: ignore[no-untyped-call]
    return needed


def _inject(model: PreTrainedModel, lora: LoraSpec, tokens: TokenKeys, effect: torch.Tensor) -> None:
    peft = import_peft()
    matrices = expert_matrices(model)
    check_expert_targets(matrices, lora)
    of_experts = {name for each in matrices if each.num_ranks(lora.targets) for name in (each.name, *each.parts)}
    if fused := targets_of_experts(model, lora) - of_experts:
        raise TrainingError(
            f"training.lora.targets: {', '.join(sorted(fused))} would adapt the experts of a "
            f"'{model.config.model_type}', which can't be adapted",
            meaning="its class computes them in a way of its own; linear layers of the same name can't be adapted "
            "either, because peft would load their adapters onto the experts",
            fix="name other layers, for example training.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
        )
    is_empty = next(model.parameters()).is_meta
    only_of_experts = of_experts - {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if of_linears := tuple(target for target in lora.targets if target not in only_of_experts):
        with warnings.catch_warnings():
            # peft corrects its own setting for each layer, and warns of it.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
            # Don't wrap the model in a PeftModel, so that parameters keep their names. With experts, pass only the
            # layers: if peft knew the family, it would adapt the experts.
            owners = {target: owner_of_target(model, target) for target in of_linears}
            for owner in {id(each): each for each in owners.values()}.values():
                chosen = tuple(target for target, each in owners.items() if each is owner)
                config = peft_config(lora.model_copy(update={"targets": chosen}))
                part = find_decoder_layers(model) if of_experts else owner
                peft.inject_adapter_in_model(config, part, ADAPTER, low_cpu_mem_usage=is_empty)
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.tuners.lora.Linear):
            model.set_submodule(name, AdaptedLinear(module, lora, effect, tokens.dropout_of(name)))


def targets_of_experts(model: nn.Module, lora: LoraSpec) -> set[str]:
    """Return the targets that peft treats as this family's experts, although linear layers may have the same names."""
    alone = {target: peft_config(lora.model_copy(update={"targets": (target,)})) for target in lora.targets}
    return {target for target, config in alone.items() if adapts_experts(config, model)}


_MERGED_AT_ONCE = 2**22
"""Elements that are merged at a time: 16 MiB in fp32, which stay in a CPU's cache between operations."""


def merge_adapters(
    base: Mapping[str, torch.Tensor],
    adapters: Mapping[str, torch.Tensor],
    lora: LoraSpec,
    dtype: torch.dtype = torch.float32,
    transposed: Collection[str] = (),
) -> LazyTensors:
    """Return the weights of a model with its adapters merged in fp32; each is computed on access.

    LoRA: `W + s B A` with `s = alpha / r` (Hu et al. 2021, section 4.1), or `alpha / sqrt(r)` (rsLoRA). DoRA scales
    each row of this sum to the trained magnitude (Liu et al. 2024, equation 5).

    `base` has unquantized weights by the names of a model without adapters; `adapters` has the names of a model with
    them. Merged weights are cast once, to `dtype`. `transposed` has the names of base weights [inputs, outputs].
    """

    def merged(
        weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, magnitude: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Merge an adapter into its matrix, [outputs, inputs]."""
        up, down = up.float(), down.float()
        scaling = lora.scaling_of(down.shape[0] // lora.rank)
        result = torch.empty(weight.shape, dtype=dtype)
        height = max(1, _MERGED_AT_ONCE // weight.shape[1])
        for first in range(0, weight.shape[0], height):
            rows = slice(first, first + height)
            sums = weight[rows].to(torch.float32, copy=True).addmm_(up[rows], down, alpha=scaling)
            if magnitude is not None:
                sums *= (magnitude[rows].float() / torch.linalg.norm(sums, dim=1))[:, None]
            result[rows] = sums
        return result

    def read(name: str) -> torch.Tensor:
        weight, module, is_turned = base[name], name.removesuffix("weight"), name in transposed
        if (down := adapters.get(f"{module}lora_A.{ADAPTER}.weight")) is not None and module != name:
            up, magnitude = adapters[f"{module}lora_B.{ADAPTER}.weight"], adapters.get(module + DORA_MAGNITUDE)
            matrix = merged(weight.T if is_turned else weight, up, down, magnitude)
            return matrix.T.contiguous() if is_turned else matrix
        owner, _, own_name = name.rpartition(".")
        if (down := adapters.get(f"{owner}.lora_A_{own_name}")) is None:
            return weight
        factors = zip(weight.mT if is_turned else weight, adapters[f"{owner}.lora_B_{own_name}"], down, strict=True)
        experts = torch.stack([merged(*each) for each in factors])
        return experts.mT.contiguous() if is_turned else experts

    return LazyTensors(base, read)


def dequantized_base(base: Mapping[str, torch.Tensor], model: PreTrainedModel, precision: torch.dtype) -> LazyTensors:
    """Return base weights as in QLoRA's forward pass: quantized to NF4, and dequantized to `precision`.

    `model` has no adapters, and is on the meta device; its linear layers are replaced.
    """
    layouts: dict[str, tuple[WeightLayout, bool]] = {}
    quantize_linears(find_decoder_layers(model), partial(Nf4Layout.of, precision))
    for owner, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            layouts[f"{owner}.weight"] = module.layout, module.is_transposed
        elif is_experts(module):
            for name, (_, *sizes) in expert_sizes(module).items():
                if (layout := Nf4Layout.of_experts(precision, *sizes)) is not None:
                    layouts[f"{owner}.{name}"] = layout, bool(module.is_transposed)

    def read(name: str) -> torch.Tensor:
        if name not in layouts:
            return base[name]
        layout, is_turned = layouts[name]
        matrix = layout.dequantize(layout.quantize(base[name].mT if is_turned else base[name]))
        return matrix.mT if is_turned else matrix

    return LazyTensors(base, read)


def with_adapters(base: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> LazyTensors:
    """Return the weights of a model with adapters by its names: peft adds a level to the names of base weights."""
    return LazyTensors(
        (*base, *adapters), lambda name: adapters[name] if is_adapter(name) else base[name.replace(".base_layer.", ".")]
    )


def peft_config(lora: LoraSpec, *, base: str | None = None, model: PreTrainedModel | None = None) -> LoraConfig:
    """Return peft's configuration of the adapters; to save it, pass the name of the base model, and the model."""
    is_of_target = tuple(f".{target}.weight" for target in lora.targets)
    transposed = () if model is None else transposed_weights(model)
    peft = import_peft()
    config: LoraConfig = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        inference_mode=base is not None,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        fan_in_fan_out=any(name.endswith(is_of_target) for name in transposed),
    )
    if model is not None:
        _add_experts(config, model, lora, targets_of_experts(model, lora))
    return config


def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialize sharded adapters as LoRA does: `lora_A` uniform as in peft, `lora_B` zero.

    Values depend only on the seed and the parameter's name, not on the engine or the number of processes.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A" in name:
            shard = local_shard(parameter)
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            bound = 1 / math.sqrt(shard.shape[-1])
            shard.copy_from(torch.empty(shard.shape).uniform_(-bound, bound, generator=generator))
        elif ".lora_B" in name:
            local_shard(parameter).values.zero_()


def load_adapters(model: PreTrainedModel, folder: Path, wrapper: PretrainedConfig | None) -> None:
    """Load sharded adapters of the same kind from an earlier run's export, or from peft's.

    `wrapper` configures the multimodal model that the model is part of, whose names exported adapters have.
    """
    check_adapters(folder)
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    own_names = {exported: name for name, exported in peft_names(model, parameters, find_text(model, wrapper)).items()}
    own_names |= {_peft_name(name): name for name in parameters if not _ADAPTER_OF_EXPERTS.fullmatch(name)}
    wanted = {name: local_shard(parameter) for name, parameter in parameters.items()}
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        stored = {own_names.get(name, name): name for name in file.keys()}  # noqa: SIM118 - not a mapping
        there = {name: file.get_slice(each).get_shape() for name, each in stored.items()}
        empty = {name: torch.empty(shard.shape, device="meta") for name, shard in wanted.items()}
        expected = {name: [*to_peft(name, each).shape] for name, each in empty.items()}
        if wrong := {name for name in {*wanted, *there} if there.get(name) != expected.get(name)}:
            fix = "set training.lora as the earlier run had it"
            if any(map(_SEPARATE_EXPERT.search, there)) and not any(map(_SEPARATE_EXPERT.search, wanted)):
                fix = (
                    "merge the adapters into their model with the versions of peft and transformers that made them: "
                    "they adapt each expert by itself, and the experts of this model are stacked"
                )
            named = sorted(stored.get(name, _peft_name(name)) for name in wrong)
            raise TrainingError(
                f"the adapters in {folder} are not those of the recipe: {', '.join(named[:3])}",
                meaning=f"{len(wrong)} of {len({*wanted, *there})} adapters are for other layers, or of another rank",
                fix=fix,
            )
        for name, shard in wanted.items():
            tensor = _from_peft(name, file.get_tensor(stored[name]), shard.shape)
            shard.copy_from(tensor.to(shard.values.device))


def peft_names(model: PreTrainedModel, adapters: Iterable[str], place: TextPlace | None) -> dict[str, str]:
    """Return the names that `PeftModel.from_pretrained` expects, by the adapters' names in the model."""
    adapters, rename = [*adapters], str if place is None else place.rename
    experts = [match for name in adapters if (match := _ADAPTER_OF_EXPERTS.fullmatch(name))]
    adapted = {(match["experts"], match["matrix"]) for match in experts}
    names = {}
    for match in experts:
        owner = match["experts"]
        order = [name for name in expert_sizes(model.get_submodule(owner)) if (owner, name) in adapted]
        levels = ".base_layer" * (len(order) - 1 - order.index(match["matrix"]))
        names[match.string] = f"base_model.model.{rename(owner)}{levels}.lora_{match['factor']}.weight"
    name_of = partial(name_for_peft, model) if place is None else place.rename
    return names | {name: _peft_name(name_of(name)) for name in adapters if not _ADAPTER_OF_EXPERTS.fullmatch(name)}


def _peft_name(name: str) -> str:
    plain = name.replace(f".{ADAPTER}", "").replace("magnitude_vector.weight", "magnitude_vector")
    return f"base_model.model.{plain}"


# --- Names and shapes in peft's files ------------------------------------------------------------
#
# peft wraps a layer's experts once per adapted parameter, and stores their adapters in two matrices: lora_A,
# [E * R, inputs], in which an expert's rows are adjacent, and lora_B, [outputs, R * E], in which a rank's columns are.


def to_peft(name: str, adapter: torch.Tensor) -> torch.Tensor:
    """Return an adapter in peft's layout: adapters of experts, [E, R, inputs] or [E, outputs, R], as a matrix."""
    match = _ADAPTER_OF_EXPERTS.fullmatch(name)
    if match is None:
        return adapter
    return adapter.flatten(0, 1) if match["factor"] == "A" else adapter.permute(1, 2, 0).flatten(1)


def _from_peft(name: str, stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return an adapter in the model's layout, with `shape`."""
    match = _ADAPTER_OF_EXPERTS.fullmatch(name)
    if match is None:
        return stored
    if match["factor"] == "A":
        return stored.view(shape)
    experts, outputs, rank = shape
    return stored.view(outputs, rank, experts).permute(2, 0, 1).contiguous()


def _add_experts(config: LoraConfig, model: PreTrainedModel, lora: LoraSpec, ambiguous: Collection[str]) -> None:
    """Add the adapters of experts to peft's configuration, which has all targets as names of linear layers.

    peft treats `ambiguous` targets as experts, although linear layers have the same names. The configuration lists the
    parameters of these layers instead. `model` has no adapters.
    """
    ranks = {each.name: num for each in expert_matrices(model) if (num := each.num_ranks(lora.targets))}
    if not ranks:
        return
    linears = {name: name.rpartition(".")[2] for name, *_ in linears_in_layers(model)}
    config.target_modules = {*linears.values()} & {*lora.targets} - {*ambiguous}
    parameters = {
        f"{path}.{name}": ranks[name]
        for path, each in experts_in_layers(model)
        for name in expert_sizes(each)
        if name in ranks
    }
    config.rank_pattern = {name: num * lora.rank for name, num in parameters.items() if num > 1}
    config.alpha_pattern = {name: num * lora.alpha for name, num in parameters.items() if num > 1}
    own = {f"{name}.weight" for name, target in linears.items() if target in lora.targets and target in ambiguous}
    config.target_parameters = {*parameters, *own}
    config.lora_dropout = 0.0  # peft's adapters of parameters support none; it matters only in training
