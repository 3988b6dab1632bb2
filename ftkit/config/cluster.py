"""A cluster profile: a site's scheduler, container runtime, GPUs and folders."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ftkit.config.layers import COMMAND_LINE
from ftkit.config.sbatch_options import SbatchOption, SrunOption, find_conflicts
from ftkit.errors import ConfigError, Problem, closest
from ftkit.models.architecture import ModelPlan
from ftkit.paths import fixed_folder
from ftkit.spec import (
    WHOLE_NUMBER,
    Name,
    NonNegativeInt,
    OneLine,
    PositiveFloat,
    PositiveInt,
    Spec,
    TimeLimit,
    VariableName,
)

if TYPE_CHECKING:
    from ftkit.config.image_reference import ImageFormat
    from ftkit.config.recipe import RecipeSpec

GpuModel = Literal["a100-40gb", "a100-80gb", "b200", "h100-80gb", "h200", "l4"]
_GPU_VARIANTS: Final[dict[GpuModel, set[str]]] = {
    "a100-40gb": {"40gb", "pcie"}, "a100-80gb": {"80gb", "pcie"}, "b200": {"180gb"}, "h100-80gb": {"80gb"},
    "h200": {"141gb"}, "l4": {"24gb"},
}  # fmt: skip
"""Words in names of the same GPU. H100 PCIe and NVL and GB200 are other GPUs, without figures; `1g` is a MIG slice."""
_COMMON_WORDS: Final = {"nvidia", "sxm", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e"}


def _models_of(name: str) -> list[GpuModel]:
    words = set(re.findall(r"[a-z0-9]+", name.lower())) - _COMMON_WORDS
    return [model for model, variant in _GPU_VARIANTS.items() if words - variant == {model.partition("-")[0]}]


def recognize_gpu(name: str) -> GpuModel | None:
    """Return the GPU with this name for users, Slurm (GRES) or the driver; None if it is unknown or ambiguous.

    `NVIDIA H100 80GB HBM3`, `nvidia_h100_80gb_hbm3` and `h100` are h100-80gb; `a100` has 40 or 80 GB.
    """
    models = _models_of(name)
    return models[0] if len(models) == 1 else None


def _gpu_model(name: object) -> object:
    models = [] if name is None else _models_of(str(name))
    if len(models) > 1:
        raise ValueError(f"{name!r} is the name of several GPUs: give {' or '.join(models)}")
    if name is not None and not models:
        raise ValueError(f"{name!r} is none of {', '.join(_GPU_VARIANTS)}: omit 'gpu' for another one")
    return models[0] if models else None


Device = Literal["auto", "cpu", "cuda"]


class NcclSpec(Spec):
    """Settings for the site's NCCL network plug-in."""

    profile_script: str | None = None
    """Script of the site that sets NCCL's variables; sourced in the job if it exists, otherwise with a warning."""
    library_dir: str | None = None
    """Folder of the plug-in: mounted into the container and put first in LD_LIBRARY_PATH."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Variables for NCCL, set before the profile script runs."""
    multi_node_only: bool = True
    """Whether a job on one node ignores these settings."""


class PreparationSpec(Spec):
    """The job without GPUs that tokenizes data and downloads weights before a training job starts."""

    partition: OneLine | None = None
    """Slurm partition, preferably without GPUs. The profile's `partition` if null."""
    cpus: PositiveInt = 8
    """CPUs to request; each runs one tokenizing process."""
    memory_gib: PositiveInt | None = None
    """Memory to request. The site's default if null."""
    time_limit: TimeLimit | None = None
    """Time limit. The partition's if null."""
    sbatch_options: tuple[SbatchOption, ...] = ()
    """More options for its sbatch, in place of those of the training job."""


class RecognitionSpec(Spec):
    """How `ftkit init` recognizes this kind of cluster; one match is enough."""

    partitions: tuple[str, ...] = ()
    """Slurm partitions that only such clusters have."""
    paths: tuple[str, ...] = ()
    """Files or folders that only their login nodes have."""


