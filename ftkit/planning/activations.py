"""Count the activations that decoder layers save for the backward pass.

The counts are the tensors that autograd saves, measured on the real layers, both eager and compiled (torch.compile
recomputes element-wise operations between matmuls). `ftkit.models.families` has them for each family.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ftkit.config.execution import FP32
from ftkit.models.families import SavedTensors, family_of
from ftkit.models.parameters import count_model, vision_of
from ftkit.planning.flops import attention_layers

if TYPE_CHECKING:
    from ftkit.config.training import ActivationCheckpointing
    from ftkit.models.adapters import LoraSpec
    from ftkit.models.architecture import ArchitectureSpec
    from ftkit.planning.training_setup import Setup


class Activations:
    """Activation memory of a micro-batch on one process, in bytes."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._shape, self._training = setup, setup.shape, setup.training
        self._vision = vision = vision_of(setup.shape)
        self._num_patches = setup.tokens / vision.tokens * vision.patches if vision and vision.tokens else 0.0
        self._bytes_per_number = setup.training.compute_bytes * setup.tokens
        self._compiled = setup.engine == "fsdp2" and setup.training.compile != "none" and setup.device == "cuda"
        self._counts, self._savings = count_model(setup.shape), family_of(setup.shape.family).savings
        self._recomputes_inputs = setup.training.adapters is not None or setup.training.trains_in_fp8
        self._has_fused_feed_forward = self._compiled and not self._counts.experts_per_token
        num_layers = setup.shape.num_hidden_layers
        self.modes = setup.training.checkpointing_of_layers(num_layers, setup.engine)
        self._is_offloaded = setup.training.offloaded_of_layers(num_layers, setup.engine)

    @cached_property
    def layer(self) -> float:
        """Activations of a layer when its backward pass begins, whether saved or recomputed."""
        shape, training, setup = self._shape, self._training, self._setup
        width, adapters = training.compute_bytes, training.adapters
        size: float = layer_bytes(shape, width, compiled=self._compiled, adapters=adapters)
        if self._recomputes_inputs and self._has_fused_feed_forward:
            size -= width * _count_numbers(self._savings.recomputed_inputs, shape)
        if adapters is not None and adapters.use_dora:
            # The gradients of the magnitudes read the outputs of the adapted matrices. Those are saved anyway, except
            # outputs added to the residual stream. With dropout or in eager mode, they read other tensors of that size.
            adapted = (each for each in self._counts.linears if each.name in adapters.targets)
            outputs = sum(each.count * each.outputs for each in adapted) / shape.num_hidden_layers
            if self._compiled and not adapters.dropout:
                outputs = 2 * shape.hidden_size * (not self._savings.norms_follow)
            size += width * outputs
        if training.context_parallel > 1:  # attention's output, before its heads are exchanged for tokens
            size += width * shape.num_attention_heads * shape.head_dim
        # Tokens of the other GPUs: all-gathered inputs of attention and feed-forward, and an output before its sum.
        size += 3 * (training.tensor_parallel - 1) * width * shape.hidden_size
        layers = attention_layers(shape)
        with_scores = sum(each.count for each in layers if not each.state) / sum(each.count for each in layers)
        return setup.tokens * size + with_scores * self._scores

    @cached_property
    def _scores(self) -> float:
        """The scores of each pair of tokens and their softmax, which only attention `eager` saves: that in fp32, too.

        Compiled, both are in the compute dtype. Counted on a layer's saved tensors.
        """
        training, width = self._training, self._training.compute_bytes
        pairs = self._setup.tokens * training.sequence_length * self._shape.num_attention_heads
        return (training.attention == "eager") * pairs * (2 * width if self._compiled else FP32 + width)

    def in_backward(self, mode: ActivationCheckpointing) -> float:
        """Return a layer's activations and their gradients at the peak of its backward pass.

        The peak is in the feed-forward layer, and includes the gradient of the layer's output. A compiled kernel reads
        gate, up, and the gradient of their product, and writes the gradients of gate and up, one of them in place of
        `up`: four wide tensors. If it also recomputes the product, Inductor reuses none of six tensors (seen in its
        code), or seven with adapters, whose part of the product's gradient is a separate tensor. `except_attention`
        recomputes the tensors of attention only after the peak.
        """
        size = self.layer + self.hidden + self._scores  # with their gradients
        if not self._has_fused_feed_forward:
            return size + self.hidden
        saved, recomputed = self._savings.compiled, self._savings.recomputed_inputs
        wide = 6 if self._recomputes_inputs or mode in {"selective", "except_attention"} else 4
        wide += self._training.adapters is not None
        wide -= saved.intermediate - (recomputed.intermediate if self._recomputes_inputs else 0)
        size += self._bytes_per_number * wide * self._counts.feed_forward
        if mode == "except_attention":
            later = SavedTensors(0 if self._savings.norms_follow else 1, saved.queries - 1, saved.keys)
            size -= self._bytes_per_number * _count_numbers(later, self._shape)
        return size

    @property
    def hidden(self) -> float:
        """The residual stream between two layers."""
        return self._bytes_per_number * self._shape.hidden_size

    @cached_property
    def of_pictures(self) -> float:
        """Pixels and a trained tower's saved tensors, for packs full of pictures; freed after the backward pass.

        The tower saves the outputs of eager operations; three of them are as wide as the feed-forward layer. These
        counts are not measured.
        """
        vision = self._vision
        if vision is None:
            return 0.0
        pixels = 3 * vision.patch**2 * (1 + self._training.compute_bytes)
        is_saved = self._training.vision == "full"
        saved = self._training.compute_bytes * vision.layers * (8 * vision.hidden + 3 * vision.intermediate)
        return self._num_patches * (pixels + is_saved * saved)

    @property
    def in_tower(self) -> float:
        """Working memory of one layer of the vision tower, for packs full of pictures."""
        vision = self._vision
        numbers = 6 * vision.hidden + 2 * vision.intermediate if vision else 0
        return self._training.compute_bytes * self._num_patches * numbers

    @property
    def mask(self) -> float:
        """The attention mask, if the attention kernel does not support packs."""
        training = self._training
        has_mask = self._setup.device == "cpu" or training.attention in {"sdpa", "eager"}
        return has_mask * training.micro_batch_size * training.sequence_length**2

    def saved(self, layers: int) -> float:
        """Return the bytes that the first `layers` layers save for the backward pass."""
        moved = self._offloaded_by_layer[:layers]
        saved = sum(self._saved_in_layer[mode] for mode in self.modes[:layers])
        return saved - sum(moved) + max(moved, default=0)  # one offloaded layer is still being copied

    @property
    def offloaded(self) -> float:
        """Activations of all layers that are copied to host memory."""
        return sum(self._offloaded_by_layer)

    @cached_property
    def _saved_in_layer(self) -> dict[ActivationCheckpointing, float]:
        """Bytes that a layer saves for the backward pass, by checkpointing mode.

        `selective` saves the layer's input and the outputs of its matmuls and of attention. It saves an output that is
        added to the residual stream only if a norm follows it, and otherwise the residual stream between attention and
        feed-forward.
        """
        shape, training = self._shape, self._training
        outputs = SavedTensors(3 if self._savings.norms_follow else 2, 2, 2, 2)
        of_experts = self._counts.experts_per_token * shape.hidden_size + _rank_of_experts(shape, training.adapters)
        output_and_log_sum_exp = shape.head_dim * training.compute_bytes + FP32
        return {
            "none": self.layer,
            "selective": self._bytes_per_number * (of_experts + _count_numbers(outputs, shape)),
            "except_attention": self.hidden + self._setup.tokens * shape.num_attention_heads * output_and_log_sum_exp,
            "full": self.hidden,
        }

    @cached_property
    def _offloaded_by_layer(self) -> list[float]:
        """Bytes that each layer copies to host memory: all that it saves, or only its input if it is not compiled."""
        return [
            is_offloaded * (self._saved_in_layer[mode] if self._compiled else self.hidden)
            for mode, is_offloaded in zip(self.modes, self._is_offloaded, strict=True)
        ]


