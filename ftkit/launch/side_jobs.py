"""Jobs on Slurm besides training: serve or verify a run's model in vLLM, evaluate checkpoints, check nodes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from ftkit import process
from ftkit.config.image_reference import AnyImage, ImageFile, NamedImage
from ftkit.config.load import load_image
from ftkit.errors import (
    ConfigError,
    NoAnswerError,
    NotFoundError,
    PrerequisiteError,
    Problem,
    RunFailedError,
    UnfitMachineError,
    one_line,
    plural,
)
from ftkit.files import InvalidJsonError, parse_json, read_json_if_valid, read_small, write_file
from ftkit.health.findings import REPORT_PREFIX
from ftkit.launch.job_states import observe
from ftkit.launch.render import NodeChecks, SideJob, render_checks, render_side_job
from ftkit.launch.resolve import resolve_image_link
from ftkit.launch.scheduler import explain_refusal, sbatch
from ftkit.launch.slurm import clean_stderr
from ftkit.launch.slurm import observe as observe_jobs
from ftkit.models.folder import ADAPTER_CONFIG, VLLM_LORA_RANKS
from ftkit.planning.layout import Workspace
from ftkit.planning.training_setup import GPUS
from ftkit.runs.job import Submission, SubmittedRun, read_submission

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.context import Context
    from ftkit.planning.plan import RunPlan

SERVING_IMAGE: Final = "vllm:0.33"
_MAX_WEIGHTS = 0.5  # maximum fraction of a GPU's memory for weights; the rest is for the KV cache
_POLL_SECONDS = 10.0


def plan_serving(  # noqa: PLR0913 - one for each option
    plan: RunPlan, cluster: ClusterProfile, image: AnyImage | None, folder: Path, ctx: Context, *,
    num_gpus: int | None = None, port: int | None = None, time_limit: str | None = None, words: Sequence[str] = (),
) -> SideJob:  # fmt: skip
    """Render the script of the job that serves an export of a run: weights or adapters.

    The cluster shares the run's workspace. The default is the shipped serving image; clusters without containers use
    no image. `words` are passed to vLLM unchanged.
    """
    plan = replace(plan, cluster=cluster)
    _check_on_slurm(plan, "ftkit serve", "choose a Slurm cluster with --cluster; here: vllm serve FOLDER")
    plan, num_gpus = _served(plan, image, num_gpus, words, ctx)
    log = plan.layout.logs / "serving.log"
    job = SideJob("serve", plan, num_gpus, log, time_limit, (str(folder),), ("VLLM_API_KEY",))
    return render_side_job(job, ctx.project, words=[*serve_command(folder, plan, num_gpus), *words], port=port)


def plan_verification(  # noqa: PLR0913 - one for each option
    plan: RunPlan, image: AnyImage | None, folder: Path, ctx: Context, *,
    num_gpus: int | None = None, time_limit: str | None = None, words: Sequence[str] = (),
) -> SideJob:  # fmt: skip
    """Render the script of the job that serves an export as `plan_serving` does, and verifies it in the run's image."""
    _check_on_slurm(plan, "--as-job", "omit --as-job to verify the export here")
    served, num_gpus = _served(plan, image, num_gpus, words, ctx)
    log = plan.layout.logs / "verification.log"
    job = SideJob("verify", plan, num_gpus, log, time_limit, (str(folder),), ("VLLM_API_KEY",))
    return render_side_job(
        job, ctx.project, port=None, engine_image=served.container_image, folder=folder,
        words=[*serve_command(folder, served, num_gpus), *words], options=["--", *words] if words else [],
    )  # fmt: skip


def _served(
    plan: RunPlan, image: AnyImage | None, num_gpus: int | None, words: Sequence[str], ctx: Context
) -> tuple[RunPlan, int]:
    """Return the plan with the serving image, and the number of GPUs; by default, the number that the weights need."""
    cluster = plan.cluster
    if any(word.partition("=")[0] == "--port" for word in words):
        what, fix = "the job script sets the server's port.", "Omit it; 'ftkit serve' has an option --port of its own."
        raise ConfigError([Problem("command line", "-- --port", what, fix)])
    if cluster.runtime != "none":
        plan = _with_image(plan, image or NamedImage(SERVING_IMAGE), ctx)
    if not num_gpus:  # the smallest power of two that holds the weights in bf16 and leaves room for the KV cache
        num_gpus = 1
        gpu = GPUS[cluster.gpu] if cluster.gpu else None
        weights_gib = 2 * plan.num_parameters / 2**30
        while gpu and weights_gib / num_gpus > _MAX_WEIGHTS * gpu.memory_gib and 2 * num_gpus <= cluster.max_processes:
            num_gpus *= 2
    heads = plan.recipe.model.architecture.num_attention_heads
    if num_gpus > cluster.max_processes:
        what = f"{plural(num_gpus, 'GPU')} requested, a node of '{cluster.name}' has {cluster.max_processes}."
        raise ConfigError([Problem("command line", "--gpus", what, "Use fewer: a model is served on one node.")])
    if heads % num_gpus:
        what = f"the model's {heads} attention heads can't be divided among {num_gpus} GPUs."
        raise ConfigError([Problem("command line", "--gpus", what, "Use a divisor.")])
    return plan, num_gpus


