"""Submit the job that evaluates the checkpoints of a run while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import PrerequisiteError
from ftkit.files import write_file
from ftkit.launch.observe import observe
from ftkit.launch.render import SideJob, render_side_job
from ftkit.launch.slurm import submit_script
from ftkit.runs.submission import SubmittedRun, read_submission

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.planning.plan import RunPlan


@dataclass(frozen=True)
class EvaluationJob:
    """The script of an evaluation job.

    Attributes:
        training_job: the Slurm job that it ends after; None if the run is over.
    """

    script: str
    log: Path
    training_job: str | None


def plan_evaluation(
    plan: RunPlan, settings: str, num_gpus: int, time_limit: str | None = None, file: Path | None = None
) -> EvaluationJob:
    """Render the script of the job that evaluates a run's checkpoints.

    Args:
        plan: plan of the run.
        settings: settings of the evaluation, as JSON (`ftkit.evaluate.job.EvaluationSettings`).
        num_gpus: GPUs of one node; on CPUs, processes.
        time_limit: Slurm's time limit; the profile's if null.
        file: rows to evaluate on; the validation split if null.

    Raises:
        PrerequisiteError: the run is not on a Slurm cluster.
        ConfigError: a value can't be expressed for Slurm, pyxis or bash.
    """
    check_on_slurm(plan, "--as-job", "omit --as-job to evaluate the checkpoint here")
    submission = read_submission(plan.layout)
    is_over = submission is None or observe(SubmittedRun(plan.layout, submission)).is_final
    log = plan.layout.logs / "evaluation.log"
    mounts = () if file is None else (str(file.parent),)
    job = SideJob("evaluate", num_gpus, log, time_limit, mounts)
    training_job = None if submission is None or is_over else submission.job_id
    script = render_side_job("evaluate.sbatch.j2", plan, job, training_job=training_job, settings=settings)
    return EvaluationJob(script, log, training_job)


def submit_evaluation(plan: RunPlan, job: EvaluationJob, environment: Mapping[str, str]) -> str:
    """Submit the job; return its id.

    Raises:
        SubmitError: Slurm refused it.
        PrerequisiteError: the run's folder or Slurm can't be used.
    """
    return write_and_submit(plan, plan.layout.evaluation_script, job.script, environment)


def check_on_slurm(plan: RunPlan, option: str, fix: str) -> None:
    """Check that a run is on a Slurm cluster.

    Raises:
        PrerequisiteError: it is not.
    """
    if plan.cluster.scheduler != "slurm":
        raise PrerequisiteError(
            f"{option} submits a job to Slurm, but {plan.id} is a run on cluster '{plan.cluster.name}'",
            meaning="its profile has scheduler 'local': there is no queue",
            fix=fix,
        )


def write_and_submit(plan: RunPlan, path: Path, script: str, environment: Mapping[str, str]) -> str:
    """Write a script into the run's folder and submit it; return the job's id. Raises as `submit_evaluation`."""
    try:
        plan.layout.logs.mkdir(exist_ok=True)
        write_file(path, script.encode())
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {error.strerror}",
            meaning="the run is somebody else's, or its file system is full or read-only",
            fix="use one of your own runs",
        ) from error
    return submit_script(plan.layout, path.name, environment)
