"""Settings of a cluster to create, and its state file: the created resources, written before and after each step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.problems import validate
from ftkit.config.yaml_files import parse_override, read_yaml
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.files import read_json, write_json
from ftkit.spec import OneLine, PositiveFloat, PositiveInt, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GcpSlurmKind = Literal["a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"]
Kind = Literal["a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "soperator", "gcp-vm-l4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FILE = "state.json"

GcpProject = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$")]
GcpZone = Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")]
"""A value that is used unchanged in a command: neither an option nor text with spaces."""
AbsoluteFolder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]


class GcpSlurmSpec(Spec):
    """A Slurm cluster created with Google's Cluster Toolkit."""

    project: GcpProject
    """The Google Cloud project's id."""
    zone: GcpZone
    """Zone with the GPUs, such as `us-central1-a`."""
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$")]
    """Bucket for Terraform's state; it is created if it does not exist."""
    service_account: Annotated[str, Field(pattern=r"^[a-z0-9-]+@[a-z0-9.-]+$")]
    """Service account of the nodes, such as `NUMBER-compute@developer.gserviceaccount.com`."""
    num_nodes: PositiveInt = 2
    """Number of GPU nodes."""
    reservation: Word | None = None
    """Name of a reservation. Give this, `flex_start` or `spot`."""
    flex_start: bool = False
    """Use the Dynamic Workload Scheduler's Flex Start."""
    spot: bool = False
    """Use spot VMs, which can be preempted."""
    filestore_tier: Literal["HIGH_SCALE_SSD", "BASIC_SSD"] | None = None
    """Tier of a Filestore for /home. The blueprint's file system if null."""
    filestore_gib: Annotated[int, Field(ge=2560, le=102400)] = 10240
    """Size of that Filestore, in GiB."""
    toolkit_version: Word = "v1.95.0"
    """Release of the Cluster Toolkit."""

    @property
    def region(self) -> str:
        """The zone's region."""
        return self.zone.rpartition("-")[0]

    @model_validator(mode="after")
    def _one_way_to_get_nodes(self) -> Self:
        if (self.reservation is not None) + self.flex_start + self.spot != 1:
            raise ValueError(
                "give exactly one of reservation, flex_start and spot, which select how to obtain the GPUs"
            )
        return self


class WorkersSpec(Spec):
    """Identical nodes of a Soperator cluster."""

    num_nodes: PositiveInt
    """Number of nodes."""
    gpu: Literal["h100", "h200", "b200"] = "h200"
    """GPU model."""
    gpus_per_node: Literal[1, 8] = 8
    """GPUs per node."""
    fabric: Word | None = None
    """InfiniBand fabric, which nodes of 8 GPUs need."""

    @model_validator(mode="after")
    def _is_offered(self) -> Self:
        if self.gpus_per_node == 8 and self.fabric is None:  # noqa: PLR2004
            raise ValueError("nodes of 8 GPUs need the InfiniBand fabric's name: set 'fabric'")
        if self.gpu == "b200" and self.gpus_per_node == 1:
            raise ValueError("b200 nodes have 8 GPUs")
        return self


class SubmountSpec(Spec):
    """An additional shared file system, mounted within the shared root."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    """Name of the file system."""
    mount_path: AbsoluteFolder
    """Where it is mounted."""
    size_gib: PositiveInt
    """Size in GiB."""


class SoperatorSpec(Spec):
    """Slurm on Kubernetes by Nebius' Terraform."""

    tenant_id: Annotated[str, Field(pattern=r"^tenant-[a-z0-9]+$")]
    """Nebius tenant."""
    project_id: Annotated[str, Field(pattern=r"^project-[a-z0-9]+$")]
    """Nebius project."""
    region: Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]+$")]
    """Region, such as `eu-north1`."""
    ssh_public_keys: tuple[OneLine, ...] = Field(min_length=1)
    """Public keys that may log in as root: the text of each `.pub` file."""
    workers: tuple[WorkersSpec, ...] = Field(min_length=1)
    """Sets of identical nodes."""
    jail_gib: PositiveInt = 2048
    """Size of the shared root file system, in GiB."""
    submounts: tuple[SubmountSpec, ...] = ()
    """Additional shared file systems, such as `/mnt/checkpoints`."""
    backups: bool = False
    """Back up the shared root; set the environment variable `TF_VAR_backups_password`."""
    release: Word = "soperator-v1.20.1-2"
    """Release of Nebius' solutions library."""

    @model_validator(mode="after")
    def _sets_of_workers_are_known(self) -> Self:
        if self.release.startswith("soperator-v1.") and len(self.workers) > 1:
            raise ValueError(f"release {self.release} has one set of workers: give one, or a newer release")
        return self


