"""Compute the loss from the output projection's weight, one chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from ftkit.config.execution import LOGITS_ALIGNMENT, logits_rows
from ftkit.config.objectives import DISTILL_METRICS, DistillSpec
from ftkit.train import gpu_kernels
from ftkit.train.private_apis.torch import TORCH, Ctx

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # losses of tokens, and the gradient of their sum
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere; Falcon H1; Muse
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite; Inkling
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma; RecurrentGemma; xLSTM


@dataclass(frozen=True)
class LogitTransform:
    """Transform the output projection's products to logits: a scale, then a soft cap `c`: `c * tanh(x / c)`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitTransform:
        factors, divisors, caps = (
            [value for name in names if isinstance(value := getattr(config, name, None), int | float) and value]
            for names in (_FACTORS, _DIVISORS, _CAPS)
        )
        if config.model_type == "hyperclovax":  # multiplies by what Granite divides by
            factors, divisors = divisors, factors
        return cls(prod(factors) / prod(divisors), next(iter(caps), None))

    def apply(self, products: torch.Tensor) -> torch.Tensor:
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `apply`, given the logits that it returned."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor,
    transform: LogitTransform = LogitTransform(), teacher: Teacher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the summed cross-entropy of the logits of `hidden @ weight.T` in fp32, and the detached loss per token.

    The forward pass also computes the gradients of each chunk, so that logits are neither saved nor recomputed.
    `hidden` is [N, H], `weight` [V, H], `targets` int64 [N]. Without `weight`, `hidden` are the products. With a
    teacher, return the loss of `_distillation`, and per token its loss and the `DISTILL_METRICS`, [N, 4].
    """
    loss, losses = _LinearLoss.apply(hidden, weight, targets, _TokenLoss(transform, teacher))  # type: ignore[no-untyped-call]
    return loss, losses


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor, loss: _TokenLoss
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad  # a frozen projection needs none
        needs = needs_hidden, needs_weight
        losses, grad_hidden, grad_weight = _losses_in_chunks(hidden, weight, targets, loss, needs)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return (losses if losses.ndim == 1 else losses[:, 0]).sum(), losses

    @staticmethod
    def backward(ctx: Ctx, grad_output: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = (None if grad is None else grad * grad_output for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None


def linear_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor,
    transform: LogitTransform = LogitTransform(),
) -> torch.Tensor:  # fmt: skip
    """Return the log-probability of each target, fp32 [N], as `linear_cross_entropy` computes it.

    The forward pass computes the gradient of each hidden state; the backward pass scales it. The gradient of a trained
    projection needs the scales first, so the backward pass recomputes each chunk of logits.
    """
    log_probs: torch.Tensor = _LinearLogProbs.apply(hidden, weight, targets, transform)  # type: ignore[no-untyped-call]
    return log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor, transform: LogitTransform
    ) -> torch.Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        ctx.loss = _TokenLoss(transform)
        losses, grad_hidden, _ = _losses_in_chunks(hidden, weight, targets, ctx.loss, (needs_hidden, False))
        ctx.save_for_backward(grad_hidden, *((hidden, weight, targets) if needs_weight else ()))
        return -losses

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, *inputs = ctx.saved_tensors
        grad_weight = None
        if inputs:
            hidden, weight, targets = inputs
            *_, grad_weight = _losses_in_chunks(hidden, weight, targets, ctx.loss, (False, True), -gradient)
        if grad_hidden is not None:
            grad_hidden = grad_hidden * -gradient[:, None].to(grad_hidden.dtype)
        return grad_hidden, grad_weight, None, None


class Teacher(NamedTuple):
    """A teacher's distribution at each of N targets: its top k tokens in descending order, and the tail.

    `stored`, int32 [2, N, k + 1], has the bits of fp32 log-probabilities, then the token ids; the tail comes last.
    """

    stored: torch.Tensor
    options: DistillSpec

    def at(self, part: slice) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[float, float, bool]]:
        """Return a chunk's log-probabilities and tokens, and the temperature, alpha, and whether KL is reversed."""
        (bits, tokens), options = self.stored[:, part], self.options
        constants = options.temperature, options.alpha, options.direction == "reverse"
        return (bits.view(torch.float32), tokens[:, :-1].long()), constants


