"""`ftkit eval`: evaluate a model and compare it with the model before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli import arguments
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.inference import engine_option, find_model, load_here, load_into_engine, model_argument
from ftkit.cli.submit import submit_job
from ftkit.cli.terminal.console import Cell, Facts, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import FtkitError
from ftkit.evaluate.source import MeasureSettings
from ftkit.files import to_json
from ftkit.launch.side_jobs import plan_evaluation
from ftkit.planning.plan import read_plan
from ftkit.runs.lease import current_holder

if TYPE_CHECKING:
    from ftkit.evaluate.results import Example, Result
    from ftkit.evaluate.scoring import Measurements
    from ftkit.evaluate.served_model import EngineName
    from ftkit.evaluate.source import Target

_MAX_SHOWN = 300  # maximum characters of a prompt or a completion in an example
_HARNESS_ALONE = (
    "--harness has its own data and metrics, and runs here in one process: omit --data, --metrics, --gpus and "
    "--as-job; --harness-tasks requires --harness"
)
_VLLM_ALONE = "--engine vllm runs here, and uses all GPUs of this machine: omit --harness, --as-job and --gpus"


@forwarded_command(
    "eval",
    "ftkit eval last --limit 3 --max-new-tokens 8",
    "ftkit eval last --data prompts.jsonl --metrics loss,repetition --json",
    "ftkit eval last@0 --no-before --limit 3 --max-new-tokens 8",
)
@model_argument
@arguments.file_option(
    "--data",
    "file",
    about="JSON Lines file in any training format, or with prompts only; default: the validation split.",
)
@click.option(
    "--metrics", metavar="NAME,...", default="", help="Metrics of the completions; the default depends on the data."
)
@arguments.number_option("--limit", default=200, about="Maximum number of rows (default 200).")
@click.option("--before/--no-before", "with_before", default=True, help="Compare with the model before training.")
@arguments.number_option(
    "--examples", "num_examples", low=0, default=2, about="Best and worst examples to show (default 2 each)."
)
@arguments.number_option("--max-new-tokens", default=128, about="Maximum tokens per completion (default 128).")
@arguments.number_option("--batch-size", default=16, about="Completions per batch (default 16).")
@click.option("--seed", metavar="N", type=int, default=0, help="Seed of the bootstrap (default 0).")
@click.option("--harness", metavar="TASK,...", default="", help="Tasks of lm-evaluation-harness in place of --metrics.")
@arguments.folder_option("--harness-tasks", about="Folder with your own tasks for --harness, as YAML files.")
@click.option(
    "--as-job", is_flag=True,
    help="Evaluate the run's checkpoints in a separate Slurm job while training continues, until the run ends.",
)  # fmt: skip
@arguments.number_option(
    "--gpus", "num_gpus", default=1,
    about="Number of GPUs of one node that share the rows, or of processes without GPUs (default 1). Each loads the "
    "whole model: omit this for a model that needs several GPUs.",
)  # fmt: skip
@engine_option
@arguments.time_option("the profile's, for --as-job")
@arguments.dry_run_option("the script of --as-job")
@arguments.json_option
def eval_command(  # noqa: PLR0913 - one for each option
    reference: str, *, file: Path | None, metrics: str, limit: int, with_before: bool, num_examples: int,
    max_new_tokens: int, batch_size: int, seed: int, harness: str, harness_tasks: Path | None, as_job: bool,
    num_gpus: int, engine: EngineName, time_limit: str | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate a model on rows it was not trained on, and the model before training on the same rows.

    Loss, perplexity and token accuracy cover the assistant turns; for rows without completions, the prompts.
    Completions are scored by --metrics; by default those of the recipe's data.task, calls (tool calls by name
    and arguments, parallel calls, and no call where none is expected) or exact_match, and repetition. Your own metric
    is a function of the task, or module:function; it receives a row and a completion, and returns a number.
    --metrics loss generates nothing.

    --harness runs tasks of lm-evaluation-harness instead (pip install 'ftkit[harness]'); most come from the hub.

    Intervals are 95% intervals of the change, by a paired bootstrap over the rows.

    {MODEL}
    """
    names = tuple(name for name in metrics.split(",") if name)
    settings = MeasureSettings(
        metrics=names, limit=limit, max_new_tokens=max_new_tokens, batch_size=batch_size,
        file=str(file.resolve()) if file else None,
    )  # fmt: skip
    if (harness and (as_job or num_gpus > 1 or names or file)) or (harness_tasks and not harness):
        raise arguments.usage_error(_HARNESS_ALONE)
    if engine == "vllm" and (harness or as_job or num_gpus > 1):
        raise arguments.usage_error(_VLLM_ALONE)
    if as_json if as_job else dry_run or time_limit:
        raise arguments.usage_error("--time and --dry-run are for --as-job, which has no --json")
    if as_job:
        _submit(reference, settings, num_gpus, time_limit, dry_run=dry_run)
        return
    terminal, target = Terminal(), find_model(reference)
    if not with_before:
        target = replace(target, before=None)
    if harness:
        tasks = [name for name in harness.split(",") if name]
        _run_harness(target, tasks, harness_tasks, settings, terminal, as_json=as_json)
        return
    from ftkit.data.completion_metrics import choose_metrics
    from ftkit.evaluate.scoring import is_a_rank, joined_ranks, measure_target, run_ranks

    if names:  # report unknown metrics before a model is loaded
        choose_metrics(names, [], target.plan.recipe.data.task if target.plan else None)
    if num_gpus > 1 and not is_a_rank():
        ctx = click.get_current_context()
        ctx.exit(run_ranks(num_gpus, ctx.obj))
    engine = "transformers" if num_gpus > 1 else _engine_of(target, engine)
    with joined_ranks() as ranks:
        found = measure_target(
            target, settings, lambda source: load_into_engine(source, engine, terminal),
            terminal.say, ranks,
        )  # fmt: skip
    if ranks.is_first:
        _report(found, target, engine, seed, num_examples, terminal, as_json=as_json)
        _send_to_trackers(found, target, settings, terminal)


