"""Predict the memory of a process from the architecture alone.

The formulas count the tensors of the Hugging Face implementations of the four measured families; tests compare the
parameter counts with the real classes. For other families, the formulas are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ftkit.config.execution import (
    GIB,
    LOGITS_ALIGNMENT,
    ZERO3_BUCKET,
    ZERO3_LIVE_WEIGHTS,
    are_quantized,
    count_repeated_parameters,
    is_gathered_in_fp8,
    is_quantized,
    logits_rows,
    method_counts,
    quantized_bytes,
)
from ftkit.models.families import SavedTensors, family_of
from ftkit.models.parameters import count_model
from ftkit.planning.estimates.activations import count_numbers, layer_bytes, selective_numbers
from ftkit.planning.estimates.linear_attention import delta_rule_bytes

if TYPE_CHECKING:
    from ftkit.config.training import ActivationCheckpointing
    from ftkit.config.training_plan import TrainingPlan
    from ftkit.models.spec import ArchitectureSpec
    from ftkit.planning.setup import Setup

FP32 = 4
"""Bytes per fp32 number."""
CPU_LIBRARIES_GIB = 0.45
"""Resident set of a process on a CPU besides the predicted tensors. Measured with the recipe `demo` and torch's build
for CPUs: 0.42 with FSDP2, 0.45 with LoRA, 0.51 with QLoRA. The formulas for tensors were fitted to GPUs: 45 million
parameters took 0.4 to 0.7 GiB more than predicted."""
Moment = Literal["loading", "loss", "backward", "optimizer"]


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak memory of one process, in GiB, by part at the time of the peak.

    Attributes:
        moment: when the peak is reached: while weights are loaded, while the loss is computed, in the backward pass, or
            in the optimizer step.
        parameters: the process's shard of the weights.
        gradients: its shard of the gradients.
        optimizer: its shard of the optimizer states.
        activations: tensors saved for the backward pass.
        logits: the output projection's logits and gradients.
        communication: unsharded weights, and gradients before their reduction.
        libraries: Python, torch and transformers on a CPU, where the memory of a process is its resident set.
    """

    moment: Moment
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0
    libraries: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """GiB by part."""
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        """GiB in total."""
        return sum(self.parts.values())


def compute_width(training: TrainingPlan) -> int:
    """Return the bytes per number in the compute dtype."""
    return 2 if training.compute_precision == "bf16" else FP32


def reduce_width(training: TrainingPlan) -> int:
    """Return the bytes per number in the dtype in which gradients are reduced."""
    return 2 if training.reduce_precision == "bf16" else FP32


def predict_memory(setup: Setup) -> MemoryPlan:
    """Predict the peak memory of one process: the maximum over loading and four points of a step.

    Trained weights have fp32 masters, gradients and two AdamW states (16 bytes per parameter in total; ZeRO-3 also has
    them in the compute dtype); frozen weights exist once. All are sharded. While a layer runs, its unsharded weights
    exist in the compute dtype, as do those of the prefetched next layer, and those outside the layers. If layers stay
    unsharded, those of all layers exist from the forward pass to the backward pass.
    """
    highest = max(Sizes(setup).moments(), key=lambda moment: moment.total)
    return replace(highest, libraries=CPU_LIBRARIES_GIB) if setup.device == "cpu" else highest


