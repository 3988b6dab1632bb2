"""Model families by transformers' `model_type`: configuration defaults, attention, norms, biases, saved activations.

The only table of families. A family that is not here is counted on its class on the meta device, if torch is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

MeasuredFamily = Literal["gemma3_text", "llama", "olmo3", "qwen3"]
"""Families with measured memory and step times; every image and engine is tested with them."""
MEASURED: tuple[MeasuredFamily, ...] = get_args(MeasuredFamily)


class SavedTensors(NamedTuple):
    """Activations that a decoder layer saves per token for its backward pass: multiples of four widths.

    These are the widths of the residual stream, of all query heads, of all key heads, and of the feed-forward layer.
    """

    hidden: int
    queries: int
    keys: int
    intermediate: int = 0


class LayerSavings(NamedTuple):
    """Activations that autograd saves for a decoder layer, measured on the real layers."""

    compiled: SavedTensors = SavedTensors(4, 2, 2, 3)
    """With torch.compile, which recomputes element-wise operations between matmuls: inputs of projections (two of them
    normalized), queries, keys, values, the attention's output, and the feed-forward's three wide tensors; a norm of
    queries and keys saves its inputs, a norm of outputs these."""
    recomputed_inputs: SavedTensors = SavedTensors(2, 0, 0, 1)
    """Those of `compiled` that are not saved with adapters, or if trained matrices multiply in FP8. A matmul in bf16
    saves its input; otherwise the compiler recomputes what element-wise operations made."""
    eager: SavedTensors = SavedTensors(4, 2, 2, 4)  # without torch.compile
    eager_fp32: SavedTensors = SavedTensors(2, 0, 0)  # inputs of norms that are saved in fp32, without torch.compile
    norms_follow: bool = False  # whether the outputs into the residual stream are normalized


_PLAIN = LayerSavings()
_QK_NORM = LayerSavings(SavedTensors(4, 3, 3, 3), eager=SavedTensors(4, 3, 3, 4), eager_fp32=SavedTensors(2, 1, 1))
_OLMO = LayerSavings(
    SavedTensors(4, 3, 3, 3), recomputed_inputs=SavedTensors(1, 0, 0, 1), eager=SavedTensors(2, 2, 2, 4),
    eager_fp32=SavedTensors(4, 2, 2), norms_follow=True,
)  # fmt: skip
_GEMMA = LayerSavings(
    SavedTensors(5, 3, 3, 3), eager=SavedTensors(2, 2, 2, 4), eager_fp32=SavedTensors(8, 2, 2), norms_follow=True
)


class UsualExperts(NamedTuple):
    """Assumed experts of a family whose config.json can't be read: those of its largest model."""

    num: int
    per_token: int
    narrower: int  # `intermediate_size` divided by the width of an expert
    shared: int = 0  # those of `num` and `per_token` that every token passes through


class Family(NamedTuple):
    """Facts about a family."""

    has_formula: bool = True  # whether `ftkit.models.parameters` counts its parameters exactly
    defaults: Mapping[str, object] = MappingProxyType({})
    """Defaults of its configuration class in transformers, for keys that config.json lacks."""
    full_attention_every: int = 0
    """Interval of layers with full attention if config.json has no `layer_types`; 0 if all have it."""
    other_layers: Literal["sliding_attention", "linear_attention"] = "sliding_attention"
    last_is_full: bool = False  # whether the last layer always has full attention
    window_switch: str | None = None  # the key without which a window in config.json has no effect
    qk_norm: Literal["none", "head", "heads"] = "none"
    """Parameters of the norms of queries and keys: one head's width each, all heads' widths, or none."""
    num_norms: int = 2  # norms as wide as the residual stream in a decoder layer
    bias: tuple[str, ...] = ()  # projections that have a bias, unless `attention_bias` says otherwise
    has_sinks: bool = False  # whether each query head has a learned attention sink
    has_output_gate: bool = False  # whether `q_proj` also computes a gate for the attention's output
    expert_bias: bool = False  # whether router and experts have biases
    expert_parts: tuple[tuple[str, ...], tuple[str, ...]] = (("gate_proj", "up_proj"), ("down_proj",))
    """Names of an expert's matrices in files: those that transformers 5 joins to `gate_up_proj`, and that of
    `down_proj`; none where files have them joined."""
    savings: LayerSavings = _PLAIN
    usual_experts: UsualExperts | None = None


