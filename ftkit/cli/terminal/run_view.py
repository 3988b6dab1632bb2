"""A run on the terminal: its state, results, and error, and the commands to type next; also as JSON."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Facts, Styled, Terminal
from ftkit.cli.terminal.format import age, count, duration, energy, short_path
from ftkit.cli.terminal.record_lines import damage_of, early_stopping, measured, pair_texts, record_line, sharding_text
from ftkit.cli.terminal.run_table import STATE_STYLES
from ftkit.errors import EXIT_CODES, RunFailedError, plural, redact
from ftkit.launch.job_states import LOST, observe_all
from ftkit.runs.checkpoints import list_checkpoints
from ftkit.runs.ends import excluded_nodes, log_tail, silent_nodes
from ftkit.runs.facts import RunFacts, read_facts
from ftkit.runs.failure import Failure, explain_failure, original_command
from ftkit.runs.history import RunSummary, Silence, measure_silence, read_summary
from ftkit.runs.job import Job, RunState, SubmittedRun
from ftkit.runs.listing import RunEntry, read_entry
from ftkit.runs.slow_ranks import describe_hang, read_hang_reports
from ftkit.runs.sync import read_status

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.find import RunFolder
    from ftkit.runs.gpu_samples import GpuSummary
    from ftkit.runs.records import EvaluationRecord, Sample, StepRecord

_NUM_SHOWN = 5  # number of checkpoints, and of restarts
_NUM_ANOMALIES_SHOWN = 8
_RECORDS = (
    "start", "first_step", "last_step", "before", "after", "checkpoint", "failed_checkpoint", "end", "sharding",
    "script_step",
)  # fmt: skip
"""Records of a history that `--json` has under their names."""


@dataclass(frozen=True)
class RunStatus:
    """The state and results of a run, read from its folder and its scheduler.

    `silence` is None also for a script, which writes no records at known times.
    """

    entry: RunEntry
    facts: RunFacts
    summary: RunSummary
    seen: Job
    failure: Failure | None
    silence: Silence | None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the failure, as `ftkit run` returns it; without a known failure, the job's."""
        if self.failure is None or self.failure.exit_code == RunFailedError.exit_code:
            return self.seen.exit_code
        return self.failure.exit_code

    @property
    def seconds_left(self) -> float | None:
        trainer, script_step = self.facts.trainer, self.summary.script_step
        if self.seen.state is not RunState.RUNNING or trainer is None:
            return script_step.seconds_left if script_step and self.seen.state is RunState.RUNNING else None
        return self.summary.seconds_left(trainer.recipe.training.log_every_steps)


def read_run_status(folder: RunFolder) -> RunStatus:
    layout, entry, facts = folder.layout, read_entry(folder), read_facts(folder.layout)
    seen = observe_all([entry.run] if entry.run else []).state_of(entry)
    interval = facts.trainer.recipe.training.log_every_steps if facts.trainer else 1
    return RunStatus(
        entry=entry,
        facts=facts,
        summary=read_summary(layout),
        seen=seen,
        failure=explain_failure(entry.run, seen) if entry.run else None,
        silence=None if layout.is_script else measure_silence(layout, seen, interval, time.time()),
    )


def show_run_status(status: RunStatus, terminal: Terminal) -> None:
    """Print a run: its state, progress and results, the error that ended it, and what to do next."""
    folder, layout, summary = status.entry.folder, status.entry.folder.layout, status.summary
    facts: Facts = [
        ("run", Styled(folder.id, "bold")),
        ("state", Styled(str(status.seen), STATE_STYLES[status.seen.state])),
        *_job_facts(status),
        *([("metrics", Styled(summary.problem, "yellow"))] if summary.problem else []),
        *_result_facts(summary),
        *_progress_facts(status),
        *([("GPUs", _gpu_text(status.facts.gpus))] if status.facts.gpus else []),
        *((f"excluded {host}", Styled(why, "yellow")) for host, why in excluded_nodes(layout).items()),
        *_place_facts(status),
    ]
    terminal.facts(facts, is_data=True)
    if summary.after:
        _show_samples(summary.after, terminal, is_data=True)
    commands = next_commands(layout, status.seen, status.failure, can_evaluate=bool(summary.after))
    following = "\n".join(each for each in commands if each != f"ftkit status {folder.id}")
    if status.failure:
        _show_failure(status.failure, layout, terminal, is_data=True)
        following = _advice(layout, status.seen, status.failure)
    terminal.facts([("next", following)], is_data=True)


