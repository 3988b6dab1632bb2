"""What training minimizes besides the loss of the next token: objectives on preferences, with their options."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ftkit.spec import NUMBER, NonNegativeFloat, PositiveFloat, Spec

Objective = Literal["next_token", "dpo", "ipo", "orpo", "simpo"]

PREFERENCE_METRICS = (
    "accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected", "length_chosen",
    "length_rejected",
)  # fmt: skip
"""Metrics of objectives on preferences, means over pairs: how often the chosen completion has the higher reward, and by
how much; then rewards, log-probabilities, and tokens of both completions."""


class ReferencedSpec(Spec):
    """Options of an objective that compares the model with a reference."""

    reference: Literal["auto", "adapters_off", "stored"] = "auto"
    """What the model is compared with. `adapters_off`: the model without adapters, in each step. `stored`: the model
    before training, which computes the log-probabilities of all completions once, before step 1; they are stored with
    the prepared data, for all runs with the same weights. `auto`: `stored` with method full, else `adapters_off`."""

    def is_stored(self, method: str) -> bool:
        """Whether the reference's log-probabilities are computed before step 1 and stored."""
        return self.reference == "stored" or (self.reference == "auto" and method == "full")


class DpoSpec(ReferencedSpec):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: PositiveFloat = 0.1
    """Weight of the log-probabilities' distance from the reference: the larger, the closer the model stays to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """Assumed fraction of pairs whose completions are swapped (conservative DPO, Mitchell 2023)."""
    loss_weight_sft: NonNegativeFloat = 0.0
    """Weight of the chosen completion's own loss, its mean over tokens, which is added (Pang et al. 2024)."""


class IpoSpec(ReferencedSpec):
    """Identity preference optimization (Azar et al. 2023), on mean log-probabilities per token."""

    beta: PositiveFloat = 0.1
    """Regularization, τ in the paper: the margin of the log-probabilities is drawn to 1 / (2 beta)."""


class OrpoSpec(Spec):
    """Odds ratio preference optimization (Hong et al. 2024), without a reference."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio, λ in the paper, beside the chosen completion's own loss."""


class SimpoSpec(Spec):
    """Simple preference optimization (Meng et al. 2024), without a reference."""

    beta: PositiveFloat = 2.0
    """Scale of rewards, which are mean log-probabilities per token."""
    gamma: NonNegativeFloat = 1.0
    """Margin by which the chosen completion's reward should exceed that of the rejected one."""


PreferenceSpec = DpoSpec | IpoSpec | OrpoSpec | SimpoSpec
_OPTIONS: dict[str, type[PreferenceSpec]] = {"dpo": DpoSpec, "ipo": IpoSpec, "orpo": OrpoSpec, "simpo": SimpoSpec}


class ObjectiveSpec(Spec):
    """The objective, with options."""

    objective: Objective = "next_token"
    """What is minimized: the loss of the next token, or an objective on preferences, pairs of a chosen and a rejected
    completion, with its options under its own key. `dpo` and `ipo` compare the model with a reference; `orpo` and
    `simpo` need none."""
    dpo: DpoSpec | None = None
    """Options of objective dpo. Default if null."""
    ipo: IpoSpec | None = None
    """Options of objective ipo. Default if null."""
    orpo: OrpoSpec | None = None
    """Options of objective orpo. Default if null."""
    simpo: SimpoSpec | None = None
    """Options of objective simpo. Default if null."""

    @property
    def preferences(self) -> PreferenceSpec | None:
        """The options of an objective on preferences; None for next tokens."""
        if self.objective == "next_token":
            return None
        return getattr(self, self.objective) or _OPTIONS[self.objective].model_validate({})

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the model with a reference."""
        return isinstance(self.preferences, ReferencedSpec)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of a step and of an evaluation besides the loss."""
        return () if self.objective == "next_token" else PREFERENCE_METRICS

    @property
    def documents_per_sample(self) -> int:
        """Documents of a sample, which are in the same pack: one, or both sides of a pair."""
        return 1 if self.objective == "next_token" else 2

    def conflicts_of_objective(self) -> Iterator[str]:
        """Yield why options have no effect."""
        for name in _OPTIONS:
            if name != self.objective and getattr(self, name) is not None:
                yield f"{name} has no effect with objective '{self.objective}': set objective to '{name}', or remove it"