def _with_image(plan: RunPlan, image: AnyImage, ctx: Context) -> RunPlan:
    if not isinstance(image, NamedImage):
        container_image = str(image.path if isinstance(image, ImageFile) else image)
        return replace(plan, image=str(image), container_image=container_image)
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
    return resolve_image_link(replace(plan, image=image.reference, container_image=str(link)))


def serve_command(folder: Path, plan: RunPlan, num_gpus: int) -> list[str]:
    """Return the command line of vLLM's server for an export, without the port.

    Adapters are served under their run's name on their base model. Tokenizer, chat template and end tokens are set from
    the export, since vLLM would take the base model's. Raises `ConfigError` if vLLM can't serve this kind of adapters.
    """
    adapter = read_json_if_valid(folder / ADAPTER_CONFIG, dict[str, object])
    shared = ["--host", "0.0.0.0", "--tensor-parallel-size", str(num_gpus)]  # noqa: S104 - other machines must reach it
    if adapter is None:
        return ["vllm", "serve", str(folder), "--served-model-name", plan.name, *shared]
    model, rank = plan.recipe.model, adapter.get("r")
    fits = [each for each in VLLM_LORA_RANKS if isinstance(rank, int) and each >= rank]
    if adapter.get("use_dora") or not fits or model.weights == "random":
        what = (
            "vLLM does not serve these adapters: it takes LoRA without DoRA, of rank up to "
            f"{VLLM_LORA_RANKS[-1]}, on a base model in files."
        )
        fix = f"Merge them: ftkit export {plan.id} --merge, then serve that run again."
        raise ConfigError([Problem("", f"{folder / ADAPTER_CONFIG}", what, fix)])
    revision = ["--revision", model.revision] if model.revision else []
    return [
        "vllm", "serve", model.weights, *revision, "--served-model-name", f"{plan.name}-base", *shared,
        "--tokenizer", str(folder), "--generation-config", str(folder),
        "--enable-lora", "--max-lora-rank", str(fits[0]),
        "--lora-modules", json.dumps({"name": plan.name, "path": str(folder)}),
    ]  # fmt: skip


def wait_for_server(job: SideJob, job_id: str, report: Callable[[str], None]) -> str:
    prefix = job.address_file
    submission = Submission(scheduler="slurm", job_id=job_id, submitted=time.time(), host=socket.gethostname())
    run = SubmittedRun(job.plan.layout, submission)
    shown = ""
    while True:
        try:
            return read_small(prefix.with_name(f"{prefix.name}-{job_id}")).decode().strip()
        except OSError:
            pass
        seen = None
        with suppress(NoAnswerError):  # the job runs on while Slurm's controller restarts
            seen = observe_jobs([run]).get(run.id)
        if seen is not None and seen.is_final:
            log = job.log.read_text(encoding="utf-8", errors="replace") if job.log.is_file() else ""
            last_line = log.strip().rpartition("\n")[2]
            raise RunFailedError(
                f"job {job_id} ended before the server answered: {seen}",
                meaning=f"the end of its log: {last_line or '(empty)'}",
                fix=f"see {job.log}",
            )
        if seen is not None and str(seen) != shown:
            shown = str(seen)
            report(f"job {job_id}: {shown}")
        time.sleep(_POLL_SECONDS)