def show_end(run: SubmittedRun, seen: Job, terminal: Terminal) -> None:
    """Show how a run ended: of a completed one the steps with their time, the results, and the model's folder."""
    if seen.state is not RunState.COMPLETED:
        failure = explain_failure(run, seen)
        if failure:
            _show_failure(failure, run.layout, terminal, is_data=False)
        raise failed(run, seen, failure)
    summary = read_summary(run.layout)
    results = dict(_result_facts(summary))
    if "time" in results and "progress" in results:
        results["progress"] = f"{results['progress']}, {results.pop('time')}"
    names = ("progress", "sharding", "loss", "validation", "best", "export")
    shown: Facts = [(name, results[name]) for name in names if name in results]
    terminal.say()
    state = Styled(str(seen), STATE_STYLES[seen.state])
    terminal.facts([("state", state), *shown, *_file_facts(run.layout)], is_data=False)
    if summary.after:
        _show_samples(summary.after, terminal, is_data=False)
    following = next_commands(run.layout, seen, None, can_evaluate=bool(summary.after))
    terminal.facts([("next", "\n".join(following))], is_data=False)


def failed(run: SubmittedRun, seen: Job, failure: Failure | None) -> RunFailedError:
    return RunFailedError(
        f"{run.id}: {seen}",
        exit_code=failure.exit_code if failure else RunFailedError.exit_code,
        fix=_advice(run.layout, seen, failure),
    )


def _show_failure(failure: Failure, layout: RunLayout, terminal: Terminal, *, is_data: bool) -> None:
    """Show the error of the rank that failed first, or the end of the log if no other reason is known."""
    error = failure.error
    if error:
        title = f"rank {error.rank} on {error.host} failed first: {error.type}{error.cause and f'; {error.cause}'}"
        text = error.message if error.is_actionable else error.traceback.rstrip() or error.message
    else:
        is_known = failure.exit_code != RunFailedError.exit_code
        what = EXIT_CODES[failure.exit_code] if is_known else "no rank left an error"
        title = f"{what}; end of {short_path(layout.job_log)}:"
        text = "\n".join(log_tail(layout)) or "(the log is empty)"
    for line in ("", Styled(title, "bold"), redact(text, os.environ), ""):
        terminal.text(line, is_data=is_data)


def _job_facts(status: RunStatus) -> Facts:
    if status.entry.run is None:
        return []
    submission, seen, code = status.entry.run.submission, status.seen, status.exit_code
    job = "process" if submission.scheduler == "local" else "job"
    where = f" on {seen.nodes or submission.host}" if seen.nodes or job == "process" else ""
    earlier = f", after {', '.join(submission.earlier_job_ids)}" if submission.earlier_job_ids else ""
    facts: Facts = [
        (job, f"{submission.job_id}{where}{earlier}"),
        ("submitted", f"{age(time.time() - submission.submitted)} ago on {submission.host}"),
    ]
    if seen.started and (seen.ended or seen.state is RunState.RUNNING):
        facts.append(("took" if seen.ended else "runs for", duration((seen.ended or time.time()) - seen.started)))
    elif seen.started and seen.started > time.time():
        facts.append(("expected", f"to start in {duration(seen.started - time.time())}"))
    if code:
        is_explained = status.failure and code == status.failure.exit_code
        facts.append(("exit code", f"{code}: {EXIT_CODES[code]}" if is_explained else f"{code} (of the job)"))
    return facts


