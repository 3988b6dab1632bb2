"""The results of a run, and the commands to type next."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age, count, duration, short_path
from ftkit.cli.terminal.record_lines import early_stopping, measured, sharding_text
from ftkit.errors import EXIT_CODES, RunFailedError, plural, redact
from ftkit.launch.job_states import LOST
from ftkit.runs.ends import log_tail
from ftkit.runs.failure import explain_failure, original_command
from ftkit.runs.history import History, read_history
from ftkit.runs.job import FAILURES, Job, RunState
from ftkit.runs.sync import read_status

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.failure import Failure
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.records import EvaluationRecord, RouterStats, Sample

STATE_STYLES = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "cyan",
    RunState.PENDING: "yellow",
    RunState.STOPPED: "yellow",
    RunState.CANCELED: "yellow",
    RunState.UNKNOWN: "dim",
    RunState.DAMAGED: "red",
    RunState.UNREADABLE: "dim",
    **dict.fromkeys(FAILURES, "red"),
}


def show_end(run: SubmittedRun, seen: Job, terminal: Terminal) -> None:
    """Show how a run ended.

    Raises:
        RunFailedError: it did not complete.
    """
    if seen.state is not RunState.COMPLETED:
        failure = explain_failure(run, seen)
        if failure:
            show_failure(failure, run.layout, terminal, is_data=False)
        raise failed(run, seen, failure)
    summary = read_history(run.layout)
    terminal.say()
    terminal.facts([("state", state_cell(seen)), *end_facts(summary), *file_facts(run.layout)], is_data=False)
    if summary.after:
        show_samples(summary.after, terminal, is_data=False)
    terminal.facts([("next", "\n".join(next_commands(run.layout, seen, None)))], is_data=False)


def end_facts(summary: History) -> list[tuple[str, Cell]]:
    """Summarize a completed run in four rows: steps, time, results, and the model's folder."""
    facts = dict(result_facts(summary))
    if "time" in facts and "progress" in facts:
        facts["progress"] = f"{facts['progress']}, {facts.pop('time')}"
    names = ("progress", "sharding", "loss", "validation", "best", "export")
    return [(name, facts[name]) for name in names if name in facts]


def failed(run: SubmittedRun, seen: Job, failure: Failure | None) -> RunFailedError:
    """Return the error of a command that followed a run which did not complete."""
    return RunFailedError(
        f"{run.id}: {seen}",
        exit_code=failure.exit_code if failure else RunFailedError.exit_code,
        fix=advice(run.layout, seen, failure),
    )


def show_failure(failure: Failure, layout: RunLayout, terminal: Terminal, *, is_data: bool) -> None:
    """Show the error of the rank that failed first, or the end of the log if no other reason is known."""
    error = failure.error
    terminal.text(is_data=is_data)
    if error:
        title = f"rank {error.rank} on {error.host} failed first: {error.type}"
        text = error.message if error.is_actionable else error.traceback.rstrip() or error.message
    else:
        is_known = failure.exit_code != RunFailedError.exit_code
        what = EXIT_CODES[failure.exit_code] if is_known else "no rank left an error"
        title = f"{what}; end of {short_path(layout.job_log)}:"
        text = "\n".join(log_tail(layout)) or "(the log is empty)"
    terminal.text(Styled(title, "bold"), is_data=is_data)
    terminal.text(redact(text, os.environ), is_data=is_data)
    terminal.text(is_data=is_data)


def state_cell(seen: Job) -> Cell:
    """Return the state in its color."""
    return Styled(str(seen), STATE_STYLES[seen.state])


def result_facts(summary: History) -> list[tuple[str, Cell]]:
    """Return the rows about the training's progress and its results."""
    facts: list[tuple[str, Cell]] = _script_facts(summary)
    first, last = summary.first_step, summary.last_step
    if first and last:
        speed = f"{count(last.tokens_per_second)} tokens/s"
        tokens = f"{count(last.tokens)} tokens ({count(last.targets)} of them trained)"
        facts.append(("progress", f"step {last.step}/{last.num_steps}, {tokens}, {speed}"))
        facts.append(("loss", f"{first.loss:.4f} → {last.loss:.4f}"))
        facts += [("experts", experts_text(last.routers))] if last.routers else []
    if summary.before or summary.after:
        moments = [measured(record) for record in (summary.before, summary.after) if record]
        facts.append(("validation", " → ".join(moments)))
    if summary.end:
        what = "of training" if summary.end.has_checkpoint else "from start to end"
        if summary.start and summary.start.resumed_from:
            what += f" since step {summary.start.resumed_from}"
        facts.append(("time", f"{duration(summary.end.training_seconds)} {what}{early_stopping(summary.end)}"))
        if summary.end.best_step is not None:
            facts.append(("best", f"step {summary.end.best_step}"))
    if summary.checkpoint:
        facts.append(("checkpoint", short_path(Path(summary.checkpoint.path))))
    if failed := summary.failed_checkpoint:
        text = f"of step {failed.step}, {failed.num_failed} in a row: {failed.reason}"
        facts.append(("failed save", Styled(text, "red")))
    if summary.end and summary.end.export:
        facts.append(("export", short_path(Path(summary.end.export))))
    return facts


