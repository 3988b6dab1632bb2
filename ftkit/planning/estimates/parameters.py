"""How many parameters a model has: of known families by formula, of others by what is known of their experts.

Exact for the Hugging Face implementations of `FAMILIES`, with which the tests compare. Counts of the model itself
(`ftkit.train.param_count`) go first where there are any: a shape that has them brings them along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftkit.config.model import ArchitecturePlan, Linear, ModelCounts
from ftkit.config.model_config import text_part
from ftkit.config.quantization import is_quantized
from ftkit.planning.estimates.adapters import ParameterCounts, adapter_size, projections

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.model import ArchitectureSpec, CountSource
    from ftkit.config.training import LoraSpec, TrainingSpec


def count_model(shape: ArchitectureSpec) -> ModelCounts:
    """Count the parameters of a model, or return how they were counted before."""
    if isinstance(shape, ArchitecturePlan) and shape.counts is not None:
        return shape.counts
    if shape.is_estimated:
        return _count(shape, _usual_experts(shape), "family")
    return _count(shape, None, "formula")


def count_by_config(shape: ArchitectureSpec, config: Mapping[str, Any]) -> ModelCounts:
    """Count the parameters of a model by its shape and the experts that its config.json names.

    Exact for `EXPERT_FAMILIES`, an estimate for others.
    """
    is_exact = shape.family in EXPERT_FAMILIES and not config.get("mlp_only_layers")
    experts = read_experts(text_part(config))
    return _count(shape, experts, "formula" if is_exact and experts is not None else "config")


def count_parameters(shape: ArchitectureSpec) -> int:
    """Count all parameters."""
    return count_model(shape).total


def count_adapter_parameters(shape: ArchitectureSpec, lora: LoraSpec) -> int:
    """Count the parameters of all adapters: two narrow matrices a projection, and DoRA's lengths of outputs."""
    counts = count_model(shape)
    adapters = sum(
        linear.count * adapter_size(lora, linear.inputs, linear.outputs)
        for linear in counts.linears
        if linear.name in lora.targets
    )
    # An estimate, for families with projections of their own.
    unknown = set() if counts.is_exact else set(lora.targets) - {linear.name for linear in counts.linears}
    return adapters + len(unknown) * shape.num_hidden_layers * adapter_size(lora, shape.hidden_size, shape.hidden_size)


def count_quantized_parameters(shape: ArchitectureSpec, training: TrainingSpec) -> int:
    """Count the frozen weights that are stored in 4 or 8 bits: those of linear layers of decoder layers, or none."""
    return sum(
        linear.count * linear.size
        for linear in count_model(shape).linears
        if is_quantized(training.quantization, linear.inputs, linear.outputs)
    )


def method_counts(shape: ArchitectureSpec, training: TrainingSpec) -> ParameterCounts:
    """Count the parameters of a model as a method trains it."""
    base = count_parameters(shape)
    if training.adapters is None:
        return ParameterCounts(total=base, trained=base)
    adapters = count_adapter_parameters(shape, training.adapters)
    return ParameterCounts(base + adapters, adapters, count_quantized_parameters(shape, training))


