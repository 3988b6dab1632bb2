"""The experts of a mixture of experts, from a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Experts:
    """The experts of a decoder layer, and which layers have them.

    Attributes:
        num: routed experts.
        per_token: experts that a token is routed to.
        width: intermediate size of each.
        shared_width: total intermediate size of the shared experts, which every token passes through.
        num_dense_layers: decoder layers without experts.
    """

    num: int
    per_token: int
    width: int
    shared_width: int = 0
    num_dense_layers: int = 0


_NUM = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
    "share_expert_dim", "shared_intermediate_size",
)  # fmt: skip
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", "moe_layer_interval")


def read_experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the experts in a Hugging Face configuration, under any of the known keys; None if it has none.

    Missing keys are assumed to have the values that need the most memory.
    """
    num = _first(config, _NUM)
    if num is None or num <= 1 or config.get("is_moe") is False or config.get("enable_moe_block") is False:
        return None
    width = _first(config, _WIDTH) or 0
    shared = _first(config, _SHARED_WIDTH) or (_first(config, _NUM_SHARED) or 0) * width
    layers = _first(config, ("num_hidden_layers",)) or 0
    dense = sum(not has_routed_experts(config, index) for index in range(layers))
    return Experts(num, _first(config, _PER_TOKEN) or num, width, shared, dense)


def has_routed_experts(config: Mapping[str, Any], index: int) -> bool:
    """Return whether a decoder layer of a mixture has routed experts, by its index."""
    first = _first(config, ("first_k_dense_replace",)) or 0
    every, dense = _first(config, _EVERY) or 1, config.get("mlp_only_layers") or ()
    return index >= first and (index + 1 - first) % every == 0 and not (isinstance(dense, list) and index in dense)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
