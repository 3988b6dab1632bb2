"""Constants shared by the trainer and the memory prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ftkit.models.adapters import count_adapter_parameters, whole_adapter_size
from ftkit.models.families import family_of
from ftkit.models.parameters import count_model, vision_of

if TYPE_CHECKING:
    from ftkit.config.training import Quantization, TrainingSpec
    from ftkit.models.architecture import ArchitectureSpec, ExpertMatrix

GIB: Final = 2**30
FP32: Final = 4  # bytes per fp32 number
USABLE_MEMORY: Final = 0.95
"""Fraction of a GPU's memory that tensors can use; the CUDA context, NCCL and fragmentation take the rest."""

CHUNK_LOGITS = 2**28
"""Approximate number of logits per chunk of the loss with engine fsdp2: half a GiB in bf16.

With a frozen projection it is half of that, if these are at least `LEAST_CHUNK_ROWS` rows. A trained one adds each
chunk's gradient to fp32 sums in memory, so it gets fewer chunks.
"""
LEAST_CHUNK_ROWS = 1024
"""Rows of a chunk with which matmuls still occupy all multiprocessors of a large GPU."""
FLEX_MINIMUM: Final = 128
"""Minimum number of tokens for flex attention's training kernel. For fewer queries, torch uses a decoding kernel, which
has no gradients, and ignores documents or fails to compile (seen with torch 2.11)."""
LOGITS_ALIGNMENT: Final = 64
"""The loss pads a vocabulary to a multiple of this: on Hopper, OLMo-3's 100,278 rows then take a third of the time."""
ZERO3_LIVE_WEIGHTS: Final = 10**9
"""Maximum number of weights that DeepSpeed keeps gathered for reuse: the default of `stage3_max_live_parameters`."""
ZERO3_BUCKET: Final = 10**8
"""Gradient elements per ZeRO-3 reduce bucket. DeepSpeed's default takes 1 GB, and 2 more in fp32."""


def indivisible_sizes(num_heads: int, num_key_value_heads: int, intermediate_size: int, parts: int) -> dict[str, int]:
    """Return the sizes of a decoder layer, by name, that tensor parallelism can't divide into equal parts."""
    names = ("attention heads", "key-value heads", "intermediate dimensions")
    sizes = zip(names, (num_heads, num_key_value_heads, intermediate_size), strict=True)
    return {name: size for name, size in sizes if size % parts}