class ClusterProfile(Spec):
    """One cluster, or this machine."""

    name: Name
    """Name of the profile, for `--cluster`."""
    description: str
    """One line for `ftkit cluster list`."""
    scheduler: Literal["local", "slurm"]
    """How jobs start: by Slurm, or by ftkit on this machine."""
    runtime: Literal["none", "pyxis", "docker", "apptainer"]
    """Container runtime: pyxis, docker, Apptainer or Singularity, or none (the Python that ftkit runs in)."""
    device: Device = "cuda"
    """Device to train on; `auto`: the GPUs of this machine if there are any, else its CPUs."""
    gpu: Annotated[GpuModel | None, BeforeValidator(_gpu_model, json_schema_input_type=GpuModel | None)] = None
    """Model of the GPUs, for memory plans and MFU. Unknown if null."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node, one process each. Required with device `cuda`; `auto` uses all of this machine."""
    processes_per_node: PositiveInt | None = None
    """Processes per node without GPUs: required with the devices `cpu` and `auto`."""
    price_per_gpu_hour: PositiveFloat | None = None
    """Price of a GPU per hour, in any currency, for predicted costs. Unknown if null."""
    network_gbps: PositiveFloat | None = None
    """Bandwidth of a node's network for GPUs, in Gbit/s, for predicted step times. Unknown if null."""
    max_nodes: PositiveInt | None = None
    """Number of nodes of the cluster. Unknown if null."""
    cpus_per_node: PositiveInt | None = None
    """CPUs to request per node. The site's default if null."""
    memory_per_node_gib: PositiveFloat | None = None
    """Host memory of a node in GiB, which the plan compares with the memory that a run offloads. Unknown if null."""
    partition: OneLine | None = None
    """Slurm partition. The site's default if null."""
    account: OneLine | None = None
    """Slurm account."""
    qos: OneLine | None = None
    """Slurm quality of service."""
    reservation: OneLine | None = None
    """Slurm reservation."""
    time_limit: TimeLimit | None = None
    """Time limit if the recipe sets none."""
    max_time_limit: TimeLimit | None = None
    """Longest time limit of the partition. A recipe with a longer one gets this limit, and continues in another job."""
    exclusive: bool = True
    """Request whole nodes."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How to request GPUs; `none` if the site has no GRES (AWS HyperPod)."""
    gpu_type: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]+$")
    """Slurm's name of the GPUs (`h100` of `Gres=gpu:h100:8`), if nodes of the partition also have other GPUs."""
    mpi: OneLine | None = "none"
    """`--mpi` of srun. torch needs no MPI, and a site's default may be broken. The site's default if null."""
    srun_options: tuple[SrunOption, ...] = ()
    """More options for srun, one argument each. Options that ftkit sets itself are refused."""
    sbatch_options: tuple[SbatchOption, ...] = ()
    """More options for sbatch: `[constraint=h200, switches=1, mail-type=FAIL]`, also spelled as on the command line
    (`-C h200`). They apply to all jobs except preparation. In training, the recipe's `resources.sbatch_options` come
    later and override them. Options that ftkit sets itself are refused."""
    stop_signal_seconds: NonNegativeInt = 120
    """How long before the time limit Slurm asks the job to write a checkpoint and stop; 0: never."""
    node_local_dir: str = "/tmp"  # noqa: S108 - made private by the job script
    """A folder on each node's own disk for caches."""
    node_local_kind: Literal["disk", "memory"] = "disk"
    """Medium of `node_local_dir`: `memory` if the folder is in the node's memory, such as /tmp on Soperator."""
    stage: Literal["shared", "local"] = "shared"
    """Where nodes read the image and pretrained weights. `shared`: from the shared file system. `local`: each node
    copies them to its `node_local_dir` once, and verifies the copy at later starts. sbcast passes the image from node
    to node. On more than 15 nodes, each rank reads only its shards of the weights from the shared file system. If there
    is not enough space, nodes read from the shared file system, with a warning in the log."""
    mounts: tuple[str, ...] = ()
    """Folders to mount into the container: `PATH` or `FROM:TO`, absolute; pyxis's flags may follow after a colon."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Environment variables of the job."""
    nccl: NcclSpec = NcclSpec.model_construct()
    """Settings of the site's network plug-in for NCCL."""
    preparation: PreparationSpec = PreparationSpec.model_construct()
    """The job that prepares data and weights."""
    metrics_port: Annotated[int, Field(ge=1024, le=65535), WHOLE_NUMBER] | None = None
    """Port on which each node of a run serves GPU metrics to Prometheus. No metrics are served if null."""
    recognized_by: RecognitionSpec = RecognitionSpec.model_construct()
    """How `ftkit init` recognizes this kind of cluster."""
    login: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%+-]*$")
    """Login node for ssh (`user@host`, or a host in ssh's configuration). If set, `ftkit run` and the commands for
    runs are forwarded to ftkit on the login node, where `ftkit cluster connect` installs it."""
    ssh_options: tuple[OneLine, ...] = ()
    """More options for ssh, one word each. `~/.ssh/config` applies too."""
    login_folder: str = Field(default="ftkit", pattern=r"^[A-Za-z0-9_./][A-Za-z0-9_./-]*$")
    """Folder on the login node for ftkit, projects and sent files, shared with all nodes; relative to HOME."""
    send_limit_gib: PositiveFloat = 1.0
    """Maximum size of a run's local files that are sent to the login node without confirmation."""
    setup: tuple[str, ...] = ()
    """Lines of bash that the job script runs first, unchanged (`module load …`)."""

    @property
    def size_key(self) -> Literal["gpus_per_node", "processes_per_node"]:
        """The key of the number of processes per node, in profiles, recipes and requests."""
        return "gpus_per_node" if self.device == "cuda" else "processes_per_node"

    @property
    def max_processes(self) -> int:
        """Processes on a whole node: one per GPU; without GPUs, the profile's `processes_per_node`."""
        return getattr(self, self.size_key) or 1

    def name_gpus(self, number: int) -> str:
        """Return a number of GPUs in the form of Slurm's options: `8`, or `h100:8`."""
        return f"{self.gpu_type}:{number}" if self.gpu_type else str(number)

    @property
    def image_format(self) -> ImageFormat:
        return "sif" if self.runtime == "apptainer" else "sqsh"

    def limit_time(self, wanted: str | None) -> str | None:
        """Return a job's time limit: `wanted` or the default, capped by the maximum; None for the partition's."""
        limits = [limit for limit in (wanted or self.time_limit, self.max_time_limit) if limit]
        return min(limits, key=lambda limit: parse_time_limit(limit) or math.inf, default=None)  # 0: no limit

    def find_conflicts(self, options: Iterable[str]) -> Iterator[str]:
        """Yield the options of sbatch that this profile's job scripts set, with the reason."""
        return find_conflicts(options, is_exclusive=self.exclusive, has_gres=self.gpu_request == "gres")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        needed = {("runtime", "pyxis"): "slurm", ("stage", "local"): "slurm", ("runtime", "docker"): "local"}
        for (key, value), scheduler in (needed | {("device", "auto"): "local"}).items():
            if getattr(self, key) == value and self.scheduler != scheduler:
                raise ValueError(f"{key} '{value}' needs scheduler '{scheduler}'")
        if self.stage == "local" and self.node_local_kind == "memory":
            raise ValueError("stage 'local' needs a disk: here node_local_dir is in the node's memory")
        for conflict in self.find_conflicts(self.sbatch_options):
            raise ValueError(f"sbatch_options has {conflict}")
        if getattr(self, self.size_key) is None:
            raise ValueError(f"device '{self.device}' needs {self.size_key}")
        return self


