"""Submit, resubmit, cancel, and remove runs."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ftkit.data.staging import needs_preparation
from ftkit.errors import FtkitError, NoAnswerError, PrerequisiteError, SubmitError, plural
from ftkit.files import DamagedFileError, atomic_folder, file_lock_if_supported, files_in, write_file, write_json
from ftkit.launch.code import files_of
from ftkit.launch.job_states import LOST, observe, observe_all
from ftkit.launch.render import render_job, render_preparation
from ftkit.launch.scheduler import InterruptedSubmitError, UncertainSubmitError, scheduler_for
from ftkit.launch.slurm import find_job
from ftkit.launch.templates import OVERRIDDEN_PARTS, find_overrides
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import PlanError, RunPlan, ScriptPlan, plan_to_json, read_job_plan
from ftkit.runs.ends import End, note_end
from ftkit.runs.job import Cause, Job, RunState, Submission, SubmittedRun, read_submission
from ftkit.runs.lease import current_holder, revoke
from ftkit.runs.manifest import add_submission
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord

if TYPE_CHECKING:
    from ftkit.launch.resume import ResumedPlan
    from ftkit.runs.find import RunFolder


_SILENT_SECONDS = 600.0  # time without a line in its log after which a run of another machine counts as lost
PlanT = TypeVar("PlanT", bound=RunPlan | ScriptPlan)


@dataclass(frozen=True)
class NewJob(Generic[PlanT]):
    plan: PlanT
    script: str
    manifest: dict[str, Any]  # content of the run's manifest.json
    environment: Mapping[str, str]  # environment variables of the jobs
    preparation: str | None = None  # script of a job that prepares the run, on which the training job depends
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """More files of the run's folder, by their path in it."""


def submit(job: NewJob[Any]) -> SubmittedRun:
    """Create the run's folder and submit its scripts.

    Raises `SubmitError` if the scheduler refuses the job, after removing the run's folder, or if its answer is unclear;
    `PrerequisiteError` if the workspace or the scheduler can't be used.
    """
    return submit_all([job])[0]


def submit_all(jobs: Sequence[NewJob[Any]], tasks: str = "", after: SubmittedRun | None = None) -> list[SubmittedRun]:
    """Submit one new run, or the `tasks` of a job array that starts after the job of `after` has ended.

    Raises as `submit` does. The first job's files include the array's script. Either all runs are submitted or none.
    """
    created: list[Path] = []
    try:
        for job in jobs:
            _create_folder(job)
            created.append(job.plan.layout.root)
        plans, has_preparation = [job.plan for job in jobs], jobs[0].preparation is not None
        return _submit(plans, jobs[0].environment, has_preparation=has_preparation, tasks=tasks, after=after)
    except (SubmitError, PrerequisiteError) as error:
        if not isinstance(error, UncertainSubmitError):
            for root in created:
                shutil.rmtree(root, ignore_errors=True)
        raise


def submit_array(
    jobs: Sequence[NewJob[Any]], tasks: str, submitted: Sequence[SubmittedRun], max_parallel: int | None
) -> list[SubmittedRun]:
    """Submit the next job array of a sweep; errors also name its runs that are `submitted` already.

    With `max_parallel`, it waits for the end of the array before.
    """
    try:
        return submit_all(jobs, tasks, after=submitted[-1] if max_parallel and submitted else None)
    except FtkitError as error:
        if not submitted:
            raise
        commands = "; ".join(f"ftkit cancel {run.id}" for run in submitted)
        there = f"already submitted: {plural(len(submitted), 'run')} of the sweep"
        raise SubmitError(
            f"{jobs[0].plan.name}: {error.what}",
            meaning=f"{error.meaning}; {there}".lstrip("; "),
            fix=f"{error.fix}; to cancel them: {commands}".lstrip("; "),
        ) from error


