"""Count a model's parameters by formula, from its configuration.

The counts are exact for the Hugging Face implementations of families with a formula in `ftkit.models.families`; tests
compare them with the real classes. For other families they are estimates, unless the parameters of the class were
counted (`ftkit.train.param_count`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftkit.models.architecture import (
    ArchitecturePlan,
    ArchitectureSpec,
    AttentionLayers,
    CountSource,
    ExpertMatrix,
    Linear,
    ModelCounts,
)
from ftkit.models.config_json import FULL, LINEAR, NUM_EXPERTS, WINDOWED, fill_config, num_experts
from ftkit.models.families import Family, family_of

if TYPE_CHECKING:
    from ftkit.models.vision import VisionPlan


def count_model(shape: ArchitectureSpec) -> ModelCounts:
    """Count the parameters of a model from its shape, or return existing counts."""
    if isinstance(shape, ArchitecturePlan) and shape.counts is not None:
        return shape.counts
    return _count_shape(shape)


def vision_of(shape: ArchitectureSpec) -> VisionPlan | None:
    return shape.vision if isinstance(shape, ArchitecturePlan) else None


@lru_cache(maxsize=64)  # called by every prediction
def _count_shape(shape: ArchitectureSpec) -> ModelCounts:
    """Count a model that is defined only by its shape, with its family's usual experts."""
    apart = {"family", "full_attention_every", "num_experts", "rope_scaling", "counts", "vision"}
    fields = shape.model_dump(exclude=apart)
    family = family_of(shape.family)
    filled = {**family.defaults, **fields, "model_type": shape.family}
    if shape.sliding_window is not None or family.full_attention_every == 0:
        has_window = shape.sliding_window is not None
        filled["layer_types"] = shape.layer_types if has_window else [FULL] * shape.num_hidden_layers
    usual = family.usual_experts
    if usual is not None:
        width = -(-shape.intermediate_size // usual.narrower)
        filled |= {"num_experts_per_tok": usual.per_token, "moe_intermediate_size": width}
    given = shape.num_experts and shape.num_experts + (usual.shared if usual else 0)
    if number := given or (usual and usual.num):
        filled |= dict.fromkeys(NUM_EXPERTS, number)
    return _count(fill_config(filled), "formula" if family.has_formula and usual is None else "family")


def count_by_config(config: Mapping[str, Any]) -> ModelCounts:
    """Count parameters from a raw config.json: exact with a formula, else an estimate. KeyError if a key is missing."""
    filled = fill_config(config)
    return _count(filled, "formula" if family_of(str(filled.get("model_type"))).has_formula else "config")


# --- Experts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """The routed experts of a decoder layer, those that every token passes through, and the layers without any."""

    num: int
    per_token: int
    width: int
    shared_width: int = 0
    num_dense_layers: int = 0


_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
    "share_expert_dim", "shared_intermediate_size",
)  # fmt: skip
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", "moe_layer_interval")