def profile_of_gpu(name: str, gpus_per_node: int | None) -> ClusterProfile:
    """Return a profile of nodes with this GPU, by default one per node, to preview runs.

    Raises ConfigError if the name is unknown or ambiguous.
    """
    models = _models_of(name)
    if len(models) != 1:
        known = [*_GPU_VARIANTS, *(model.partition("-")[0] for model in _GPU_VARIANTS)]
        meant = models or _models_of(closest(name.lower(), known))
        what = f"{name!r} is {'several' if models else 'none'} of the known GPUs: {', '.join(models or _GPU_VARIANTS)}."
        fix = f"Did you mean {' or '.join(meant)}?" if meant else "Give one of these."
        raise ConfigError([Problem(COMMAND_LINE, "--gpu", what, fix)])
    return ClusterProfile(
        name=models[0], description=f"Nodes with {models[0]}", scheduler="slurm", runtime="none", gpu=models[0],
        gpus_per_node=gpus_per_node or 1,
    )  # fmt: skip


def nccl_for(cluster: ClusterProfile, num_nodes: int) -> NcclSpec | None:
    """Return the settings of NCCL's plug-in for a job of this size; None if it needs none."""
    nccl = cluster.nccl
    is_empty = not (nccl.environment or nccl.profile_script or nccl.library_dir)
    return None if is_empty or (nccl.multi_node_only and num_nodes == 1) else nccl


def site_folders(cluster: ClusterProfile, workspace: Path, num_nodes: int) -> Iterator[tuple[str, str]]:
    """Yield each folder that any job on the cluster needs, with its key."""
    yield "workspace", str(workspace)
    yield "node_local_dir", cluster.node_local_dir
    nccl = nccl_for(cluster, num_nodes)
    if nccl and nccl.library_dir:
        yield "nccl.library_dir", nccl.library_dir


def mounted_folders(
    recipe: RecipeSpec, cluster: ClusterProfile, workspace: Path, num_nodes: int
) -> Iterator[tuple[str, str]]:
    """Yield each folder that a job reads or writes, with its key; a folder may have several keys."""
    yield from site_folders(cluster, workspace, num_nodes)
    if isinstance(recipe.model, ModelPlan) and recipe.model.adapter is not None:
        yield "model.weights", recipe.model.adapter
    files = recipe.data.files
    yield from ((key, str(fixed_folder(path)) if (key, path) in files else path) for key, path in recipe.paths)


def parse_time_limit(text: str) -> int | None:
    """Parse Slurm's time format, `[days-]hours:minutes:seconds` and shorter; None: unlimited, or unknown."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if match is None:
        return None
    given = [int(part) for part in match[2].split(":")]
    if match[1] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = [*given, 0, 0][:3]
    elif len(given) == 1:  # M
        hours, minutes, seconds = 0, given[0], 0
    else:  # M:S, H:M:S
        hours, minutes, seconds = [0, *given][-3:]
    return 86400 * int(match[1] or 0) + 3600 * hours + 60 * minutes + seconds


def format_time_limit(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
