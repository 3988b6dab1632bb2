"""The recipe's `evaluation`: metrics on the validation split, the best checkpoint, and early stopping."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ftkit.spec import WHOLE_NUMBER, NonNegativeFloat, OneLine, PositiveInt, Spec

SCORES: dict[str, tuple[str, ...]] = {
    "calls": ("calls", "call_names", "parallel_calls", "no_call"),
    "exact_match": ("exact_match",),
    "repetition": ("repetition",),
}
"""The scores of each metric of completions that ftkit has."""
_LOWER_IS_BETTER = frozenset(("loss", "perplexity", "repetition"))


class GenerationSpec(Spec):
    """Generate completions for rows of the validation split, and score them."""

    metrics: tuple[OneLine, ...] = ()
    """`calls`, `exact_match`, `repetition`, or functions of `data.task`. If empty: all metrics of the task,
    `calls` for rows with tools, and repetition."""
    num_rows: PositiveInt = 100
    """Number of rows before and after training."""
    num_rows_during: Annotated[int, Field(ge=0, le=2**31), WHOLE_NUMBER] = 20
    """Number of rows every `evaluation.every_steps`; always the same rows."""
    max_new_tokens: PositiveInt = 128
    """Longest completion, in tokens."""


class BestSpec(Spec):
    """The metric of the best evaluation."""

    metric: OneLine = "loss"
    """`loss`, `perplexity`, `loss/SOURCE`, or a score of `evaluation.generation`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto`: lower for losses, perplexity and repetition, else higher."""

    @property
    def is_lower_better(self) -> bool:
        """Whether lower values are better."""
        return self.mode == "min" or (self.mode == "auto" and self.metric.partition("/")[0] in _LOWER_IS_BETTER)


class EvaluationSpec(Spec):
    """Evaluations on the validation split, before, during, and after training."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations during training."""
    max_packs: PositiveInt = 64
    """Measure perplexity on at most this many packs of the validation split."""
    generation: GenerationSpec | None = None
    """Score completions: exact match, tool calls, repetition, and metrics of `data.task`."""
    best: BestSpec | None = None
    """Keep the checkpoint of the best evaluation, and export it at the end: `RUN@best`. A checkpoint is written after
    each evaluation that is better than all before it."""
    early_stopping_patience: PositiveInt | None = None
    """End training after this many evaluations in a row without improvement of `best.metric` (`loss` if `best` is
    null)."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """A smaller improvement does not count for early_stopping_patience."""

    @property
    def selection(self) -> BestSpec | None:
        """The metric of the best evaluation, if the run uses one."""
        return self.best or (None if self.early_stopping_patience is None else BestSpec())

    @model_validator(mode="after")
    def _comparisons_need_evaluations(self) -> Self:
        if self.every_steps is None and (self.best is not None or self.early_stopping_patience is not None):
            key = "best" if self.best is not None else "early_stopping_patience"
            raise ValueError(f"{key} compares evaluations during training: set every_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect without early_stopping_patience")
        return self
