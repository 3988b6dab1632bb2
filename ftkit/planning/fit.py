"""Predict the memory of a process and of a node from the architecture alone.

The formulas count the tensors of the Hugging Face implementations of the four measured families; tests compare the
parameter counts with the real classes. For other families, the formulas are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2
from typing import Final, Literal

from ftkit.config.execution import (
    FP32,
    GIB,
    LOGITS_ALIGNMENT,
    ZERO3_BUCKET,
    ZERO3_LIVE_WEIGHTS,
    count_repeated_parameters,
    logits_rows,
    method_counts,
    quantized_experts,
    saved_by_quantization,
)
from ftkit.models.parameters import count_model, vision_of
from ftkit.planning.activations import Activations
from ftkit.planning.flops import delta_rule_bytes
from ftkit.planning.step_time import replays_graphs
from ftkit.planning.training_setup import Setup, teacher_setup

CPU_LIBRARIES_GIB = 0.45
"""Resident set size of a CPU process beyond the predicted tensors. Measured with the recipe `demo` and torch's CPU
build: 0.42 with FSDP2, 0.45 with LoRA, 0.51 with QLoRA. The formulas for tensors were fitted to GPUs: on CPUs, 45
million parameters took 0.4 to 0.7 GiB more than predicted."""
_STATE_BYTES: Final = {"adamw": 2 * FP32, "adamw8bit": 2 * (1 + FP32 / 256)}
"""Bytes of an optimizer's states per trained parameter: two in fp32, or two of one byte with an fp32 scale per 256."""
PROCESS_GIB: Final = 4.0  # host memory of a process without offloaded tensors: torch, CUDA and NCCL. Assumed.
Moment = Literal["teacher", "loading", "pictures", "loss", "backward", "optimizer"]


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak memory of one process in GiB, split into its parts at the moment of the peak.

    `communication` is unsharded weights, and gradients before their reduction. `libraries` is Python, torch and
    transformers on a CPU, where the resident set counts.
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
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def _tensors_of(setup: Setup) -> Tensors:
    return Tensors(setup) if setup.engine == "fsdp2" else _Zero3Tensors(setup)


