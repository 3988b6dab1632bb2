"""Count a model's parameters, and those that a method trains, on a model without weights or shards."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ftkit.config.execution import ParameterCounts, are_quantized, is_quantized
from ftkit.errors import TrainingError
from ftkit.models.adapters import adapter_size, expert_adapter_size
from ftkit.models.architecture import MULTIMODAL, NO_CAUSAL_CLASS, UNKNOWN_FAMILY, ArchitectureSpec, Linear, ModelCounts
from ftkit.models.config_json import fill_config, text_part
from ftkit.models.parameters import Experts, count_attention, read_experts
from ftkit.train.model.expert_adapters import expert_matrices
from ftkit.train.model.hf_model import (
    auto_class_of,
    find_decoder_layers,
    has_causal_class,
    make_config,
    sees_pictures,
    shape_fields,
    text_part_of,
)
from ftkit.train.model.linears import linear_sizes, linears_in_layers, owner_of_target
from ftkit.train.model.vision import trained_vision, vision_parameters

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan


_OF_AN_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
"""Pattern of expert names within a decoder layer if each expert is a module, as in transformers 4."""


def count_modules(model: PreTrainedModel, feed_forward: int) -> ModelCounts:
    """Count the parameters of an unsharded text model without adapters, and those active per token.

    `feed_forward` is the width of the feed-forward layers without experts.
    """
    layers, config = find_decoder_layers(model), _with_heads(fill_config(text_part_of(model.config).to_dict()))
    experts = read_experts(config)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    in_vision = [weight.numel() for part in vision_parameters(model) for weight in part.values()]
    linears = Counter((name.rpartition(".")[2], *sizes) for name, _, sizes in linears_in_layers(model))
    used = feed_forward
    if experts is not None:
        used = max(
            feed_forward * (experts.num_dense_layers > 0), experts.per_token * experts.width + experts.shared_width
        )
    has_heads = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"} <= config.keys()
    return ModelCounts(
        "model",
        layers=sum(sizes),
        largest_layer=max(sizes),
        around=sum(weight.numel() for weight in model.parameters()) - sum(sizes) - sum(in_vision),
        active=round(
            sum(_active(name, parameter, experts) for layer in layers for name, parameter in layer.named_parameters())
        ),
        feed_forward=used,
        experts_per_token=0 if experts is None else experts.per_token,
        linears=tuple(Linear(*kind, count) for kind, count in linears.items()),
        attention=count_attention(config) if has_heads else (),
        expert_matrices=expert_matrices(model),
    )


def _with_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Add the number of key-value heads and the head size if the class has no keys for them."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    known = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    return {"num_key_value_heads": heads, "head_dim": hidden // heads} | known if heads and hidden else known


def _active(name: str, parameter: nn.Parameter, experts: Experts | None) -> float:
    """Return the number of a parameter's weights that are active per token; for experts, those of the chosen ones."""
    if parameter.ndim == 1 or name.endswith("bias"):
        return 0
    is_stacked = experts is not None and parameter.ndim > 2 and parameter.shape[0] == experts.num  # noqa: PLR2004
    if experts is not None and (is_stacked or _OF_AN_EXPERT.search(name)):
        return parameter.numel() * experts.per_token / experts.num
    return parameter.numel()


def count_method(model: PreTrainedModel, training: TrainingPlan) -> ParameterCounts:
    """Count the parameters of a model for a training method, before adding adapters and sharding."""
    base = sum(parameter.numel() for parameter in model.parameters())
    lora, vision = training.adapters, trained_vision(model, training.vision)
    of_vision, frozen = (sum(each.numel() for each in part.values() if each.requires_grad) for part in vision)
    if lora is None:  # some classes freeze parameters, such as the biases of AFMoE's routers
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return ParameterCounts(base, trained - frozen)
    adapters = sum(adapter_size(lora, *sizes) for sizes in find_targets(model, lora.targets))
    adapters += sum(each.count * expert_adapter_size(lora, each) for each in expert_matrices(model))
    quantized = sum(
        inputs * outputs
        for _, _, (inputs, outputs) in linears_in_layers(model)
        if is_quantized(training.quantization, inputs, outputs)
    )
    experts = expert_matrices(model)
    matrices = [each for each in experts if are_quantized(training.quantization, each.inputs, each.outputs)]
    return ParameterCounts(
        base + adapters, adapters + of_vision, quantized + sum(each.count * each.size for each in matrices)
    )