class GcpVmSpec(Spec):
    """One VM with a GPU on Google Cloud."""

    project: GcpProject
    """The Google Cloud project's id."""
    zone: GcpZone
    """Zone with the GPU, such as `us-central1-a`."""
    machine_type: Word = "g2-standard-4"
    """Machine type, which includes its GPUs."""
    disk_gib: Annotated[int, Field(ge=50, le=65536)] = 200
    """Size of the boot disk, in GiB."""
    image_family: Word = "common-cu128-ubuntu-2204-nvidia-570"
    """Family of Google's deep learning images."""
    spot: bool = False
    """Use a spot VM, which can be preempted."""
    price_per_hour: PositiveFloat = 0.7
    """Price in US dollars per hour, even when idle; shown, not checked."""

    @property
    def region(self) -> str:
        """The zone's region."""
        return self.zone.rpartition("-")[0]


AnySpec = GcpSlurmSpec | SoperatorSpec | GcpVmSpec


def spec_class(kind: Kind) -> type[AnySpec]:
    """Return the spec of a kind of cluster."""
    if kind == "soperator":
        return SoperatorSpec
    return GcpVmSpec if kind == "gcp-vm-l4" else GcpSlurmSpec


def read_spec(kind: Kind, file: Path | None, overrides: Iterable[str]) -> AnySpec:
    """Read a file with settings, apply `key=value` overrides, and validate the result.

    Raises:
        ConfigError: with every problem found.
    """
    layers = Layers() if file is None else read_yaml(file)
    for override in overrides:
        layers = parse_override(override).over(layers)
    kind_of_spec = spec_class(kind)
    missing = [
        name for name, field in kind_of_spec.model_fields.items() if field.is_required() and name not in layers.values
    ]
    if missing:
        raise ConfigError(
            [
                Problem(COMMAND_LINE, name, f"is required for a cluster of kind '{kind}'.", f"Add {name}=…")
                for name in missing
            ]
        )
    return validate(kind_of_spec, layers)


def restore_spec(kind: Kind, settings: Mapping[str, object]) -> AnySpec:
    """Return the settings with which a cluster was created."""
    return spec_class(kind).model_validate(settings)


@dataclass(frozen=True)
class ProvisionState:
    """State of a cluster's creation.

    Attributes:
        kind: kind of the cluster.
        settings: the user's settings, with defaults.
        made: ids of the completed steps.
        found: ids of steps whose resource existed before; it stays when the cluster is destroyed.
        begun: id of a started but unfinished step, whose resource may exist in part.
        is_destroyed: whether all is removed except what other clusters use: this cluster itself uses nothing any more.
    """

    kind: Kind
    settings: dict[str, object]
    made: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    begun: str | None = None
    is_destroyed: bool = False


def clusters_folder() -> Path:
    """Return the folder of all clusters that were created from this account."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ftkit" / "clusters"


def clusters_of_account(parent: Path) -> list[str]:
    """Return the names of all recorded clusters."""
    return sorted(path.parent.name for path in parent.glob(f"*/{_FILE}"))


def read_state(folder: Path) -> ProvisionState:
    """Read the state of a cluster.

    Raises:
        NotFoundError: no cluster was created under this name.
    """
    state = read_json(folder / _FILE, ProvisionState)
    if state is None:
        names = ", ".join(clusters_of_account(folder.parent))
        raise NotFoundError(
            f"no cluster '{folder.name}' was created from this account",
            meaning=f"these were: {names}" if names else f"none is recorded in {folder.parent}",
            fix="create it with: ftkit cluster create NAME --kind KIND",
        )
    return state


def begin_or_continue(folder: Path, new: ProvisionState) -> ProvisionState:
    """Return the state of an earlier start of the same creation, or a new state.

    Raises:
        ConfigError: the cluster was created with other settings.
    """
    before = read_json(folder / _FILE, ProvisionState)
    if before is None:
        return new
    changed = [key for key, value in new.settings.items() if before.settings.get(key) != value]
    if before.kind != new.kind:
        changed = ["kind"]
    if changed:
        raise ConfigError(
            [
                Problem(
                    COMMAND_LINE, ", ".join(changed), f"differs from what '{folder.name}' was created with.",
                    f"Use another name, or first run: ftkit cluster destroy {folder.name}",
                )
            ]
        )  # fmt: skip
    return before


def write_state(folder: Path, state: ProvisionState) -> None:
    """Write the state."""
    write_json(folder / _FILE, state)
