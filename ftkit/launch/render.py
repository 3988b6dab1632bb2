"""Render the job script of a plan.

`render_job` is pure, apart from reading templates and caching their compiled code. A file in a project's `sbatch/`
folder replaces the shipped template of the same name (`ftkit.launch.templates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ftkit.config.cluster import ClusterProfile, mounted_folders, nccl_for, site_folders
from ftkit.config.image_reference import image_file
from ftkit.launch.templates import as_bash, fill
from ftkit.planning.layout import DataLayout
from ftkit.planning.plan import PlacementPlan, RunPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftkit.config.cluster import NcclSpec
    from ftkit.planning.script import ScriptPlan

_TEMPLATES = {"local": "local.sh.j2", "slurm": "slurm.sbatch.j2"}


@dataclass(frozen=True)
class SideJobOptions:
    """Slurm options of a job that accompanies a run.

    Attributes:
        name: suffix of the job's name, after the run's name.
        num_gpus: GPUs of one node; on CPUs, processes.
        log: file of its output.
        time_limit: Slurm's time limit; the profile's if null.
        mounts: folders to mount in addition to those of the run.
        environment: variables of the submitting shell to pass into the container, if they are set.
    """

    name: str
    num_gpus: int
    log: Path
    time_limit: str | None = None
    mounts: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_SET_BY_SCRIPT = (
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONUNBUFFERED",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
"""Variables that the script sets, and that the image may also set."""

_PASSED_BY_PREFIX = ("FTKIT_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "WANDB_")
"""Prefixes of variables that the script looks up at run time, because a site's script or the user may set them."""


_PREFLIGHT_SECONDS: Final = 600
"""Starting a container of a large image takes minutes on a slow disk."""
_CHECK_SECONDS: Final = 300


def render_job(plan: RunPlan | ScriptPlan, project: Path | None = None, *, prepares: bool = True) -> str:
    """Render the script of a run.

    Args:
        plan: plan of the run.
        project: folder whose `sbatch/` overrides parts of the script; only shipped parts if null.
        prepares: whether a Slurm job prepares missing data when it starts, while its GPUs are idle.

    Raises:
        ConfigError: a value can't be expressed for Slurm, pyxis or bash.
    """
    template, checks = _TEMPLATES[plan.cluster.scheduler], plan.has_preflight
    values: dict[str, object] = {"prepares": prepares, "preflight": checks, "check_seconds": _PREFLIGHT_SECONDS}
    values |= _image_to_start(is_staged=plan.cluster.stage == "local" and plan.image_file is not None)
    return _render(template, plan, project, _script_folders(plan), **values)


def _render(
    template: str, plan: RunPlan | ScriptPlan, project: Path | None, mounted: Sequence[str] = (), **values: object
) -> str:
    nccl = nccl_for(plan.cluster, plan.placement.num_nodes)
    num_nodes = plan.placement.num_nodes
    named = (
        mounted_folders(plan.recipe, plan.cluster, plan.workspace, num_nodes)
        if isinstance(plan, RunPlan)
        else site_folders(plan.cluster, plan.workspace, num_nodes)
    )
    return fill(
        template,
        project,
        plan=plan,
        profile=plan.cluster,
        placement=plan.placement,
        layout=plan.layout,
        runtime=plan.cluster.runtime,
        in_container=_in_container(plan.cluster),
        spare_nodes=plan.resources.spare_nodes,
        excludes_stragglers=plan.resources.exclude_stragglers and plan.placement.num_nodes > 1,
        payload=_payload(plan),
        python_path=[str(folder) for folder in plan.python_path],
        nccl=nccl,
        mounts=_mounts(plan.cluster, (*(folder for _, folder in named), *mounted)),
        image_is_file=plan.image_file is not None,
        **{
            "time_limit": plan.cluster.limit_time(plan.resources.time_limit),
            "container_environment": _container_environment(plan.cluster, nccl, has_code=bool(plan.code)),
            "preflight": False,
            **_image_to_start(is_staged=False),
        }
        | values,
    )  # fmt: skip


@dataclass(frozen=True)
class _Payload:
    """The program that a run's job starts: ftkit's trainer, or a script.

    Attributes:
        module: the module of ftkit that each process runs.
        data_manifest: file that exists once the data is prepared; None if there is no data to prepare.
        weights: folder of weights to export first; None if there are none.
        can_restart: whether it continues from a checkpoint when it is restarted.
        max_restarts: maximum restarts of the processes within a job.
    """

    module: str
    data_manifest: Path | None
    weights: Path | None
    can_restart: bool
    max_restarts: int