def _create_folder(job: NewJob[Any]) -> None:
    """Write plan, manifest and other files into a temporary folder, then rename it."""
    layout, final = job.plan.layout, job.plan.layout.root
    contents: dict[str, str | bytes] = {
        layout.plan.name: plan_to_json(job.plan),
        layout.script.name: job.script,
        **job.files,
    }
    if job.preparation is not None:
        contents[layout.preparation_script.name] = job.preparation
    try:
        with atomic_folder(final, final.with_name(f".unfinished-{job.plan.id}")) as root:
            RunLayout(root).logs.mkdir()
            for name, content in contents.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            write_json(RunLayout(root).manifest, job.manifest)
    except OSError as error:
        raise PrerequisiteError(
            f"can't create the run's folder: {error}",
            meaning="the workspace is not writable, is full, or is not mounted on this machine",
            fix="set FTKIT_WORKSPACE or 'workspace:' in ftkit.yaml; 'ftkit config' shows where it is set",
        ) from error


def read_resumable_plan(layout: RunLayout) -> RunPlan | ScriptPlan:
    """Read a run's plan to submit it again; PlanError if it is unreadable or belongs to a run in another folder."""
    plan = read_job_plan(layout)
    try:
        is_same = plan.layout.root.samefile(layout.root)
    except (OSError, ValueError):  # it does not exist, or the path is impossible
        is_same = False
    if not is_same:
        raise PlanError(
            f"the plan in {layout.plan} is that of the run in {plan.layout.root}",
            meaning="the folder was copied or moved; its plan and its job script still have the old paths",
            fix="move it back, or start a new run",
        )
    return plan


def resume(
    plan: RunPlan | ScriptPlan,
    environment: Mapping[str, str],
    command: Sequence[str] = (),
    changed: ResumedPlan[Any] | None = None,
    image_facts: Mapping[str, str] | None = None,
    project: Path | None = None,
) -> SubmittedRun:
    """Submit a run again; training continues from the newest checkpoint.

    `command` and `image_facts` are for the manifest. `changed` replaces the run's plan and script; if None, they are
    submitted unchanged. A project's `sbatch/` overrides parts of new scripts. Raises `SubmitError` if the run has not
    ended or has no steps left; also raises as `submit` does. On an error, the run keeps its plan and script.
    """
    layout, new = plan.layout, changed.plan if changed else plan
    with file_lock_if_supported(layout.root / ".resume.lock"):  # the later of two commands sees the job
        if read_submission(layout) is None and (holder := current_holder(layout)):
            raise SubmitError(
                f"{plan.id} is already being trained by {holder}: two jobs must not train in one folder",
                fix="cancel that job first (squeue --me lists your jobs), or wait until it ends",
            )
        submission, end = find_submission(layout), None
        if submission:
            end = End.of_run(_check_it_ended(SubmittedRun(layout, submission), new))
            end = End(Cause.DISK_FULL) if layout.disk_full.exists() else end
        files: dict[Path, str | bytes] = {}
        former = list[Path]()
        changes = {}
        if changed:
            files = {layout.root / path: content for path, content in files_of(changed.copies).items()}
            former = files_in(layout.code) if files else []
            files |= {layout.plan: plan_to_json(new), layout.script: render_job(new, project, prepares=False)}
            changes = {each.key: (each.before, each.after) for each in changed.changes}
        has_preparation = isinstance(new, RunPlan) and needs_preparation(new, environment)
        if isinstance(new, RunPlan) and has_preparation and (changed or not layout.preparation_script.is_file()):
            files[layout.preparation_script] = render_preparation(new, project)
        facts: dict[str, object] = dict(image_facts or {})
        if project is not None and files:
            facts[OVERRIDDEN_PARTS] = find_overrides(project)
        revoke(layout)  # no process trains anymore, so the next job need not wait for the lease to expire
        ended = _files_of_end(layout, submission)
        with _restored_if_refused(layout.manifest, layout.end_reason, *ended, *former, *files):
            for path in ended:
                path.unlink(missing_ok=True)
            if end:
                note_end(layout, end)
            for path in set(former) - set(files):
                path.unlink()
            for path, content in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, content if isinstance(content, bytes) else content.encode())
            add_submission(new, command, changes, facts)
            return _submit([new], environment, has_preparation=has_preparation, earlier=submission)[0]


