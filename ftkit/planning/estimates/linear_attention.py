"""Predict what linear attention takes where no kernel runs, and PyTorch computes the gated delta rule.

`ftkit.train.model.packed_mixers` computes chunks of tokens by matmuls in fp32; a test counts its operations. Its
backward pass computes the forward pass again (docs/adr/0057-linear-attention-is-an-operator.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ftkit.config.training import RECOMPUTES_LAYERS
from ftkit.planning.estimates.flops import attention_layers

if TYPE_CHECKING:
    from ftkit.models.spec import ArchitectureSpec
    from ftkit.planning.setup import Gpu, Setup

CHUNK: Final = 64
"""Tokens of a chunk."""
EFFICIENCY: Final = 0.55
"""Fraction of the GPU's fp32 FLOP/s and memory bandwidth that the operations reach, one after the other: one layer of
Qwen 3.5 9B took 10.4 ms forward and 17.5 ms backward for 8,192 tokens (one H200)."""
PEAK_BYTES: Final = 134
"""Bytes per token and element of the value heads at the peak of a layer's backward pass: Qwen 3.5 9B with LoRA and full
checkpointing took 4.2 GiB more than predicted with a kernel for 8,192 tokens and 4,096 elements (one H200)."""


def has_linear_attention(shape: ArchitectureSpec) -> bool:
    """Return whether some layers have linear attention whose cost is known."""
    return any(layers.state for layers in attention_layers(shape))


def count_operations(keys: int) -> tuple[float, float, float, float]:
    """Count the operations per token and element of the value heads, in heads with as many values as keys.

    Returns:
        FLOPs of the forward and of the backward pass, and the fp32 numbers that each reads and writes.
    """
    flops = 6 * CHUNK + 8 * keys + 6 * keys**2 / CHUNK
    return flops, 2 * flops, 80 + 29 * keys / CHUNK, 178 + 46 * keys / CHUNK


def delta_rule_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds per token, forward and backward; 0 with a kernel, whose FLOPs are counted as attention's."""
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
    """Return the bytes at the peak of a layer's backward pass that a kernel would not take."""
    if setup.has_linear_kernel:
        return 0.0
    widths = (layers.width for layers in attention_layers(setup.shape) if layers.state)
    return PEAK_BYTES * setup.tokens * max(widths, default=0)
