"""peft's names and shapes of adapters: of experts, and of the text model in a multimodal model's class.

peft wraps a layer's experts once for each adapted parameter, and stores their adapters in two matrices: lora_A is
[E * R, inputs], with the rows of an expert together, and lora_B [outputs, R * E], with the columns of a rank together.
"""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftkit.errors import one_line
from ftkit.models.weight_files import WRAPPED
from ftkit.train.model.expert_adapters import expert_matrices, experts_in_layers, matrix_names
from ftkit.train.model.hf_model import auto_class_of, find_decoder
from ftkit.train.model.linears import linears_in_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from peft import LoraConfig
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.models.adapters import LoraSpec


_NAME = re.compile(r"(?P<experts>.+)\.lora_(?P<factor>[AB])_(?P<matrix>\w+)")


def is_of_experts(name: str) -> bool:
    """Return whether an adapter belongs to experts, by its name in the model."""
    return _NAME.fullmatch(name) is not None


def peft_names_of_experts(model: nn.Module, adapters: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the names of adapters of experts in peft's files, by their names in a model.

    Args:
        model: with or without adapters.
        adapters: names of adapters; those of linear layers are left out.
        rename: returns the name of a module in the class that peft loads.
    """
    found = [match for name in adapters if (match := _NAME.fullmatch(name))]
    adapted = {(match["experts"], match["matrix"]) for match in found}
    names = {}
    for match in found:
        order = [
            name for name in matrix_names(model.get_submodule(match["experts"])) if (match["experts"], name) in adapted
        ]
        levels = len(order) - 1 - order.index(match["matrix"])
        module = rename(match["experts"]) + ".base_layer" * levels
        names[match.string] = f"base_model.model.{module}.lora_{match['factor']}.weight"
    return names


def to_peft(name: str, adapter: torch.Tensor) -> torch.Tensor:
    """Return an adapter in peft's form: of experts, [E, R, inputs] or [E, outputs, R], as a matrix."""
    match = _NAME.fullmatch(name)
    if match is None:
        return adapter
    return adapter.flatten(0, 1) if match["factor"] == "A" else adapter.permute(1, 2, 0).flatten(1)


def from_peft(name: str, stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return an adapter in its form in the model, of `shape`."""
    match = _NAME.fullmatch(name)
    if match is None:
        return stored
    if match["factor"] == "A":
        return stored.view(shape)
    experts, outputs, rank = shape
    return stored.view(outputs, rank, experts).permute(2, 0, 1).contiguous()


def shape_in_peft(name: str, shape: torch.Size) -> list[int]:
    """Return the shape of an adapter in peft's form."""
    return [*to_peft(name, torch.empty(shape, device="meta")).shape]


def add_experts(config: LoraConfig, model: PreTrainedModel, lora: LoraSpec, ambiguous: Collection[str]) -> None:
    """Add the adapters of experts to peft's configuration of exported adapters.

    Args:
        config: with all targets as names of linear layers.
        model: without adapters.
        lora: the adapters.
        ambiguous: targets that peft takes for experts although linear layers have the same names: it adapts the
            parameters of these instead.
    """
    ranks = {each.name: num for each in expert_matrices(model) if (num := each.num_ranks(lora.targets))}
    if not ranks:
        return
    linears = {name: name.rpartition(".")[2] for name, *_ in linears_in_layers(model)}
    config.target_modules = {*linears.values()} & {*lora.targets} - {*ambiguous}
    parameters = {
        f"{path}.{name}": ranks[name]
        for path, each in experts_in_layers(model)
        for name in matrix_names(each)
        if name in ranks
    }
    config.rank_pattern = {name: num * lora.rank for name, num in parameters.items() if num > 1}
    config.alpha_pattern = {name: num * lora.alpha for name, num in parameters.items() if num > 1}
    own = {f"{name}.weight" for name, target in linears.items() if target in lora.targets and target in ambiguous}
    config.target_parameters = {*parameters, *own}
    config.lora_dropout = 0.0  # peft's adapters of parameters have none; it matters in training alone


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextPlace:
    """The decoder's place in two classes.

    Attributes:
        own: prefix of its tensors in the text model, with a period.
        wrapped: prefix in the multimodal model.
    """

    own: str = "model."
    wrapped: str = WRAPPED

    def rename(self, name: str) -> str:
        """Return the multimodal class's name of a tensor or module of the text model."""
        return self.wrapped + name.removeprefix(self.own) if name.startswith(self.own) else name

    def targets(self, projections: Iterable[str]) -> str:
        """Return peft's pattern for the adapted modules: the vision tower may have modules of the same names."""
        return rf"{re.escape(self.wrapped)}.*\.({'|'.join(map(re.escape, projections))})"


def find_text(model: PreTrainedModel, wrapper: PretrainedConfig | None) -> TextPlace | None:
    """Return where a text model lies in the multimodal class that loads the weights, by the class of its decoder.

    Args:
        model: the text model, with or without adapters; it may be sharded.
        wrapper: the multimodal model's configuration; None if the model is not part of one.
    """
    if wrapper is None:
        return None
    decoder = find_decoder(model)
    own = next(name for name, module in model.named_modules() if module is decoder)
    try:
        with torch.device("meta"):
            # It sets the attention of the configuration, whose text part is the model's own.
            whole = auto_class_of(wrapper).from_config(deepcopy(wrapper), attn_implementation="eager")
    except Exception as error:  # noqa: BLE001 - a vision tower may need a package that training on text does not
        reason = f"{type(error).__name__}: {one_line(error)}"
    else:
        # FSDP2 makes a subclass of a sharded module's class.
        found = [name for name, module in whole.named_modules() if isinstance(decoder, type(module))]
        if len(found) == 1:
            return TextPlace(f"{own}.", f"{found[0]}.")
        reason = f"{type(whole).__name__} has {len(found)} modules of class {type(decoder).__name__}"
    log.warning("adapters are named for a text model at '%s', as in most multimodal models: %s", WRAPPED, reason)
    return TextPlace()