def _result_facts(summary: RunSummary) -> Facts:
    end, sharding = summary.end, summary.sharding
    facts: Facts = [("progress", record_line(summary.script_step))] if summary.script_step else []
    if sharding:
        facts.append(("sharding", Styled(sharding.warning, "yellow") if sharding.warning else sharding_text(sharding)))
    if summary.first_step and summary.last_step:
        facts += _step_facts(summary.first_step, summary.last_step)
    moments = [measured(summary.before)] if summary.before else []
    if (last := summary.last_evaluation) and last.when != "before":
        moments.append(measured(last) + ("" if last.when == "after" else f" at step {last.step}"))
    facts += [("validation", " → ".join(moments))] if moments else []
    if end:
        what = "of training" if end.has_checkpoint else "from start to end"
        if summary.start and summary.start.resumed_from:
            what += f" since step {summary.start.resumed_from}"
        facts.append(("time", f"{duration(end.training_seconds)} {what}{early_stopping(end)}"))
        if end.best_step is not None:
            facts.append(("best", f"step {end.best_step}"))
    facts += [("checkpoint", short_path(Path(summary.checkpoint.path)))] if summary.checkpoint else []
    if summary.start and summary.start.damaged:
        facts.append(("damaged", Styled(damage_of(summary.start), "red")))
    if lost := summary.failed_checkpoint:
        facts.append(("failed save", Styled(f"of step {lost.step}, {lost.num_failed} in a row: {lost.reason}", "red")))
    facts += [("export", short_path(Path(end.export)))] if end and end.export else []
    return facts


def _step_facts(first: StepRecord, last: StepRecord) -> Facts:
    tokens = f"{count(last.tokens)} tokens ({count(last.targets)} of them trained)"
    speed = f"{count(last.tokens_per_second)} tokens/s in total in the last steps"
    progress = f"step {last.step}/{last.num_steps}, {tokens}, {speed}"
    facts: Facts = [("progress", progress), ("loss", f"{first.loss:.4f} → {last.loss:.4f}")]
    if last.scores:
        facts.append(("teacher" if "agreement" in last.scores else "preferences", ", ".join(pair_texts(last.scores))))
    if routers := last.routers:
        balance = routers.load_balancing_loss
        text = (
            f"busiest {routers.max_utilization:.2f} × the mean load of its layer, "
            f"{routers.mean_max_utilization:.2f} × on average over the layers, "
            f"{routers.dead_expert_ratio:.1%} without tokens"
        )
        facts.append(("experts", text if balance is None else f"{text}, load-balancing loss {balance:.3f}"))
    return facts


def _progress_facts(status: RunStatus) -> Facts:
    left = status.seconds_left
    facts: Facts = [] if left is None else [("left", f"about {duration(left)} at this rate")]
    if status.seen.state is RunState.RUNNING:
        layout = status.entry.folder.layout
        for node, (since, peer) in silent_nodes(layout).items():
            when = f"{datetime.fromtimestamp(since, UTC):%H:%M:%S} UTC ({age(time.time() - since)} ago)"
            facts.append((f"silent {node}", Styled(f"since {when}, says {peer}", "red")))
        if reports := read_hang_reports(layout):
            hosts = {rank: each.host for rank, each in reports.items()}
            facts.append(("hang", Styled(describe_hang(reports, hosts), "red")))
    silence = status.silence
    if silence and silence.is_stalled:
        alive = "its trainer is alive" if silence.is_alive else "its trainer does not respond"
        facts.append(("stalled", Styled(f"no record for {duration(silence.seconds)}, and {alive}", "red")))
    restarts = status.summary.restarts
    lines = [
        f"{age(time.time() - each.time)} ago"
        + ("" if each.step is None else f", from step {each.step}")
        + (f", on {each.host}" if each.host else "")
        + (f": {each.reason}" if each.reason else "")
        for each in restarts[-_NUM_SHOWN:]
    ]
    if lines:
        facts.append(("restarts", "\n".join([f"{len(restarts)}, newest last", *lines])))
    for kind, title, what in (("nonfinite", "skipped", ", not finite"), ("spike", "spikes", "")):
        steps = [str(each.step) for each in status.summary.anomalies if each.kind == kind]
        if steps:
            newest = ", ".join(steps[-_NUM_ANOMALIES_SHOWN:])
            facts.append((title, f"{plural(len(steps), 'step')}{what}, newest last: {newest}"))
    if status.facts.stragglers:
        facts.append(("slow", Styled("\n".join(map(str, status.facts.stragglers)), "yellow")))
    facts += [("repetition", str(status.facts.verdict))] if status.facts.verdict else []
    facts += [("not repeatable", "; ".join(status.facts.doubts))] if status.facts.doubts else []
    return facts


