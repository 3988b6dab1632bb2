"""Low-rank adapters: peft's layers within the model, everything else frozen in the compute precision."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from ftkit.train.distributed.precision import DTYPES
from ftkit.train.model.build import find_decoder_layers
from ftkit.train.model.nf4 import quantise_linears
from ftkit.train.model.shards import own_part

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.training import LoraSpec, TrainingPlan

ADAPTER = "default"
"""peft's name for an adapter that has none; part of its parameters' names."""
DORA_LENGTHS = f"lora_magnitude_vector.{ADAPTER}.weight"


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's, by its name."""
    return ".lora_" in name


def prepare_method(model: nn.Module, training: TrainingPlan) -> None:
    """Make of a whole model what the method trains. With method 'full' that is the model as it is.

    Parameters may be empty still; `fill_adapters` gives adapters their first values.
    """
    lora = training.adapters
    if lora is None:
        return
    precision = DTYPES[training.precision]
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # noqa: FBT003
        parameter.data = parameter.data.to(precision)
    if training.method == "qlora":
        quantise_linears(find_decoder_layers(model), precision)
    _inject(model, lora)


def _inject(model: nn.Module, lora: LoraSpec) -> None:
    from peft import inject_adapter_in_model  # noqa: PLC0415 - takes seconds, and only adapters need it

    is_empty = next(model.parameters()).is_meta
    # Without a wrapper around the model: the names of its parameters and methods stay those of the family.
    inject_adapter_in_model(peft_config(lora), cast("Any", model), ADAPTER, low_cpu_mem_usage=is_empty)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()  # peft made it in the precision of the layer


def peft_config(lora: LoraSpec, *, base: str | None = None) -> Any:
    """Return peft's configuration of the adapters; with the name of the model that they belong to, to be saved."""
    from peft import LoraConfig, TaskType  # noqa: PLC0415 - takes seconds, and only adapters need it

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        inference_mode=base is not None,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )


def fill_adapters(model: nn.Module, seed: int) -> None:
    """Give sharded adapters the first values that LoRA asks for: random inputs' sides, outputs' sides of zeros.

    They depend on the seed and the parameter's name alone, not on engine and number of processes.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            part = own_part(parameter)
            generator = torch.Generator().manual_seed(_seed_of(name, seed))
            bound = 1 / math.sqrt(part.shape[1])
            part.fill_from(torch.empty(part.shape).uniform_(-bound, bound, generator=generator))
        elif ".lora_B." in name:
            own_part(parameter).values.zero_()


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


def to_peft_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapters among a model's weights under the names that `PeftModel.from_pretrained` looks for."""
    return {
        "base_model.model." + name.replace(f".{ADAPTER}", "").replace("magnitude_vector.weight", "magnitude_vector"): w
        for name, w in weights.items()
        if is_adapter(name)
    }
