"""The state and results of a run: collected, on the terminal, and as JSON."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import age, duration, energy, finite, short_path
from ftkit.cli.terminal.report import (
    advice,
    file_facts,
    next_commands,
    result_facts,
    show_failure,
    show_samples,
    state_cell,
    sync_facts,
)
from ftkit.errors import EXIT_CODES, RunFailedError, plural
from ftkit.runs.checkpoints import list_checkpoints
from ftkit.runs.ends import excluded_nodes
from ftkit.runs.failure import Failure, explain_failure
from ftkit.runs.find import RunFolder
from ftkit.runs.gpu_samples import GpuSummary, read_samples, summarize_samples
from ftkit.runs.history import History, Silence, measure_silence, read_history
from ftkit.runs.job import Job, RunState, SubmittedRun
from ftkit.runs.listing import read_entry
from ftkit.runs.stragglers import Straggler, find_stragglers, read_timings
from ftkit.runs.sync import read_status

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan  # noqa: TC004 - no pydantic reads this dataclass
    from ftkit.planning.script import Script, ScriptPlan  # noqa: TC004
    from ftkit.runs.repeat import Verdict  # noqa: TC004

_NUM_CHECKPOINTS_SHOWN = 5
_NUM_RESTARTS_SHOWN = 5
_NUM_ANOMALIES_SHOWN = 8
_RECORDS = (
    "start", "first_step", "last_step", "before", "after", "checkpoint", "failed_checkpoint", "end", "sharding",
    "script_step",
)  # fmt: skip
"""Records of a history that `--json` has under their names."""


@dataclass(frozen=True)
class RunStatus:
    """The state and results of a run, read from its folder and its scheduler."""

    folder: RunFolder
    plan: RunPlan | ScriptPlan | None
    plan_problem: str
    """Reason why an undamaged plan can't be read: another version of ftkit wrote it."""
    run: SubmittedRun | None
    seen: Job
    history: History
    failure: Failure | None
    silence: Silence | None
    stragglers: list[Straggler]
    doubts: list[str]
    """Reasons why the run can't be repeated exactly."""
    verdict: Verdict | None
    """Whether it reproduced the run that it repeats; None if it repeats none."""
    gpus: GpuSummary | None


def read_run_status(folder: RunFolder) -> RunStatus:
    """Read the files of a run, and query its scheduler."""
    from ftkit.launch.job_states import observe_all
    from ftkit.planning.plan import PlanError
    from ftkit.planning.script import read_job_plan
    from ftkit.runs.manifest import explain_missing_digests
    from ftkit.runs.repeat import judge

    entry, plan, plan_problem = read_entry(folder), None, ""
    if entry.plan:
        try:
            plan = read_job_plan(folder.layout)
        except PlanError as error:
            plan_problem = error.what
    seen = observe_all([entry.run] if entry.run else []).state_of(entry)
    return RunStatus(
        folder=folder,
        plan=plan,
        plan_problem=plan_problem,
        run=entry.run,
        seen=seen,
        history=read_history(folder.layout),
        failure=explain_failure(entry.run, seen) if entry.run else None,
        silence=_measure_silence(folder, plan, seen),
        stragglers=find_stragglers(read_timings(folder.layout)),
        doubts=explain_missing_digests(folder.layout),
        verdict=judge(folder.layout),
        gpus=summarize_samples(read_samples(folder.layout)),
    )


def _measure_silence(folder: RunFolder, plan: RunPlan | ScriptPlan | None, seen: Job) -> Silence | None:
    """Return how long the trainer has been silent; None for a script, which writes no records at known times."""
    if folder.layout.is_script:
        return None
    trainer = _trainer(plan)
    return measure_silence(folder.layout, seen, trainer.recipe.training.log_every_steps if trainer else 1, time.time())


def _trainer(plan: RunPlan | ScriptPlan | None) -> RunPlan | None:
    """Return the plan of ftkit's trainer; None for a script."""
    from ftkit.planning.plan import RunPlan

    return plan if isinstance(plan, RunPlan) else None


def _script(plan: RunPlan | ScriptPlan | None) -> Script | None:
    from ftkit.planning.script import ScriptPlan

    return plan.script if isinstance(plan, ScriptPlan) else None