def _gpu_text(gpus: GpuSummary) -> str:
    busy = gpus.utilization if gpus.sm_activity is None else gpus.sm_activity
    known = {
        "{:,.0f}% busy": busy, "{:,.0f} W each": gpus.power, "peak {:,.0f} GiB": gpus.peak_memory_gib,
        "peak {:,.0f} °C": gpus.peak_temperature,
    }  # fmt: skip
    parts = [form.format(value) for form, value in known.items() if value is not None]
    parts += [] if gpus.energy_kwh is None else [f"{energy(gpus.energy_kwh)} in total"]
    parts += [f"clocks limited by {name} {share:.0%} of the time" for name, share in gpus.throttled.items()]
    return f"{gpus.num_gpus}: {', '.join(parts)}"


def _place_facts(status: RunStatus) -> Facts:
    plan, script, trainer = status.facts.plan, status.facts.script, status.facts.trainer
    layout = status.entry.folder.layout
    facts: Facts = []
    if plan:
        place = f"{plan.placement.num_nodes} × {plural(plan.placement.processes_per_node, 'process')}"
        facts += [("script", " ".join([script.path, *script.args]))] if script else []
        facts += [("recipe", trainer.recipe.name)] if trainer else []
        engine = f", {trainer.engine.name}" if trainer else ""
        facts.append(("cluster", f"{plan.cluster.name}, {place} ({plan.placement.device}){engine}"))
        facts += [("image", plan.image)] if plan.image else []
    elif status.entry.plan:  # else it is damaged, which is the run's state
        facts.append(("plan", status.facts.plan_problem))
    checkpoints = [path.name for _, path in list_checkpoints(layout)][-_NUM_SHOWN:]
    if checkpoints:
        facts.append(("checkpoints", f"{', '.join(checkpoints)} in {short_path(layout.checkpoints)}"))
    facts += _file_facts(layout)
    if copy := read_status(layout):
        total = len(copy.done) + len(copy.waiting)
        text = f"{len(copy.done)} of {total} parts in {copy.destination}, {age(time.time() - copy.time)} ago"
        if copy.error:
            facts.append(("copy", Styled(f"{text}; failed: {copy.error}", "red")))
        elif copy.waiting:
            facts.append(("copy", Styled(f"{text}; missing: {', '.join(copy.waiting)}", "yellow")))
        else:
            facts.append(("copy", text))
    return [*facts, ("run folder", short_path(layout.root)), ("log", short_path(layout.job_log))]


def _file_facts(layout: RunLayout) -> Facts:
    facts: Facts = [("report", short_path(layout.report))] if layout.report.is_file() else []
    num_traces = len(list(layout.profile.glob("rank-*.trace.json.gz")))
    traces = f"{plural(num_traces, 'trace')} in {short_path(layout.profile)}"
    return [*facts, ("profile", traces)] if num_traces else facts


def _show_samples(evaluation: EvaluationRecord, terminal: Terminal, *, is_data: bool) -> None:
    for sample in choose_samples(evaluation.samples):
        verdict: Cell = Styled("correct", "green") if sample.correct else Styled("wrong", "red")
        facts: Facts = [("question", sample.question), ("answer", sample.answer), ("", verdict)]
        if sample.reference and not sample.correct:
            facts.append(("expected", sample.reference))
        terminal.text(is_data=is_data)
        terminal.facts(facts, is_data=is_data)
    terminal.text(is_data=is_data)


def choose_samples(samples: tuple[Sample, ...]) -> list[Sample]:
    correct = [sample for sample in samples if sample.correct]
    wrong = [sample for sample in samples if not sample.correct]
    return [correct[0], wrong[0]] if correct and wrong else list(samples[:2])