class Tensors:
    """Tensor memory of a process with FSDP2, in bytes: between steps, and at points within a step.

    Trained weights have fp32 masters, gradients and two AdamW states (16 bytes per parameter; ZeRO-3 also keeps a copy
    in the compute dtype). Frozen weights exist once. All are sharded. While a layer runs, three sets of weights are
    unsharded in the compute dtype: its own, those of the prefetched next layer, and those outside the layers. If layers
    stay unsharded, those of all layers are unsharded from the forward to the backward pass.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.shape, self.training = setup, setup.shape, setup.training
        self.num_shards, self.tokens = setup.num_shards, setup.tokens
        self.width = setup.training.compute_bytes
        self.counts, method = count_model(setup.shape), method_counts(setup.shape, setup.training)
        self.trained, self.total = method.trained, method.total
        self.stored = self.trained + count_repeated_parameters(setup.shape, setup.training)
        """Trained parameters on all processes; those that tensor parallelism doesn't divide are on each rank."""
        self.table = setup.shape.vocab_size * setup.shape.hidden_size
        self.activations = Activations(setup)
        # A layer that tensor parallelism divides among all GPUs is never resharded.
        self.keeps_weights = setup.keeps_weights or setup.num_layer_shards == 1 < self.training.tensor_parallel
        vision = vision_of(setup.shape)
        self.trained_vision = vision.num_trained(self.training.vision) if vision else 0
        self.frozen_vision = vision.total - self.trained_vision if vision else 0
        self.trained_around = (self.counts.around if self.training.adapters is None else 0) + self.trained_vision
        self.around: float = self.width * self.counts.around
        if vision and vision.layers:  # the projector, and a layer of the tower with the one prefetched
            self.around += self.width * (vision.projector + 2 * vision.tower / vision.layers)

    # Between steps

    @property
    def has_masters(self) -> bool:
        """Whether the fp32 weights and their gradients are in the GPU's memory."""
        return self.training.offload != "all"

    @property
    def copies(self) -> float:
        """Copies of all trained weights in the compute dtype."""
        return 0

    @cached_property
    def weights(self) -> float:
        if self.training.offload == "all":
            return 0
        frozen = self.width * self.frozen_vision
        if self.training.adapters is not None:
            frozen += self.width * self.counts.total - saved_by_quantization(self.shape, self.training)
        return (frozen + self.copies + FP32 * self.stored * self.has_masters) / self.num_shards

    @cached_property
    def gradients(self) -> float:
        """Gradients in fp32; in the compute dtype if one process has a single micro-batch per step."""
        setup = self.setup
        is_single = setup.engine == "fsdp2" and setup.num_processes == setup.num_micro_batches == 1
        width = self.width if is_single and self.training.adapters is None else FP32
        return width * self.stored * self.has_masters / self.num_shards

    @cached_property
    def states(self) -> float:
        if self.training.offload != "none":
            return 0
        return _STATE_BYTES[self.training.optimizer] * self.stored / self.num_shards

    # In a step

    @property
    def accumulated_gradients(self) -> float | None:
        """Gradients of earlier micro-batches; None if a step has one: no gradients exist before its backward pass."""
        if self.setup.num_micro_batches == 1:
            return None
        if not self.setup.defers_sync:
            return self.gradients
        in_layers = (self.stored - self.trained_around) / self.training.tensor_parallel
        return self.training.reduce_bytes * (self.trained_around + in_layers)

    @cached_property
    def layer(self) -> float:
        """The unsharded weights of the largest layer. Adapters are all-gathered in fp32."""
        adapters = 0 if self.training.adapters is None else self.trained_layer
        saved = saved_by_quantization(self.shape, self.training) + self.setup.num_gathered_in_fp8
        frozen = self.width * self.counts.largest_layer / self.training.tensor_parallel
        return frozen + FP32 * adapters - saved / self.shape.num_hidden_layers

    @cached_property
    def trained_layer(self) -> float:
        """Trained parameters of the largest layer."""
        if self.training.adapters:
            return (self.stored - self.trained_vision) / self.training.tensor_parallel / self.shape.num_hidden_layers
        return self.counts.largest_layer / self.training.tensor_parallel

    @cached_property
    def matrix(self) -> float:
        """A copy of the largest quantized matrix: dequantized from NF4, or transposed in FP8."""
        width = {"none": 0, "nf4": self.width, "fp8": 1}[self.training.quantization]
        sizes = [linear.size for linear in self.counts.linears]
        sizes += [each.size for each in quantized_experts(self.shape, self.training)]
        return width * max(sizes, default=0)

    def unsharded_weights(self, layers: int) -> float:
        """Return the unsharded weights while `layers` layers wait for their backward pass."""
        if self.num_shards > 1 or self.training.offload == "all":
            if self.keeps_weights and self.setup.defers_sync:  # until the last micro-batch's backward pass
                layers = self.shape.num_hidden_layers
            return self.around + self.layer * (layers if self.keeps_weights else 1)
        if self.width == FP32:
            return 0
        # One process computes with the frozen weights themselves, and with copies of trained ones in the compute dtype.
        return self.width * (self.trained_around + self.trained_layer * layers)

    def in_flight(self, layers: int) -> float:
        """Return the buffers of a layer's backward: its gradients, and prefetched weights of the next of `layers`."""
        size = self.width * self.trained_layer
        if self.num_shards > 1:
            reduced = self.training.reduce_bytes * self.trained_layer
            # The previous layer's gradients are being reduced. This layer's follow once its activations are freed.
            size += reduced + max(0, reduced - self.activations.layer)
            size += 2 * self.layer if layers and not self.keeps_weights else 0
        return size + self.matrix

    @property
    def loss_logits(self) -> float:
        """The logits, which their gradients overwrite, while the loss is computed."""
        padded = -(-self.shape.vocab_size // LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT
        rows = logits_rows(self.tokens, padded, is_trained=self.training.adapters is None)
        table = self.width * self.table if padded != self.shape.vocab_size else 0
        if self.training.adapters is None:
            table += (self.width + FP32) * self.table
        is_overwritten = self.setup.device == "cuda" and self.training.distillation is None
        return (1 if is_overwritten else 2) * self.width * rows * padded + table

    @property
    def kept_logits(self) -> float:
        """The part of `loss_logits` that lives in the backward pass: with FSDP2, the gradient of the projection."""
        return self.width * self.table if self.training.adapters is None else 0

    @property
    def reduced_last(self) -> float:
        """Unsharded weights and gradients at the optimizer step, which immediately follows the last reduction."""
        reduced = self.training.reduce_bytes if self.num_shards > 1 else 0
        size: float = (reduced + 2 * self.width) * self.trained_around
        if self.training.offload == "optimizer":  # one tensor's states at a time
            size += 8 * self.table / self.num_shards
        return size

    # The points of a step

    def moments(self) -> list[MemoryPlan]:
        layers = self.shape.num_hidden_layers
        loaded = self.weights
        is_tied = self.shape.tie_word_embeddings and self.setup.engine == "fsdp2"
        if is_tied and self.training.offload != "all":  # the embedding exists twice before the weights are tied
            width = FP32 if self.training.adapters is None else self.width
            loaded += width * self.table / self.num_shards
        norm_and_loss = (8 + 2 * self.width) * self.tokens * self.shape.hidden_size
        saved = self.activations.saved(layers) + norm_and_loss + self.activations.mask + self.activations.of_pictures
        loss = self._plan(
            "loss",
            gradients=self.accumulated_gradients or 0,
            activations=saved,
            logits=self.loss_logits,
            communication=self.unsharded_weights(layers),
        )
        # Activations peak after the last layer's gradients are reduced; gradients peak at the first layer.
        backward = [self._in_backward(max(0, layers - 2)), self._in_backward(0)]
        if replays_graphs(self.setup):
            loss = self._beside_graphs(loss, backward)
        return [
            MemoryPlan("loading", parameters=loaded / GIB),
            *([self._in_tower()] if self.activations.of_pictures else []),
            loss,
            *backward,
            self._plan("optimizer", gradients=self.gradients, communication=self.reduced_last),
        ]

    def _beside_graphs(self, loss: MemoryPlan, backward: list[MemoryPlan]) -> MemoryPlan:
        """Return the memory at the loss with CUDA graphs, if they fit: they also hold what only the backward needs.

        The loss has its own copy of the projection, if that is trained, and the hidden states and their gradient.
        """
        gradients = (0.0, self.width * self.stored / GIB)  # of a micro-batch, at the last layer and at the first
        sizes = (each.activations + each.communication for each in backward)
        in_graphs = max(map(sum, zip(sizes, gradients, strict=True)))
        rest = max(0.0, in_graphs - loss.activations - loss.communication)
        own = 2 * self.width * self.tokens * self.shape.hidden_size
        own += self.width * self.table if self.training.adapters is None else 0
        beside = replace(loss, activations=loss.activations + rest + own / GIB)
        gpu = self.setup.gpu
        return beside if gpu is None or beside.total <= gpu.usable_gib else loss  # a run gives up what does not fit

    def _in_tower(self) -> MemoryPlan:
        return self._plan(
            "pictures",
            gradients=self.accumulated_gradients or 0,
            activations=self.activations.of_pictures + self.activations.in_tower,
            communication=self.unsharded_weights(0),
        )

    def _in_backward(self, layers: int) -> MemoryPlan:
        """Return the memory in the backward pass of a layer, while `layers` other layers wait for theirs."""
        done = 1 - (layers + 1) / self.shape.num_hidden_layers
        accumulated, activations = self.accumulated_gradients, self.activations
        own = activations.in_backward(activations.modes[layers]) + delta_rule_bytes(self.setup)
        return self._plan(
            "backward",
            gradients=done * self.gradients if accumulated is None else accumulated,
            activations=activations.saved(layers) + own + activations.mask + activations.of_pictures,
            logits=self.kept_logits,
            communication=self.unsharded_weights(layers + 1) + self.in_flight(layers),
        )

    def _plan(self, moment: Moment, **parts: float) -> MemoryPlan:
        parts |= {"parameters": self.weights, "optimizer": self.states}
        return MemoryPlan(moment, **{name: size / GIB for name, size in parts.items()})


class _Zero3Tensors(Tensors):
    """Tensor memory with DeepSpeed's ZeRO-3, which all-gathers up to `ZERO3_LIVE_WEIGHTS` in the order of their use."""

    @property
    def has_masters(self) -> bool:
        return self.training.offload == "none"

    @property
    def copies(self) -> float:
        return self.width * self.trained

    @property
    def accumulated_gradients(self) -> float:
        return self.gradients

    def unsharded_weights(self, layers: int) -> float:  # noqa: ARG002 - it depends on none
        return self.width * min(ZERO3_LIVE_WEIGHTS, self.total)

    def in_flight(self, layers: int) -> float:  # noqa: ARG002 - it depends on none
        return (self.width + self.training.reduce_bytes) * ZERO3_BUCKET + self.matrix

    @property
    def loss_logits(self) -> float:
        return self.tokens * self.shape.vocab_size * (self.width + 8)

    @property
    def kept_logits(self) -> float:
        return self.loss_logits

    @property
    def reduced_last(self) -> float:
        return FP32 * min(ZERO3_LIVE_WEIGHTS, self.trained / self.num_shards)


def teacher_memory(setup: Setup) -> MemoryPlan:
    """Predict the peak memory of a process while a frozen teacher with this setup computes its distributions."""
    tensors, is_offloaded, size = Tensors(setup), setup.training.offload == "all", setup.shape.vocab_size
    weights = 0 if is_offloaded else tensors.width * tensors.total / setup.num_shards
    gathered = tensors.around + 2 * tensors.layer if setup.num_shards > 1 or is_offloaded else 0
    activations = tensors.activations.layer + 2 * tensors.activations.hidden + tensors.activations.mask
    logits = (tensors.width + 2 * FP32) * logits_rows(setup.tokens, size, is_trained=False) * size
    return MemoryPlan("teacher", weights / GIB, 0, 0, activations / GIB, logits / GIB, gathered / GIB)


# --- Does it fit? -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostMemoryPlan:
    """Predicted host memory of a node of a run that offloads, in GiB, over all processes of the node.

    `processes` is the memory of the processes without offloaded tensors. Host snapshots for checkpoints are not
    included: without room for them, training waits for each checkpoint.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    processes: float

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Fit:
    """Predicted memory of a setup, computed lazily and cached."""

    setup: Setup

    @cached_property
    def memory(self) -> MemoryPlan:
        """Peak memory of a process: that of the steps, or of a teacher, which computes before them."""
        moments = [self.steps, *([teacher_memory(self._teacher)] if self._teacher else [])]
        return max(moments, key=lambda each: each.total)

    @cached_property
    def steps(self) -> MemoryPlan:
        """The maximum over loading and four points of a step."""
        highest = max(_tensors_of(self.setup).moments(), key=lambda moment: moment.total)
        return replace(highest, libraries=CPU_LIBRARIES_GIB) if self.setup.device == "cpu" else highest

    @cached_property
    def _teacher(self) -> Setup | None:
        return teacher_setup(self.setup)

    @cached_property
    def host_memory(self) -> HostMemoryPlan | None:
        """Host memory of a node, or what a teacher needs there if that is more; None if nothing is offloaded.

        The state that `offload` removes from GPU memory is in host memory instead.
        """
        setup, training = self.setup, self.setup.training
        if setup.device == "cpu" or (training.offload == "none" and not training.activation_offload):
            return None
        local, whole = _tensors_of(setup), _tensors_of(setup.with_training(offload="none"))
        per_node = setup.num_processes // setup.num_nodes
        rounding = _pinned_rounding(setup) if training.offload == "all" and setup.engine == "fsdp2" else 1.0
        own = HostMemoryPlan(
            parameters=per_node * rounding * (whole.weights - local.weights) / GIB,
            gradients=per_node * rounding * FP32 * local.stored * (not local.has_masters) / setup.num_shards / GIB,
            optimizer=per_node * (whole.states - local.states) / GIB,
            activations=per_node * local.activations.offloaded / GIB,
            processes=per_node * PROCESS_GIB,
        )
        if self._teacher is None or training.offload != "all":
            return own
        tensors, rounding = Tensors(self._teacher), _pinned_rounding(self._teacher)
        weights = per_node * rounding * tensors.width * tensors.total / setup.num_shards / GIB
        return max(own, HostMemoryPlan(weights, 0, 0, 0, own.processes), key=lambda each: each.total)

    def on_gpu(self, room_gib: float) -> bool:
        return self.memory.total <= room_gib

    def on_host(self, room_gib: float) -> bool:
        return self.host_memory is None or self.host_memory.total <= room_gib


def _pinned_rounding(setup: Setup) -> float:
    """Return the ratio of pinned memory to tensor bytes: torch's pinned allocator rounds up to powers of two."""
    counts = count_model(setup.shape)
    width = FP32 if setup.training.adapters is None else setup.training.compute_bytes
    matrices = [(each.count, each.size) for each in counts.linears]
    matrices += [(each.count, each.size) for each in counts.expert_matrices]
    matrices.append((1, setup.shape.vocab_size * setup.shape.hidden_size))
    sizes = [(num, width * size / setup.num_shards) for num, size in matrices]
    pinned: float = sum(num * 2.0 ** ceil(log2(size)) for num, size in sizes)
    return pinned / sum(num * size for num, size in sizes)