def layer_bytes(shape: ArchitectureSpec, width: int, *, compiled: bool, adapters: LoraSpec | None = None) -> int:
    """Return the bytes per token that a layer saves for the backward pass; `width` is the compute dtype's itemsize."""
    savings = family_of(shape.family).savings
    size = width * _count_numbers(savings.compiled if compiled else savings.eager, shape)
    if not compiled:
        size += FP32 * _count_numbers(savings.eager_fp32, shape)
    return size + width * _count_of_experts(shape, adapters)


def _rank_of_experts(shape: ArchitectureSpec, adapters: LoraSpec | None) -> int:
    """Return the total rank of the adapters of a token's experts: the width of the products with `lora_A`."""
    if adapters is None:
        return 0
    counts = count_model(shape)
    ranks = sum(each.num_ranks(adapters.targets) for each in counts.expert_matrices)
    return counts.experts_per_token * ranks * adapters.rank


def _count_of_experts(shape: ArchitectureSpec, adapters: LoraSpec | None) -> int:
    """Count the elements per token that routed experts save in addition to a dense layer of their total width.

    Each expert saves its copy of the token, and its output, which is multiplied by the router's weight. Frozen experts
    without adapters don't save the inputs of their matmuls, because no weight gradient needs them. Neither does a
    frozen router.
    """
    counts = count_model(shape)
    copies = counts.experts_per_token * shape.hidden_size
    if not copies or adapters is None:
        return 2 * copies
    adapted = {each.name: each.inputs for each in counts.expert_matrices if each.num_ranks(adapters.targets)}
    inputs = counts.experts_per_token * sum(adapted.values())
    return copies - shape.hidden_size - counts.feed_forward + inputs + _rank_of_experts(shape, adapters)


def _count_numbers(saved: SavedTensors, shape: ArchitectureSpec) -> int:
    return (
        saved.hidden * shape.hidden_size
        + saved.queries * shape.num_attention_heads * shape.head_dim
        + saved.keys * shape.num_key_value_heads * shape.head_dim
        + saved.intermediate * count_model(shape).feed_forward
    )