def _send_to_trackers(found: Measurements, target: Target, settings: MeasureSettings, terminal: Terminal) -> None:
    """Send the results on a run's validation split to its trackers, unless its trainer holds them open."""
    plan, step = target.plan, target.step
    if plan is None or step is None or settings.file or not plan.recipe.tracking.sinks:
        return
    from ftkit.evaluate import checkpoint_scores, results

    sinks = ", ".join(plan.recipe.tracking.sinks)
    if current_holder(plan.layout) is not None:
        terminal.warn(f"the run is training, so {sinks} did not get these results; --as-job sends them")
        return
    try:
        checkpoint_scores.send_to_trackers(plan, [results.to_record(step, found.data, found.metrics, found.after)])
    except FtkitError as error:
        terminal.warn(f"{sinks} did not get these results: {error}")


def _report(  # noqa: PLR0913 - what was measured, and how it is shown
    found: Measurements,
    target: Target,
    engine: EngineName,
    seed: int,
    num_examples: int,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    from ftkit.evaluate.results import changed_examples, compare

    results, examples = compare(found.data, found.metrics, found.after, found.before, seed), []
    if found.metrics and found.before:
        examples = changed_examples(found.tokenizer, found.data, found.metrics[0], found.after, found.before)
    best = [example for example in examples if example.change > 0][:num_examples]
    worst = [example for example in reversed(examples) if example.change < 0][:num_examples]
    if as_json:
        about = {
            "model": target.source.label,
            "before": target.before.label if found.before and target.before else None,
            "engine": engine,
            "num_rows": len(found.data.rows),
            "seed": seed,
        }
        shown = {"best": list(map(asdict, best)), "worst": list(map(asdict, worst))}
        terminal.json({**about, "metrics": [asdict(result) for result in results], "examples": shown})
        return
    _show(results, terminal)
    _show_examples("improved", best, terminal)
    _show_examples("worsened", worst, terminal)


def _engine_of(target: Target, engine: EngineName) -> EngineName:
    """Return the engine for both models. It must be the same, because engines round differently."""
    from ftkit.evaluate.served_model import takes_vllm

    sources = [target.source, *([target.before] if target.before else [])]
    return "vllm" if all(takes_vllm(source, engine) for source in sources) else "transformers"


def _run_harness(
    target: Target,
    tasks: list[str],
    folder: Path | None,
    settings: MeasureSettings,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    from ftkit.evaluate.results import Harness, compare_harness

    harness, limits = Harness(tasks, folder), (settings.limit, settings.batch_size)
    after, before = harness.evaluate(load_here(target.source, terminal), *limits), None
    if target.before and target.before != target.source:
        before = harness.evaluate(load_here(target.before, terminal), *limits)
    results = compare_harness(after, before)
    if as_json:
        terminal.json({"model": target.source.label, "metrics": [asdict(result) for result in results]})
    else:
        _show(results, terminal)


def _submit(reference: str, settings: MeasureSettings, num_gpus: int, time_limit: str | None, *, dry_run: bool) -> None:
    terminal, folder, project = Terminal(), arguments.get_run(reference), current_context().project
    file = Path(settings.file) if settings.file else None
    job = plan_evaluation(read_plan(folder.layout), to_json(settings), num_gpus, time_limit, file, project)
    if not (job_id := submit_job(job, terminal, dry_run=dry_run)):
        return
    until = f" until job {job.training_job} ends" if job.training_job else ""
    terminal.say(f"job {job_id} evaluates the checkpoints of {folder.id}{until}")
    results = short_path(folder.layout.evaluations)
    terminal.facts([("results", results), ("log", short_path(job.log)), ("cancel", f"scancel {job_id}")], is_data=False)
    terminal.data(f"{job_id}\n")


def _show(results: Sequence[Result], terminal: Terminal) -> None:
    has_before = any(result.before is not None for result in results)
    values = ("#before", "#after", "#change") if has_before else ("#value",)
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
        interval = [_number(each, result, sign="+" if has_before else "") for each in result.interval]
        rows.append([*cells, " to ".join(interval)])
    terminal.table(("metric…", "#cases", *values, "#95% interval"), rows)


def _number(value: float, result: Result, sign: str = "") -> str:
    return f"{value * 100:{sign}.1f}%" if result.is_part else f"{value:{sign}.4g}"


def _show_examples(title: str, examples: Sequence[Example], terminal: Terminal) -> None:
    for example in examples:
        terminal.text()
        terminal.text(Styled(f"{title} ({example.metric}): {example.where}", "bold"))
        # The question is at the end of a prompt.
        prompt = "…" * (len(example.prompt) > _MAX_SHOWN) + example.prompt[-_MAX_SHOWN:]
        expected: Facts = [] if example.reference is None else [("expected", _short(example.reference))]
        completions: Facts = [("before", _short(example.before)), ("after", _short(example.after))]
        terminal.facts([("prompt", prompt), *expected, *completions], is_data=True)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