def logits_rows(num_targets: int, vocabulary: int, *, is_trained: bool) -> int:
    """Return the tokens per chunk of the loss, in equal chunks; `is_trained` says whether the projection is."""
    rows = CHUNK_LOGITS / vocabulary
    if not is_trained:
        rows = min(rows, max(rows / 2, LEAST_CHUNK_ROWS))
    return -(-num_targets // max(1, round(num_targets / rows)))


def only_with_fsdp2(training: TrainingSpec) -> tuple[str, ...]:
    """Return the settings that engine zero3 does not support."""
    needed = {
        "activation_checkpointing": training.activation_checkpointing in {"selective", "except_attention"},
        "precision": training.trains_in_fp8,
        "base_precision": training.base_precision == "fp8",
        "optimizer": training.optimizer != "adamw",
        "reshard_after_forward": training.reshard_after_forward == "never",
        "shard_degree": training.shard_degree != "auto",
        "sync_gradients": training.sync_gradients == "last_micro_batch",
        "collectives": training.collectives == "copy_engine",
        "offloaded_layers": training.offloaded_layers is not None,
        "context_parallel": training.context_parallel > 1,
        "tensor_parallel": training.tensor_parallel > 1,
        "vision": training.vision != "frozen",
    }
    return tuple(setting for setting, is_needed in needed.items() if is_needed)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of a model under a method: all, including adapters; trained; stored in 4 or 8 bits."""

    total: int
    trained: int
    quantized: int = 0


NF4_BLOCK = 64  # weights that share a scale
FP8_MULTIPLE = 16  # both dimensions of FP8 matrices must be multiples of this
GROUPED_MULTIPLE = 8  # grouped matmuls need rows of multiples of 16 bytes: 8 elements in bf16
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of routers in transformers' models. Routers are small and sensitive to rounding."""
NF4_NESTED_BLOCK = 256  # scales per second-level scale of double quantization


def is_quantized(quantization: Quantization, num_inputs: int, num_outputs: int) -> bool:
    """Return whether a frozen linear layer of a decoder layer is stored quantized."""
    if quantization == "fp8":
        return num_inputs % FP8_MULTIPLE == 0 and num_outputs % FP8_MULTIPLE == 0
    return quantization == "nf4"


READ_BY_KERNELS: Final = frozenset({"out_proj", "x_proj", "dt_proj"})
"""Matrices that state-space layers also pass to their own kernels, which read them in the compute dtype."""


def is_gathered_in_fp8(name: str, num_inputs: int, num_outputs: int) -> bool:
    """Return whether FSDP2 all-gathers this trained linear layer in FP8, if FP8 all-gather is on."""
    return name not in READ_BY_KERNELS and is_quantized("fp8", num_inputs, num_outputs)


def are_quantized(quantization: Quantization, num_inputs: int, num_outputs: int) -> bool:
    """Return whether a matrix of each of a layer's frozen experts is stored quantized."""
    is_grouped = num_inputs % GROUPED_MULTIPLE == 0 and num_outputs % GROUPED_MULTIPLE == 0
    return is_grouped and is_quantized(quantization, num_inputs, num_outputs)


def quantized_experts(shape: ArchitectureSpec, training: TrainingSpec) -> tuple[ExpertMatrix, ...]:
    """Return the matrices of experts that are stored quantized; none if it is not known how the class computes them."""
    counts = count_model(shape)
    if counts.source != "model" and not family_of(shape.family).has_formula:
        return ()
    kind = training.quantization
    return tuple(each for each in counts.expert_matrices if are_quantized(kind, each.inputs, each.outputs))


def quantized_bytes(quantization: Quantization, num_inputs: int, num_outputs: int) -> int:
    """Count the bytes of a quantized matrix, its scales included."""
    if quantization == "fp8":
        return num_outputs * (num_inputs + 4)
    return sum(nf4_parts(num_inputs * num_outputs))


def nf4_parts(num_weights: int) -> tuple[int, int, int, int]:
    """Return the bytes of a matrix in NF4: 4-bit weights, absmax, absmax2, and the mean of the scales.

    Weights and scales are padded to whole blocks, and each part is aligned to 16 bytes.
    """
    blocks = -(-num_weights // NF4_BLOCK)
    nested = -(-blocks // NF4_NESTED_BLOCK)
    return blocks * NF4_BLOCK // 2, nested * NF4_NESTED_BLOCK, -(-4 * nested // 16) * 16, 16


def count_repeated_parameters(shape: ArchitectureSpec, training: TrainingSpec) -> int:
    """Count the extra copies of adapter parameters that tensor parallelism replicates instead of dividing."""
    adapters, copies = training.adapters, training.tensor_parallel - 1
    if adapters is None or not copies:
        return 0
    return copies * sum(
        linear.count * whole_adapter_size(adapters, linear.name, linear.inputs, linear.outputs)
        for linear in count_model(shape).linears
        if linear.name in adapters.targets
    )


def _quantized_matrices(shape: ArchitectureSpec, training: TrainingSpec) -> Iterator[tuple[int, int, int]]:
    """Yield number, inputs and outputs of the frozen matrices that are stored in 4 or 8 bits."""
    counts, kind = count_model(shape), training.quantization
    for linear in counts.linears:
        if is_quantized(kind, linear.inputs, linear.outputs):
            yield linear.count, linear.inputs, linear.outputs
    for matrix in quantized_experts(shape, training):
        yield matrix.count * matrix.experts, matrix.inputs, matrix.outputs


def saved_by_quantization(shape: ArchitectureSpec, training: TrainingSpec) -> int:
    """Return the bytes that quantized matrices save compared with the compute dtype."""
    kind, width = training.quantization, training.compute_bytes
    return sum(
        num * (width * inputs * outputs - quantized_bytes(kind, inputs, outputs))
        for num, inputs, outputs in _quantized_matrices(shape, training)
    )


def method_counts(shape: ArchitectureSpec, training: TrainingSpec) -> ParameterCounts:
    """Count the parameters of a model as a method trains it."""
    base, vision = count_model(shape).total, vision_of(shape)
    total, trained = (vision.total, vision.num_trained(training.vision)) if vision else (0, 0)
    if training.adapters is None:
        return ParameterCounts(base + total, base + trained)
    adapters = count_adapter_parameters(shape, training.adapters)
    quantized = sum(num * inputs * outputs for num, inputs, outputs in _quantized_matrices(shape, training))
    return ParameterCounts(base + total + adapters, trained + adapters, quantized)