# --- Mixtures of experts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """The experts of a decoder layer, and which layers have them.

    Attributes:
        num: routed experts.
        per_token: those that a token is sent to.
        width: of each.
        shared_width: of all experts together that every token goes through.
        num_dense_layers: decoder layers without experts.
    """

    num: int
    per_token: int
    width: int
    shared_width: int = 0
    num_dense_layers: int = 0


EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen3_moe")
"""Whose experts are counted exactly, when their configuration can be read."""
_NUM = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
    "share_expert_dim", "shared_intermediate_size",
)  # fmt: skip
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", "moe_layer_interval")
_WIDTHS_OF_MATRICES = 3
"""Gate, up and down projection. Experts with two have fewer parameters than are planned for."""


def read_experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the experts that a Hugging Face configuration names, under whichever keys; None: it names none.

    What it leaves open is taken as what needs more memory.
    """
    num = _first(config, _NUM)
    if num is None or num <= 1 or config.get("is_moe") is False or config.get("enable_moe_block") is False:
        return None
    width = _first(config, _WIDTH) or 0
    shared = _first(config, _SHARED_WIDTH) or (_first(config, _NUM_SHARED) or 0) * width
    layers = _first(config, ("num_hidden_layers",)) or 0
    dense = _first(config, ("first_k_dense_replace",)) or 0
    every = _first(config, _EVERY) or 1
    return Experts(num, _first(config, _PER_TOKEN) or num, width, shared, layers - (layers - dense) // every)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


_USUAL = {
    # Experts, those of a token, and how many times narrower than `intermediate_size` they are: of the largest model.
    "deepseek_v2": (162, 8, 7),
    "deepseek_v3": (257, 9, 9),
    "glm4_moe": (161, 9, 7),
    "gpt_oss": (128, 4, 1),
    "granitemoe": (62, 8, 1),
    "jamba": (16, 2, 1),
    "llama4_text": (129, 2, 1),
    "minimax": (32, 2, 1),
    "minimax_m2": (256, 8, 1),
    "mixtral": (8, 2, 1),
    "olmoe": (64, 8, 1),
    "phimoe": (16, 2, 1),
    "qwen2_moe": (68, 12, 4),
    "qwen3_moe": (128, 8, 8),
    "qwen3_next": (513, 11, 10),
}
_UNKNOWN = (128, 8, 1)


def _usual_experts(shape: ArchitectureSpec) -> Experts | None:
    """Return the experts to expect of a family whose configuration can't be read: rather too many than too few."""
    usual = _USUAL.get(shape.family) or (_UNKNOWN if "moe" in shape.family else None)
    if usual is None:
        return None
    num, per_token, narrower = usual
    return Experts(num, per_token, -(-shape.intermediate_size // narrower))


# --- The formula ---------------------------------------------------------------------------------


def _count(shape: ArchitectureSpec, experts: Experts | None, source: CountSource) -> ModelCounts:
    num_layers, hidden = shape.num_hidden_layers, shape.hidden_size
    linears = tuple(Linear(name, *sizes, num_layers) for name, sizes in projections(shape).items())
    dense_layer = sum(linear.size for linear in linears) + _norm_parameters(shape)
    around = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * hidden + hidden
    if experts is None:
        active = sum(linear.size * linear.count for linear in linears)
        return ModelCounts(
            source, num_layers * dense_layer, dense_layer, around, active, shape.intermediate_size, 0, linears
        )
    dense = min(num_layers, experts.num_dense_layers)
    sparse = num_layers - dense
    one_wide = _WIDTHS_OF_MATRICES * hidden
    router = hidden * (experts.num + (experts.shared_width > 0))
    without = dense_layer - one_wide * shape.intermediate_size + router
    layer = without + one_wide * (experts.num * experts.width + experts.shared_width)
    used = experts.per_token * experts.width + experts.shared_width
    active = dense * dense_layer + sparse * (without + one_wide * used)
    attention = tuple(linear for linear in linears if linear.name not in _FEED_FORWARD)
    return ModelCounts(
        source,
        layers=dense * dense_layer + sparse * layer,
        largest_layer=max(layer, dense_layer) if dense else layer,
        around=around,
        active=active,
        feed_forward=max(used, shape.intermediate_size) if dense else used,
        experts_per_token=experts.per_token,
        linears=attention,
    )


_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def _norm_parameters(shape: ArchitectureSpec) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return {
        "qwen3": 2 * hidden + 2 * shape.head_dim,
        "qwen3_moe": 2 * hidden + 2 * shape.head_dim,
        "olmo3": 2 * hidden + heads + keys,
        "olmoe": 2 * hidden + heads + keys,
        "gemma3_text": 4 * hidden + 2 * shape.head_dim,
    }.get(shape.family, 2 * hidden)
