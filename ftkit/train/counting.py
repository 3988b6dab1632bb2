"""What a method will make of a model, counted on the real one while it is empty and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ftkit.errors import TrainingError
from ftkit.methods import ParameterCounts, adapter_size
from ftkit.train.model import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftkit.specs.training import TrainingPlan


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
    return ParameterCounts(base + adapters, adapters, _count_matrices(model) if training.method == "qlora" else 0)


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


def _count_matrices(model: nn.Module) -> int:
    return sum(linear.weight.numel() for _, linear in _linears_in_layers(model))
