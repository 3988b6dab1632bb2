"""`ftkit eval`: evaluate a model and compare it with the model before training."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import get_run, json_option
from ftkit.cli.chat import MODEL_HELP, engine_option, find_model, load_into_engine, load_model, model_argument
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.submit import say_overridden
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.launch.side_jobs import plan_evaluation, submit
from ftkit.planning.plan import read_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.evaluate.compare import Example, Result
    from ftkit.evaluate.measure import Measurements
    from ftkit.evaluate.source import Target
    from ftkit.evaluate.vllm import EngineName


_MAX_SHOWN = 300
"""Maximum characters of a prompt or a completion in an example."""


@click.command(
    "eval",
    cls=ForwardedCommand,
    examples=(
        "ftkit eval last --limit 3 --max-new-tokens 8",
        "ftkit eval last --data prompts.jsonl --metrics loss,repetition --json",
        "ftkit eval last@0 --no-before --limit 3 --max-new-tokens 8",
    ),
    help=f"""Evaluate a model on rows it was not trained on, and the model before training on the same rows.

    Loss, perplexity and token accuracy cover the assistant turns; for rows without completions, the prompts.
    Completions are scored by --metrics; by default those of the recipe's data.task, calls (tool calls by name
    and arguments, parallel calls, and no call where none is expected) or exact_match, and repetition. Your own metric
    is a function of the task, or module:function; it receives a row and a completion, and returns a number.
    --metrics loss generates nothing.

    --harness runs tasks of lm-evaluation-harness instead (pip install 'ftkit[harness]'); most come from the hub.

    Intervals are 95% intervals of the change, by a paired bootstrap over the rows.

    {MODEL_HELP}
    """,
)
@model_argument
@click.option(
    "--data",
    "file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON Lines file in any training format, or with prompts only; default: the validation split.",
)
@click.option(
    "--metrics", metavar="NAME,...", default="", help="Metrics of the completions; the default depends on the data."
)
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), default=200, help="Maximum number of rows (default 200)."
)
@click.option("--before/--no-before", "with_before", default=True, help="Compare with the model before training.")
@click.option(
    "--examples", "num_examples", metavar="N", type=click.IntRange(min=0), default=2,
    help="Best and worst examples to show (default 2 of each).",
)  # fmt: skip
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=128,
    help="Maximum tokens per completion (default 128).",
)
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), default=16, help="Completions per batch.")
@click.option("--seed", metavar="N", type=int, default=0, help="Seed of the bootstrap (default 0).")
@click.option("--harness", metavar="TASK,...", default="", help="Tasks of lm-evaluation-harness in place of --metrics.")
@click.option(
    "--harness-tasks", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with your own tasks for --harness, as YAML files.",
)  # fmt: skip
@click.option(
    "--as-job", is_flag=True,
    help="Evaluate the run's checkpoints in a separate Slurm job while training continues, until the run ends.",
)  # fmt: skip
@click.option(
    "--gpus", metavar="N", type=click.IntRange(min=1), default=1,
    help="Number of GPUs of one node that share the rows, or of processes without GPUs (default 1). Each loads the "
    "whole model: omit this for a model that needs several GPUs.",
)  # fmt: skip
@engine_option
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit for --as-job; default: the profile's.")
@click.option("--dry-run", is_flag=True, help="Print the script of --as-job and submit nothing.")
@json_option
def eval_command(  # noqa: PLR0913 - one for each option
    reference: str, *, file: Path | None, metrics: str, limit: int, with_before: bool, num_examples: int,
    max_new_tokens: int, batch_size: int, seed: int, harness: str, harness_tasks: Path | None, as_job: bool, gpus: int,
    engine: EngineName, time_limit: str | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate a model."""
    names = tuple(name for name in metrics.split(",") if name)
    settings = (names, limit, max_new_tokens, batch_size, str(file.resolve()) if file else None)
    if (harness and (as_job or gpus > 1 or names or file)) or (harness_tasks and not harness):
        raise click.UsageError(
            "--harness has its own data and metrics, and runs here in one process: omit --data, --metrics, --gpus and "
            "--as-job; --harness-tasks requires --harness",
            click.get_current_context(),
        )
    if engine == "vllm" and (harness or as_job or gpus > 1):
        raise click.UsageError(
            "--engine vllm runs here, and uses all GPUs of this machine: omit --harness, --as-job and --gpus",
            click.get_current_context(),
        )
    if as_job:
        _submit(reference, settings, gpus, time_limit, dry_run=dry_run)
        return
    if dry_run or time_limit:
        raise click.UsageError("--time and --dry-run are for --as-job", click.get_current_context())
    terminal, target = Terminal(), find_model(reference)
    if harness:
        tasks = [name for name in harness.split(",") if name]
        _run_harness(
            target if with_before else replace(target, before=None), tasks, harness_tasks, limit, batch_size,
            terminal, as_json=as_json,
        )  # fmt: skip
        return
    from ftkit.data.completion_metrics import choose_metrics
    from ftkit.evaluate.measure import MeasureSettings, is_a_rank, joined_ranks, measure_target, run_ranks

    if names:
        task = target.plan.recipe.data.task if target.plan else None
        choose_metrics(names, [], task)  # report an unknown metric before a model is loaded
    if gpus > 1 and not is_a_rank():
        click.get_current_context().exit(run_ranks(gpus, click.get_current_context().obj))
    with joined_ranks() as ranks:
        target = target if with_before else replace(target, before=None)
        engine = _engine_of(target, engine, gpus)
        found = measure_target(
            target, MeasureSettings(*settings), lambda source: load_into_engine(source, engine, terminal), terminal.say,
            ranks,
        )  # fmt: skip
    if ranks.is_first:
        _report(found, target, engine, seed, num_examples, terminal, as_json=as_json)


