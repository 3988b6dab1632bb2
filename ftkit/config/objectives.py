"""Objectives besides the next-token loss: distillation and objectives on preferences, with their options."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ftkit.spec import NUMBER, NonNegativeFloat, PositiveFloat, PositiveInt, Spec, Weights

Objective = Literal["next_token", "distill", "dpo", "ipo", "kto", "orpo", "simpo"]

PREFERENCE_METRICS = (
    "accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected", "length_chosen",
    "length_rejected",
)  # fmt: skip
"""Metrics of objectives on preferences, means over pairs: how often the chosen completion has the higher reward, and by
how much; then rewards, log-probabilities, and tokens of both completions. For `kto`, they are means over desirable and
over undesirable completions, and `accuracy` is how often the reward is on the right side of the reference point."""
KL_METRICS = {"dpo": ("kl_per_token",), "ipo": ("kl_per_token",), "kto": ("kl_per_token", "kl", "desirable")}
"""More metrics of objectives with a reference. `kl_per_token`: log π(y|x) - log π_ref(y|x), its mean over the tokens of
chosen completions (k1 of Schulman 2020), which estimates the divergence without bias only for the model's own samples.
`kl` and `desirable`: the reference point of `kto`, and the fraction of desirable completions."""


ENTRY_BYTES = 6  # bytes of a token of a teacher's distribution on disk
DISTILL_METRICS = ("kl", "next_token_loss", "agreement")
"""Metrics of distillation, means over tokens: the divergence from the teacher, without the factor T²; the next-token
loss; and how often the student's likeliest token is the teacher's."""
OBJECTIVE_METRICS = {*PREFERENCE_METRICS, *DISTILL_METRICS, "kl_per_token", "desirable"}


class DistillSpec(Spec):
    """Distillation from a larger model (Hinton et al. 2015), whose distributions are computed once, before step 1."""

    teacher: Weights
    """The model to learn from, with the same tokenizer. Values as for `model.weights`, except adapters and `random`."""
    top_k: PositiveInt = 64
    """Number of the likeliest tokens stored of each distribution: 6 bytes each per trained token. The total probability
    of all other tokens is stored as one value, and is part of the loss."""
    temperature: Annotated[float, Field(ge=0.1, le=100), NUMBER] = 1.0
    """Temperature of both distributions over the top k tokens and the rest, which counts as one token."""
    alpha: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.5
    """Weight of the divergence from the teacher, times temperature²; 1 - alpha is that of the next-token loss."""
    direction: Literal["forward", "reverse"] = "forward"
    """Divergence: `forward`, KL(teacher || student), covers all tokens that the teacher finds likely; `reverse`,
    KL(student || teacher), avoids tokens that it finds unlikely."""


def usual_learning_rate(objective: str, method: str) -> float:
    """Return the learning rate for 7B to 13B models; the papers halve it for 65B and 70B.

    Next token: Ivison et al. 2023 (Tulu 2), appendix; for adapters Dettmers et al. 2023 (QLoRA), table 9. Preferences:
    5e-7 in Tunstall et al. 2023 (Zephyr), Ivison et al. 2023, and Ethayarajh et al. 2024; ORPO, which also trains on
    the chosen completions, 8e-6 (Hong et al. 2024). As for the next token, adapters get ten times the rate.
    """
    full, adapters = (5e-7, 5e-6) if objective in {"dpo", "ipo", "kto", "simpo"} else (2e-5, 2e-4)
    if objective == "orpo":
        full, adapters = 8e-6, 8e-5
    return full if method == "full" else adapters


class ReferencedSpec(Spec):
    """Options of an objective that compares the model with a reference."""

    reference: Literal["auto", "adapters_off", "stored"] = "auto"
    """The reference model. `adapters_off`: the model without adapters, run in each step. `stored`: the model before
    training; it computes the log-probabilities of all completions once, before step 1, and they are stored with the
    prepared data for all runs with the same weights. `auto`: `stored` with method full, else `adapters_off`."""


class DpoSpec(ReferencedSpec):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: PositiveFloat = 0.1
    """Weight of the log-probabilities' distance from the reference: the larger, the closer the model stays to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """Assumed fraction of pairs whose completions are swapped (conservative DPO, Mitchell 2023)."""
    loss_weight_sft: NonNegativeFloat = 0.0
    """Weight of the chosen completion's next-token loss (mean over tokens) that is added (Pang et al. 2024)."""


class IpoSpec(ReferencedSpec):
    """Identity preference optimization (Azar et al. 2023), on mean log-probabilities per token."""

    beta: PositiveFloat = 0.1
    """Regularization, τ in the paper: the target margin of the mean log-ratios to the reference is 1 / (2 beta)."""


