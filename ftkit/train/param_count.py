"""What is in a model, and what a method will make of it, counted on the real one while it is empty and whole.

As a program (`python -m ftkit.train.param_count JSON`) it counts for a plan, which does without torch: it prints the
`ModelCounts` of a model that it builds without weights.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import AutoModelForCausalLM

from ftkit.config.model import ArchitectureSpec, Linear, ModelCounts
from ftkit.config.quantization import is_quantized
from ftkit.errors import TrainingError
from ftkit.planning.estimates.adapters import ParameterCounts, adapter_size
from ftkit.planning.estimates.parameters import Experts, read_experts
from ftkit.train.model.build import find_decoder_layers, make_config, read_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PretrainedConfig

    from ftkit.config.training import TrainingPlan


_OF_AN_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
"""Within a decoder layer, where experts are modules of their own, as in transformers 4."""


def count_modules(model: Any, feed_forward: int) -> ModelCounts:
    """Count the parameters of a model; those of experts also by how many a token is sent to.

    Args:
        model: whole, with or without its weights, and without adapters.
        feed_forward: width of its feed-forward layers without experts.
    """
    layers = find_decoder_layers(model)
    experts = read_experts(model.config.to_dict())
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    linears = Counter(
        (name.rpartition(".")[2], linear.in_features, linear.out_features) for name, linear in _linears_in_layers(model)
    )
    used = feed_forward
    if experts is not None:
        used = max(
            feed_forward * (experts.num_dense_layers > 0), experts.per_token * experts.width + experts.shared_width
        )
    return ModelCounts(
        "model",
        layers=sum(sizes),
        largest_layer=max(sizes),
        around=sum(parameter.numel() for parameter in model.parameters()) - sum(sizes),
        active=round(
            sum(_active(name, parameter, experts) for layer in layers for name, parameter in layer.named_parameters())
        ),
        feed_forward=used,
        experts_per_token=0 if experts is None else experts.per_token,
        linears=tuple(Linear(*kind, count) for kind, count in linears.items()),
    )


def _active(name: str, parameter: nn.Parameter, experts: Experts | None) -> float:
    """Return how many weights of a parameter a token is multiplied by: of experts, those of its own alone."""
    if parameter.ndim == 1:
        return 0
    is_stacked = experts is not None and parameter.ndim > 2 and parameter.shape[0] == experts.num  # noqa: PLR2004
    if experts is not None and (is_stacked or _OF_AN_EXPERT.search(name)):
        return parameter.numel() * experts.per_token / experts.num
    return parameter.numel()


def count_method(model: nn.Module, training: TrainingPlan) -> ParameterCounts:
    """Count the parameters of a model as a method will train it: the model has neither adapters nor shards yet.

    Raises:
        TrainingError: an adapter belongs on a projection that the model does not have.
    """
    base = sum(parameter.numel() for parameter in model.parameters())
    lora = training.adapters
    if lora is None:
        return ParameterCounts(total=base, trained=base)
    targeted = find_targets(model, lora.targets)
    adapters = sum(adapter_size(lora, linear.in_features, linear.out_features) for linear in targeted)
    return ParameterCounts(base + adapters, adapters, _count_quantized(model, training))


def find_targets(model: nn.Module, targets: Iterable[str]) -> list[nn.Linear]:
    """Return the linear layers that get an adapter.

    Raises:
        TrainingError: the model has none of such a name.
    """
    found: dict[str, list[nn.Linear]] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            found.setdefault(name.rpartition(".")[2], []).append(module)
    missing = [target for target in targets if target not in found]
    if missing:
        there = dict.fromkeys(name.rpartition(".")[2] for name, _ in _linears_in_layers(model))
        raise TrainingError(
            f"training.lora.targets: the model has no linear layer {', '.join(missing)}",
            meaning=f"the linear layers of its decoder layers are: {', '.join(there)}",
            fix="name those that get an adapter: training.lora.targets=[…]",
        )
    return [linear for target in targets for linear in found[target]]


def _linears_in_layers(model: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    for layer in find_decoder_layers(model):
        for name, module in layer.named_modules():
            if type(module) is nn.Linear:
                yield name, module


def _count_quantized(model: nn.Module, training: TrainingPlan) -> int:
    return sum(
        linear.weight.numel()
        for _, linear in _linears_in_layers(model)
        if is_quantized(training.quantization, linear.in_features, linear.out_features)
    )


def main() -> None:
    """Print the counts of a model that the first argument names by its shape, and by a folder if it has weights."""
    asked = json.loads(sys.argv[1])
    shape = ArchitectureSpec.model_validate(asked["architecture"])
    if asked["folder"] is None:
        no_tokens = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        config: PretrainedConfig = make_config(shape, cast("Any", no_tokens))
    else:
        config = read_config(Path(asked["folder"]), shape).text
    with torch.device("meta"):  # accelerate's empty weights have their memory for a moment: 30 GB for some experts
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    sys.stdout.write(TypeAdapter(ModelCounts).dump_json(count_modules(model, shape.intermediate_size)).decode() + "\n")


if __name__ == "__main__":
    main()
