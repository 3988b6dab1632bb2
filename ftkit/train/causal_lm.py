"""The loss: cross-entropy summed over the target tokens of a batch."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional

from ftkit.train.components.linear_cross_entropy import LogitTransform, linear_cross_entropy
from ftkit.train.model.build import find_decoder, find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class MicroBatch:
    """What one process computes at a time. B packs of T tokens hold N targets.

    Attributes:
        input_ids: int64 [B, T].
        position_ids: int64 [B, T]; they restart at 0 with each document, which is all that keeps documents apart.
        label_index: int64 [N], places in the flattened tokens whose next token counts.
        labels: int64 [N], those next tokens.
        cu_seqlens: int32, where each document begins in the flattened tokens, and B * T at the end.
        max_seqlen: no document is longer.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    label_index: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    def pinned(self) -> MicroBatch:
        """Return it in pinned memory, from which copies to a GPU don't stop the host."""
        return self._each(torch.Tensor.pin_memory)

    def on(self, device: torch.device) -> MicroBatch:
        """Return it on a device; from pinned memory, the copies are only queued."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **changed)


def _hidden_states(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states, [B, T, H]."""
    hidden: torch.Tensor = find_decoder(model)(**_inputs(batch)).last_hidden_state
    return hidden


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    """Return what a decoder is called with.

    There is never an attention mask and never a cache: either would make transformers overlook the borders of
    packed documents. Kernels find them in the positions, or in the borders.
    """
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "use_cache": False,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def _loss_in_chunks(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy summed over the targets, in fp32. Logits are there a chunk at a time."""
    kept = _hidden_states(model, batch).flatten(0, 1).index_select(0, batch.label_index)
    transform = LogitTransform.of(model.config)
    return linear_cross_entropy(kept, model.get_output_embeddings().weight, batch.labels, transform)


def _loss_of_whole(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the same from logits that are there as a whole: for engines that gather weights by calling modules."""
    kept = _hidden_states(model, batch).flatten(0, 1).index_select(0, batch.label_index)
    logits = LogitTransform.of(model.config).apply(model.get_output_embeddings()(kept).float())
    return functional.cross_entropy(logits, batch.labels, reduction="sum")


def add_objective(model: nn.Module, *, in_chunks: bool) -> None:
    """Give the model methods that gather the shards as its `forward` does.

    Methods rather than a wrapper, so that the names of its parameters stay those of the family.
    """
    has_bias = getattr(cast("Any", model).get_output_embeddings(), "bias", None) is not None
    loss = _loss_in_chunks if in_chunks and not has_bias else _loss_of_whole
    for name, function in {"summed_loss": loss, "packed_hidden_states": _hidden_states}.items():
        object.__setattr__(model, name, types.MethodType(function, model))
        register_fsdp_forward_method(model, name)


def summed_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy of a model that has an objective, summed over the targets."""
    loss: torch.Tensor = model.summed_loss(batch)
    return loss


def packed_hidden_states(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states of a model that has an objective, [B * T, H]."""
    hidden: torch.Tensor = model.packed_hidden_states(batch)  # not a view yet, which FSDP2 warns of
    return hidden.flatten(0, 1)


def states_and_gradients(model: Any, batch: MicroBatch, is_kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's last hidden states, and gradients of the chosen ones to the first layer's output at all tokens.

    Not to the embeddings: those of a frozen table have no gradient in training, and giving them one would compile the
    first layer anew.

    Args:
        model: a model that has an objective.
        batch: N tokens.
        is_kept: bool [N], the tokens whose hidden states the gradients are of, in a random direction.

    Returns:
        Both [N, H].
    """
    outputs: list[torch.Tensor] = []

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with find_decoder_layers(model)[0].register_forward_hook(watch):
        states = packed_hidden_states(model, batch)
    direction = torch.randn(states.shape, dtype=states.dtype, device=states.device) * is_kept[:, None]
    (gradients,) = torch.autograd.grad(states, outputs[:1], direction)
    return states.detach(), gradients.flatten(0, 1)


def own_forward(model: Any, batch: MicroBatch, num_logits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call a model's own class.

    Returns:
        Its last hidden states, [N, H]; its logits for the last `num_logits` tokens of each row, [M, V]; and those that
        `summed_loss` would compute its loss from, [M, V].
    """
    states: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    def watch_decoder(_: nn.Module, __: Any, output: Any) -> None:
        states.append(output.last_hidden_state.detach())

    def watch_projection(module: Any, __: Any, ___: Any) -> None:
        # Here, since it is only now that an engine has its weights in one piece.
        kept = states[0][:, -num_logits:].to(module.weight.dtype)
        products = functional.linear(kept, module.weight, module.bias)
        expected.append(LogitTransform.of(model.config).apply(products.detach().float()))

    with (
        find_decoder(model).register_forward_hook(watch_decoder),
        model.get_output_embeddings().register_forward_hook(watch_projection),
    ):
        logits = model(**_inputs(batch), logits_to_keep=num_logits).logits[:, -num_logits:]
    return states[0].flatten(0, 1), logits.detach().flatten(0, 1), expected[0].flatten(0, 1)