def read_experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the experts in a configuration, under any known key; missing values are those that need most memory."""
    num = num_experts(config)
    if not num:
        return None
    width = _first(config, _WIDTH) or 0
    shared = _first(config, _SHARED_WIDTH) or (_first(config, _NUM_SHARED) or 0) * width
    layers = _first(config, ("num_hidden_layers",)) or 0
    dense = sum(not _has_routed_experts(config, index) for index in range(layers))
    return Experts(num, _first(config, _PER_TOKEN) or num, width, shared, dense)


def _has_routed_experts(config: Mapping[str, Any], index: int) -> bool:
    """Return whether a decoder layer of a mixture has routed experts, by its index."""
    first = _first(config, ("first_k_dense_replace",)) or 0
    every, dense = _first(config, _EVERY) or 1, config.get("mlp_only_layers") or ()
    return index >= first and (index + 1 - first) % every == 0 and not (isinstance(dense, list) and index in dense)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


# --- The formula ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """The counts of a decoder layer, or of a part of one; layers are sums of parts."""

    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of inputs and outputs of its linear layers, by name."""
    others: int = 0  # parameters of other matrices that are active for every token: routers and convolutions
    experts: tuple[ExpertMatrix, ...] = ()
    active_experts: int = 0  # parameters of the matrices of the experts that a token is routed to
    vectors: int = 0  # parameters of norms, biases, scales and sinks
    feed_forward: int = 0  # width of the feed-forward layer that a token passes through

    def __add__(self, other: _Layer) -> _Layer:
        return _Layer(
            self.linears | other.linears, self.others + other.others, self.experts + other.experts,
            self.active_experts + other.active_experts, self.vectors + other.vectors,
            self.feed_forward + other.feed_forward,
        )  # fmt: skip

    @property
    def active(self) -> int:
        linears = sum(inputs * outputs for inputs, outputs in self.linears.values())
        return linears + self.others + self.active_experts

    @property
    def total(self) -> int:
        return self.active - self.active_experts + sum(each.size for each in self.experts) + self.vectors


def _count(config: Mapping[str, Any], source: CountSource) -> ModelCounts:
    family, experts = family_of(str(config.get("model_type"))), read_experts(config)
    layers = [_layer(config, family, experts, index) for index in range(config["num_hidden_layers"])]
    linears = Counter((name, *sizes) for layer in layers for name, sizes in layer.linears.items())
    matrices = Counter(matrix for layer in layers for matrix in layer.experts)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    around: int = (1 if config.get("tie_word_embeddings") else 2) * vocabulary * hidden + hidden
    if per_layer := config.get("hidden_size_per_layer_input"):  # Gemma 4's embeddings for each layer
        width = config["num_hidden_layers"] * per_layer
        around += config["vocab_size_per_layer_input"] * width + hidden * width + per_layer
    return ModelCounts(
        source, layers=sum(layer.total for layer in layers), largest_layer=max(layer.total for layer in layers),
        around=around, active=sum(layer.active for layer in layers),
        feed_forward=max(layer.feed_forward for layer in layers), experts_per_token=experts.per_token if experts else 0,
        linears=tuple(Linear(*kind, count) for kind, count in linears.items()), attention=count_attention(config),
        expert_matrices=tuple(replace(matrix, count=count) for matrix, count in matrices.items()),
    )  # fmt: skip


def _layer(config: Mapping[str, Any], family: Family, experts: Experts | None, index: int) -> _Layer:
    hidden, kind = config["hidden_size"], _layer_type(config, index)
    layer = _Layer(vectors=family.num_norms * hidden)
    layer += _gated_delta_net(config) if kind == LINEAR else _attention(config, family, index, kind)
    is_sparse = experts is not None and _has_routed_experts(config, index)
    if not is_sparse or "enable_moe_block" in config:  # Gemma 4 has experts in addition to a dense feed-forward layer
        layer += _feed_forward(config, index)
    if experts is not None and is_sparse:
        layer += _experts(config, family, experts)
    if per_layer := config.get("hidden_size_per_layer_input"):
        linears = {"per_layer_input_gate": (hidden, per_layer), "per_layer_projection": (per_layer, hidden)}
        layer += _Layer(linears, vectors=hidden)
    return layer


def _layer_type(config: Mapping[str, Any], index: int) -> str:
    types = config.get("layer_types")
    return str(types[index]) if isinstance(types, list) and index < len(types) else FULL


