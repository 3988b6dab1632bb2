"""What came of a run, and what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.cli.follow_views import state_words
from ftkit.cli.record_lines import measured
from ftkit.cli.terminal import Cell, Styled, Terminal
from ftkit.cli.wording import count, duration, plural, short_path
from ftkit.errors import RunFailedError
from ftkit.launch.states import FAILURES, Observation, RunState
from ftkit.launch.summary import TrainingSummary, first_error, log_tail, summarise

if TYPE_CHECKING:
    from ftkit.launch.submission import SubmittedRun
    from ftkit.layout import RunLayout
    from ftkit.records import EvaluationRecord, RankError, Sample

STATE_STYLES = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "cyan",
    RunState.PENDING: "yellow",
    RunState.STOPPED: "yellow",
    RunState.CANCELLED: "yellow",
    RunState.UNKNOWN: "dim",
    RunState.DAMAGED: "red",
    **dict.fromkeys(FAILURES, "red"),
}


def show_end(run: SubmittedRun, seen: Observation, terminal: Terminal) -> None:
    """Show how a run ended.

    Raises:
        RunFailedError: in another way than by completing.
    """
    summary = summarise(run.layout)
    if seen.state is RunState.COMPLETED:
        terminal.say()
        terminal.facts([("state", state_cell(seen)), *result_facts(summary), *profile_facts(run.layout)], is_data=False)
        if summary.after:
            show_samples(summary.after, terminal, is_data=False)
        terminal.facts([("next", "\n".join(next_commands(run.id, seen)))], is_data=False)
        return
    show_failure(run, seen, terminal)
    raise RunFailedError(f"{run.id}: {state_words(seen)}", fix="; ".join(next_commands(run.id, seen)))


def show_failure(run: SubmittedRun, seen: Observation, terminal: Terminal) -> None:
    """Show the error of the rank that failed first, or the end of the log if no rank left one."""
    if seen.state not in FAILURES:
        return
    error = failing_rank(run, seen)
    if error:
        terminal.say(Styled(f"\nrank {error.rank} on {error.host} failed first: {error.type}", "bold"))
        terminal.say(error.message if is_actionable(error) else error.traceback.rstrip())
        return
    terminal.say(Styled(f"\nend of {short_path(run.layout.job_log)}:", "bold"))
    terminal.say("\n".join(log_tail(run.layout)) or "(the log is empty)")


def failing_rank(run: SubmittedRun, seen: Observation) -> RankError | None:
    """Return the error that made the run fail; None if it did not fail, or no rank left one."""
    since = max(run.submission.submitted, seen.started or 0.0)
    return first_error(run.layout, since=since) if seen.state in FAILURES else None


def is_actionable(error: RankError) -> bool:
    """Whether the message says all: then the traceback is of no use to the user."""
    return error.exit_code != 1


def state_cell(seen: Observation) -> Cell:
    """Return the state in its colour."""
    return Styled(state_words(seen), STATE_STYLES[seen.state])


def result_facts(summary: TrainingSummary) -> list[tuple[str, Cell]]:
    """Return how far the training came, and what it brought."""
    facts: list[tuple[str, Cell]] = []
    first, last = summary.first_step, summary.last_step
    if first and last:
        speed = f"{count(last.tokens_per_second)} tokens/s"
        facts.append(("progress", f"step {last.step}/{last.num_steps}, {count(last.tokens)} tokens, {speed}"))
        facts.append(("loss", f"{first.loss:.4f} → {last.loss:.4f}"))
    if summary.before or summary.after:
        moments = [measured(record) for record in (summary.before, summary.after) if record]
        facts.append(("held-out", " → ".join(moments)))
    if summary.end:
        facts.append(("time", f"{duration(summary.end.training_seconds)} of training"))
    if summary.checkpoint:
        facts.append(("checkpoint", short_path(Path(summary.checkpoint.path))))
    if summary.end and summary.end.export:
        facts.append(("export", short_path(Path(summary.end.export))))
    return facts


def profile_facts(layout: RunLayout) -> list[tuple[str, Cell]]:
    """Return where the profiler's traces are, if there are any."""
    num_traces = len(list(layout.profile.glob("rank-*.trace.json.gz")))
    return [("profile", f"{plural(num_traces, 'trace')} in {short_path(layout.profile)}")] if num_traces else []


def show_samples(evaluation: EvaluationRecord, terminal: Terminal, *, is_data: bool) -> None:
    """Show two held-out questions with the model's answers."""
    for sample in choose_samples(evaluation.samples):
        verdict: Cell = Styled("correct", "green") if sample.correct else Styled("wrong", "red")
        facts: list[tuple[str, Cell]] = [("question", sample.question), ("answer", sample.answer), ("", verdict)]
        if not sample.correct:
            facts.append(("expected", sample.reference))
        terminal.text(is_data=is_data)
        terminal.facts(facts, is_data=is_data)
    terminal.text(is_data=is_data)


def choose_samples(samples: tuple[Sample, ...]) -> list[Sample]:
    """Take two samples: a correct one and a wrong one if there are both."""
    correct = [sample for sample in samples if sample.correct]
    wrong = [sample for sample in samples if not sample.correct]
    if correct and wrong:
        return [correct[0], wrong[0]]
    return (correct or wrong)[:2]


def next_commands(run_id: str, seen: Observation) -> list[str]:
    """Return what to type next."""
    if not seen.is_final:
        return [f"ftkit status {run_id} --follow", f"ftkit logs {run_id} -f", f"ftkit cancel {run_id}"]
    if seen.state is RunState.COMPLETED:
        return [f"ftkit status {run_id}", f"ftkit logs {run_id}"]
    if seen.state in (RunState.FAILED, RunState.OUT_OF_MEMORY):
        return [f"ftkit logs {run_id}", f"ftkit resume {run_id}"]
    return [f"ftkit resume {run_id}"]