def experts_text(routers: RouterStats) -> str:
    """Describe how a step's tokens were spread over the experts."""
    parts = [
        f"busiest {routers.max_utilization:.2f} × the mean load of its layer",
        f"{routers.mean_max_utilization:.2f} × on average over the layers",
        f"{routers.dead_expert_ratio:.1%} without tokens",
    ]
    if routers.load_balancing_loss is not None:
        parts.append(f"load-balancing loss {routers.load_balancing_loss:.3f}")
    return ", ".join(parts)


def _script_facts(summary: History) -> list[tuple[str, Cell]]:
    """Return the rows about a script's progress, and about the sharding of its model."""
    facts: list[tuple[str, Cell]] = []
    step, end, sharding = summary.script_step, summary.end, summary.sharding
    if step:
        num_steps = max(step.step, end.step) if end and not end.has_checkpoint else step.step
        facts.append(("progress", plural(num_steps, "optimizer step")))
    if sharding:
        facts.append(("sharding", Styled(sharding.warning, "yellow") if sharding.warning else sharding_text(sharding)))
    return facts


def sync_facts(layout: RunLayout) -> list[tuple[str, Cell]]:
    """Return the row about the run's copy at its `sync` destination; none if it is not copied."""
    status = read_status(layout)
    if status is None:
        return []
    done, total = len(status.done), len(status.done) + len(status.waiting)
    text = f"{done} of {total} parts in {status.destination}, {age(time.time() - status.time)} ago"
    if status.error:
        return [("copy", Styled(f"{text}; failed: {status.error}", "red"))]
    return [("copy", Styled(f"{text}; missing: {', '.join(status.waiting)}", "yellow") if status.waiting else text)]


def file_facts(layout: RunLayout) -> list[tuple[str, Cell]]:
    """Return the rows with the paths of the report and of the profiler's traces, if they exist."""
    facts: list[tuple[str, Cell]] = [("report", short_path(layout.report))] if layout.report.is_file() else []
    num_traces = len(list(layout.profile.glob("rank-*.trace.json.gz")))
    if num_traces:
        facts.append(("profile", f"{plural(num_traces, 'trace')} in {short_path(layout.profile)}"))
    return facts


def show_samples(evaluation: EvaluationRecord, terminal: Terminal, *, is_data: bool) -> None:
    """Show two questions of the validation split with their completions."""
    for sample in choose_samples(evaluation.samples):
        verdict: Cell = Styled("correct", "green") if sample.correct else Styled("wrong", "red")
        facts: list[tuple[str, Cell]] = [("question", sample.question), ("answer", sample.answer), ("", verdict)]
        if not sample.correct:
            facts.append(("expected", sample.reference))
        terminal.text(is_data=is_data)
        terminal.facts(facts, is_data=is_data)
    terminal.text(is_data=is_data)


def choose_samples(samples: tuple[Sample, ...]) -> list[Sample]:
    """Choose two samples: a correct and a wrong one if there are both."""
    correct = [sample for sample in samples if sample.correct]
    wrong = [sample for sample in samples if not sample.correct]
    if correct and wrong:
        return [correct[0], wrong[0]]
    return (correct or wrong)[:2]


def advice(layout: RunLayout, seen: Job, failure: Failure | None) -> str:
    """Return what to do next, in one line."""
    commands = "; ".join(next_commands(layout, seen, failure))
    if failure and failure.is_in_code:
        again = f"or continue this run with the corrected code: ftkit resume {layout.root.name} --allow code"
        return f"correct the code, then run it again: {original_command(layout)}; {again}"
    if failure is None or failure.exit_code == RunFailedError.exit_code:
        return commands
    return f"{'fix that, then' if failure.can_resume else 'fix that, then run again'}: {commands}"


def next_commands(layout: RunLayout, seen: Job, failure: Failure | None) -> list[str]:
    """Return the commands to type next; the original command instead of 'ftkit resume' if the plan itself is wrong."""
    run_id = layout.root.name
    if seen.state is RunState.DAMAGED:
        return [f"ftkit logs {run_id}"]
    is_lost = seen.state is RunState.UNKNOWN and seen.reason == LOST
    if not seen.is_final and not is_lost and layout.submission.exists():
        return [f"ftkit status {run_id} --follow", f"ftkit logs {run_id} -f", f"ftkit cancel {run_id}"]
    if seen.state is RunState.COMPLETED:
        words = ("logs", "status") if layout.is_script else ("chat", "eval", "export", "status")
        return [f"ftkit {word} {run_id}" for word in words]
    if failure and not failure.can_resume:
        return [original_command(layout)] + [f"ftkit resume {run_id} --allow code"] * failure.is_in_code
    has_failed = failure and failure.exit_code == RunFailedError.exit_code and seen.state is RunState.FAILED
    if has_failed or is_lost:
        return [f"ftkit logs {run_id}", f"ftkit resume {run_id}"]
    return [f"ftkit resume {run_id}"]
