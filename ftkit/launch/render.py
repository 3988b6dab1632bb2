"""Render the scripts of jobs. Rendering is pure, apart from reading templates.

A file in a project's `sbatch/` folder replaces the shipped template of the same name (`ftkit.launch.templates`); with
`project=None`, only shipped templates are used. All functions raise `ConfigError` if a value can't be expressed for
Slurm, pyxis or bash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from ftkit.config.cluster import ClusterProfile, mounted_folders, nccl_for, site_folders
from ftkit.config.image_reference import image_file
from ftkit.launch.templates import as_bash, fill, quote_word
from ftkit.planning.plan import PlacementPlan, RunPlan, ScriptPlan
from ftkit.process import SLURM_NO_ANSWER

_SET_BY_SCRIPT = (
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that the script sets and that the image may set too."""

_PASSED_BY_PREFIX = ("FTKIT_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "WANDB_")
"""Prefixes of variables that the script reads at run time, because a site's script or the user may set them."""
_PREFLIGHT_SECONDS: Final = 600  # starting a container of a large image takes minutes on a slow disk
_CHECK_SECONDS: Final = 300


def render_job(plan: RunPlan | ScriptPlan, project: Path | None = None, *, prepares: bool = True) -> str:
    """Render the script of a run; with `prepares`, a Slurm job prepares missing data while its GPUs are idle."""
    values: dict[str, object] = {
        "prepares": prepares, "check_seconds": _PREFLIGHT_SECONDS, "preflight": plan.has_preflight
    }  # fmt: skip
    if plan.cluster.stage == "local" and plan.image_file is not None:
        values |= {"stages_image": True, "image_variable": "$staged_image"}
    template = "local.sh.j2" if plan.cluster.scheduler == "local" else "slurm.sbatch.j2"
    return _render(template, plan, project, values, () if isinstance(plan, RunPlan) else (plan.script.folder,))


def render_preparation(plan: RunPlan, project: Path | None = None) -> str:
    """Render the script of the job that prepares a run on Slurm, without GPUs."""
    cpus = plan.cluster.preparation.cpus
    placement = replace(plan.placement, num_nodes=1, processes_per_node=1, device="cpu", threads_per_process=cpus)
    options = [option.partition("=") for option in plan.cluster.preparation.sbatch_options]
    return _render("prepare.sbatch.j2", replace(plan, placement=placement), project, {"sbatch_options": options})


def render_array(plan: RunPlan, script: Path, text: str, project: Path | None = None) -> str:
    """Render the script of a job array whose tasks are runs of a sweep; runs with equal scripts can share one array.

    `script` is the path of the run's Slurm script, and `text` its content, from which the array takes its options.
    """
    name, suffix = (text.removesuffix(plan.number) for text in (plan.name, plan.id.removeprefix(plan.name)))
    options = "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH "))
    options = options.replace(plan.id, f"{name}%a{suffix}%a").replace(f"-name={plan.name}", f"-name={name[:-1]}")
    parts = str(script).replace(plan.id, f"{name}\0{suffix}\0").split("\0")
    values = {"options": options, "needed": '"$task"'.join(map(quote_word, parts)), "preflight": plan.has_preflight}
    return fill("array.sbatch.j2", project, plan=plan, **values)


@dataclass(frozen=True)
class SideJob:
    """A job that accompanies a run, on GPUs of one node: it serves or verifies its model, or evaluates checkpoints."""

    kind: str  # `serve`, `verify` or `evaluate`: the name of the template and the script, the suffix of the job's name
    plan: RunPlan  # plan of the run, on the job's cluster and in its image
    num_gpus: int  # on CPUs, processes
    log: Path
    time_limit: str | None = None  # Slurm's time limit; the profile's if null
    mounts: tuple[str, ...] = ()  # folders to mount in addition to those of the run
    environment: tuple[str, ...] = ()  # variables of the submitting shell to pass into the container, if set
    training_job: str | None = None  # the Slurm job after which it ends; None without one
    script: str = ""  # its script, once it is rendered

    @property
    def path(self) -> Path:
        return self.plan.layout.root / f"{self.kind}.sbatch"

    @property
    def address_file(self) -> Path:
        """Prefix of the file to which a serving job writes its address when it is ready; `-JOB_ID` is appended."""
        return self.plan.layout.root / "serving"


