"""LoRA: peft's layers within the model, everything else frozen in the compute dtype."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from ftkit.errors import TrainingError
from ftkit.models.folder import ADAPTER_FILE, check_adapters
from ftkit.train.model.adapted_linear import ADAPTER, AdaptedLinear, TokenKeys
from ftkit.train.model.expert_adapters import GroupedExperts, check_expert_targets, expert_matrices, prepare_experts
from ftkit.train.model.float8 import Fp8Layout, check_fp8, convert_linears
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.model.linears import Nf4Layout, quantize_linears, transposed_weights
from ftkit.train.model.local_shard import local_shard
from ftkit.train.model.peft_names import (
    add_experts,
    find_text,
    from_peft,
    is_of_experts,
    peft_names_of_experts,
    shape_in_peft,
)
from ftkit.train.model.weight_conversion import LazyTensors, name_for_peft
from ftkit.train.private_apis.libraries import adapts_experts, compute_in_input_dtype, import_peft
from ftkit.train.world import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from peft import LoraConfig
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.config.training import Quantization, TrainingPlan
    from ftkit.models.adapters import LoraSpec
    from ftkit.train.model.linears import WeightLayout
    from ftkit.train.model.peft_names import TextPlace

_SEPARATE_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYOUTS: dict[Quantization, type[WeightLayout]] = {"fp8": Fp8Layout, "nf4": Nf4Layout}
DORA_MAGNITUDE = f"lora_magnitude_vector.{ADAPTER}.weight"


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return ".lora_" in name


def saved_parameters(model: nn.Module, training: TrainingPlan) -> dict[str, nn.Parameter]:
    """Return the parameters of checkpoints and exports, by name; a tied one once, under its first name.

    With adapters, these; otherwise all: a class may freeze some, such as the biases of routers, which belong to the
    trained model.
    """
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad or training.adapters is None}


def prepare_method(model: PreTrainedModel, training: TrainingPlan, device: torch.device) -> None:
    """Prepare an unsharded model for its training method: freeze, quantize and add adapters; or train in FP8.

    Parameters may still be on the meta device; `init_adapters` initializes adapters later.

    Args:
        model: unsharded, without adapters.
        training: its method and dtypes.
        device: of training.

    Raises:
        PrerequisiteError: the GPU does not multiply in FP8, or a package is missing.
    """
    if training.multiplies_in_fp8:
        check_fp8(device)
    lora = training.adapters
    if lora is None:
        if training.precision == "fp8":
            convert_linears(find_decoder_layers(model))
        return
    precision = DTYPES[training.compute_precision]
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # noqa: FBT003
        parameter.data = parameter.data.to(precision)
    if (layout := _LAYOUTS.get(training.quantization)) is not None:
        quantize_linears(find_decoder_layers(model), partial(layout.of, precision))
    tokens = TokenKeys(lora.dropout, training.seed)
    _inject(model, lora, tokens)
    prepare_experts(model, lora, tokens, partial(Fp8Layout.of, precision) if training.quantization == "fp8" else None)
    if any(isinstance(module, GroupedExperts) and module.layouts for module in model.modules()):
        check_fp8(device, has_experts=True)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()  # peft created it in the dtype of the layer
    model.get_input_embeddings().register_forward_hook(_require_gradient)


def _require_gradient(_: nn.Module, __: object, embedded: torch.Tensor) -> None:
    """Have the first layer compute the gradient of its input, as all others do: the compiler then needs one graph."""
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def _inject(model: PreTrainedModel, lora: LoraSpec, tokens: TokenKeys) -> None:
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
        config = peft_config(lora.model_copy(update={"targets": of_linears}))
        with warnings.catch_warnings():
            # peft corrects its own setting for each layer, and warns of it.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
            # Not wrapped in a PeftModel: parameters keep the names that they have in the family. Given the layers
            # alone, peft does not know the family, whose experts it would adapt.
            owner = find_decoder_layers(model) if of_experts else model
            peft.inject_adapter_in_model(config, owner, ADAPTER, low_cpu_mem_usage=is_empty)
    compute_in_input_dtype(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.tuners.lora.Linear):
            model.set_submodule(name, AdaptedLinear(module, lora, tokens.dropout_of(name)))


def targets_of_experts(model: nn.Module, lora: LoraSpec) -> set[str]:
    """Return the targets that peft treats as experts of this family, though linear layers may have the same names."""
    alone = {target: peft_config(lora.model_copy(update={"targets": (target,)})) for target in lora.targets}
    return {target for target, config in alone.items() if adapts_experts(config, model)}


_MERGED_AT_ONCE = 2**22
"""Elements that are merged at a time: in fp32 16 MiB, which stay in a CPU's cache from one step to the next."""