class KtoSpec(ReferencedSpec):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), on single completions with a label."""

    beta: PositiveFloat = 0.1
    """Weight of the log-probabilities' distance from the reference: the larger, the closer the model stays to it."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable completions, λ_D in the paper."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable completions, λ_U in the paper."""


class OrpoSpec(Spec):
    """Odds ratio preference optimization (Hong et al. 2024), without a reference."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio, λ in the paper, relative to the chosen completion's next-token loss."""


class SimpoSpec(Spec):
    """Simple preference optimization (Meng et al. 2024), without a reference."""

    beta: PositiveFloat = 2.0
    """Scale of rewards, which are mean log-probabilities per token."""
    gamma: NonNegativeFloat = 1.0
    """Target margin between the rewards of the chosen and the rejected completion."""


PreferenceSpec = DpoSpec | IpoSpec | KtoSpec | OrpoSpec | SimpoSpec
OPTIONS: dict[str, type[PreferenceSpec]] = {
    "dpo": DpoSpec, "ipo": IpoSpec, "kto": KtoSpec, "orpo": OrpoSpec, "simpo": SimpoSpec
}  # fmt: skip
"""The objectives on preferences, with their options."""


class ObjectiveSpec(Spec):
    """The objective, with options."""

    objective: Objective = "next_token"
    """The loss to minimize: the next-token loss; with `distill`, also the divergence from a larger model; or an
    objective on preferences: pairs of a chosen and a rejected completion, or (`kto`) completions with a label. Options
    are under the objective's own key. `dpo`, `ipo`, and `kto` compare the model with a reference; `orpo` and `simpo`
    need none."""
    distill: DistillSpec | None = None
    """Teacher and options of objective distill."""
    dpo: DpoSpec | None = None
    """Options of objective dpo. Default if null."""
    ipo: IpoSpec | None = None
    """Options of objective ipo. Default if null."""
    kto: KtoSpec | None = None
    """Options of objective kto. Default if null."""
    orpo: OrpoSpec | None = None
    """Options of objective orpo. Default if null."""
    simpo: SimpoSpec | None = None
    """Options of objective simpo. Default if null."""

    @property
    def preferences(self) -> PreferenceSpec | None:
        """The options of an objective on preferences; None for another."""
        if self.objective not in OPTIONS:
            return None
        return getattr(self, self.objective) or OPTIONS[self.objective].model_validate({})

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the model with a reference."""
        return isinstance(self.preferences, ReferencedSpec)

    @property
    def distillation(self) -> DistillSpec | None:
        return self.distill if self.objective == "distill" else None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of a step and of an evaluation besides the loss."""
        if self.objective == "distill":
            return DISTILL_METRICS
        return () if self.preferences is None else PREFERENCE_METRICS + KL_METRICS.get(self.objective, ())

    @property
    def completions_per_sample(self) -> int:
        """Completions per sample: 2 for pairs, 1 with a label (`kto`), 0 without preferences."""
        return 0 if self.preferences is None else 1 if self.objective == "kto" else 2

    @property
    def documents_per_sample(self) -> int:
        """Documents of a sample, which are in the same pack."""
        return max(1, self.completions_per_sample)

    @property
    def sample_name(self) -> str:
        return "document" if self.documents_per_sample == 1 else "pair"

    def conflicts_of_objective(self) -> Iterator[str]:
        if self.objective == "distill" and (self.distill is None or self.distill.teacher == "random"):
            yield "objective 'distill' needs a trained teacher: set distill.teacher"
        for name in ("distill", *OPTIONS):
            if name != self.objective and getattr(self, name) is not None:
                yield f"{name} has no effect with objective '{self.objective}': set objective to '{name}', or remove it"

    def warn_of_balance(self, num_desirable: int, num_undesirable: int) -> str:
        """Return a warning unless λ_D n_D : λ_U n_U of `kto` is from 1 to 4/3, as the paper advises; else no text."""
        if not isinstance(options := self.preferences, KtoSpec):
            return ""
        desirable, undesirable = options.desirable_weight * num_desirable, options.undesirable_weight * num_undesirable
        if 0.995 * undesirable <= desirable <= 1.34 * undesirable:
            return ""
        counts = f"kto: {num_desirable:,} desirable and {num_undesirable:,} undesirable completions"
        if not (num_desirable and num_undesirable):
            return f"{counts}: it learns from the difference, which needs both"
        key = "undesirable_weight" if desirable > undesirable else "desirable_weight"
        weight = getattr(options, key) * max(desirable, undesirable) / min(desirable, undesirable)
        return (
            f"{counts}, by their weights {desirable:g} to {undesirable:g}; 1 to 1.33 : 1 is advised, for example "
            f"training.kto.{key}={weight:.3g}"
        )