class _TokenLoss(NamedTuple):
    """The loss of a chunk of logits: cross-entropy, or distillation with a teacher."""

    transform: LogitTransform
    teacher: Teacher | None = None

    def compute(self, products: torch.Tensor, targets: torch.Tensor, vocabulary: int, part: slice) -> Losses:
        """Return the losses and their gradient, which may overwrite the products."""
        if self.teacher is not None:
            function = _compiled(_distillation) if products.is_cuda else _distillation
            return function(products, targets, vocabulary, self.transform, *self.teacher.at(part))
        if gpu_kernels.has_kernels(products):
            scale, cap = self.transform.scale, self.transform.cap
            return gpu_kernels.cross_entropy(products, targets, vocabulary, scale, cap), products
        return losses_and_gradient(products, targets, vocabulary, self.transform)


def _losses_in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    loss: _TokenLoss,
    needs: tuple[bool, bool],
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the losses of targets, fp32 [N], and the gradients of their sum, weighted by `scales` if given.

    `needs` tells whether hidden states and weight need gradients. With a teacher, losses are [N, 4].
    """
    vocabulary = (hidden if weight is None else weight.T).shape[1]
    if weight is not None and (missing := -vocabulary % LOGITS_ALIGNMENT):  # fast matmul kernels need multiples
        weight = functional.pad(weight, (0, 0, 0, missing))
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight is not None and needs[1] else None
    shape = (len(targets),) if loss.teacher is None else (len(targets), 1 + len(DISTILL_METRICS))
    losses = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    for part in _chunks(len(targets), vocabulary, is_trained=grad_weight is not None):
        logits = hidden[part] if weight is None else hidden[part] @ weight.T
        if weight is None and hidden.is_cuda:
            logits = logits.clone()  # its gradient may overwrite it
        losses[part], grad_logits = loss.compute(logits, targets[part], vocabulary, part)
        if scales is not None:
            grad_logits *= scales[part, None].to(grad_logits.dtype)
        if grad_hidden is not None and weight is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[part])
        elif grad_hidden is not None:
            grad_hidden[part] = grad_logits
        if grad_weight is not None:
            if hidden.is_cuda and hidden.dtype != torch.float32 and TORCH >= (2, 11):  # in one kernel
                torch.addmm(grad_weight, grad_logits.T, hidden[part], out_dtype=torch.float32, out=grad_weight)
            else:
                grad_weight += grad_logits.T @ hidden[part]
        del logits, grad_logits  # freed before the next chunk's logits
    if grad_weight is not None:
        grad_weight = grad_weight[:vocabulary].to(hidden.dtype)
    return losses, grad_hidden, grad_weight


def _chunks(num_targets: int, vocabulary: int, *, is_trained: bool) -> Iterator[slice]:
    padded = -(-vocabulary // LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT
    size = max(1, logits_rows(num_targets, padded, is_trained=is_trained))
    yield from (slice(begin, begin + size) for begin in range(0, num_targets, size))


def losses_and_gradient(
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
def _compiled(function: Callable[..., Losses]) -> Callable[..., Losses]:
    return torch.compile(function, dynamic=True)


_FLOOR = -1e4
"""Smallest log-probability of an outcome. The tail's would be minus infinity if the top k are the whole vocabulary."""


