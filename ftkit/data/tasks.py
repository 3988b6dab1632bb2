"""Run a recipe's task: its generator, its prompts, and its metrics."""

from __future__ import annotations

import sys
import traceback
from functools import lru_cache, partial
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.config.data import DataSpec, TaskFile
    from ftkit.config.data_sources import GeneratedSource

ResultT = TypeVar("ResultT")


def generate_rows(data: DataSpec, source: GeneratedSource) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a task to train and to validate on.

    Raises:
        DataError: the task failed, or returned something else.
    """
    task = _task_of(data)

    def run() -> tuple[list[Any], list[Any]]:
        generate = _load(task).generate
        train, heldout = generate(
            seed=source.seed, num_train=source.num_train, num_heldout=source.num_heldout, **source.options
        )
        return list(islice(train, source.num_train)), list(islice(heldout, source.num_heldout))

    splits = _run(task, "generate", run)
    for rows, wanted, split in zip(splits, (source.num_train, source.num_heldout), ("train", "validate"), strict=True):
        if len(rows) < wanted:
            raise DataError(
                f"{task.file}: 'generate' returned {len(rows):,} of {wanted:,} rows to {split} on",
                fix="correct the task, or request fewer rows in data.source",
            )
        for bad in (row for row in rows if not isinstance(row, dict)):
            raise DataError(
                f"{task.file}: 'generate' returned a row that is not a dict: {str(bad)[:80]}", fix="correct the task"
            )
    return splits


def read_pair(data: DataSpec, columns: Mapping[str, Any], *, with_completion: bool = True) -> dict[str, Any]:
    """Return the prompt, and the completion, that a task makes of a row: each is a text or a list of turns.

    Raises:
        DataError: the task failed.
    """
    task = _task_of(data)
    names = ("prompt", "completion") if with_completion else ("prompt",)
    return {name: _run(task, name, partial(_call, task, name, dict(columns))) for name in names}


def score_row(task: TaskFile, metric: str, columns: Mapping[str, Any], completion: str) -> float | None:
    """Return the score of a completion, from 0 to 1, by a task's metric; None if it does not apply to the row.

    Raises:
        DataError: the task failed, or returned something else.
    """

    def run() -> float | None:
        score = _call(task, metric, dict(columns), completion)
        return None if score is None else float(score)

    score = _run(task, metric, run)
    if score is not None and not 0 <= score <= 1:
        raise DataError(
            f"{task.file}: the metric '{metric}' returned {score}", fix="return a score from 0 to 1, or None"
        )
    return score


def _task_of(data: DataSpec) -> TaskFile:
    if data.task is None:
        raise TypeError("the recipe has no task")
    return data.task


def _call(task: TaskFile, name: str, *args: object) -> Any:
    return getattr(_load(task), name)(*args)


@lru_cache(maxsize=8)
def _load(task: TaskFile) -> ModuleType:
    """Run a task's file as a module. Its text is the plan's, which may differ from the file's by now."""
    module = ModuleType(f"ftkit_task_{task.digest[:16]}")
    module.__file__ = task.file
    sys.modules[module.__name__] = module  # dataclasses look up their module
    exec(compile(task.text, task.file, "exec"), module.__dict__)  # noqa: S102 - the project's own code
    return module


def _run(task: TaskFile, name: str, function: Callable[[], ResultT]) -> ResultT:
    """Call a task's code.

    Raises:
        DataError: it raised anything; with the line of the task.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == task.file]
        place = f"{task.file}:{lines[-1]}" if lines else task.file
        raise DataError(
            f"{place}: '{name}' of the task failed: {type(error).__name__}: {one_line(error)}",
            meaning="the task is your project's code, named by data.task",
            fix="correct it",
        ) from error