def _payload(plan: RunPlan | ScriptPlan) -> _Payload:
    restarts = plan.resources.max_restarts
    if isinstance(plan, RunPlan):
        exported = plan.weights_to_export
        manifest = DataLayout(plan.data_directory).manifest
        weights = Path(exported.folder) if exported else None
        return _Payload("ftkit.train", manifest, weights, can_restart=True, max_restarts=restarts)
    can_restart = plan.script.can_restart
    restarts = restarts if can_restart else 0
    return _Payload("ftkit.train.user_script", None, None, can_restart=can_restart, max_restarts=restarts)


def _image_to_start(*, is_staged: bool) -> dict[str, object]:
    """Return the templates' values for the image: whether nodes get a copy, and the bash variable of its path."""
    return {"stages_image": is_staged, "image_variable": "$staged_image" if is_staged else "$CONTAINER_IMAGE"}


def _script_folders(plan: RunPlan | ScriptPlan) -> Sequence[str]:
    return () if isinstance(plan, RunPlan) else (plan.script.folder,)


@dataclass(frozen=True)
class NodeChecks:
    """The checks of `ftkit doctor` on some nodes of a Slurm cluster.

    Attributes:
        cluster: the profile.
        placement: nodes, and the processes on each.
        workspace: the shared folder.
        python: Python interpreter: this one on a cluster without containers, else the image's.
        container_image: image in the runtime's notation; None without containers.
        folder: folder for the results.
        project: folder whose `sbatch/` overrides parts of the script; only shipped parts if null.
    """

    cluster: ClusterProfile
    placement: PlacementPlan
    workspace: Path
    python: str
    container_image: str | None
    folder: Path
    project: Path | None = None


def render_checks(checks: NodeChecks) -> str:
    """Render the script that salloc runs on the machine where `ftkit doctor` was typed. Raises as `render_job`."""
    cluster, num_nodes = checks.cluster, checks.placement.num_nodes
    nccl = nccl_for(cluster, num_nodes)
    return fill(
        "doctor.sh.j2",
        checks.project,
        plan=checks,
        profile=cluster,
        placement=checks.placement,
        runtime=cluster.runtime,
        in_container=_in_container(cluster),
        nccl=nccl,
        mounts=_mounts(cluster, (folder for _, folder in site_folders(cluster, checks.workspace, num_nodes))),
        container_environment=_container_environment(cluster, nccl),
        image_is_file=image_file(checks.container_image) is not None,
        python_path=[],
        **_image_to_start(is_staged=False),
        check_seconds=_CHECK_SECONDS,
    )  # fmt: skip


def render_preparation(plan: RunPlan, project: Path | None = None) -> str:
    """Render the script of the job that prepares a run on Slurm, without GPUs. As `render_job` does."""
    cpus = plan.cluster.preparation.cpus
    placement = replace(plan.placement, num_nodes=1, processes_per_node=1, device="cpu", threads_per_process=cpus)
    return _render("prepare.sbatch.j2", replace(plan, placement=placement), project)


def render_side_job(
    template: str, plan: RunPlan, options: SideJobOptions, project: Path | None = None, **values: object
) -> str:
    """Render the script of a job that accompanies a run, on GPUs of one node. Raises as `render_job` does.

    Args:
        template: name of the template.
        plan: plan of the run.
        options: Slurm options of the job.
        project: folder whose `sbatch/` overrides parts of the script; only shipped parts if null.
        values: additional values of the template.
    """
    cluster, num_gpus = plan.cluster, options.num_gpus
    cpus = cluster.cpus_per_node
    threads = max(1, cpus // cluster.gpus_per_node) if cpus else plan.placement.threads_per_process
    placement = replace(plan.placement, num_nodes=1, processes_per_node=num_gpus, threads_per_process=threads)
    return _render(
        template,
        replace(plan, placement=placement),
        project,
        options.mounts,
        container_environment=sorted(
            {*_container_environment(cluster, nccl_for(cluster, 1), has_code=bool(plan.code)), *options.environment}
        ),
        job_name=f"{plan.name}-{options.name}",
        job_log=options.log,
        num_cpus=cpus and max(1, cpus * num_gpus // cluster.gpus_per_node),
        takes_node=cluster.exclusive and num_gpus == cluster.gpus_per_node,
        time_limit=cluster.limit_time(options.time_limit),
        **values,
    )


def _in_container(cluster: ClusterProfile) -> str:
    return as_bash('"${container_start[@]}" ' if cluster.runtime in ("docker", "apptainer") else "")


def _container_environment(cluster: ClusterProfile, nccl: NcclSpec | None, *, has_code: bool = False) -> list[str]:
    names = {
        *_SET_BY_SCRIPT,
        *(["PYTHONPATH"] if has_code else []),
        *cluster.environment,
        *(nccl.environment if nccl else ()),
    }
    return sorted(name for name in names if not name.startswith(_PASSED_BY_PREFIX))


# --- Mounts --------------------------------------------------------------------------------------


def _mounts(cluster: ClusterProfile, folders: Iterable[str]) -> list[str]:
    """Return the mounts as FROM:TO, without folders inside one that is mounted at the same path anyway."""
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