def _advice(layout: RunLayout, seen: Job, failure: Failure | None) -> str:
    commands = "; ".join(next_commands(layout, seen, failure))
    if failure and failure.is_in_code:
        again = f"or continue this run with the corrected code: ftkit resume {layout.root.name} --allow code"
        return f"correct the code, then run it again: {original_command(layout)}; {again}"
    if failure is None or failure.exit_code == RunFailedError.exit_code:
        return commands
    return f"{'fix that, then' if failure.can_resume else 'fix that, then run again'}: {commands}"


def next_commands(layout: RunLayout, seen: Job, failure: Failure | None, *, can_evaluate: bool = False) -> list[str]:
    """Return the commands to type next; the original command instead of 'ftkit resume' if the plan itself is wrong."""
    run_id = layout.root.name
    if seen.state is RunState.DAMAGED:
        return [f"ftkit logs {run_id}"]
    is_lost = seen.state is RunState.UNKNOWN and seen.reason == LOST
    if not seen.is_final and not is_lost and layout.submission.exists():
        return [f"ftkit status {run_id} --follow", f"ftkit logs {run_id} -f", f"ftkit cancel {run_id}"]
    if seen.state is RunState.COMPLETED:
        words = ["logs", "status"] if layout.is_script else ["chat", *["eval"] * can_evaluate, "export", "status"]
        return [f"ftkit {word} {run_id}" for word in words]
    if failure and not failure.can_resume:
        return [original_command(layout)] + [f"ftkit resume {run_id} --allow code"] * failure.is_in_code
    has_failed = failure and failure.exit_code == RunFailedError.exit_code and seen.state is RunState.FAILED
    logs = [f"ftkit logs {run_id}"] if has_failed or is_lost else []
    return [*logs, f"ftkit resume {run_id}"]


def run_status_as_json(status: RunStatus) -> dict[str, object]:
    folder, facts, summary, failure = status.entry.folder, status.facts, status.summary, status.failure
    layout, plan, script, trainer = folder.layout, facts.plan, facts.script, facts.trainer
    submission, copy = status.entry.run.submission if status.entry.run else None, read_status(layout)
    return {
        **asdict(status.seen),
        "id": folder.id,
        "name": folder.name,
        "recipe": trainer.recipe.name if trainer else None,
        "script": script and {"path": script.path, "args": list(script.args), "folder": script.folder},
        "cluster": plan.cluster.name if plan else None,
        "image": plan.image if plan else None,
        "scheduler": plan.cluster.scheduler if plan else None,
        "job_id": status.seen.id,
        "earlier_job_ids": list(submission.earlier_job_ids) if submission else [],
        "created": folder.created.isoformat(),
        "submitted": submission.submitted if submission else None,
        "plan_problem": facts.plan_problem or None if status.entry.plan else None,
        "metrics_problem": summary.problem or None,
        "world_size": plan.placement.world_size if plan else None,
        "engine": trainer.engine.name if trainer else None,
        "num_steps": summary.last_step.num_steps if summary.last_step else trainer and trainer.num_steps,
        **{key: asdict(record) if (record := getattr(summary, key)) else None for key in _RECORDS},
        "seconds_left": status.seconds_left,
        "silent_seconds": status.silence.seconds if status.silence else None,
        "is_stalled": bool(status.silence and status.silence.is_stalled),
        "restarts": [asdict(restart) for restart in summary.restarts],
        "anomalies": [asdict(each) for each in summary.anomalies],
        "stragglers": [asdict(each) for each in facts.stragglers],
        "not_repeatable": facts.doubts,
        "repetition": facts.verdict and {**asdict(facts.verdict), "is_repeated": facts.verdict.is_repeated},
        "sync": copy and asdict(copy),
        "gpus": facts.gpus and asdict(facts.gpus),
        "excluded_nodes": excluded_nodes(layout),
        "silent_nodes": {
            node: {"since": since, "noticed_by": peer} for node, (since, peer) in silent_nodes(layout).items()
        },
        "checkpoints": [{"step": step, "path": str(path)} for step, path in list_checkpoints(layout)],
        "exit_code": status.exit_code,
        "error": asdict(failure.error) if failure and failure.error else None,
        "folder": str(layout.root),
        "log": str(layout.job_log),
        "next": next_commands(layout, status.seen, failure, can_evaluate=bool(status.summary.after)),
    }
