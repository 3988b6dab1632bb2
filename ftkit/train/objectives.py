"""Objectives on preferences: losses and metrics of samples, computed from log-probabilities of completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.functional import logsigmoid

from ftkit.config.objectives import DpoSpec, IpoSpec, KtoSpec, OrpoSpec, PreferenceSpec, SimpoSpec

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan


@dataclass(frozen=True)
class Pairs:
    """S pairs; each tensor is fp32 [2, S]: chosen completions, then rejected ones.

    With `is_desirable`, samples are single completions, and tensors are [1, S].
    """

    log_probs: torch.Tensor  # sums over the tokens of a completion, with a graph
    reference: torch.Tensor  # the reference's `log_probs`, without a graph; zeros without a reference
    lengths: torch.Tensor  # tokens of a completion, including the end of its turn
    is_desirable: torch.Tensor | None = None  # bool [S]
    kl: torch.Tensor | None = None  # scalar, the reference point of objective kto

    @property
    def log_ratios(self) -> torch.Tensor:
        return self.log_probs - self.reference

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probabilities per token."""
        return self.log_probs / self.lengths

    def margins(self, values: torch.Tensor) -> torch.Tensor:
        """Return chosen minus rejected values, [S]; for single completions, negate the undesirable ones."""
        if self.is_desirable is None:
            return values[0] - values[1]
        return torch.where(self.is_desirable, values[0], -values[0])

    def metrics(self, rewards: torch.Tensor, *, has_reference: bool) -> torch.Tensor:
        """Return the objective's metrics summed over the pairs, fp32 [M], given detached rewards."""
        margins, ratios = self.margins(rewards), self.log_ratios.detach()
        sides, others = [rewards, self.log_probs.detach(), self.lengths, ratios], []
        is_right = margins > 0
        if self.is_desirable is not None and self.kl is not None:
            sides = [torch.cat([each * self.is_desirable, each * ~self.is_desirable]) for each in sides]
            is_right, others = self.margins(ratios - self.kl) > 0, [self.kl.expand_as(margins), self.is_desirable]
        *sides, (of_chosen, _) = sides
        values = [is_right, margins, *torch.cat(sides), *[of_chosen] * has_reference, *others]
        return torch.stack([value.float().sum() for value in values])


def completion_sums(log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum the log-probabilities of labels, fp32 [N], over completions of these lengths, int64 [C]; return fp32 [C]."""
    # Deterministic, unlike `index_add`. `unsafe` skips the checks of lengths, which would be a host sync.
    return torch.segment_reduce(log_probs, "sum", lengths=lengths, unsafe=True)


@dataclass(frozen=True)
class Preferences:
    """An objective on preferences with its options.

    Notation: x is a prompt, y_w its chosen and y_l its rejected completion, |y| the tokens of a completion, π the
    trained model and π_ref the reference; log π(y|x) is the sum over the tokens of y.
    """

    options: PreferenceSpec
    has_reference: bool
    stores_reference: bool = False

    @classmethod
    def of(cls, training: TrainingPlan) -> Self | None:
        """Return the objective of these settings; None for `next_token`."""
        if training.preferences is None:
            return None
        return cls(training.preferences, training.has_reference, training.stores_reference)

    def initial_loss(self, pairs: Pairs) -> float | None:
        """Return the mean loss while the model equals the reference; None if it depends on the completions."""
        if not self.has_reference or (isinstance(self.options, DpoSpec) and self.options.loss_weight_sft):
            return None
        zeros = torch.zeros_like(pairs.reference)
        return float(self.losses(replace(pairs, log_probs=zeros, reference=zeros))[0].mean())

    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair, [S], and the rewards of both completions, [2, S]."""
        return _LOSSES[type(self.options)](pairs, self.options)


def dpo(pairs: Pairs, options: DpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct preference optimization (Rafailov et al. 2023, equation 7): `-log sigmoid(r_w - r_l)`.

    Rewards are `r = β (log π(y|x) - log π_ref(y|x))`. With `label_smoothing` ε (Mitchell 2023, equation 3):
    `-(1 - ε) log sigmoid(r_w - r_l) - ε log sigmoid(r_l - r_w)`. The loss adds `-log π(y_w|x) / |y_w|`, weighted by
    `loss_weight_sft` (Pang et al. 2024, equation 1).
    """
    rewards = options.beta * pairs.log_ratios
    margins, smoothing = rewards[0] - rewards[1], options.label_smoothing
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    return losses - options.loss_weight_sft * pairs.means[0], rewards


def ipo(pairs: Pairs, options: IpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Identity preference optimization (Azar et al. 2023, equation 17): `(h_w - h_l - 1 / (2 β))²`.

    `h = (log π(y|x) - log π_ref(y|x)) / |y|`. The paper uses sums; the mean over the tokens, as in TRL, makes β
    independent of the lengths. Rewards are `β h`.
    """
    ratios = pairs.log_ratios / pairs.lengths
    return (ratios[0] - ratios[1] - 1 / (2 * options.beta)).square(), options.beta * ratios


def kto(singles: Pairs, options: KtoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 8).

    The loss is `λ_D (1 - sigmoid(β (h - z)))` for a desirable completion, and `λ_U (1 - sigmoid(β (z - h)))` for an
    undesirable one, with `h = log π(y|x) - log π_ref(y|x)`. The reference point z, without a gradient, estimates the
    divergence from the reference: the mean of h over prompts with mismatched completions (`mismatch_completions`), at
    least 0. It is a mean over a step; the paper uses a micro-batch. Rewards are `β h`.
    """
    if singles.is_desirable is None or singles.kl is None:
        raise TypeError("the completions have no labels, or the step no reference point")
    weights = torch.where(singles.is_desirable, options.desirable_weight, options.undesirable_weight)
    ratios = singles.log_ratios
    return weights * torch.sigmoid(-options.beta * singles.margins(ratios - singles.kl)), options.beta * ratios


def orpo(pairs: Pairs, options: OrpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Odds ratio preference optimization (Hong et al. 2024, equations 3 to 7).

    `-log P_w - β log sigmoid(log odds_w - log odds_l)` with `log P = log π(y|x) / |y|` and `odds = P / (1 - P)`.
    Rewards are `β log P`.
    """
    means = pairs.means
    odds = means - torch.log1p(-means.exp().clamp(max=1 - torch.finfo(means.dtype).eps))  # keeps P below 1 if rounded
    return -means[0] - options.beta * logsigmoid(odds[0] - odds[1]), options.beta * means


def simpo(pairs: Pairs, options: SimpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Simple preference optimization (Meng et al. 2024, equation 6): `-log sigmoid(r_w - r_l - gamma)`.

    Rewards are `r = β log π(y|x) / |y|`.
    """
    rewards = options.beta * pairs.means
    return -logsigmoid(rewards[0] - rewards[1] - options.gamma), rewards


_LOSSES: dict[type[PreferenceSpec], Callable[[Pairs, Any], tuple[torch.Tensor, torch.Tensor]]] = {
    DpoSpec: dpo, IpoSpec: ipo, KtoSpec: kto, OrpoSpec: orpo, SimpoSpec: simpo
}  # fmt: skip
