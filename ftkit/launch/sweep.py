"""Sweeps: a command line for several runs, one run per combination of values and clusters.

`training.learning_rate=1e-5,3e-5` is two values, because a learning rate can't contain a comma. A value that is valid
as a whole is not split: commas in lists, mappings, quotes and texts are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from ftkit.config.load import read_recipe
from ftkit.errors import ConfigError, Problem
from ftkit.launch.render import render_array, render_preparation
from ftkit.launch.resolve import RunArgs, recipe_name, resolve
from ftkit.planning.plan import RunPlan, SweepPlan

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.config.context import Context
    from ftkit.launch.submission import NewJob

MAX_RUNS = 200  # more are probably a mistake
_BEFORE_QUOTE = ("", "[", "{", ",", ":")
"""Characters that may precede an opening quotation mark; after any other, it is an ordinary character."""
_CHOOSE_DOCUMENTS = ("data.source", "data.validation")
_PAIRS = {"[": "]", "{": "}"}


class Trial(NamedTuple):
    """The arguments of one run of a sweep, and its values for the swept keys."""

    args: RunArgs
    values: dict[str, str]


def expand(args: RunArgs, ctx: Context) -> list[Trial]:
    """Return the runs of a command line; the last key varies fastest. ConfigError for too many runs or duplicates."""
    axes = [(override, _alternatives(override, args, ctx)) for override in args.overrides]
    clusters = (args.cluster or "").split(",")
    if len(clusters) == 1 and all(len(found) == 1 for _, found in axes):
        return [Trial(args, {})]
    trials = []
    for cluster, *overrides in product(clusters, *(found for _, found in axes)):
        values = {"cluster": cluster} if len(clusters) > 1 else {}
        for (_, found), override in zip(axes, overrides, strict=True):
            if len(found) > 1:
                key, _, value = override.partition("=")
                values[key] = value
        trials.append(Trial(args._replace(overrides=tuple(overrides), cluster=cluster or None), values))
    problems = []
    if len(trials) > MAX_RUNS:
        problems.append(Problem("", "", f"the values make {len(trials)} runs, more than {MAX_RUNS}.", "Use fewer."))
    for former, trial in pairwise(sorted(trials, key=_format_values)):
        if former.values == trial.values:
            problems.append(Problem("", _format_values(trial), "is given twice.", "Give each value once."))
            break
    if problems:
        raise ConfigError(problems)
    return trials


def _format_values(trial: Trial) -> str:
    return ", ".join(f"{key}={value}" for key, value in trial.values.items())


def plan_sweep(trials: Sequence[Trial], ctx: Context) -> list[RunPlan]:
    """Plan all runs of a sweep. Raises as `resolve` does, with the problems of all invalid runs."""
    plans: list[RunPlan] = []
    problems: list[Problem] = []
    first: RunPlan | None = None
    for number, trial in enumerate(trials, start=1):
        try:
            plan = resolve(trial.args, ctx)
        except ConfigError as error:
            for each in error.problems:
                where = [_format_values(trial)] + [each.where] * bool(each.where)
                problems.append(replace(each, where=": ".join(where)))
            continue
        first = first or plan
        rest = first.id.removeprefix(first.name)  # the same for all: their job array finds a folder by its number
        sweep = SweepPlan(first.id.rpartition("-")[0], first.name, trial.values)
        name = f"{plan.name}-{number}"
        plans.append(replace(plan, id=f"{name}{rest}{number}", name=name, sweep=sweep))
    if problems:
        raise ConfigError(problems)
    return plans


def find_other_documents(plans: Sequence[RunPlan]) -> str | None:
    """Return a warning if the runs of a sweep train on different documents; None if they don't, or if unknown."""
    fits = {plan.name: plan.documents for plan in plans if plan.documents}
    is_same_part = len({fit.num_read for fit in fits.values()}) == 1  # data that is prepared already is read as a whole
    keys = {key for plan in plans if plan.sweep for key in plan.sweep.values if key.startswith(_CHOOSE_DOCUMENTS)}
    if len({fit.num_whole if is_same_part else fit.num_whole == fit.num_read for fit in fits.values()}) > 1:
        shown = (f"{name} {fit.num_fitting:,} of {fit.num_read:,}" for name, fit in fits.items())
        reason = f"not as many fit the packs of each: {', '.join(shown)}"
    elif keys:
        reason = f"{' and '.join(sorted(keys))} chooses them"
    else:
        return None
    return f"the runs train on different documents, so their losses are not of the same data: {reason}"


def make_arrays(
    jobs: Sequence[NewJob[RunPlan]], max_parallel: int | None, project: Path | None
) -> list[tuple[list[NewJob[RunPlan]], str]]:
    """Group the jobs to submit together: on Slurm, runs with equal resources form a job array; else each run is alone.

    The first job of an array has the array's scripts; the text is the value of sbatch's `--array`. All tasks of an
    array get the same resources, so runs with different resources need separate arrays.
    """
    groups: dict[tuple[str, str], list[NewJob[RunPlan]]] = {}
    for job in jobs:
        plan, is_local = job.plan, job.plan.cluster.scheduler == "local"
        text = plan.id if is_local else render_array(plan, plan.layout.script, job.script, project)
        groups.setdefault((plan.cluster.name, text), []).append(job)
    return [_make_array(group, text, max_parallel, project) for (_, text), group in groups.items()]


def _make_array(
    jobs: list[NewJob[RunPlan]], text: str, max_parallel: int | None, project: Path | None
) -> tuple[list[NewJob[RunPlan]], str]:
    plan = jobs[0].plan
    if plan.cluster.scheduler == "local":
        return jobs, ""
    files = {plan.layout.array_script.name: text}
    if any(job.preparation for job in jobs):  # each task depends on the preparation's task with its number
        scripts = [render_preparation(job.plan, project) for job in jobs]
        jobs = [replace(job, preparation=script) for job, script in zip(jobs, scripts, strict=True)]
        preparation = render_array(plan, plan.layout.preparation_script, scripts[0], project)
        files[plan.layout.preparation_array.name] = preparation
    numbers = [job.plan.number for job in jobs]
    is_range = int(numbers[-1]) - int(numbers[0]) == len(jobs) - 1 > 0
    tasks = f"{numbers[0]}-{numbers[-1]}" if is_range else ",".join(numbers)
    first = replace(jobs[0], files={**jobs[0].files, **files})
    return [first, *jobs[1:]], f"{tasks}%{max_parallel}" if max_parallel else tasks


def _alternatives(override: str, args: RunArgs, ctx: Context) -> list[str]:
    """Split an override at commas if only its parts are valid values; else return it unchanged."""
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in split(value)]
    if len(parts) == 1 or not equals or not all(parts):
        return [override]
    name = recipe_name(args, ctx)
    if name is None or _is_valid(name, override, ctx) or not _is_valid(name, f"{key}={parts[0]}", ctx):
        return [override]
    return [f"{key}={part}" for part in parts]


def _is_valid(recipe: str, override: str, ctx: Context) -> bool:
    """Return whether a recipe accepts a value, ignoring problems of other values."""
    key = override.partition("=")[0]
    try:
        read_recipe(recipe, ctx, (override,))
    except ConfigError as error:
        return not any(each.key == key or each.key.startswith(f"{key}.") or key in each.where
                       for each in error.problems)  # fmt: skip
    return True


def split(text: str) -> list[str]:
    """Split a text at commas outside brackets, braces and quotes."""
    parts, closing, quote = [""], [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and parts[-1].rstrip()[-1:] in _BEFORE_QUOTE:
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            parts.append("")
            continue
        parts[-1] += char
    return parts
