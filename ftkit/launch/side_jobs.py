"""Jobs on Slurm that accompany a run: serve its model with vLLM, or evaluate its checkpoints as it trains."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import ImageFile, NamedImage
from ftkit.config.load import load_image
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem, RunFailedError, plural
from ftkit.files import read_json_if_valid, read_small, write_file
from ftkit.launch.job_states import observe
from ftkit.launch.render import SideJob, render_side_job
from ftkit.launch.resolve import resolve_image_link
from ftkit.launch.scheduler import submit_script
from ftkit.launch.slurm import observe as observe_jobs
from ftkit.models.folder import ADAPTER_CONFIG, VLLM_LORA_RANKS
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import RunPlan
from ftkit.planning.training_setup import GPUS
from ftkit.runs.submission import Submission, SubmittedRun, read_submission

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.context import Context
    from ftkit.config.image_reference import AnyImage

SERVING_IMAGE: Final = "vllm:0.33"
_MAX_WEIGHTS = 0.5
"""Maximum fraction of a GPU's memory for weights; the rest is for the KV cache."""
_POLL_SECONDS = 3.0


@dataclass(frozen=True)
class ServingJob:
    """The script of a serving job.

    Attributes:
        address_file: prefix of the file to which the job writes its address once it answers; `-JOB_ID` follows.
    """

    plan: RunPlan
    script: str
    log: Path
    address_file: Path


@dataclass(frozen=True)
class ServeArgs:
    """Arguments of `ftkit serve RUN`; defaults are chosen for nulls. `words` are passed to vLLM unchanged."""

    num_gpus: int | None = None
    port: int | None = None
    time_limit: str | None = None
    words: tuple[str, ...] = ()


def plan_serving(
    plan: RunPlan, cluster: ClusterProfile, image: AnyImage | None, folder: Path, args: ServeArgs, ctx: Context
) -> ServingJob:
    """Render the script of the job that serves an export of a run.

    Args:
        plan: plan of the run.
        cluster: cluster to serve on, which shares the run's workspace.
        image: serving image; the shipped one if null. Unused if the cluster has no containers.
        folder: the export: weights or adapters.
        args: the command's arguments.
        ctx: where images are defined.

    Raises:
        PrerequisiteError: the cluster does not use Slurm.
        ConfigError: the model can't be served with these arguments, or the image is not for serving.
        NotFoundError: the image is not defined, or not imported.
    """
    plan = replace(plan, cluster=cluster)
    check_on_slurm(plan, "ftkit serve", "choose a Slurm cluster with --cluster; here: vllm serve FOLDER")
    if cluster.runtime != "none":
        plan = replace(plan, **_image(plan, image or NamedImage(SERVING_IMAGE), ctx))
    num_gpus = args.num_gpus or _choose_gpus(plan, cluster)
    if num_gpus > cluster.gpus_per_node:
        what = f"{plural(num_gpus, 'GPU')} requested, a node of '{cluster.name}' has {cluster.gpus_per_node}."
        raise ConfigError([Problem("command line", "--gpus", what, "Use fewer: a model is served on one node.")])
    heads = plan.recipe.model.architecture.num_attention_heads
    if heads % num_gpus:
        what = f"the model's {heads} attention heads can't be divided among {num_gpus} GPUs."
        raise ConfigError([Problem("command line", "--gpus", what, "Use a divisor.")])
    words = [*serve_command(folder, plan, num_gpus), *args.words]
    log, address_file = plan.layout.logs / "serving.log", plan.layout.root / "serving"
    job = SideJob("serve", num_gpus, log, args.time_limit, (str(folder),), ("VLLM_API_KEY",))
    script = render_side_job(
        "serve.sbatch.j2", plan, job, ctx.project, words=words, port=args.port, address_file=address_file
    )
    return ServingJob(plan, script, log, address_file)


def _image(plan: RunPlan, image: AnyImage, ctx: Context) -> dict[str, Any]:
    """Return the plan's fields about its image, for the serving image."""
    if isinstance(image, NamedImage):
        spec = load_image(image.reference, ctx)
        if spec.purpose != "serving":
            fix = f"Use {SERVING_IMAGE}, or another image with purpose 'serving'."
            raise ConfigError([Problem("command line", "--image", f"{spec.reference} is a training image.", fix)])
        link = Workspace(plan.workspace).image_file(image, plan.cluster.image_format)
        if not link.exists():
            raise NotFoundError(
                f"the image {spec.reference} is not imported: there is no {link}",
                fix=f"ftkit build {spec.reference} --push, where docker is; then here: ftkit import {spec.reference}",
            )
        found = resolve_image_link(replace(plan, image=image.reference, container_image=str(link)))
        return {"image": image.reference, "container_image": found.container_image}
    return {"image": str(image), "container_image": str(image.path if isinstance(image, ImageFile) else image)}


