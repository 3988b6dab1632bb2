"""The trained module: decoder, output projection and loss, for all engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ftkit.config.execution import LOGITS_ALIGNMENT, logits_rows
from ftkit.train.model.adapted_linear import TokenKeys
from ftkit.train.model.attention import packed_masks
from ftkit.train.model.hf_model import accepted_inputs, find_decoder, has_recurrent_layers
from ftkit.train.model.lora import adapters_off
from ftkit.train.model.routers import Routers
from ftkit.train.objectives import Pairs, Preferences, completion_sums
from ftkit.train.private_apis.torch import TORCH, Ctx, mark_dynamic

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one process: B packs of T tokens, or B padded rows of one document each, with N labels.

    Positions restart at 0 with each document, which is all that separates documents. With context or tensor
    parallelism, this process has a part of the packs, and what is marked with * is of the full packs.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor  # int64 [B, T]; * with tensor parallelism
    label_index: torch.Tensor  # int64 [N], indices into the flattened tokens; the next token of each is a label
    labels: torch.Tensor  # int64 [N], these next tokens
    cu_seqlens: torch.Tensor  # int32 [D + 1], offsets of D documents in the flattened tokens, then B * T; *
    max_seqlen: int  # upper bound of the documents' lengths
    is_token: torch.Tensor | None = None  # bool [B, T], false for padding; None without, or if nothing needs it
    attention_mask: torch.Tensor | None = None  # int64 [B, T], 0 for the padding on the right; None for packs
    label_sources: torch.Tensor | None = None  # int64 [N], indices in `data.source`, or [S]; None for a single source
    completion_lengths: torch.Tensor | None = None  # int64 [2 S], labels of S pairs' documents; None for next tokens
    # int32 [2 S], the bits of the stored reference's log-probabilities, which FSDP2 would cast if they were fp32.
    reference_bits: torch.Tensor | None = None
    token_keys: torch.Tensor | None = None  # int64 [B, T], random bits for dropout; * with tensor parallelism

    def pinned(self) -> MicroBatch:
        """Return a copy in pinned memory, from which copies to a GPU don't block the host."""
        return self._each(torch.Tensor.pin_memory)

    def on(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; from pinned memory, the copy is only queued."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **changed)  # type: ignore[arg-type]


class SourceLosses:
    """The losses of each of S sources, and metrics of pairs, accumulated on the device over micro-batches.

    `sums`, fp32 [2, S], are the losses of each source's labels (or pairs), and their number (exact up to 2**24);
    `metrics`, fp32 [M], those of an objective on preferences. Not a dataclass: FSDP2 casts tensors in dataclasses that
    are passed to `forward` to the compute dtype.
    """

    def __init__(self, num_sources: int, device: torch.device, num_metrics: int = 0) -> None:
        self.sums = torch.zeros((2, num_sources), dtype=torch.float32, device=device)
        self.metrics = torch.zeros(num_metrics, dtype=torch.float32, device=device)

    def add(self, losses: torch.Tensor, label_sources: torch.Tensor) -> None:
        """Add the losses of labels, fp32 [N] without a graph, each to its source, int64 [N]."""
        self.sums.index_add_(1, label_sources, torch.stack([losses, torch.ones_like(losses)]))

    def flatten(self) -> torch.Tensor:
        """Return all numbers, fp32 [2 * S + M]."""
        return torch.cat([self.sums.flatten(), self.metrics])


@dataclass(frozen=True)
class LogitTransform:
    """Transform of the output projection's products to logits: a scale, then a cap `c`, `c * tanh(x / c)`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitTransform:
        """Read the transform from a model's configuration, in which families use different keys."""
        divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
        divisor *= getattr(config, "logits_mup_width_multiplier", None) or 1.0  # Inkling
        factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
        return cls(factor / divisor, getattr(config, "final_logit_softcapping", None))

    def apply(self, products: torch.Tensor) -> torch.Tensor:
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `apply`, from the logits that it returned."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform = LogitTransform()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the logits of `hidden @ weight.T`, in fp32, and of each token, without graph.

    The forward pass also computes the gradients, while a chunk's logits exist, so that logits are neither saved nor
    recomputed. `hidden` is [N, H], `weight` [V, H], `targets` int64 [N].
    """
    loss, losses = _LinearCrossEntropy.apply(hidden, weight, targets, transform)  # type: ignore[no-untyped-call]
    return loss, losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad  # a frozen projection needs none
        losses, grad_hidden, grad_weight = _losses_in_chunks(
            hidden, weight, targets, transform, (needs_hidden, needs_weight)
        )
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Ctx, grad_output: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = (None if grad is None else grad * grad_output for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None


def linear_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform = LogitTransform()
) -> torch.Tensor:
    """Return the log-probability of each target, fp32 [N], as `linear_cross_entropy` computes it.

    The gradient of the hidden states of each target is computed in the forward pass and scaled in the backward pass; a
    trained projection's needs the scales, so its backward pass computes each chunk of logits again.
    """
    log_probs: torch.Tensor = _LinearLogProbs.apply(hidden, weight, targets, transform)  # type: ignore[no-untyped-call]
    return log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform
    ) -> torch.Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        losses, grad_hidden, _ = _losses_in_chunks(hidden, weight, targets, transform, (needs_hidden, False))
        ctx.save_for_backward(grad_hidden, *((hidden, weight, targets) if needs_weight else ()))
        ctx.transform = transform
        return -losses

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, *inputs = ctx.saved_tensors
        grad_weight = None
        if inputs:
            hidden, weight, targets = inputs
            *_, grad_weight = _losses_in_chunks(hidden, weight, targets, ctx.transform, (False, True), -gradient)
        if grad_hidden is not None:
            grad_hidden = grad_hidden * -gradient[:, None].to(grad_hidden.dtype)
        return grad_hidden, grad_weight, None, None


def _losses_in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    transform: LogitTransform,
    needs: tuple[bool, bool],
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the losses of targets, fp32 [N], and the gradients of their sum, or of their sum weighted by `scales`.

    `needs` says whether the gradients of hidden states and weight are needed.
    """
    vocabulary = weight.shape[0]
    missing = -vocabulary % LOGITS_ALIGNMENT
    if missing:  # matmuls have fast kernels for multiples
        weight = functional.pad(weight, (0, 0, 0, missing))
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    compute = _compiled() if hidden.device.type == "cuda" else _losses_and_gradient
    chunk = max(1, logits_rows(len(targets), weight.shape[0]))
    for begin in range(0, len(targets), chunk):
        part = slice(begin, begin + chunk)
        logits = hidden[part] @ weight.T
        losses[part], grad_logits = compute(logits, targets[part], vocabulary, transform)
        if scales is not None:
            grad_logits *= scales[part, None].to(grad_logits.dtype)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[part])
        if grad_weight is not None:
            if hidden.is_cuda and hidden.dtype != torch.float32 and TORCH >= (2, 11):  # in one kernel
                torch.addmm(grad_weight, grad_logits.T, hidden[part], out_dtype=torch.float32, out=grad_weight)
            else:
                grad_weight += grad_logits.T @ hidden[part]
        del logits, grad_logits  # freed before the next chunk's logits
    if grad_weight is not None:
        grad_weight = grad_weight[:vocabulary].to(weight.dtype)
    return losses, grad_hidden, grad_weight