def render_side_job(job: SideJob, project: Path | None = None, **values: object) -> SideJob:
    """Return the job with its rendered script; `values` fill its template."""
    plan, cluster, cpus = job.plan, job.plan.cluster, job.plan.cluster.cpus_per_node
    threads = max(1, cpus // cluster.max_processes) if cpus else plan.placement.threads_per_process
    place = replace(plan.placement, num_nodes=1, processes_per_node=job.num_gpus, threads_per_process=threads)
    values |= {
        "job_name": f"{plan.name}-{job.kind}",
        "job_log": job.log,
        "num_cpus": cpus and max(1, cpus * job.num_gpus // cluster.max_processes),
        "takes_node": cluster.exclusive and job.num_gpus == cluster.max_processes,
        "time_limit": cluster.limit_time(job.time_limit),
        "sbatch_options": [option.partition("=") for option in cluster.sbatch_options],
        "training_job": job.training_job,
        "address_file": job.address_file,
    }
    placed = replace(plan, placement=place)
    script = _render(f"{job.kind}.sbatch.j2", placed, project, values, job.mounts, job.environment)
    return replace(job, script=script)


@dataclass(frozen=True)
class NodeChecks:
    """The checks of `ftkit doctor` on some nodes of a Slurm cluster; `folder` is for the results."""

    cluster: ClusterProfile
    placement: PlacementPlan
    workspace: Path
    python: str
    container_image: str | None
    folder: Path


def render_checks(checks: NodeChecks, project: Path | None = None) -> str:
    """Render the script that salloc runs on the machine where `ftkit doctor` was typed."""
    place, folders = checks.placement, site_folders(checks.cluster, checks.workspace, checks.placement.num_nodes)
    return fill(
        "doctor.sh.j2",
        project,
        plan=checks,
        placement=place,
        python_path=[],
        image_is_file=image_file(checks.container_image) is not None,
        check_seconds=_CHECK_SECONDS,
        **_site_values(checks.cluster, place, (folder for _, folder in folders)),
    )


def _render(
    template: str,
    plan: RunPlan | ScriptPlan,
    project: Path | None,
    values: Mapping[str, object],
    mounted: Sequence[str] = (),
    environment: Sequence[str] = (),
) -> str:
    cluster, num_nodes, resources = plan.cluster, plan.placement.num_nodes, plan.resources
    if isinstance(plan, RunPlan):
        folders = mounted_folders(plan.recipe, cluster, plan.workspace, num_nodes)
        exported = plan.weights_to_export
        manifest, weights = plan.data.manifest, exported and Path(exported.folder)
        payload: dict[str, object] = {"module": "ftkit.train", "data_manifest": manifest, "weights": weights}
        can_restart, smaller = True, [num for num in range(num_nodes - 1, 0, -1) if plan.on_nodes(num)]
    else:
        folders = site_folders(cluster, plan.workspace, num_nodes)
        payload = {"module": "ftkit.train.script_process", "data_manifest": None, "weights": None}
        can_restart, smaller = plan.script.can_restart, []
    variables = (*environment, "PYTHONPATH") if plan.code else environment
    all_values = {
        "plan": plan,
        "placement": plan.placement,
        "layout": plan.layout,
        "spare_nodes": resources.spare_nodes,
        "node_counts": " ".join(map(str, (num_nodes, *smaller))),
        "no_kill": bool(resources.spare_nodes or smaller),
        "excludes_stragglers": resources.exclude_stragglers and num_nodes > 1,
        "payload": payload | {"can_restart": can_restart, "max_restarts": resources.max_restarts * can_restart},
        "python_path": [str(plan.layout.code / code.name) for code in plan.code],
        "image_is_file": plan.image_file is not None,
        "time_limit": cluster.limit_time(resources.time_limit),
        "sbatch_options": [option.partition("=") for option in (*cluster.sbatch_options, *resources.sbatch_options)],
        "preflight": False,
        "no_answer": SLURM_NO_ANSWER,
        **_site_values(cluster, plan.placement, (*(each for _, each in folders), *mounted), variables),
        **values,
    }
    return fill(template, project, **all_values)


def _site_values(
    cluster: ClusterProfile, place: PlacementPlan, folders: Iterable[str], variables: Sequence[str] = ()
) -> dict[str, object]:
    """Return template values for cluster and container; `variables` are passed into it in addition to the site's."""
    nccl = nccl_for(cluster, place.num_nodes)
    names = {*_SET_BY_SCRIPT, *variables, *cluster.environment, *(nccl.environment if nccl else ())}
    starts = cluster.runtime in ("docker", "apptainer")
    return {
        "profile": cluster,
        "runtime": cluster.runtime,
        "nccl": nccl,
        "in_container": as_bash('"${container_start[@]}" ' if starts else ""),
        "container_environment": sorted(name for name in names if not name.startswith(_PASSED_BY_PREFIX)),
        "mounts": _mounts(cluster, folders),
        "stages_image": False,
        "image_variable": "$CONTAINER_IMAGE",
    }


def _mounts(cluster: ClusterProfile, folders: Iterable[str]) -> list[str]:
    """Return the mounts as FROM:TO, without folders that an outer mount already provides at the same path."""
    mounts: list[str] = []
    mounted: list[PurePosixPath] = []
    for wanted in (*cluster.mounts, *folders) if cluster.runtime != "none" else ():
        source, *rest = wanted.split(":")
        inside = PurePosixPath(source)
        if any(inside.is_relative_to(folder) for folder in mounted) and rest in ([], [source]):
            continue
        mounts.append(wanted if rest else f"{source}:{source}")
        if rest in ([], [source]):
            mounted.append(inside)
    return mounts
