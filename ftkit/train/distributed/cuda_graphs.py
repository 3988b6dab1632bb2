"""CUDA graphs of the decoder's forward and backward pass, so that one process launches a micro-batch as two graphs.

A decoder has thousands of kernels, and short micro-batches finish them sooner than the host launches them. The graphs
have the same kernels in the same order. Embedding to final norm is captured; output projection, loss and update are
not, because their shapes depend on the number of labels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ftkit.config.execution import CHUNK_LOGITS
from ftkit.errors import one_line
from ftkit.train.causal_lm import CausalLM, MicroBatch
from ftkit.train.memory.activation_checkpointing import activation_checkpointing_of
from ftkit.train.model.expert_adapters import experts_in_layers
from ftkit.train.model.hf_model import find_decoder_layers, has_recurrent_layers, text_part_of
from ftkit.train.private_apis.transformers import computes_experts_one_by_one

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ftkit.train.private_apis.torch import Ctx

log = logging.getLogger(__name__)

Receive = Callable[["torch.Tensor", "torch.Tensor"], None]  # is called with a parameter and its gradient

MIN_DOCUMENTS = 64  # the least capacity of `cu_seqlens`, as of cuDNN's graphs


def can_capture(model: CausalLM) -> bool:
    """Return whether a capture of the decoder is worth a try: its kernels should be the same for all packs."""
    config = text_part_of(model.hf_model.config)
    drops_layers = getattr(config, "layerdrop", 0.0) > 0
    are_grouped = next(experts_in_layers(model.hf_model), None) is not None
    if model.routers.exist and (not are_grouped or computes_experts_one_by_one(config)):
        return False  # tokens per expert would be sizes of tensors
    return not (model.has_head_layers or has_recurrent_layers(config) or drops_layers)


class GraphedDecoder:
    """Captures the decoder at its first call, and replays it at all later ones.

    Gradients are in the memory of the backward graph until the next forward. If the decoder can't be captured, such as
    one that waits for the device, `hidden_states` returns None.
    """

    def __init__(
        self,
        model: CausalLM,
        leaves: Sequence[torch.Tensor],
        cast: Callable[[Receive], AbstractContextManager[object]],
        receive: Receive,
    ) -> None:
        """Prepare to capture; `receive` is called in each backward pass, with every parameter that has a gradient.

        Args:
            model: the model with the decoder.
            leaves: parameters that the model computes with, and the input of copies of others.
            cast: a context in which the model computes with copies; their gradients go to its argument.
            receive: keeps or adds up the gradients.
        """
        self._model = model
        self._leaves = leaves
        self._cast = cast
        self._receive = receive
        self._captured: _Captured | None = None
        self._is_impossible = False
        self._anchor = torch.zeros((), requires_grad=True)

    def hidden_states(self, batch: MicroBatch, *, is_only: bool) -> torch.Tensor | None:
        """Return the last hidden states, [B, T, H], valid until the next call; None if it can't be captured.

        `is_only` tells whether steps have one micro-batch, so that gradients are not added up elsewhere.
        """
        if self._is_impossible or batch.attention_mask is not None or batch.picture_tokens is not None:
            return None
        if self._captured is None or not self._captured.accepts(batch):
            self.release()
            self._capture(batch, is_only=is_only)
        if self._captured is None:
            return None
        self._model.begin_routing(batch)  # the loss reads the sums of this micro-batch's shape
        self._captured.replay_forward(batch)
        hidden: torch.Tensor = _Replay.apply(self._anchor, self._captured)  # type: ignore[no-untyped-call]
        return hidden

    def release(self) -> None:
        """Free the memory of the graphs; the next call captures again."""
        if self._captured is not None:
            self._captured.move_gradients()
            self._captured = None
            torch.cuda.empty_cache()

    def _capture(self, batch: MicroBatch, *, is_only: bool) -> None:
        stream = torch.cuda.current_stream()
        try:
            self._captured = _Captured(self._model, self._leaves, batch, self._cast, self._receive)
        except Exception as error:  # noqa: BLE001 - each library has its own errors for what can't be captured
            torch.cuda.set_stream(stream)  # a failed capture leaves its own
            self._give_up(one_line(error))
            return
        free, _ = torch.cuda.mem_get_info(batch.input_ids.device)
        sums = 0 if is_only else 4 * self._captured.num_trained
        if free < _bytes_of_loss(self._model) + sums:
            self._give_up(f"they leave only {free / 2**30:.1f} GiB of memory free")
        else:
            log.info("the decoder's forward and backward pass were captured as CUDA graphs")

    def _give_up(self, reason: str) -> None:
        log.info("layers run without CUDA graphs, which takes the host longer: %s", reason)
        self._is_impossible = True
        self.release()


class _Captured:
    """The two graphs, with the tensors that they read and write."""

    def __init__(
        self,
        model: CausalLM,
        leaves: Sequence[torch.Tensor],
        batch: MicroBatch,
        cast: Callable[[Receive], AbstractContextManager[object]],
        receive: Receive,
    ) -> None:
        self._receive = receive
        inputs = _inputs_of(batch)
        device = batch.input_ids.device
        with torch.random.fork_rng([device]):  # host sync: once
            state = torch.cuda.get_rng_state(device)
            # Libraries build kernels for this number of documents, which they can't do during a capture.
            with cast(lambda *_: None):  # its backward pass too, which may compute layers again
                hidden = model(compute=CausalLM.hidden_states, batch=_with_room(inputs))
                torch.autograd.grad(hidden, leaves, torch.zeros_like(hidden), allow_unused=True)
            del hidden
            is_recomputed = "full" in map(activation_checkpointing_of, find_decoder_layers(model.hf_model))
            if is_recomputed and not state.equal(torch.cuda.get_rng_state(device)):
                raise RuntimeError("a decoder with recomputed layers draws random numbers, which a graph can't repeat")
        self._inputs = _with_room(inputs)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and their gradients
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Other threads prefetch batches, so they may allocate pinned memory during the capture.
        capture = partial(
            torch.cuda.graph, pool=torch.cuda.graph_pool_handle(), stream=stream, capture_error_mode="thread_local"
        )  # fmt: skip
        # Host syncs: once.
        with ExitStack() as copies:
            with capture(self._forward), _without_syncs():
                copies.enter_context(cast(lambda *own: self._gradients.append(own)))
                hidden = model(compute=CausalLM.hidden_states, batch=self._inputs)
            self._gradient = torch.empty_like(hidden)
            with capture(self._backward), _without_syncs():
                computed = torch.autograd.grad(hidden, leaves, self._gradient, allow_unused=True)
        self.hidden = hidden.detach()
        self._gradients += [(one, each) for one, each in zip(leaves, computed, strict=True) if each is not None]
        self.num_trained = sum(each.numel() for _, each in self._gradients)

    def accepts(self, batch: MicroBatch) -> bool:
        given, own = (
            {name: each.shape for name, each in _tensors(inputs).items()}
            for inputs in (_inputs_of(batch), self._inputs)
        )
        documents, most = (each.pop("cu_seqlens")[0] for each in (given, own))
        return given == own and documents <= most

    def replay_forward(self, batch: MicroBatch) -> None:
        self.move_gradients()
        inputs = _tensors(_inputs_of(batch))
        for name, own in _tensors(self._inputs).items():
            given = inputs[name]
            if name == "cu_seqlens":  # the rest are empty documents
                own[len(given) :].fill_(batch.input_ids.numel())
            own[: len(given)].copy_(given)
        self._forward.replay()

    def replay_backward(self, gradient: torch.Tensor) -> None:
        """Compute the parameters' gradients, given that of the hidden states."""
        self._gradient.copy_(gradient)
        self._backward.replay()
        for parameter, own in self._gradients:
            self._receive(parameter, own)

    def move_gradients(self) -> None:
        """Move gradients that a micro-batch adds to, because the next replay overwrites them here."""
        for parameter, own in self._gradients:
            if parameter.grad is own:
                parameter.grad = own.clone()


