"""Count the FLOPs of a token.

Attention is counted as causal, with its windows; recomputation is not counted. A matrix of m x n costs 2mn FLOPs per
token in the forward pass, another 2mn for the input gradient, and another 2mn for the weight gradient if it is trained.
A query that attends to k keys costs 4k FLOPs per dimension and head in the forward pass, and twice that in the backward
pass (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ftkit.config.training import RECOMPUTES_LAYERS, TrainingSpec
from ftkit.models.adapters import count_active_adapter_parameters
from ftkit.models.architecture import ArchitectureSpec, AttentionLayers
from ftkit.models.parameters import count_model, vision_of

if TYPE_CHECKING:
    from ftkit.planning.training_setup import Gpu, Setup


class TokenFlops(NamedTuple):
    """FLOPs of one token, forward and backward: in matmuls, and in attention between queries and keys."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def attention_layers(shape: ArchitectureSpec) -> tuple[AttentionLayers, ...]:
    """Return the attention of all layers as counted on the model, or else as derived from the shape."""
    if counted := count_model(shape).attention:
        return counted
    layers, width = shape.num_hidden_layers, shape.num_attention_heads * shape.head_dim
    full = layers // (1 if shape.sliding_window is None else shape.full_attention_every)
    return AttentionLayers(full, width), AttentionLayers(layers - full, width, is_windowed=True)


def mean_visible_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a token of a document of `length` tokens attends to, itself included."""
    seen = min(length, window or length)
    return seen - seen * (seen - 1) / (2 * length)


def token_flops(
    shape: ArchitectureSpec, training: TrainingSpec, keys: float, keys_in_window: float, target_ratio: float = 1.0
) -> TokenFlops:
    """Count the FLOPs of one token that attends to `keys` keys on average, and to `keys_in_window` with a window.

    `target_ratio` is the fraction of tokens in the loss; the others skip the output projection.
    """
    matrices = count_model(shape).active + target_ratio * shape.vocab_size * shape.hidden_size
    adapters = 0 if training.adapters is None else count_active_adapter_parameters(shape, training.adapters)
    passes = 6 if training.adapters is None else 4
    attention = 0.0
    for layers in attention_layers(shape):
        # The gated delta rule decays, corrects and reads a keys x values state per head: 3 products forward.
        seen = 1.5 * layers.state if layers.state else keys_in_window if layers.is_windowed else keys
        attention += 12 * layers.count * layers.width * seen
    return TokenFlops(passes * matrices + 6 * adapters, attention)


_COMPLETION_SHARE = 0.5
"""Assumed fraction of tokens in completions, for objectives on preferences: only completions are in the loss."""


def document_flops(shape: ArchitectureSpec, training: TrainingSpec, length: int) -> TokenFlops:
    """Count the FLOPs of one token in documents of `length` tokens, all in the loss unless they are preferences."""
    keys, in_window = mean_visible_keys(length, None), mean_visible_keys(length, shape.sliding_window)
    return token_flops(shape, training, keys, in_window, 1.0 if training.preferences is None else _COMPLETION_SHARE)


def vision_flops(shape: ArchitectureSpec, training: TrainingSpec) -> TokenFlops:
    """Count the FLOPs of the vision part per token of the largest picture. Attention stays within a tile."""
    vision = vision_of(shape)
    if vision is None or not vision.tokens:
        return TokenFlops(0.0, 0.0)
    passes = 3 if training.vision == "full" else 1
    per_token = vision.patches / vision.tokens
    attention = 4 * vision.layers * vision.hidden * vision.patches / vision.tiles
    projector = 2 * vision.projector * (1 if training.vision == "frozen" else 3)
    return TokenFlops(passes * per_token * 2 * vision.tower + projector, passes * per_token * attention)


# --- Linear attention without a kernel --------------------------------------------------------------
#
# `ftkit.train.model.packed_mixers` computes chunks of tokens with fp32 matmuls; a test counts its operations. Its
# backward pass recomputes the forward pass.

CHUNK: Final = 64  # tokens of a chunk
EFFICIENCY: Final = 0.55
"""Fraction of the GPU's fp32 FLOP/s and memory bandwidth that the operations reach, without overlap: one layer of Qwen
3.5 9B took 10.4 ms forward and 17.5 ms backward for 8,192 tokens (one H200)."""
PEAK_BYTES: Final = 134
"""Bytes per token and element of the value heads at the peak of a layer's backward pass: Qwen 3.5 9B with LoRA and full
checkpointing took 4.2 GiB more than predicted with a kernel for 8,192 tokens and 4,096 elements (one H200)."""


def has_linear_attention(shape: ArchitectureSpec) -> bool:
    """Return whether some layers have linear attention whose cost is known."""
    return any(layers.state for layers in attention_layers(shape))


def count_operations(keys: int) -> tuple[float, float, float, float]:
    """Count the operations per token and element of the value heads, if keys and values have the same dimension.

    Returns the FLOPs of the forward and the backward pass, and the fp32 elements that each of them reads and writes.
    """
    flops = 6 * CHUNK + 8 * keys + 6 * keys**2 / CHUNK
    return flops, 2 * flops, 80 + 29 * keys / CHUNK, 178 + 46 * keys / CHUNK


def delta_rule_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds per token, forward and backward; 0 with a kernel, whose FLOPs count as attention."""
    if setup.has_linear_kernel:
        return 0.0
    modes = setup.training.checkpointing_of_layers(setup.shape.num_hidden_layers, setup.engine)
    forward_passes = 2 + sum(modes.count(mode) for mode in RECOMPUTES_LAYERS) / len(modes)
    seconds = 0.0
    for layers in attention_layers(setup.shape):
        if layers.state:
            flops, backward_flops, numbers, backward_numbers = count_operations(layers.state)
            busy = (forward_passes * flops + backward_flops) / gpu.fp32_flops
            busy += 4 * (forward_passes * numbers + backward_numbers) / gpu.memory_bandwidth
            seconds += layers.count * layers.width * busy / EFFICIENCY
    return seconds


def delta_rule_bytes(setup: Setup) -> float:
    """Return the extra bytes at the peak of a layer's backward pass, compared with a kernel."""
    if setup.has_linear_kernel:
        return 0.0
    widths = (layers.width for layers in attention_layers(setup.shape) if layers.state)
    return PEAK_BYTES * setup.tokens * max(widths, default=0)
