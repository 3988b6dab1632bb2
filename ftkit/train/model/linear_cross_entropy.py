"""Fused output projection and cross-entropy in chunks of tokens, so that no tensor holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ftkit.config.execution import LOGITS_ALIGNMENT, logits_rows
from ftkit.train.private_apis.torch import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LogitTransform:
    """Transform of the output projection's products to logits: a scale, then a soft cap.

    A cap `c` is `c * tanh(x / c)`, as in Gemma 2.
    """

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
        """Return the logits."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `apply`, from the logits that it returned."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform = LogitTransform()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the logits of `hidden @ weight.T`, in fp32, and each token's.

    The forward pass also computes the gradients, while a chunk's logits exist, so that logits are neither saved nor
    recomputed.

    Args:
        hidden: [N, H].
        weight: [V, H].
        targets: int64 [N], token ids below V.
        transform: from products to logits.

    Returns:
        The sum, a scalar; and the losses of the tokens, [N], through which no gradients flow.
    """
    loss, losses = _LinearCrossEntropy.apply(hidden, weight, targets, transform)  # type: ignore[no-untyped-call]
    return loss, losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad  # a frozen projection needs none
        vocabulary = weight.shape[0]
        missing = -vocabulary % LOGITS_ALIGNMENT
        if missing:  # matmuls have fast kernels for multiples
            weight = functional.pad(weight, (0, 0, 0, missing))
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        compute = _compiled() if hidden.device.type == "cuda" else _losses_and_gradient
        chunk = max(1, logits_rows(len(targets), weight.shape[0]))
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits = hidden[part] @ weight.T
            losses[part], grad_logits = compute(logits, targets[part], vocabulary, transform)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[part])
            del logits, grad_logits  # freed before the next chunk's logits
        if grad_weight is not None:
            grad_weight = grad_weight[:vocabulary].to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = (None if grad is None else grad * grad_output for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the product of two matrices to an fp32 one, on GPUs in one kernel if torch supports it."""
    if total.device.type == "cuda" and right.dtype != total.dtype and TORCH >= (2, 11):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _losses_and_gradient(
    products: torch.Tensor, targets: torch.Tensor, vocabulary: int, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of logits [N, V], and the gradient of their sum: softmax minus one at the target.

    Columns from `vocabulary` on are padding: no token is there.
    """
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