@contextmanager
def _without_syncs() -> Iterator[None]:
    """Raise an error where the host would wait for the device: after CUDA's own, torch could not end the capture.

    The mode is the process's: other threads must not copy to or from the device without `non_blocking` meanwhile.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _bytes_of_loss(model: CausalLM) -> int:
    """Return about the memory that loss and update need beside the graphs.

    These are two chunks of logits in fp32; and of a trained projection, a copy, its gradient, and their sum in fp32.
    """
    weight = model.hf_model.get_output_embeddings().weight
    return 8 * CHUNK_LOGITS + (8 * weight.numel() if weight.requires_grad else 0)


class _Replay(torch.autograd.Function):
    """The decoder's last hidden states as a function of an anchor, which has autograd call the backward pass."""

    @staticmethod
    def forward(ctx: Ctx, _: torch.Tensor, captured: _Captured) -> torch.Tensor:
        ctx.captured = captured
        hidden: torch.Tensor = captured.hidden.detach()
        return hidden

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.captured.replay_backward(gradient)
        return None, None


def _inputs_of(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch without what only the loss reads: its shapes differ between micro-batches."""
    nothing = batch.labels[:0]
    return replace(
        batch, labels=nothing, label_index=nothing, label_sources=None, completion_lengths=None, reference_bits=None,
        is_desirable=None, kl_bits=None, teacher=None,
    )  # fmt: skip


def _with_room(inputs: MicroBatch) -> MicroBatch:
    """Return a copy with room for more documents: `cu_seqlens` is padded by empty ones."""
    num = len(inputs.cu_seqlens) - 1
    room = max(MIN_DOCUMENTS, 1 << (num - 1).bit_length()) - num
    padded = functional.pad(inputs.cu_seqlens, (0, room), value=inputs.input_ids.numel())
    return replace(inputs.each(torch.clone), cu_seqlens=padded)


def _tensors(inputs: MicroBatch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