class MergedTensors(LazyTensors):
    """The weights of a model with its adapters merged in fp32; each is computed on access.

    LoRA: `W + s B A` with `s = alpha / r` (Hu et al. 2021, section 4.1), or `alpha / sqrt(r)` (rsLoRA). DoRA: each row
    of that is scaled to the trained magnitude (Liu et al. 2024, equation 5).
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        adapters: Mapping[str, torch.Tensor],
        lora: LoraSpec,
        dtype: torch.dtype = torch.float32,
        transposed: Collection[str] = (),
    ) -> None:
        """Combine base weights and adapters.

        Args:
            base: unquantized weights, by the names of a model without adapters.
            adapters: by the names of the model with adapters.
            lora: how the adapters were made.
            dtype: of merged weights, which are rounded once.
            transposed: names of the base weights that are [inputs, outputs].
        """
        super().__init__(base)
        self._base, self._adapters, self._lora, self._dtype = base, adapters, lora, dtype
        self._transposed = transposed

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, module = self._base[name], name.removesuffix("weight")
        is_turned = name in self._transposed
        if (down := self._adapters.get(f"{module}lora_A.{ADAPTER}.weight")) is not None and module != name:
            up, magnitude = (
                self._adapters[f"{module}lora_B.{ADAPTER}.weight"],
                self._adapters.get(module + DORA_MAGNITUDE),
            )
            merged = self._merged(weight.T if is_turned else weight, up, down, magnitude)
            return merged.T.contiguous() if is_turned else merged
        owner, _, matrix = name.rpartition(".")
        if (down := self._adapters.get(f"{owner}.lora_A_{matrix}")) is None:
            return weight
        turned = weight.mT if is_turned else weight
        factors = zip(turned, self._adapters[f"{owner}.lora_B_{matrix}"], down, strict=True)
        experts = torch.stack([self._merged(*each) for each in factors])
        return experts.mT.contiguous() if is_turned else experts

    def _merged(
        self, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, magnitude: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Merge an adapter into its matrix, [outputs, inputs]."""
        up, down = up.float(), down.float()
        scaling = self._lora.scaling_of(down.shape[0] // self._lora.rank)
        merged = torch.empty(weight.shape, dtype=self._dtype)
        height = max(1, _MERGED_AT_ONCE // weight.shape[1])
        for first in range(0, weight.shape[0], height):
            rows = slice(first, first + height)
            sums = weight[rows].to(torch.float32, copy=True).addmm_(up[rows], down, alpha=scaling)
            if magnitude is not None:
                sums *= (magnitude[rows].float() / torch.linalg.norm(sums, dim=1))[:, None]
            merged[rows] = sums
        return merged


class AdaptedTensors(LazyTensors):
    """The weights of a model with adapters, by its names: peft adds a level to the names of base weights."""

    def __init__(self, base: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> None:
        """Combine base weights, by the names of a model without adapters, and adapters."""
        super().__init__((*base, *adapters))
        self._base, self._adapters = base, adapters

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._adapters[name] if is_adapter(name) else self._base[name.replace(".base_layer.", ".")]


def peft_config(lora: LoraSpec, *, base: str | None = None, model: PreTrainedModel | None = None) -> LoraConfig:
    """Return peft's configuration of the adapters; for saving, with the name of their base model and the model."""
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
        add_experts(config, model, lora, targets_of_experts(model, lora))
    return config


def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialize sharded adapters as LoRA does: `lora_A` uniform as in peft, `lora_B` zero.

    Values depend only on the seed and the parameter's name, not on engine and number of processes.
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
    """Load sharded adapters from an earlier run's export, or from peft's.

    Args:
        model: with adapters of the same kind.
        folder: peft's layout.
        wrapper: configuration of the multimodal model that the model is part of, whose names exported adapters have.

    Raises:
        NotFoundError: their file is missing or incomplete.
        TrainingError: they differ from the model's adapters.
    """
    check_adapters(folder)
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    own_names = {exported: name for name, exported in peft_names(model, parameters, find_text(model, wrapper)).items()}
    own_names |= {_peft_name(name): name for name in parameters if not is_of_experts(name)}
    wanted = {name: local_shard(parameter) for name, parameter in parameters.items()}
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        stored = {own_names.get(name, name): name for name in file.keys()}  # noqa: SIM118 - not a mapping
        there = {name: file.get_slice(each).get_shape() for name, each in stored.items()}
        wrong = sorted(
            stored.get(name, _peft_name(name))
            for name in {*wanted, *there}
            if name not in wanted or there.get(name) != shape_in_peft(name, wanted[name].shape)
        )
        if wrong:
            raise TrainingError(
                f"the adapters in {folder} are not those of the recipe: {', '.join(wrong[:3])}",
                meaning=f"{len(wrong)} of {len(there)} adapters are for other layers, or of another rank",
                fix="merge the adapters into their model with the versions of peft and transformers that made them: "
                "they adapt each expert by itself, and the experts of this model are stacked"
                if any(map(_SEPARATE_EXPERT.search, there)) and not any(map(_SEPARATE_EXPERT.search, wanted))
                else "set training.lora as the earlier run had it",
            )
        for name, shard in wanted.items():
            tensor = from_peft(name, file.get_tensor(stored[name]), shard.shape)
            shard.copy_from(tensor.to(shard.values.device))


def peft_names(model: PreTrainedModel, adapters: Iterable[str], place: TextPlace | None) -> dict[str, str]:
    """Return the names that `PeftModel.from_pretrained` expects, by a model's names of its adapters."""
    names = [*adapters]
    name_of = partial(name_for_peft, model) if place is None else place.rename
    of_linears = {name: _peft_name(name_of(name)) for name in names if not is_of_experts(name)}
    return of_linears | peft_names_of_experts(model, names, str if place is None else place.rename)


def _peft_name(name: str) -> str:
    plain = name.replace(f".{ADAPTER}", "").replace("magnitude_vector.weight", "magnitude_vector")
    return f"base_model.model.{plain}"