def _losses_and_gradient(
    products: torch.Tensor, targets: torch.Tensor, vocabulary: int, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of logits [N, V], and the gradient of their sum; columns from `vocabulary` on are padding."""
    places = torch.arange(products.shape[1], device=products.device)
    logits = transform.apply(products.float())
    exact = logits.masked_fill(places >= vocabulary, -torch.inf)
    lse = exact.logsumexp(dim=-1, keepdim=True)
    chosen = exact.gather(1, targets[:, None])
    gradient = (exact - lse).exp() - (places == targets[:, None]).float()
    return (lse - chosen).squeeze(1), (gradient * transform.derivative(logits)).to(products.dtype)


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_losses_and_gradient, dynamic=True)


class CausalLM(nn.Module):
    """A transformers model, `hf_model`, with its loss.

    FSDP2 and DeepSpeed all-gather weights in hooks around `forward`. So every computation with unsharded weights goes
    through `forward`: the loss by default, else its argument `compute`. `forward` also counts what the routers of a
    mixture of experts do in training.

    If `has_head_layers`, between decoder and output projection, as in ModernBERT's decoder, the loss is computed from
    all logits of the model's own class.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        routers: Routers | None = None,
        by_weight: bool = True,
        objective: Preferences | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Wrap a model; its parameters may be on the meta device.

        Args:
            hf_model: a causal language model of transformers.
            routers: found before an engine changed the model; None: they are left alone.
            by_weight: compute the loss from the output projection's weight, a chunk of logits at a time; otherwise call
                the projection as a module, for an engine that gathers weights in hooks of every module.
            objective: an objective on preferences; None: the loss of the next token.
            autocast: creates the autocast context if the compute dtype is not that of the parameters.
        """
        super().__init__()
        self.hf_model = hf_model
        self.logit_transform = LogitTransform.of(hf_model.config)
        self.routers = routers or Routers()
        decoder, projection = find_decoder(hf_model), hf_model.get_output_embeddings()
        inside = {id(parameter) for part in (decoder, projection) for parameter in part.parameters()}
        self.has_head_layers = any(id(parameter) not in inside for parameter in hf_model.parameters())
        has_bias = getattr(projection, "bias", None) is not None
        self._tokens = TokenKeys.of(hf_model)
        self._is_chunked = by_weight and not has_bias and not self.has_head_layers
        self.objective = objective
        self._autocast = autocast

    def forward(self, *, compute: Callable[..., Any] | None = None, **inputs: Any) -> Any:
        """Return `compute(self, **inputs)`, or `self.loss(**inputs)` without `compute`."""
        if (keys := getattr(inputs.get("batch"), "token_keys", None)) is not None:
            self._tokens.keys = keys
        with self._autocast():
            return self.loss(**inputs) if compute is None else compute(self, **inputs)

    def loss(self, batch: MicroBatch, source_losses: SourceLosses | None = None) -> torch.Tensor:
        """Return the loss summed over the labels, or over the pairs: a scalar in fp32. Within `forward` only.

        Its gradient includes that of the load-balancing loss, if the routers have one. `source_losses` accumulates the
        losses of each source, if the labels are from several, and the metrics of pairs.
        """
        if self.objective is not None:
            loss, losses = self._preference_loss(self.objective, batch, source_losses)
        else:
            states = self.label_states(batch)
            if self._is_chunked:
                weight = self.hf_model.get_output_embeddings().weight
                loss, losses = linear_cross_entropy(states, weight, batch.labels, self.logit_transform)
            else:
                losses = self._unchunked_losses(states, batch)
                loss = losses.sum()
        if source_losses is not None and batch.label_sources is not None:
            source_losses.add(losses.detach(), batch.label_sources)
        return self.routers.balance(loss, batch.label_index)

    def label_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the hidden states, or the logits, of the tokens whose next one is a label, [N, ...]."""
        if self.has_head_layers:
            self._begin_routing(batch)
            states: torch.Tensor = self.hf_model(**model_inputs(self.hf_model, batch)).logits
        else:
            states = self.hidden_states(batch)
        return states.flatten(0, 1).index_select(0, batch.label_index)

    def _unchunked_losses(self, states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        projection = self.hf_model.get_output_embeddings()
        logits = states if self.has_head_layers else self.logit_transform.apply(projection(states).float())
        return functional.cross_entropy(logits.float(), batch.labels, reduction="none")

    def log_probs(self, batch: MicroBatch, states: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log-probability of each label, fp32 [N], from these `label_states` if given.

        Within `forward` only.
        """
        states = self.label_states(batch) if states is None else states
        if not self._is_chunked:
            return -self._unchunked_losses(states, batch)
        weight = self.hf_model.get_output_embeddings().weight
        return linear_log_probs(states, weight, batch.labels, self.logit_transform)

    def completion_log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the log-probability of each completion, fp32 [2 S]. Within `forward` only."""
        if batch.completion_lengths is None:
            raise TypeError("the batch has no pairs")
        return completion_sums(self.log_probs(batch), batch.completion_lengths)

    def reference_log_probs(self, batch: MicroBatch, objective: Preferences) -> torch.Tensor | None:
        """Return those by the reference, without dropout; None without a reference. Within `forward` only."""
        if batch.reference_bits is not None:
            return batch.reference_bits.view(torch.float32)
        if objective.stores_reference:
            raise TypeError("the batch has no log-probabilities of the reference")
        if not objective.has_reference:
            return None
        with torch.no_grad(), adapters_off(self.hf_model):
            return self.completion_log_probs(batch)

    def _preference_loss(
        self, objective: Preferences, batch: MicroBatch, sums: SourceLosses | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss summed over the pairs, and that of each pair, fp32 [S]."""
        if batch.completion_lengths is None:
            raise TypeError("the batch has no pairs")
        reference = self.reference_log_probs(batch, objective)
        pairs = Pairs.of(self.log_probs(batch), reference, batch.completion_lengths)
        losses, rewards = objective.losses(pairs)
        if sums is not None:
            sums.metrics += pairs.metrics(rewards.detach())
        return losses.sum(), losses

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states, [B, T, H]. Within `forward` only."""
        decoder = find_decoder(self.hf_model)
        self._begin_routing(batch)
        hidden: torch.Tensor = decoder(**model_inputs(decoder, batch)).last_hidden_state
        return hidden

    def _begin_routing(self, batch: MicroBatch) -> None:
        self.routers.begin(batch.input_ids, batch.is_token, is_packed=batch.attention_mask is None)

    def generate(self, **inputs: Any) -> torch.Tensor:
        """Return the result of transformers' `generate`: int64 [B, T + new]. Within `forward` only."""
        tokens: torch.Tensor = self.hf_model.generate(**inputs)
        return tokens


def model_inputs(module: PreTrainedModel, batch: MicroBatch) -> dict[str, object]:
    """Return a micro-batch as the keyword arguments that a transformers model accepts.

    Packs have no attention mask and no cache: with either, transformers ignores where packed documents end. Attention
    kernels find the ends in the positions or in `cu_seqlens`; recurrent layers get all packs as one row, since their
    kernels need `cu_seqlens` of a single row.
    """
    input_ids, positions = batch.input_ids, batch.position_ids
    inputs: dict[str, object] = {"use_cache": False}
    if getattr(module.config, "output_router_logits", False):
        inputs["output_router_logits"] = False  # ftkit's own hooks read them
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    else:
        if has_recurrent_layers(module.config):
            input_ids, positions = input_ids.view(1, -1), positions.view(1, -1)
            inputs["seq_idx"] = ((positions == 0).int().cumsum(1) - 1).int()
        mark_dynamic(batch.cu_seqlens, 0)  # one compiled graph for any number of documents
        inputs |= {
            "attention_mask": packed_masks(module, positions),
            "cu_seq_lens_q": batch.cu_seqlens,
            "cu_seq_lens_k": batch.cu_seqlens,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
        }
    return accepted_inputs(module, inputs | {"input_ids": input_ids, "position_ids": positions})