def show_run_status(status: RunStatus, terminal: Terminal) -> None:
    """Print a run: its state, progress and results, the error that ended it, and what to do next."""
    facts: list[tuple[str, Cell]] = [
        ("run", Styled(status.folder.id, "bold")),
        ("state", state_cell(status.seen)),
        *_job_facts(status),
        *([("metrics", Styled(status.history.problem, "yellow"))] if status.history.problem else []),
        *result_facts(status.history),
        *_progress_facts(status),
        *_gpu_facts(status.gpus),
        *((f"excluded {host}", Styled(why, "yellow")) for host, why in excluded_nodes(status.folder.layout).items()),
        *_place_facts(status),
    ]
    terminal.facts(facts, is_data=True)
    if status.history.after:
        show_samples(status.history.after, terminal, is_data=True)
    layout, this = status.folder.layout, f"ftkit status {status.folder.id}"
    following = [text for text in next_commands(layout, status.seen, status.failure) if text != this]
    if status.failure:
        show_failure(status.failure, layout, terminal, is_data=True)
        following = [advice(layout, status.seen, status.failure)]
    terminal.facts([("next", "\n".join(following))], is_data=True)


def _job_facts(status: RunStatus) -> list[tuple[str, Cell]]:
    if status.run is None:
        return []
    submission, seen = status.run.submission, status.seen
    job = "process" if submission.scheduler == "local" else "job"
    where = f" on {seen.nodes or submission.host}" if seen.nodes or job == "process" else ""
    earlier = f", after {', '.join(submission.earlier_job_ids)}" if submission.earlier_job_ids else ""
    facts: list[tuple[str, Cell]] = [
        (job, f"{submission.job_id}{where}{earlier}"),
        ("submitted", f"{age(time.time() - submission.submitted)} ago on {submission.host}"),
    ]
    if seen.started and (seen.ended or seen.state is RunState.RUNNING):
        facts.append(("took" if seen.ended else "runs for", duration((seen.ended or time.time()) - seen.started)))
    elif seen.started and seen.started > time.time():
        facts.append(("expected", f"to start in {duration(seen.started - time.time())}"))
    code = _exit_code(status)
    if code:
        is_explained = status.failure and code == status.failure.exit_code
        facts.append(("exit code", f"{code}: {EXIT_CODES[code]}" if is_explained else f"{code} (of the job)"))
    return facts


def _progress_facts(status: RunStatus) -> list[tuple[str, Cell]]:
    """Return the rows about the time left, a stall, restarts, anomalies and slow nodes."""
    facts: list[tuple[str, Cell]] = []
    left = _seconds_left(status)
    if left is not None:
        facts.append(("left", f"about {duration(left)} at this rate"))
    silence = status.silence
    if silence and silence.is_stalled:
        alive = "its trainer is alive" if silence.is_alive else "its trainer does not respond"
        facts.append(("stalled", Styled(f"no record for {duration(silence.seconds)}, and {alive}", "red")))
    shown = status.history.restarts[-_NUM_RESTARTS_SHOWN:]
    lines = [
        f"{age(time.time() - each.time)} ago"
        + ("" if each.step is None else f", from step {each.step}")
        + (f", on {each.host}" if each.host else "")
        + (f": {each.reason}" if each.reason else "")
        for each in shown
    ]
    if lines:
        facts.append(("restarts", "\n".join([f"{len(status.history.restarts)}, newest last", *lines])))
    kinds = {"nonfinite": ("skipped", ", not finite"), "spike": ("spikes", "")}
    for kind, (title, what) in kinds.items():
        steps = [str(each.step) for each in status.history.anomalies if each.kind == kind]
        if steps:
            newest = ", ".join(steps[-_NUM_ANOMALIES_SHOWN:])
            facts.append((title, f"{plural(len(steps), 'step')}{what}, newest last: {newest}"))
    if status.stragglers:
        facts.append(("slow", Styled("\n".join(map(str, status.stragglers)), "yellow")))
    if status.verdict:
        facts.append(("repetition", str(status.verdict)))
    if status.doubts:
        facts.append(("not repeatable", "; ".join(status.doubts)))
    return facts


def _seconds_left(status: RunStatus) -> float | None:
    trainer = _trainer(status.plan)
    if status.seen.state is not RunState.RUNNING or trainer is None:
        return None
    return status.history.seconds_left(trainer.recipe.training.log_every_steps)


