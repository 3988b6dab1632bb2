"""How many parameters a model has and how much memory a process needs, from the architecture alone.

Formulas count the tensors of the Hugging Face implementations of the four families; the tests
compare the parameter counts with the real classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.methods import (
    ParameterCounts,
    count_adapter_parameters,
    count_quantised_parameters,
    nf4_parts,
    projections,
)

if TYPE_CHECKING:
    from ftkit.specs.model import ArchitectureSpec
    from ftkit.specs.training import EngineName, TrainingSpec

GIB = 2**30

GPU_MEMORY_GIB: dict[str, float] = {
    # What nvidia-smi shows as total, in GiB; l4, a100, h100 and b200 by the vendor's data sheets.
    "a100-40gb": 40.0,
    "a100-80gb": 80.0,
    "b200": 178.0,
    "h100-80gb": 79.6,
    "h200": 140.4,
    "l4": 22.5,
}


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak memory of one process, in GiB, by part."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.logits


def layer_parameters(shape: ArchitectureSpec) -> int:
    """Count the parameters of one decoder layer."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    attention = hidden * heads + 2 * hidden * keys + heads * hidden
    feed_forward = 3 * hidden * shape.intermediate_size
    norms = {
        "llama": 2 * hidden,
        "qwen3": 2 * hidden + 2 * shape.head_dim,
        "olmo3": 2 * hidden + heads + keys,
        "gemma3_text": 4 * hidden + 2 * shape.head_dim,
    }[shape.family]
    return attention + feed_forward + norms


def embedding_parameters(shape: ArchitectureSpec) -> int:
    """Count the parameters outside the decoder layers: embedding, last norm, output projection."""
    tables = 1 if shape.tie_word_embeddings else 2
    return tables * shape.vocab_size * shape.hidden_size + shape.hidden_size


def count_parameters(shape: ArchitectureSpec) -> int:
    """Count all parameters."""
    return shape.num_hidden_layers * layer_parameters(shape) + embedding_parameters(shape)


def method_counts(shape: ArchitectureSpec, training: TrainingSpec) -> ParameterCounts:
    """Count the parameters of a model as a method trains it."""
    base = count_parameters(shape)
    if training.adapters is None:
        return ParameterCounts(total=base, trained=base)
    adapters = count_adapter_parameters(shape, training.adapters)
    return ParameterCounts(base + adapters, adapters, count_quantised_parameters(shape, training))


def predict_memory(
    shape: ArchitectureSpec, training: TrainingSpec, num_shards: int, engine: EngineName = "fsdp2"
) -> MemoryPlan:
    """Predict the peak memory of one of `num_shards` processes.

    Trained weights have fp32 masters, gradients and two states of AdamW (16 bytes a parameter in all; ZeRO-3 has
    them in the compute precision as well); frozen ones are there once. All are sharded. While a layer runs, its
    whole weights are there in the compute precision, those of the next one are on their way, and so are those
    outside the layers.
    """
    width = 2 if training.precision == "bf16" else 4
    tokens = training.micro_batch_size * training.sequence_length
    trained = method_counts(shape, training).trained
    stays = {"none": 1, "optimizer": 1 if engine == "fsdp2" else 0, "all": 0}[training.offload]
    weights = 0 if training.offload == "all" else _frozen_bytes(shape, training, width)
    if engine == "zero3" and training.offload != "all":
        weights += width * trained
    return MemoryPlan(
        parameters=(weights + 4 * trained * stays) / num_shards / GIB,
        gradients=4 * trained * stays / num_shards / GIB,
        optimizer=(8 * trained if training.offload == "none" else 0) / num_shards / GIB,
        gathered=_gathered_bytes(shape, training, num_shards, width) / GIB,
        activations=_activation_bytes(shape, training, tokens, width) / GIB,
        # Logits in the compute precision, their fp32 copy, and the gradient of each.
        logits=tokens * shape.vocab_size * (2 * width + 8) / GIB,
    )


def _frozen_layer_bytes(shape: ArchitectureSpec, training: TrainingSpec, width: int) -> int:
    """Count the bytes of a decoder layer's frozen weights, 4-bit ones as they are stored."""
    weights = layer_parameters(shape)
    if training.method != "qlora":
        return width * weights
    matrices = [inputs * outputs for inputs, outputs in projections(shape).values()]
    return width * (weights - sum(matrices)) + sum(sum(nf4_parts(matrix)) for matrix in matrices)


def _frozen_bytes(shape: ArchitectureSpec, training: TrainingSpec, width: int) -> int:
    if training.adapters is None:
        return 0
    return shape.num_hidden_layers * _frozen_layer_bytes(shape, training, width) + width * embedding_parameters(shape)


def _gathered_bytes(shape: ArchitectureSpec, training: TrainingSpec, num_shards: int, width: int) -> int:
    """Count the bytes of weights that are whole at a time, beside a rank's own shards."""
    counts = method_counts(shape, training)
    # A 4-bit matrix is there in the compute precision while it is multiplied by.
    matrix = width * max(inputs * outputs for inputs, outputs in projections(shape).values()) if counts.quantised else 0
    if num_shards == 1 and training.offload != "all":
        return matrix + (width * counts.trained if training.precision == "bf16" else 0)
    adapters = width * (counts.total - count_parameters(shape)) // shape.num_hidden_layers
    layer = _frozen_layer_bytes(shape, training, width) + adapters
    return width * embedding_parameters(shape) + 2 * layer + matrix


def _activation_bytes(shape: ArchitectureSpec, training: TrainingSpec, tokens: int, width: int) -> float:
    heads = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    # Kept for the backward pass: inputs of two norms and of their outputs, queries, keys, values twice (before
    # and after the rotation), the attention's output, and the feed-forward's four wide tensors.
    one_layer = width * tokens * (6 * shape.hidden_size + 3 * heads + 4 * keys + 4 * shape.intermediate_size)
    if training.activation_checkpointing == "none":
        return float(shape.num_hidden_layers * one_layer)
    kept = shape.hidden_size  # a layer's input
    if training.activation_checkpointing == "selective":  # and what its products and its attention gave
        kept += 2 * shape.hidden_size + 2 * heads + 2 * keys + 2 * shape.intermediate_size
    return float(one_layer + shape.num_hidden_layers * width * tokens * kept)
