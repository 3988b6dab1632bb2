"""Objectives on preferences: losses and metrics of pairs, from the log-probabilities of their completions' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn.functional import logsigmoid

from ftkit.config.objectives import DpoSpec, IpoSpec, OrpoSpec, PreferenceSpec, SimpoSpec

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan


@dataclass(frozen=True)
class Pairs:
    """S pairs; each tensor is fp32 [2, S], of the chosen and of the rejected completions."""

    log_probs: torch.Tensor  # sums over the tokens of a completion, in the graph
    reference: torch.Tensor  # the same by the reference, without a graph; zeros without one
    lengths: torch.Tensor  # tokens of a completion, with the end of its turn

    @classmethod
    def of(cls, log_probs: torch.Tensor, reference: torch.Tensor | None, lengths: torch.Tensor) -> Self:
        """Return pairs by the log-probabilities of labels, fp32 [N], and the reference's `completion_sums`.

        `lengths`, int64 [2 S], are those of the completions, chosen and rejected ones in turn.
        """
        sums = completion_sums(log_probs, lengths).view(-1, 2).T
        expected = torch.zeros_like(sums) if reference is None else reference.view(-1, 2).T
        return cls(sums, expected, lengths.to(sums.dtype).view(-1, 2).T)

    @property
    def log_ratios(self) -> torch.Tensor:
        """Log-probabilities relative to the reference."""
        return self.log_probs - self.reference

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probabilities per token."""
        return self.log_probs / self.lengths

    def metrics(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the sums over the pairs of `PREFERENCE_METRICS`, fp32 [M], for rewards without a graph, [2, S]."""
        margins = rewards[0] - rewards[1]
        values = [(margins > 0).float(), margins, *rewards, *self.log_probs.detach(), *self.lengths]
        return torch.stack([value.sum() for value in values])


def completion_sums(log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum the log-probabilities of labels, fp32 [N], over completions of these lengths, int64 [2 S]: fp32 [2 S]."""
    # In a fixed order, unlike `index_add`; the checks of lengths would wait for the device.
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
        """Return the objective of these settings; None for next tokens."""
        if training.preferences is None:
            return None
        return cls(training.preferences, training.has_reference, training.stores_reference)

    @property
    def initial_loss(self) -> float | None:
        """The loss of each pair while the model equals the reference; None if it depends on the pair."""
        zero = torch.zeros(2, 1, dtype=torch.float64)
        if not self.has_reference or (isinstance(self.options, DpoSpec) and self.options.loss_weight_sft):
            return None
        return float(self.losses(Pairs(zero, zero, torch.ones_like(zero)))[0])

    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair, [S], and the rewards of both completions, [2, S]."""
        match self.options:
            case DpoSpec() as options:
                return dpo(pairs, options)
            case IpoSpec() as options:
                return ipo(pairs, options)
            case OrpoSpec() as options:
                return orpo(pairs, options)
            case SimpoSpec() as options:
                return simpo(pairs, options)
            case _:
                raise TypeError(self.options)


def dpo(pairs: Pairs, options: DpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct preference optimization (Rafailov et al. 2023, equation 7): `-log sigmoid(r_w - r_l)`.

    Rewards are `r = β (log π(y|x) - log π_ref(y|x))`. With `label_smoothing` ε (Mitchell 2023, equation 3):
    `-(1 - ε) log sigmoid(r_w - r_l) - ε log sigmoid(r_l - r_w)`. To that, `-log π(y_w|x) / |y_w|` is added, weighted by
    `loss_weight_sft` (Pang et al. 2024, equation 1).
    """
    rewards = options.beta * pairs.log_ratios
    margins, smoothing = rewards[0] - rewards[1], options.label_smoothing
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    return losses - options.loss_weight_sft * pairs.means[0], rewards


def ipo(pairs: Pairs, options: IpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Identity preference optimization (Azar et al. 2023, equation 17): `(h_w - h_l - 1 / (2 β))²`.

    `h = (log π(y|x) - log π_ref(y|x)) / |y|`: the paper has the sums; the mean over the tokens, as in TRL, makes β
    independent of lengths. Rewards are `β h`.
    """
    ratios = pairs.log_ratios / pairs.lengths
    return (ratios[0] - ratios[1] - 1 / (2 * options.beta)).square(), options.beta * ratios


def orpo(pairs: Pairs, options: OrpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Odds ratio preference optimization (Hong et al. 2024, equations 3 to 7).

    `-log P_w - β log sigmoid(log odds_w - log odds_l)` with `log P = log π(y|x) / |y|` and `odds = P / (1 - P)`.
    Rewards are `β log P`.
    """
    means = pairs.means
    odds = means - torch.log1p(-means.exp().clamp(max=1 - torch.finfo(means.dtype).eps))  # P is below 1, rounded or not
    return -means[0] - options.beta * logsigmoid(odds[0] - odds[1]), options.beta * means


def simpo(pairs: Pairs, options: SimpoSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Simple preference optimization (Meng et al. 2024, equation 6): `-log sigmoid(r_w - r_l - gamma)`.

    Rewards are `r = β log π(y|x) / |y|`.
    """
    rewards = options.beta * pairs.means
    return -logsigmoid(rewards[0] - rewards[1] - options.gamma), rewards