def tunnel(address: str, login: str, user: str) -> str:
    """Return the command that forwards the server's port to the same port of a laptop."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    return f"ssh -L {port}:{host}:{port} {user}@{login}"


def plan_evaluation(
    plan: RunPlan,
    settings: str,
    num_gpus: int,
    time_limit: str | None = None,
    file: Path | None = None,
    project: Path | None = None,
) -> SideJob:
    """Render the script of the job that evaluates a run's checkpoints.

    `settings` are the evaluation's, as JSON (`ftkit.evaluate.source.MeasureSettings`). It evaluates on the rows of
    `file`, or on the validation split if None.
    """
    _check_on_slurm(plan, "--as-job", "omit --as-job to evaluate the checkpoint here")
    layout, submission = plan.layout, read_submission(plan.layout)
    is_over = submission is None or observe(SubmittedRun(layout, submission)).is_final
    training_job = None if submission is None or is_over else submission.job_id
    mounts = () if file is None else (str(file.parent),)
    log = layout.logs / "evaluation.log"
    job = SideJob("evaluate", plan, num_gpus, log, time_limit, mounts, training_job=training_job)
    return render_side_job(job, project, settings=settings)


def _check_on_slurm(plan: RunPlan, option: str, fix: str) -> None:
    if plan.cluster.scheduler != "slurm":
        raise PrerequisiteError(
            f"{option} submits a job to Slurm, but {plan.id} is a run on cluster '{plan.cluster.name}'",
            meaning="its profile has scheduler 'local': there is no queue",
            fix=fix,
        )


def submit(job: SideJob, environment: Mapping[str, str]) -> str:
    """Write the script into the run's folder and submit it; return the job's id."""
    try:
        job.plan.layout.logs.mkdir(exist_ok=True)
        write_file(job.path, job.script.encode())
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {job.path}: {error.strerror}",
            meaning="the run is somebody else's, or its file system is full or read-only",
            fix="use one of your own runs",
        ) from error
    job_id, _ = sbatch([job.path.name], job.plan.layout, environment)
    return job_id


# --- Checks of nodes: one job from salloc, with a step for each node --------------------------------

_QUEUE_SECONDS: Final = 24 * 3600.0
_JOB_MINUTES: Final = 10


@dataclass(frozen=True)
class NodeResult:
    """The result of one node: its report (`NodeReport` in `health`), and the reason if it can't be used, else empty."""

    host: str
    report: dict[str, Any] | None
    problem: str


def check_nodes(
    checks: NodeChecks, hosts: Sequence[str], environment: Mapping[str, str], project: Path | None = None
) -> list[NodeResult]:
    """Wait for `hosts`, or for any nodes if it is empty; run the checks on them and read the results."""
    script = checks.folder / "checks.sh"
    script.write_text(render_checks(checks, project), encoding="utf-8")
    (checks.folder / "marker").touch()
    cluster, place = checks.cluster, checks.placement
    gpus = {"gpus-per-node": "", "gres": "gpu:"}.get(cluster.gpu_request)
    options = {  # as of the profile's jobs
        "job-name": "ftkit-doctor",
        "nodes": place.num_nodes,
        "ntasks-per-node": 1,
        "time": _JOB_MINUTES,
        cluster.gpu_request: None if gpus is None else f"{gpus}{cluster.name_gpus(place.processes_per_node)}",
        "mem": "0" if cluster.exclusive else None,
        "cpus-per-task": cluster.cpus_per_node,
        "nodelist": ",".join(hosts),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
    }
    exclusive = ["--exclusive"] if cluster.exclusive else []
    given = [*(f"--{option}={value}" for option, value in options.items() if value), *exclusive]
    done = process.run_stoppable(
        ["salloc", *given, *(f"--{option}" for option in cluster.sbatch_options), "bash", str(script)],
        timeout_seconds=_QUEUE_SECONDS,
        environment=process.slurm_environment(environment),
    )
    verdicts = checks.folder / "bad-nodes"
    if not verdicts.is_file():
        if "Granted job allocation" not in done.stderr:
            raise explain_refusal(done.stderr)
        raise UnfitMachineError(f"the checks did not run: {one_line(clean_stderr(done.stderr)[-200:])}")
    problems = dict(line.split("\t", 1) for line in verdicts.read_text(encoding="utf-8").splitlines())
    outputs = sorted(checks.folder.glob("*.out"))
    return [NodeResult(path.stem, _report(path), problems.get(path.stem, "")) for path in outputs]


def idle_nodes(cluster: ClusterProfile) -> tuple[list[str], int]:
    """Return the idle nodes of the profile's partition, and the number of others; PrerequisiteError without Slurm."""
    partition = [f"--partition={cluster.partition}"] if cluster.partition else []
    done = process.run(["sinfo", "--noheader", "--Node", "--format=%N %t", *partition])
    if done.returncode != 0:
        raise PrerequisiteError(f"Slurm can't be queried for nodes: {clean_stderr(done.stderr)}")
    states = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    idle = [host for host, state in states.items() if state.strip() == "idle"]
    return idle, len(states) - len(idle)


def _report(path: Path) -> dict[str, Any] | None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.removeprefix(REPORT_PREFIX) for line in lines if line.startswith(REPORT_PREFIX)]
    try:
        return parse_json(found[0], dict[str, Any]) if found else None
    except InvalidJsonError:
        return None


@contextmanager
def checks_folder(workspace: Path) -> Iterator[Path]:
    """Yield a temporary folder in the workspace, which nodes share; PrerequisiteError if it can't be written to."""
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=".ftkit-doctor-", dir=workspace, ignore_cleanup_errors=True)
    except OSError as error:
        raise PrerequisiteError(
            f"can't write to the workspace {workspace}: {one_line(error)}",
            fix="set 'workspace:' in ftkit.yaml to a folder that you can write to",
        ) from error
    with folder as path:
        yield Path(path)