def _gpu_facts(gpus: GpuSummary | None) -> list[tuple[str, Cell]]:
    """Return the row about the GPUs: their load, memory, temperature and energy."""
    if gpus is None:
        return []
    busy = gpus.utilization if gpus.sm_activity is None else gpus.sm_activity
    known = (
        ("", busy, "% busy"),
        ("", gpus.power, " W each"),
        ("peak ", gpus.peak_memory_gib, " GiB"),
        ("peak ", gpus.peak_temperature, " °C"),
    )
    parts = [f"{peak}{value:,.0f}{unit}" for peak, value, unit in known if value is not None]
    parts += [] if gpus.energy_kwh is None else [f"{energy(gpus.energy_kwh)} in total"]
    parts += [f"clocks limited by {name} {share:.0%} of the time" for name, share in gpus.throttled.items()]
    return [("GPUs", f"{gpus.num_gpus}: {', '.join(parts)}")]


def _exit_code(status: RunStatus) -> int | None:
    """Return the exit code of the failure, as `ftkit run` does; without a known failure, the job's."""
    failure = status.failure
    return (
        status.seen.exit_code if failure is None or failure.exit_code == RunFailedError.exit_code else failure.exit_code
    )


def _place_facts(status: RunStatus) -> list[tuple[str, Cell]]:
    plan, layout = status.plan, status.folder.layout
    facts: list[tuple[str, Cell]] = []
    if plan:
        place = f"{plan.placement.num_nodes} × {plural(plan.placement.processes_per_node, 'process')}"
        trainer, script = _trainer(plan), _script(plan)
        if script:
            facts.append(("script", " ".join([script.path, *script.args])))
        facts += [("recipe", trainer.recipe.name)] if trainer else []
        engine = f", {trainer.engine.name}" if trainer else ""
        facts.append(("cluster", f"{plan.cluster.name}, {place} ({plan.placement.device}){engine}"))
    if status.plan_problem:
        facts.append(("plan", status.plan_problem))
    if plan and plan.image:
        facts.append(("image", plan.image))
    checkpoints = [path.name for _, path in list_checkpoints(layout)][-_NUM_CHECKPOINTS_SHOWN:]
    if checkpoints:
        facts.append(("checkpoints", f"{', '.join(checkpoints)} in {short_path(layout.checkpoints)}"))
    facts += [*file_facts(layout), *sync_facts(layout)]
    return [*facts, ("run folder", short_path(layout.root)), ("log", short_path(layout.job_log))]


def run_status_as_json(status: RunStatus) -> dict[str, Any]:
    """Return the values of `ftkit status --json`."""
    summary, plan, layout = status.history, status.plan, status.folder.layout
    trainer, script = _trainer(plan), _script(plan)
    submission, sync = status.run.submission if status.run else None, read_status(layout)
    values: dict[str, Any] = finite(
        {
            **asdict(status.seen),
            "id": status.folder.id,
            "name": status.folder.name,
            "recipe": trainer.recipe.name if trainer else None,
            "script": script and {"path": script.path, "args": list(script.args), "folder": script.folder},
            "cluster": plan.cluster.name if plan else None,
            "image": plan.image if plan else None,
            "scheduler": plan.cluster.scheduler if plan else None,
            "job_id": status.seen.id,
            "earlier_job_ids": list(submission.earlier_job_ids) if submission else [],
            "created": status.folder.created.isoformat(),
            "submitted": submission.submitted if submission else None,
            "plan_problem": status.plan_problem or None,
            "metrics_problem": status.history.problem or None,
            "world_size": plan.placement.world_size if plan else None,
            "engine": trainer.engine.name if trainer else None,
            "num_steps": summary.last_step.num_steps if summary.last_step else trainer and trainer.num_steps,
            **{key: asdict(record) if (record := getattr(summary, key)) else None for key in _RECORDS},
            "seconds_left": _seconds_left(status),
            "silent_seconds": status.silence.seconds if status.silence else None,
            "is_stalled": bool(status.silence and status.silence.is_stalled),
            "restarts": [asdict(restart) for restart in status.history.restarts],
            "anomalies": [asdict(each) for each in status.history.anomalies],
            "stragglers": [asdict(each) for each in status.stragglers],
            "not_repeatable": status.doubts,
            "repetition": status.verdict and {**asdict(status.verdict), "is_repeated": status.verdict.is_repeated},
            "sync": sync and asdict(sync),
            "gpus": asdict(status.gpus) if status.gpus else None,
            "excluded_nodes": excluded_nodes(layout),
            "checkpoints": [{"step": step, "path": str(path)} for step, path in list_checkpoints(layout)],
            "exit_code": _exit_code(status),
            "error": asdict(status.failure.error) if status.failure and status.failure.error else None,
            "folder": str(layout.root),
            "log": str(layout.job_log),
            "next": next_commands(layout, status.seen, status.failure),
        }
    )
    return values