def _files_of_end(layout: RunLayout, submission: Submission | None) -> list[Path]:
    """Return the files of a run's former job about its end: state, exit code, requests."""
    ended = [layout.canceled, layout.disk_full, layout.stop_request, layout.state]
    if submission:
        job_id = submission.job_id
        ended += [layout.job_exit_code(job_id), layout.job_stop_request(job_id), layout.job_no_restart(job_id)]
    return ended


def find_submission(layout: RunLayout) -> Submission | None:
    """Return a run's newest submission; a job that Slurm accepted although its answer was lost is found and recorded.

    Raises FtkitError: Slurm does not respond. Other errors are those of `read_submission`.
    """
    submission = read_submission(layout)
    if submission and submission.superseded is None:
        return submission
    try:
        if read_job_plan(layout).cluster.scheduler != "slurm":
            return submission
    except PlanError:
        return submission
    try:
        job_id = find_job(layout, os.environ)
    except PrerequisiteError:
        if submission is None:
            raise
        return submission
    if job_id is None or (submission and job_id == submission.job_id):
        return submission
    earlier = (*submission.earlier_job_ids, submission.job_id) if submission else ()
    submitted = (submission and submission.superseded) or layout.plan.stat().st_mtime
    submission = Submission("slurm", job_id, submitted, socket.gethostname(), earlier_job_ids=earlier)
    write_json(layout.submission, submission)
    return submission


@contextmanager
def _restored_if_refused(*paths: Path) -> Iterator[None]:
    """Restore files if the block raises an error, unless a job may already read them."""
    former = {path: path.read_bytes() if path.is_file() else None for path in paths}
    try:
        yield
    except UncertainSubmitError:
        raise
    except BaseException:
        for path, content in former.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_file(path, content)
        raise


def _submit(
    plans: Sequence[RunPlan | ScriptPlan],
    environment: Mapping[str, str],
    *,
    has_preparation: bool,
    tasks: str = "",
    earlier: Submission | None = None,
    after: SubmittedRun | None = None,
) -> list[SubmittedRun]:
    plan = plans[0]
    scheduler = scheduler_for(plan.cluster.scheduler)
    check_first = f"check with 'ftkit status {plan.id}', which finds its job; if there is none: ftkit resume {plan.id}"
    try:
        submission = scheduler.submit(
            plan.layout, environment, has_preparation=has_preparation, tasks=tasks, after=after
        )
    except (NoAnswerError, KeyboardInterrupt) as error:
        with suppress(OSError):
            if earlier:
                write_json(plan.layout.submission, replace(earlier, superseded=time.time()))
        if isinstance(error, KeyboardInterrupt):
            what = f"interrupted while {plan.id} was submitted"
            raise InterruptedSubmitError(what, meaning="a job may exist", fix=check_first) from error
        meaning = f"{error.meaning}; a job may exist anyway"
        raise UncertainSubmitError(error.what, meaning=meaning, fix=check_first) from error
    if earlier:
        submission = replace(submission, earlier_job_ids=(*earlier.earlier_job_ids, earlier.job_id))
    runs = []
    for each in plans:
        own = submission.of_task(each.number) if tasks else submission
        write_json(each.layout.submission, own)
        runs.append(SubmittedRun(each.layout, own))
    return runs