_BASE: Mapping[str, object] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_QKV = ("q_proj", "k_proj", "v_proj")
_QWEN3_5: Mapping[str, object] = {
    **_BASE, "vocab_size": 248_320, "max_position_embeddings": 32_768, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    # Measured
    "llama": Family(defaults={**_BASE, "vocab_size": 32_000, "max_position_embeddings": 2_048}),
    "qwen3": Family(
        defaults={
            **_BASE, "vocab_size": 151_936, "max_position_embeddings": 32_768, "head_dim": 128,
            "num_key_value_heads": 32,
        },
        window_switch="use_sliding_window", qk_norm="head", savings=_QK_NORM,
    ),
    "olmo3": Family(
        defaults={
            **_BASE, "vocab_size": 50_304, "max_position_embeddings": 2_048, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0, "sliding_window": 4_096,
        },
        full_attention_every=4, qk_norm="heads", savings=_OLMO,
    ),
    "gemma3_text": Family(
        defaults={
            "vocab_size": 262_208, "hidden_size": 2_304, "intermediate_size": 9_216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "sliding_window": 4_096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        },
        full_attention_every=6, qk_norm="head", num_norms=4, savings=_GEMMA,
    ),
    # Counted exactly; memory and step times are estimates
    "mistral": Family(
        defaults={
            **_BASE, "vocab_size": 32_000, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
            "sliding_window": 4_096,
        },
    ),
    "ministral3": Family(
        defaults={
            **_BASE, "vocab_size": 131_072, "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        },
    ),
    "qwen2": Family(
        defaults={**_BASE, "vocab_size": 151_936, "max_position_embeddings": 32_768, "num_key_value_heads": 32},
        window_switch="use_sliding_window", bias=_QKV,
    ),
    "mixtral": Family(
        defaults={
            **_BASE, "vocab_size": 32_000, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        expert_parts=(("w1", "w3"), ("w2",)), usual_experts=UsualExperts(8, 2, 1),
    ),
    "olmoe": Family(
        defaults={
            **_BASE, "vocab_size": 50_304, "intermediate_size": 2_048, "max_position_embeddings": 4_096,
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
        },
        qk_norm="heads", savings=_QK_NORM, usual_experts=UsualExperts(64, 8, 1),
    ),
    "qwen3_moe": Family(
        defaults={
            **_BASE, "vocab_size": 151_936, "intermediate_size": 6_144, "max_position_embeddings": 32_768,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
        window_switch="use_sliding_window", qk_norm="head", savings=_QK_NORM, usual_experts=UsualExperts(128, 8, 8),
    ),
    "gpt_oss": Family(
        defaults={
            **_BASE, "vocab_size": 201_088, "hidden_size": 2_880, "intermediate_size": 2_880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
            "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        full_attention_every=2, bias=(*_QKV, "o_proj"), has_sinks=True, expert_bias=True,
        expert_parts=((), ()), usual_experts=UsualExperts(128, 4, 1),
    ),
    "gemma4_text": Family(
        defaults={
            "vocab_size": 262_144, "hidden_size": 2_304, "intermediate_size": 9_216, "num_hidden_layers": 30,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "sliding_window": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "global_head_dim": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        },
        full_attention_every=6, last_is_full=True, qk_norm="head", num_norms=4, expert_parts=((), ()), savings=_GEMMA,
    ),
    "qwen3_5_text": Family(
        defaults={
            **_QWEN3_5, "hidden_size": 4_096, "intermediate_size": 12_288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        full_attention_every=4, other_layers="linear_attention", qk_norm="head", has_output_gate=True,
        savings=_QK_NORM,
    ),
    "qwen3_5_moe_text": Family(
        defaults={
            **_QWEN3_5, "hidden_size": 2_048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        full_attention_every=4, other_layers="linear_attention", qk_norm="head", has_output_gate=True,
        savings=_QK_NORM, usual_experts=UsualExperts(512, 10, 1),
    ),
    # Without a formula: assumed experts if config.json can't be read
    **{name: Family(has_formula=False, usual_experts=UsualExperts(*numbers)) for name, numbers in {
        "deepseek_v2": (162, 8, 7, 2), "deepseek_v3": (257, 9, 9, 1), "glm4_moe": (161, 9, 7, 1),
        "granitemoe": (62, 8, 1), "jamba": (16, 2, 1), "llama4_text": (129, 2, 1, 1), "minimax": (32, 2, 1),
        "minimax_m2": (256, 8, 1), "phimoe": (16, 2, 1), "qwen2_moe": (68, 12, 4, 8), "qwen3_next": (513, 11, 10, 1),
    }.items()},
}  # fmt: skip

_UNKNOWN = Family(has_formula=False)
_UNKNOWN_MIXTURE = Family(has_formula=False, usual_experts=UsualExperts(128, 8, 1))

TEXT_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "ministral3", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""The `model_type` of the text model within a multimodal one, if config.json leaves it to the class."""


UNPACKED = frozenset([
    "afmoe", "bailing_hybrid", "bamba", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt",
    "blenderbot", "blenderbot-small", "bloom", "camembert", "data2vec-text", "deepseek_v4", "electra", "ernie",
    "falcon", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba", "kimi_linear",
    "lfm3", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "minimax", "mpt", "mvp", "nemotron_h", "openai-gpt",
    "opt", "pegasus", "plbart", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roformer", "rwkv",
    "trocr", "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl", "xlstm", "zaya",
])  # fmt: skip
"""Families whose packed documents attended to each other in tests (docs/reference/families.md), at least without
kernels of other packages: `data.packing: auto` then trains padded rows."""


WITHOUT_BALANCING_LOSS = frozenset(["deepseek_v2", "deepseek_v3", "gemma4_text", "glm4_moe"])
"""Mixtures of experts whose configuration has no `router_aux_loss_coef`."""
WITHOUT_OUT_PROJ_ADAPTERS = frozenset(["falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"])
"""Families whose Mamba layers give the weight of `out_proj` to kernels, which ignore adapters: peft makes none."""


def family_of(model_type: str) -> Family:
    """Return the facts about a family; for one that is not in the table, its name decides whether it has experts."""
    return FAMILIES.get(model_type) or (_UNKNOWN_MIXTURE if "moe" in model_type else _UNKNOWN)
