"""Run a recipe's task: its generator, its prompts, and its metrics."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

from ftkit.config.data_sources import GeneratedSource
from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec
    from ftkit.config.data_sources import TaskFile
    from ftkit.data.rows import Columns


def generate_rows(data: DataSpec, source: GeneratedSource) -> tuple[list[Columns], list[Columns]]:
    return _generate(_task_of(data), source.model_dump_json())


@lru_cache(maxsize=1)  # training a tokenizer and encoding read the same rows
def _generate(task: TaskFile, source_json: str) -> tuple[list[Columns], list[Columns]]:
    source = GeneratedSource.model_validate_json(source_json)
    numbers = (source.num_train, source.num_heldout)
    with _errors_of(task, "generate"):
        made = _load(task).generate(seed=source.seed, num_train=numbers[0], num_heldout=numbers[1], **source.options)
        train, heldout = (list(islice(rows, number)) for rows, number in zip(made, numbers, strict=True))
    for rows, wanted, split in zip((train, heldout), numbers, ("train", "validate"), strict=True):
        if len(rows) < wanted:
            raise DataError(
                f"{task.file}: 'generate' returned {len(rows):,} of {wanted:,} rows to {split} on",
                fix="correct the task, or request fewer rows in data.source",
            )
        for bad in (row for row in rows if not isinstance(row, dict)):
            raise DataError(
                f"{task.file}: 'generate' returned a row that is not a dict: {str(bad)[:80]}", fix="correct the task"
            )
    return train, heldout


def read_pair(data: DataSpec, columns: Columns) -> Columns:
    """Return the prompt and the completion that a task makes of a row: each is a text or a list of turns."""
    task, pair = _task_of(data), {}
    for name in ("prompt", "completion"):
        with _errors_of(task, name):
            pair[name] = getattr(_load(task), name)(dict(columns))
    return pair


def score_row(task: TaskFile, metric: str, columns: Columns, completion: str) -> float | None:
    """Return the score of a completion, from 0 to 1, by a task's metric; None if it does not apply to the row."""
    with _errors_of(task, metric):
        score = getattr(_load(task), metric)(dict(columns), completion)
        score = None if score is None else float(score)
    if score is not None and not 0 <= score <= 1:
        raise DataError(
            f"{task.file}: the metric '{metric}' returned {score}", fix="return a score from 0 to 1, or None"
        )
    return score


def _task_of(data: DataSpec) -> TaskFile:
    if data.task is None:
        raise TypeError("the recipe has no task")
    return data.task


@lru_cache(maxsize=8)
def _load(task: TaskFile) -> ModuleType:
    """Run a task's file as a module. Its text is the plan's, which may differ from the file's by now."""
    module = ModuleType(f"ftkit_task_{task.digest[:16]}")
    module.__file__ = task.file
    sys.modules[module.__name__] = module  # dataclasses look up their module
    exec(compile(task.text, task.file, "exec"), module.__dict__)  # noqa: S102 - the project's own code
    return module


@contextmanager
def _errors_of(task: TaskFile, name: str) -> Iterator[None]:
    """Turn anything that a task's code raises into a DataError with the task's line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == task.file]
        place = f"{task.file}:{lines[-1]}" if lines else task.file
        raise DataError(
            f"{place}: '{name}' of the task failed: {type(error).__name__}: {one_line(error)}",
            meaning="the task is your project's code, named by data.task",
            fix="correct it",
        ) from error