def _engine_of(target: Target, engine: EngineName, num_ranks: int) -> EngineName:
    """Return the engine for both models. It must be the same, because engines round differently."""
    from ftkit.evaluate.vllm import takes_vllm

    if num_ranks > 1:
        return "transformers"
    sources = [target.source, *([target.before] if target.before else [])]
    return "vllm" if all(takes_vllm(source, engine) for source in sources) else "transformers"


def _report(  # noqa: PLR0913 - what to report, and how
    found: Measurements, target: Target, engine: EngineName, seed: int, num_examples: int, terminal: Terminal, *,
    as_json: bool,
) -> None:  # fmt: skip
    from ftkit.evaluate.compare import changed_examples, compare

    results = compare(found.data, found.metrics, found.after, found.before, seed)
    examples = []
    if found.metrics and found.before:
        examples = changed_examples(found.tokenizer, found.data, found.metrics[0], found.after, found.before)
    best = [example for example in examples if example.change > 0][:num_examples]
    worst = [example for example in reversed(examples) if example.change < 0][:num_examples]
    if as_json:
        terminal.json(
            {
                "model": target.source.label,
                "before": target.before.label if found.before and target.before else None,
                "engine": engine,
                "num_rows": len(found.data.rows),
                "seed": seed,
                "metrics": [asdict(result) for result in results],
                "examples": {"best": list(map(asdict, best)), "worst": list(map(asdict, worst))},
            }
        )
        return
    _show(results, terminal)
    _show_examples("improved", best, terminal)
    _show_examples("worsened", worst, terminal)


def _run_harness(  # noqa: PLR0913 - one for each option
    target: Target, tasks: list[str], folder: Path | None, limit: int, batch_size: int, terminal: Terminal, *,
    as_json: bool,
) -> None:  # fmt: skip
    from ftkit.evaluate.compare import Harness, compare_harness

    harness = Harness(tasks, folder)
    after, before = harness.evaluate(load_model(target.source, terminal), limit, batch_size), None
    if target.before and target.before != target.source:
        before = harness.evaluate(load_model(target.before, terminal), limit, batch_size)
    results = compare_harness(after, before)
    if as_json:
        terminal.json({"model": target.source.label, "metrics": [asdict(result) for result in results]})
    else:
        _show(results, terminal)


def _submit(reference: str, settings: tuple[Any, ...], num_gpus: int, time_limit: str | None, *, dry_run: bool) -> None:
    terminal, folder = Terminal(), get_run(reference)
    plan = read_plan(folder.layout)
    names = ("metrics", "limit", "max_new_tokens", "batch_size", "file")
    file = Path(settings[-1]) if settings[-1] else None
    values, project = json.dumps(dict(zip(names, settings, strict=True))), current_context().project
    job = plan_evaluation(plan, values, num_gpus, time_limit, file, project)
    say_overridden(terminal, project)
    if dry_run:
        terminal.data(job.script)
        return
    job_id = submit(job, os.environ)
    until = f" until job {job.training_job} ends" if job.training_job else ""
    terminal.say(f"job {job_id} evaluates the checkpoints of {folder.id}{until}")
    facts: list[tuple[str, Cell]] = [
        ("results", short_path(folder.layout.evaluations)),
        ("log", short_path(job.log)),
        ("cancel", f"scancel {job_id}"),
    ]
    terminal.facts(facts, is_data=False)
    terminal.data(f"{job_id}\n")


def _show(results: Sequence[Result], terminal: Terminal) -> None:
    has_before = any(result.before is not None for result in results)
    titles = ["metric", "cases", *(["before", "after", "change"] if has_before else ["value"]), "95% interval"]
    columns = [Column(title, is_number=title != "metric", can_shrink=title == "metric") for title in titles]
    rows = []
    for result in results:
        name = f"{result.metric} ({result.source})" if result.source else result.metric
        cells: list[Cell] = [name, f"{result.num_cases:,}"]
        if result.before is not None and result.change is not None:
            is_better = result.change < 0 if result.is_lower_better else result.change > 0
            low, high = result.interval
            style = "" if low <= 0 <= high else "green" if is_better else "red"
            cells += [_number(result.before, result), _number(result.after, result)]
            cells.append(Styled(_number(result.change, result, sign="+"), style))
        else:
            cells.append(_number(result.after, result))
        low_text, high_text = (_number(each, result, sign="+" if has_before else "") for each in result.interval)
        rows.append([*cells, f"{low_text} to {high_text}"])
    terminal.table(columns, rows)


def _number(value: float, result: Result, sign: str = "") -> str:
    return f"{value * 100:{sign}.1f}%" if result.is_part else f"{value:{sign}.4g}"


def _show_examples(title: str, examples: Sequence[Example], terminal: Terminal) -> None:
    for example in examples:
        terminal.text(is_data=True)
        terminal.text(Styled(f"{title} ({example.metric}): {example.where}", "bold"), is_data=True)
        facts: list[tuple[str, Cell]] = [("prompt", _short(example.prompt, keeps_end=True))]
        facts += [] if example.reference is None else [("expected", _short(example.reference))]
        facts += [("before", _short(example.before)), ("after", _short(example.after))]
        terminal.facts(facts, is_data=True)


def _short(text: str, *, keeps_end: bool = False) -> str:
    """Truncate a long text; of a prompt keep the end, which has the question."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"…{text[-_MAX_SHOWN:]}" if keeps_end else f"{text[:_MAX_SHOWN]}…"