def _choose_gpus(plan: RunPlan, cluster: ClusterProfile) -> int:
    """Return the smallest power of two of GPUs that hold the weights in bf16 and leave room for the KV cache."""
    gpu = GPUS[cluster.gpu] if cluster.gpu else None
    num_gpus = 1
    weights_gib = 2 * plan.num_parameters / 2**30
    while gpu and weights_gib / num_gpus > _MAX_WEIGHTS * gpu.memory_gib and 2 * num_gpus <= cluster.gpus_per_node:
        num_gpus *= 2
    return num_gpus


def serve_command(folder: Path, plan: RunPlan, num_gpus: int) -> list[str]:
    """Return the command line of vLLM's server for an export, without the port.

    Adapters are served by their run's name, on their base model. Tokenizer, chat template and end tokens are those of
    the export: vLLM would take them from the base.

    Raises:
        ConfigError: vLLM can't serve adapters of this kind.
    """
    adapter = read_json_if_valid(folder / ADAPTER_CONFIG, dict[str, Any])
    shared = ["--host", "0.0.0.0", "--tensor-parallel-size", str(num_gpus)]  # noqa: S104 - other machines must reach it
    if adapter is None:
        return ["vllm", "serve", str(folder), "--served-model-name", plan.name, *shared]
    model, rank = plan.recipe.model, adapter.get("r")
    fits = [each for each in VLLM_LORA_RANKS if isinstance(rank, int) and each >= rank]
    if adapter.get("use_dora") or not fits or model.weights == "random":
        raise ConfigError(
            [Problem("", f"{folder / ADAPTER_CONFIG}", "vLLM does not serve these adapters: it takes LoRA without "
                     f"DoRA, of rank up to {VLLM_LORA_RANKS[-1]}, on a base model in files.",
                     f"Merge them: ftkit export {plan.id} --merge, then serve that run again.")]
        )  # fmt: skip
    revision = ["--revision", model.revision] if model.revision else []
    return [
        "vllm", "serve", model.weights, *revision, "--served-model-name", f"{plan.name}-base", *shared,
        "--tokenizer", str(folder), "--generation-config", str(folder),
        "--enable-lora", "--max-lora-rank", str(fits[0]),
        "--lora-modules", json.dumps({"name": plan.name, "path": str(folder)}),
    ]  # fmt: skip


def submit_serving(job: ServingJob, environment: Mapping[str, str]) -> str:
    """Submit the job; return its id. Raises as `submit_evaluation`."""
    return write_and_submit(job.plan, job.plan.layout.serving_script, job.script, environment)


def wait_for_server(job: ServingJob, job_id: str, report: Callable[[str], None]) -> str:
    """Wait until the server answers; return its address.

    Raises:
        RunFailedError: the job ended first.
        SubmitError: Slurm can't be queried.
    """
    file = job.address_file.with_name(f"{job.address_file.name}-{job_id}")
    submission = Submission(scheduler="slurm", job_id=job_id, submitted=time.time(), host=socket.gethostname())
    run = SubmittedRun(job.plan.layout, submission)
    shown = ""
    while True:
        try:
            return read_small(file).decode().strip()
        except OSError:
            pass
        seen = observe_jobs([run]).get(run.id)
        if seen is not None and seen.is_final:
            raise RunFailedError(
                f"job {job_id} ended before the server answered: {seen}",
                meaning=f"the end of its log: {_last_line(job.log)}",
                fix=f"see {job.log}",
            )
        if seen is not None and str(seen) != shown:
            shown = str(seen)
            report(f"job {job_id}: {shown}")
        time.sleep(_POLL_SECONDS)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(the log does not exist)"
    return next((line for line in reversed(lines) if line.strip()), "(the log is empty)")


def tunnel(address: str, login: str, user: str) -> str:
    """Return the command that forwards the server's port to the same port of a laptop."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    return f"ssh -L {port}:{host}:{port} {user}@{login}"


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
    plan: RunPlan,
    settings: str,
    num_gpus: int,
    time_limit: str | None = None,
    file: Path | None = None,
    project: Path | None = None,
) -> EvaluationJob:
    """Render the script of the job that evaluates a run's checkpoints.

    Args:
        plan: plan of the run.
        settings: settings of the evaluation, as JSON (`ftkit.evaluate.job.EvaluationSettings`).
        num_gpus: GPUs of one node; on CPUs, processes.
        time_limit: Slurm's time limit; the profile's if null.
        file: rows to evaluate on; the validation split if null.
        project: folder whose `sbatch/` overrides parts of the script; only shipped parts if null.

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
    script = render_side_job("evaluate.sbatch.j2", plan, job, project, training_job=training_job, settings=settings)
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