def _check_it_ended(run: SubmittedRun, plan: RunPlan | ScriptPlan) -> Job:
    """Return the final state of a run that may be submitted again; unknown if Slurm purged the job."""
    seen = observe(run)
    if seen.state is RunState.COMPLETED and not _has_steps_left(plan):
        longer = ""
        if isinstance(plan, RunPlan):
            longer = f", or train this one for longer: ftkit resume {run.id} {_override_for_more_steps(plan)}"
        raise SubmitError(
            f"{run.id} has completed: there is nothing left to do", fix=f"start a new run{longer}", name="run-completed"
        )
    is_unknown, is_slurm = seen.state is RunState.UNKNOWN, run.submission.scheduler == "slurm"
    if is_unknown and is_slurm and seen.reason != LOST:
        what = f"whether the job of {run.id} has ended is unknown: {seen.reason}"
        fix = "try again in a minute, on a login node: two jobs must not train in one folder"
        raise NoAnswerError(what, fix=fix)
    is_lost = is_unknown and (is_slurm or not _may_run_elsewhere(run.layout))
    if not seen.is_final and not is_lost:
        raise SubmitError(
            f"{run.id} is {seen}, and two jobs must not train in one folder",
            fix=f"watch it with 'ftkit status {run.id} --follow', or end it first with 'ftkit cancel {run.id}'",
            name="run-not-ended",
        )
    return seen


def _may_run_elsewhere(layout: RunLayout) -> bool:
    """Return whether a run of another machine trains, or has logged anything lately, as while it prepares its data."""
    try:
        is_logging = time.time() - layout.job_log.stat().st_mtime < _SILENT_SECONDS
    except OSError:
        is_logging = False
    return is_logging or current_holder(layout) is not None


def _has_steps_left(plan: RunPlan | ScriptPlan) -> bool:
    if isinstance(plan, ScriptPlan):
        return False
    end, patience = read_last_record(plan.layout.metrics), plan.recipe.evaluation.early_stopping_patience
    if not isinstance(end, EndRecord) or plan.num_steps is None or plan.num_steps <= end.step:
        return False
    return end.early_stopping_patience is None or patience is None or patience > end.early_stopping_patience


def _override_for_more_steps(plan: RunPlan) -> str:
    end = read_last_record(plan.layout.metrics)
    if isinstance(end, EndRecord) and end.early_stopping_patience is not None:
        threshold = " evaluation.early_stopping_threshold=0" if plan.recipe.evaluation.early_stopping_threshold else ""
        return f"evaluation.early_stopping_patience=null{threshold}"
    return f"training.{'max_steps' if plan.recipe.training.num_epochs is None else 'num_epochs'}=N"


def cancel(runs: Sequence[SubmittedRun]) -> dict[str, Job]:
    """Cancel runs, those of Slurm with one scancel; return the final states of runs that had already ended.

    Files that mark runs as canceled are written first, so that no job script requeues itself. Raises `FtkitError` if
    the scheduler could not end all of them.
    """
    states = observe_all(runs, asks_again=True).states
    to_cancel = [run for run in runs if not states[run.id].is_final]
    for run in to_cancel:
        with suppress(OSError):  # a full disk must not keep the job running
            run.layout.canceled.touch()
    for name in dict.fromkeys(run.submission.scheduler for run in to_cancel):
        own = [run for run in to_cancel if run.submission.scheduler == name]
        try:
            scheduler_for(name).cancel(own)
        except FtkitError:
            for run in own:
                run.layout.canceled.unlink(missing_ok=True)
            raise
    return {run_id: seen for run_id, seen in states.items() if seen.is_final}


def check_removable(folder: RunFolder) -> None:
    """Raise SubmitError if a process trains in a run's folder, its job is pending or running, or Slurm can't tell."""
    submission = None
    with suppress(DamagedFileError, PrerequisiteError):  # such as a machine without Slurm's programs
        submission = find_submission(folder.layout)
    seen = observe(SubmittedRun(folder.layout, submission)) if submission else None
    if holder := current_holder(folder.layout):
        reason = f"is trained by {holder}"
    elif seen and not seen.is_final and not (seen.state is RunState.UNKNOWN and seen.reason == LOST):
        reason = f"is {seen}"
    else:
        return
    raise SubmitError(
        f"{folder.id} {reason}, so it is not removed",
        fix=f"cancel it first: ftkit cancel {folder.id}; if its job can't be queried: squeue --me",
    )