def find_targets(model: nn.Module, targets: Collection[str]) -> list[tuple[int, int]]:
    """Return the numbers of inputs and outputs of each linear layer that gets an adapter."""
    found: dict[str, list[tuple[int, int]]] = {}
    owners = {target: {*owner_of_target(model, target).modules()} for target in targets}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if (sizes := linear_sizes(module)) is not None and (name not in owners or module in owners[name]):
            found.setdefault(name, []).append(sizes)
    of_experts = dict.fromkeys(name for each in expert_matrices(model) for name in (*each.parts, each.name))
    if missing := [target for target in targets if target not in found and target not in of_experts]:
        available = dict.fromkeys(name.rpartition(".")[2] for name, *_ in linears_in_layers(model)) | of_experts
        others = {
            type(part).__name__
            for layer in find_decoder_layers(model)
            for part in layer.modules()
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2  # noqa: PLR2004 - matrices
        }
        meaning = f"ftkit adapts linear layers, but its decoder layers have only {', '.join(sorted(others))}"
        fix = "set training.method=full"
        if available:
            meaning = f"the linear layers of its decoder layers are: {', '.join(available)}"
            fix = "list those that get an adapter: training.lora.targets=[…]"
        raise TrainingError(
            f"training.lora.targets: the model has no linear layer {', '.join(missing)}", meaning=meaning, fix=fix
        )
    return [sizes for target in targets for sizes in found.get(target, ())]


_WITHOUT_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
"""Heads of a class without attention, such as Mamba's: a shape needs some, and the counts have no attention."""
_UNLIMITED = {"max_position_embeddings": 1 << 20}
"""Positions of a class without a limit: it computes biases from distances, or a recurrent state."""


def _with_floats(value: Any) -> Any:
    """Return a raw configuration with the floats that JSON lacks (infinity), saved by transformers 5 as objects."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def print_counts(text: str) -> None:
    """Print the configuration and `ModelCounts` of a model without weights, given its config or shape as JSON."""
    request = json.loads(text)
    raw = request.get("config")
    family = raw["model_type"] if raw else request["architecture"]["family"]
    if family not in CONFIG_MAPPING:
        sys.exit(UNKNOWN_FAMILY)
    if raw:
        whole: Any = CONFIG_MAPPING[family].from_dict(_with_floats(raw))
        config: Any = text_part_of(whole)
    else:
        no_tokens = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        default: Any = CONFIG_MAPPING[family]()
        inner = text_part_of(default)
        if inner.model_type != default.model_type:
            sys.stdout.write(inner.model_type)
            sys.exit(MULTIMODAL if has_causal_class(inner) else NO_CAUSAL_CLASS)
        config = whole = make_config(ArchitectureSpec.model_validate(request["architecture"]), cast("Any", no_tokens))
    if not has_causal_class(config) and auto_class_of(whole) is AutoModelForCausalLM:
        sys.exit(NO_CAUSAL_CLASS)
    if (tied := text_part(request.get("config", {})).get("tie_word_embeddings")) is not None:
        config.tie_word_embeddings = tied
    with torch.device("meta"):  # accelerate's init_empty_weights allocates each briefly: 30 GB for some experts
        built = config if has_causal_class(config) else whole
        model = auto_class_of(built).from_config(built)
    model.tie_weights()
    saved = json.loads(config.to_json_string(use_diff=False))
    filled = fill_config({name: saved.get(own) for name, own in config.attribute_map.items()} | saved)
    filled = _with_heads({key: value for key, value in shape_fields(config).items() if value is not None} | filled)
    filled = _WITHOUT_ATTENTION | _UNLIMITED | filled
    width = filled.get("intermediate_size") or 0
    if not width and read_experts(fill_config(filled)) is None:
        # The class has no `intermediate_size`: use the largest dimension of the decoder layers' matrices.
        shapes = [each.shape for layer in find_decoder_layers(model) for each in layer.parameters() if each.ndim > 1]
        width = filled["intermediate_size"] = max((max(shape) for shape in shapes), default=0)
    counts, vision = count_modules(model, width), None
    if sees_pictures(model) or request.get("pictures"):
        if not sees_pictures(model):
            with torch.device("meta"):
                model = auto_class_of(whole).from_config(whole)
        sizes = [sum(each.numel() for each in part.values()) for part in vision_parameters(model)]
        vision = {"config": json.loads(whole.vision_config.to_json_string(use_diff=False)), "sizes": sizes}
        counts = replace(counts, around=counts.around - sum(sizes)) if built is whole else counts
    found = {"config": filled, "counts": TypeAdapter(ModelCounts).dump_python(counts), "vision": vision}
    sys.stdout.write(json.dumps(found) + "\n")
