"""Checks of a recipe's evaluation against its data, its generation and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.config.evaluation import SCORES
from ftkit.config.sources import GeneratedSource
from ftkit.errors import Problem, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.evaluation import GenerationSpec
    from ftkit.config.recipe import RecipeSpec


def check_evaluation(recipe: RecipeSpec) -> Iterator[Problem]:
    """Yield the problems of a recipe's evaluation."""
    evaluation, where = recipe.evaluation, f"recipe {recipe.name}"
    no_split = "there is no validation split.", "Set data.validation, for example data.validation.count=200."
    if evaluation.every_steps is not None and not recipe.data.has_validation:
        yield Problem(where, "evaluation.every_steps", *no_split)
    generation = evaluation.completions
    if generation is not None:
        key = "generation" if evaluation.sql_execution is None else "sql_execution"
        yield from _completions(recipe, generation, f"evaluation.{key}", no_split)
    if evaluation.selection is not None:
        yield from _selection(recipe, evaluation.selection.metric, generation)


def _completions(
    recipe: RecipeSpec, generation: GenerationSpec, key: str, no_split: tuple[str, str]
) -> Iterator[Problem]:
    source, where, num_rows = recipe.data.source, f"recipe {recipe.name}", recipe.data.num_validation_rows
    is_short = key.endswith("sql_execution")
    if is_short and recipe.data.format.kind != "prompt-completion":
        yield Problem(where, key, "needs data.format.kind 'prompt-completion'.")
    if recipe.data.format.kind == "text":
        yield Problem(where, key, "plain text has no turns to complete.", "Omit it; every_steps measures the loss.")
    if "sql" in generation.metrics and isinstance(source, GeneratedSource) and source.generator != "text-to-sql":
        yield Problem(where, key, f"generator '{source.generator}' generates no SQL.")
    if not recipe.data.has_validation:
        yield Problem(where, key, *no_split)
    elif num_rows is not None and generation.num_rows > num_rows and is_short:
        yield Problem(
            where, f"{key}.num_questions",
            f"{plural(generation.num_rows, 'question')} requested, the validation split has {plural(num_rows, 'row')}.",
        )  # fmt: skip


def _selection(recipe: RecipeSpec, metric: str, generation: GenerationSpec | None) -> Iterator[Problem]:
    """Check that each evaluation during training measures the metric that selects the best one."""
    where, key = f"recipe {recipe.name}", "evaluation.best.metric"
    names = [source.name for source in recipe.data.sources]
    names = [f"{name}.{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]
    losses = ["loss", "perplexity", *(f"loss/{name}" for name in names if len(names) > 1)]
    chosen = SCORES if generation is None or not generation.metrics else generation.metrics
    scores = [score for name in chosen for score in SCORES[name]]
    if metric in losses:
        return
    if metric not in scores:
        yield Problem(where, key, f"'{metric}' is not measured.", f"Use one of {', '.join([*losses, *scores])}.")
    elif generation is None or not generation.num_rows_during:
        yield Problem(
            where, key, f"'{metric}' is not measured during training.",
            f"Set evaluation.generation, for example evaluation.generation.metrics=[{metric}].",
        )  # fmt: skip
