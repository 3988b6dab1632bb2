"""The recipe's `evaluation`: metrics on the validation split, the best checkpoint, and early stopping."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ftkit.spec import WHOLE_NUMBER, NonNegativeFloat, OneLine, PositiveInt, Spec

MetricName = Literal["sql", "calls", "verdict", "exact_match", "repetition"]
SCORES: dict[MetricName, tuple[str, ...]] = {
    "sql": ("sql",),
    "calls": ("calls", "call_names", "parallel_calls", "no_call"),
    "verdict": ("verdict",),
    "exact_match": ("exact_match",),
    "repetition": ("repetition",),
}
"""The scores of each metric of completions."""
_LOWER_IS_BETTER = frozenset(("loss", "perplexity", "repetition"))


class SqlExecutionSpec(Spec):
    """Execute the model's SQL in SQLite and compare the rows with those of the reference, before and after training."""

    num_questions: PositiveInt = 100
    """Number of validation questions."""
    max_new_tokens: PositiveInt = 128
    """Longest completion, in tokens."""


class GenerationSpec(Spec):
    """Generate completions for rows of the validation split, and score them."""

    metrics: tuple[MetricName, ...] = ()
    """Metrics of the completions; if empty, the columns of the data decide."""
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
    """Score completions: exact match, SQL execution, tool calls, verdicts, repetition."""
    sql_execution: SqlExecutionSpec | None = None
    """For text-to-SQL data: short for `generation` with the metric sql, before and after training."""
    best: BestSpec | None = None
    """Keep the checkpoint of the best evaluation, and export it at the end: `RUN@best`. A checkpoint is written after
    each evaluation that is better than all before it."""
    early_stopping_patience: PositiveInt | None = None
    """End training after this many evaluations in a row without improvement of `best.metric` (`loss` if `best` is
    null)."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """A smaller improvement does not count for early_stopping_patience."""

    @property
    def completions(self) -> GenerationSpec | None:
        """The generation settings, from the long or the short form."""
        if self.sql_execution is None:
            return self.generation
        short = self.sql_execution
        return GenerationSpec(
            metrics=("sql",), num_rows=short.num_questions, num_rows_during=0, max_new_tokens=short.max_new_tokens
        )

    @property
    def selection(self) -> BestSpec | None:
        """The metric of the best evaluation, if the run uses one."""
        return self.best or (None if self.early_stopping_patience is None else BestSpec())

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.generation is not None and self.sql_execution is not None:
            raise ValueError("sql_execution is short for a generation with metrics [sql]: set one of them to null")
        return self

    @model_validator(mode="after")
    def _comparisons_need_evaluations(self) -> Self:
        if self.every_steps is None and (self.best is not None or self.early_stopping_patience is not None):
            key = "best" if self.best is not None else "early_stopping_patience"
            raise ValueError(f"{key} compares evaluations during training: set every_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect without early_stopping_patience")
        return self