def _distillation(
    products: torch.Tensor, targets: torch.Tensor, vocabulary: int, transform: LogitTransform,
    outcomes: tuple[torch.Tensor, torch.Tensor], options: tuple[float, float, bool],
) -> Losses:  # fmt: skip
    """Return losses and `DISTILL_METRICS` of logits [N, V], [N, 4], and the gradient of the losses' sum.

    `outcomes` and `options` are those of `Teacher.at`. Both models' outcomes are the teacher's top k tokens K, and one
    tail for all other tokens: `p = (p_i for i in K, 1 - sum of p_i)`, and likewise q for the student. The temperature T
    applies to these outcomes, `p_T = softmax(log p / T)`, because the tail's tokens are not stored; this is exact if T
    is 1 or k is the vocabulary. The loss of a token y is `a T² D - (1 - a) log q(y)` with a for alpha and
    `D = KL(p_T || q_T)` or its reverse (Hinton et al. 2015, section 2; Gu et al. 2024, equation 2). `g = dD / d log q`
    sums to 0. The gradient of D is `g_i` at a logit i in K, and `g_tail softmax(z outside K)_j` at another logit j.
    """
    (teacher, tokens), (temperature, alpha, is_reverse) = outcomes, options
    places = torch.arange(products.shape[1], device=products.device)
    logits = transform.apply(products.float())
    exact = logits.masked_fill(places >= vocabulary, -torch.inf)
    is_top = torch.zeros_like(products, dtype=torch.bool).scatter(1, tokens, value=True)
    outside = exact.masked_fill(is_top, -torch.inf)
    lse, rest = exact.logsumexp(dim=-1, keepdim=True), outside.logsumexp(dim=-1, keepdim=True)
    student = torch.cat([exact.gather(1, tokens), rest], dim=1) - lse
    expected = (teacher / temperature).log_softmax(dim=-1)
    found = (student.clamp(min=_FLOOR) / temperature).log_softmax(dim=-1)
    if is_reverse:
        weights, ratios = found.exp(), found - expected
        divergence = (weights * ratios).sum(dim=-1, keepdim=True)
        by_outcome = weights * (ratios - divergence) / temperature
    else:
        divergence = (expected.exp() * (expected - found)).sum(dim=-1, keepdim=True)
        by_outcome = (found.exp() - expected.exp()) / temperature
    by_outcome = alpha * temperature**2 * by_outcome
    likely = (1 - alpha) * ((exact - lse).exp() - (places == targets[:, None]).float())
    tail = (outside - rest.nan_to_num(neginf=0.0)).exp() * by_outcome[:, -1:]
    gradient = ((likely + tail) * transform.derivative(logits)).to(products.dtype)
    at_top = (1 - alpha) * (student[:, :-1].exp() - (tokens == targets[:, None]).float()) + by_outcome[:, :-1]
    slope = transform.derivative(logits.gather(1, tokens))
    gradient = gradient.scatter(1, tokens, (at_top * slope).to(products.dtype))
    divergence, next_token = divergence.squeeze(1), (lse - exact.gather(1, targets[:, None])).squeeze(1)
    agrees = (exact.argmax(dim=-1) == tokens[:, 0]).float()
    loss = alpha * temperature**2 * divergence + (1 - alpha) * next_token
    return torch.stack([loss, divergence, next_token, agrees], dim=1), gradient


def linear_top_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor | None, transform: LogitTransform, vocabulary: int, top_k: int
) -> torch.Tensor:
    """Return a teacher's distributions over the first `vocabulary` tokens as `Teacher.stored`, without a graph.

    NaN stays NaN.
    """
    stored = torch.empty((2, len(hidden), top_k + 1), dtype=torch.int32, device=hidden.device)
    for part in _chunks(len(hidden), vocabulary, is_trained=False):
        products = hidden[part, :vocabulary] if weight is None else hidden[part] @ weight[:vocabulary].T
        log_probs = transform.apply(products.float()).log_softmax(dim=-1)
        top, tokens = log_probs.topk(top_k)
        tail = log_probs.scatter_(1, tokens, -torch.inf).logsumexp(dim=-1, keepdim=True)
        stored[0, part] = torch.cat([top, tail], dim=1).clamp(min=_FLOOR, max=0).view(torch.int32)
        stored[1, part] = functional.pad(tokens, (0, 1))
        del products, log_probs
    return stored