class Sizes:
    """Bytes of all tensors of a process, at several points of a step."""

    def __init__(self, setup: Setup) -> None:
        shape, training = setup.shape, setup.training
        self.tensor_parallel = setup.training.tensor_parallel
        # A layer that tensor parallelism divides among all GPUs is never resharded.
        self.keeps_weights = setup.keeps_weights or setup.num_layer_shards == 1 < self.tensor_parallel
        self.defers_sync = setup.defers_sync
        self.shape, self.training, self.num_shards, self.engine = shape, training, setup.num_shards, setup.engine
        self.compiled = setup.engine == "fsdp2" and training.compile != "none" and setup.device == "cuda"
        self.plain_attention = setup.device == "cpu" or training.attention in {"sdpa", "eager"}
        self.width = compute_width(training)
        self.gathered_in_fp8 = count_gathered_in_fp8(setup)
        self.tokens = setup.tokens
        self.delta_rule = delta_rule_bytes(setup)
        self.checkpointing = training.checkpointing_of_layers(shape.num_hidden_layers, setup.engine)
        self.offloaded = training.offloaded_of_layers(shape.num_hidden_layers, setup.engine)
        self.counts, method = count_model(shape), method_counts(shape, training)
        self.trained, self.total = method.trained, method.total
        self.stored = self.trained + count_repeated_parameters(shape, training)
        """Trained parameters on all processes; those that tensor parallelism does not divide are on each of a group."""
        self.savings = family_of(shape.family).savings
        self.recomputes_inputs = training.adapters is not None or training.trains_in_fp8
        self.has_fused_feed_forward = self.compiled and not self.counts.experts_per_token
        self.keeps_gradients = setup.engine == "zero3" or setup.num_micro_batches > 1
        self.table = shape.vocab_size * shape.hidden_size
        self.trains_table = training.adapters is None

    # Tensors between steps

    def local_weights(self) -> float:
        if self.training.offload == "all":
            return 0
        kept = 0 if self.training.adapters is None else self._frozen_bytes()
        if self.engine == "zero3":
            kept += self.width * self.trained
        on_device = self.training.offload == "none" or self.engine == "fsdp2"
        return (kept + 4 * self.stored * on_device) / self.num_shards

    def local_gradients(self) -> float:
        on_device = self.training.offload == "none" or (self.training.offload == "optimizer" and self.engine == "fsdp2")
        return 4 * self.stored * on_device / self.num_shards

    def accumulated_gradients(self) -> float:
        """Return the bytes of the gradients of earlier micro-batches: unsharded if they are not reduced yet."""
        if not self.defers_sync:
            return self.local_gradients()
        around = self.trained_around()
        return reduce_width(self.training) * (around + (self.stored - around) / self.tensor_parallel)

    def local_states(self) -> float:
        if self.training.offload != "none":
            return 0
        # fp32, or one byte per state and an fp32 scale per 256 of them.
        each = 4 if self.training.optimizer == "adamw" else 1 + 4 / 256
        return 2 * each * self.stored / self.num_shards

    # Unsharded weights and gradients

    def layer(self) -> float:
        adapters = 0 if self.training.adapters is None else self.trained_layer()
        saved = (saved_by_quantization(self.shape, self.training) + self.gathered_in_fp8) / self.shape.num_hidden_layers
        adapter_width = self.width if self.engine == "zero3" else FP32  # FSDP2 all-gathers adapters in fp32
        return self.width * self.counts.largest_layer / self.tensor_parallel + adapter_width * adapters - saved

    def around(self) -> float:
        return self.width * self.counts.around

    def trained_layer(self) -> float:
        if self.training.adapters:
            return self.stored / self.tensor_parallel / self.shape.num_hidden_layers
        return self.counts.largest_layer / self.tensor_parallel

    def trained_around(self) -> float:
        return self.counts.around if self.trains_table else 0

    def matrix(self) -> float:
        """Return the bytes of a copy of the largest quantized matrix: dequantized, or of FP8 transposed."""
        width = {"none": 0, "nf4": self.width, "fp8": 1}[self.training.quantization]
        sizes = [linear.size for linear in self.counts.linears]
        sizes += [each.size for each in self.counts.expert_matrices if are_quantized(self.training.quantization, each)]
        return width * max(sizes, default=0)

    def _frozen_bytes(self) -> float:
        """Return the bytes of all frozen weights in their storage dtype."""
        return self.width * self.counts.total - saved_by_quantization(self.shape, self.training)

    def unsharded_weights(self, layers: int) -> float:
        """Return the bytes of unsharded weights while `layers` layers wait for their backward pass."""
        if self.engine == "zero3":
            return self.width * min(ZERO3_LIVE_WEIGHTS, self.total)
        if self.num_shards > 1 or self.training.offload == "all":
            if self.keeps_weights and self.defers_sync:  # until the last micro-batch's backward pass
                layers = self.shape.num_hidden_layers
            return self.around() + self.layer() * (layers if self.keeps_weights else 1)
        if self.width == FP32:
            return 0
        # One process: frozen weights are used without a copy, trained ones have a copy in the compute dtype.
        return self.width * (self.trained_around() + self.trained_layer() * layers)

    def in_flight(self, layers: int) -> float:
        """Return the bytes in communication in a layer's backward pass: its gradients, and the next layer's weights."""
        if self.engine == "zero3":
            return (self.width + reduce_width(self.training)) * ZERO3_BUCKET + self.matrix()
        size = self.width * self.trained_layer()
        if self.num_shards > 1:
            reduced = reduce_width(self.training) * self.trained_layer()
            # The previous layer's gradients are being reduced; this layer's follow once its activations are freed.
            size += reduced + max(0, reduced - self.layer_activations())
            size += 2 * self.layer() if layers and not self.keeps_weights else 0
        return size + self.matrix()

    # Activations and logits

    def layer_activations(self) -> float:
        """Return the bytes of a layer's activations when its backward pass begins, recomputed or not."""
        adapters = self.training.adapters
        size: float = layer_bytes(self.shape, self.width, compiled=self.compiled, adapters=adapters)
        if self.recomputes_inputs and self.has_fused_feed_forward:
            size -= self.width * count_numbers(self.savings.recomputed_inputs, self.shape)
        if self.training.context_parallel > 1:  # attention's output, before its heads are exchanged for tokens
            size += self.width * self.shape.num_attention_heads * self.shape.head_dim
        # All-gathered tokens of the other GPUs: inputs of attention and feed-forward layer, and an output to be summed.
        size += 3 * (self.tensor_parallel - 1) * self.width * self.shape.hidden_size
        return self.tokens * size

    def in_layer(self, mode: ActivationCheckpointing) -> float:
        """Return the bytes of a layer's activations and their gradients at the peak of its backward pass.

        That is in the feed-forward layer, besides the gradient of the layer's output. A compiled kernel reads gate, up,
        and the gradient of their product, and writes the gradients of both. One of these takes the place of `up`, which
        makes four wide tensors, unless the kernel also recomputes the product: then Inductor reuses none of six (seen
        in its code). What `except_attention` recomputes for attention comes
        later.
        """
        size = self.layer_activations() + self.hidden()
        if not self.has_fused_feed_forward:
            return size + self.hidden()
        saved, recomputed = self.savings.compiled, self.savings.recomputed_inputs
        wide = 6 if self.recomputes_inputs or mode in {"selective", "except_attention"} else 4
        wide -= saved.intermediate - (recomputed.intermediate if self.recomputes_inputs else 0)
        later = SavedTensors(0, 0, 0)
        if mode == "except_attention":
            later = SavedTensors(0 if self.savings.norms_follow else 1, saved.queries - 1, saved.keys)
        size += self.width * self.tokens * wide * self.counts.feed_forward
        return size - self.width * self.tokens * count_numbers(later, self.shape)

    def hidden(self) -> float:
        """Return the bytes of the residual stream between two layers."""
        return self.width * self.tokens * self.shape.hidden_size

    def attention_output(self) -> float:
        """Return the bytes of the output of a layer's attention and of its log-sum-exp."""
        return self.tokens * self.shape.num_attention_heads * (self.width * self.shape.head_dim + FP32)

    def mask(self) -> float:
        return self.plain_attention * self.training.micro_batch_size * self.training.sequence_length**2

    def saved_activations(self, layers: int) -> float:
        """Return the bytes of the activations that the first `layers` layers save for their backward pass."""
        moved = self.offloaded_by_layer[:layers]
        saved = sum(self.saved_in_layer[mode] for mode in self.checkpointing[:layers])
        return saved - sum(moved) + max(moved, default=0)  # those of one offloaded layer are being copied

    @cached_property
    def saved_in_layer(self) -> dict[ActivationCheckpointing, float]:
        """The bytes of the activations that a layer with each mode saves for its backward pass."""
        return {mode: self._saved_with(mode) for mode in set(self.checkpointing)}

    def _saved_with(self, mode: ActivationCheckpointing) -> float:
        if mode == "none":
            return self.layer_activations()
        if mode == "selective":
            return self.width * self.tokens * selective_numbers(self.shape, self.training.adapters)
        return self.hidden() + (self.attention_output() if mode == "except_attention" else 0)

    def offloaded_activations(self) -> float:
        """Return the bytes of the activations of all layers that are copied to host memory."""
        return sum(self.offloaded_by_layer)

    @cached_property
    def offloaded_by_layer(self) -> list[float]:
        """The bytes that each layer copies to host memory: if it is not compiled, only its input."""
        return [
            is_offloaded * (self.saved_in_layer[mode] if self.compiled else self.hidden())
            for mode, is_offloaded in zip(self.checkpointing, self.offloaded, strict=True)
        ]

    def loss_logits(self) -> float:
        if self.engine == "zero3":
            return self.tokens * self.shape.vocab_size * (self.width + 8)
        padded = -(-self.shape.vocab_size // LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT
        rows = logits_rows(self.tokens, padded)
        table = self.width * self.table if padded != self.shape.vocab_size else 0
        if self.trains_table:
            table += (self.width + 4) * self.table
        return 2 * self.width * rows * padded + table

    def kept_logits(self) -> float:
        if self.engine == "zero3":
            return self.tokens * self.shape.vocab_size * (self.width + 8)
        return self.width * self.table if self.trains_table else 0

    # The points of a step

    def moments(self) -> list[MemoryPlan]:
        # Activations are largest after the last layer's gradients are reduced, gradients at the first layer.
        at_its_start = self.in_backward(max(0, self.shape.num_hidden_layers - 2))
        return [self.in_loading(), self.in_loss(), at_its_start, self.in_backward(0), self.in_optimizer()]

    def in_loading(self) -> MemoryPlan:
        """Return the memory while weights are loaded: a tied table exists twice before it is tied."""
        tied = self.engine == "fsdp2" and self.shape.tie_word_embeddings
        width = FP32 if self.trains_table else self.width
        second = width * self.table / self.num_shards if tied and self.training.offload != "all" else 0
        parameters = (self.local_weights() + second) / GIB
        return MemoryPlan("loading", parameters=parameters)

    def in_loss(self) -> MemoryPlan:
        layers = self.shape.num_hidden_layers
        norm_and_loss = (8 + 2 * self.width) * self.tokens * self.shape.hidden_size
        return self._plan(
            "loss",
            gradients=self.accumulated_gradients() if self.keeps_gradients else 0,
            activations=self.saved_activations(layers) + norm_and_loss + self.mask(),
            logits=self.loss_logits(),
            communication=self.unsharded_weights(layers),
        )

    def in_backward(self, layers: int) -> MemoryPlan:
        """Return the memory in the backward pass of a layer, while `layers` other layers wait for theirs."""
        done = 1 - (layers + 1) / self.shape.num_hidden_layers
        return self._plan(
            "backward",
            gradients=self.accumulated_gradients() if self.keeps_gradients else done * self.local_gradients(),
            activations=self.saved_activations(layers)
            + self.in_layer(self.checkpointing[layers])
            + self.delta_rule
            + self.mask(),
            logits=self.kept_logits(),
            communication=self.unsharded_weights(layers + 1) + self.in_flight(layers),
        )

    def in_optimizer(self) -> MemoryPlan:
        """Return the memory at the optimizer step: all gradients exist, those outside the layers were reduced last."""
        if self.engine == "zero3":
            leaving = 4 * min(ZERO3_LIVE_WEIGHTS, self.trained / self.num_shards)
        else:
            reduced = reduce_width(self.training) if self.num_shards > 1 else 0
            leaving = (reduced + 2 * self.width) * self.trained_around()
        if self.training.offload == "optimizer" and self.engine == "fsdp2":  # one tensor's states at a time
            leaving += 8 * self.table / self.num_shards
        return self._plan("optimizer", gradients=self.local_gradients(), communication=leaving)

    def _plan(self, moment: Moment, **parts: float) -> MemoryPlan:
        parts |= {"parameters": self.local_weights(), "optimizer": self.local_states()}
        return MemoryPlan(moment, **{name: size / GIB for name, size in parts.items()})


def saved_by_quantization(shape: ArchitectureSpec, training: TrainingPlan) -> int:
    """Return the bytes that quantized matrices save compared with the compute dtype."""
    kind, width, counts = training.quantization, compute_width(training), count_model(shape)
    linears = (
        each.count * (width * each.size - quantized_bytes(kind, each.inputs, each.outputs))
        for each in counts.linears
        if is_quantized(kind, each.inputs, each.outputs)
    )
    experts = (
        each.count * (width * each.size - each.experts * quantized_bytes(kind, each.inputs, each.outputs))
        for each in counts.expert_matrices
        if are_quantized(kind, each)
    )
    return sum(linears) + sum(experts)


def count_gathered_in_fp8(setup: Setup) -> int:
    """Count the weights that are all-gathered in FP8: each takes a byte less than in bf16."""
    linears = count_model(setup.shape).linears if setup.gathers_in_fp8 else ()
    return sum(each.count * each.size for each in linears if is_gathered_in_fp8(each.name, each.inputs, each.outputs))