def _heads(config: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Return the head size and the number of key and value heads, which differ in Gemma 4's full-attention layers."""
    width, groups = config["head_dim"], config["num_key_value_heads"]
    if kind == FULL and config.get("global_head_dim"):
        width = config["global_head_dim"]
        groups = (config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None) or groups
    return width, groups


def _attention(config: Mapping[str, Any], family: Family, index: int, kind: str) -> _Layer:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    width, groups = _heads(config, kind)
    queries, keys = num_heads * width, groups * width
    projections = {
        "q_proj": (hidden, queries * (2 if family.has_output_gate else 1)), "k_proj": (hidden, keys),
        "v_proj": (hidden, keys), "o_proj": (queries, hidden),
    }  # fmt: skip
    has_keys = index < config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    if not has_keys:
        del projections["k_proj"]
    if not has_keys or (config.get("attention_k_eq_v") and kind == FULL):
        del projections["v_proj"]
    biased = family.bias if config.get("attention_bias") is not False else ()
    if config.get("attention_bias"):
        biased = tuple(projections)
    vectors = num_heads * family.has_sinks + sum(projections[name][1] for name in biased if name in projections)
    if family.qk_norm == "head":
        vectors += width * (2 if has_keys else 1)
    elif family.qk_norm == "heads":
        vectors += queries + keys
    return _Layer(projections, vectors=vectors)


def _gated_delta_net(config: Mapping[str, Any]) -> _Layer:
    """Count the linear attention of Qwen 3.5 (Yang et al. 2024): its gates, its short convolution and its norm."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    linears = {
        "in_proj_qkv": (hidden, 2 * keys + values), "in_proj_z": (hidden, values), "in_proj_b": (hidden, heads),
        "in_proj_a": (hidden, heads), "out_proj": (values, hidden),
    }  # fmt: skip
    convolution = (2 * keys + values) * config["linear_conv_kernel_dim"]
    return _Layer(linears, others=convolution, vectors=2 * heads + config["linear_value_head_dim"])


def _feed_forward(config: Mapping[str, Any], index: int) -> _Layer:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    shares_keys = index >= config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    if config.get("use_double_wide_mlp") and shares_keys:
        width *= 2
    linears = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return _Layer(linears, vectors=2 * width + hidden if config.get("mlp_bias") else 0, feed_forward=width)


_MATRICES_OF_AN_EXPERT = 3  # gate, up and down projection. Experts with only two have fewer parameters than planned.


def _experts(config: Mapping[str, Any], family: Family, experts: Experts) -> _Layer:
    hidden, wide = config["hidden_size"], experts.shared_width
    routed = _Layer(
        experts=(
            ExpertMatrix("gate_up_proj", family.expert_parts[0], experts.num, hidden, 2 * experts.width, 1),
            ExpertMatrix("down_proj", family.expert_parts[1], experts.num, experts.width, hidden, 1),
        ),
        active_experts=experts.per_token * _MATRICES_OF_AN_EXPERT * hidden * experts.width,
        vectors=experts.num * (1 + 2 * experts.width + hidden) if family.expert_bias else 0,
        feed_forward=experts.per_token * experts.width + wide,
    )
    if "enable_moe_block" in config:  # norms around the experts, the router's scales
        routed += _Layer({"proj": (hidden, experts.num)}, vectors=3 * hidden + hidden + experts.num)
    else:
        routed += _Layer(others=hidden * experts.num)
    if not wide:
        return routed
    if not family.has_formula:
        return routed + _Layer(others=hidden + _MATRICES_OF_AN_EXPERT * hidden * wide)
    shared = {
        "shared_expert_gate": (hidden, 1), "gate_proj": (hidden, wide), "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
    }  # fmt: skip
    return routed + _Layer(shared)


def count_attention(config: Mapping[str, Any]) -> tuple[AttentionLayers, ...]:
    """Count the layers with each kind of attention in a configuration with defaults; KeyError: without heads."""
    kinds = Counter(_layer_type(config, index) for index in range(config["num_hidden_layers"]))
    found = []
    for kind, count in kinds.items():
        if kind == LINEAR and "linear_num_value_heads" in config:
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            found.append(AttentionLayers(count, values, state=config["linear_key_head_dim"]))
        else:
            width, _ = _heads(config, kind)
            has_window = kind == WINDOWED and config.get("sliding_window") is not None
            found.append(AttentionLayers(count, config["num_attention_heads"] * width, has_window))
    return tuple(found)
