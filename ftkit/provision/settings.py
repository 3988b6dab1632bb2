"""Settings of a cluster to create, by its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.problems import validate
from ftkit.config.yaml_files import parse_override, read_yaml
from ftkit.errors import ConfigError, Problem
from ftkit.spec import OneLine, PositiveFloat, PositiveInt, Spec

Kind = Literal["a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "soperator", "gcp-vm-l4"]
KINDS: tuple[Kind, ...] = get_args(Kind)

GcpProject = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$")]
GcpZone = Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")]
"""A value that is used unchanged in a command: neither an option nor text with spaces."""
AbsoluteFolder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]


class _GcpSpec(Spec):
    project: GcpProject
    """The Google Cloud project's id."""
    zone: GcpZone
    """Zone with the GPUs, such as `us-central1-a`."""

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]


class GcpSlurmSpec(_GcpSpec):
    """A Slurm cluster created with Google's Cluster Toolkit."""

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

    @model_validator(mode="after")
    def _one_way_to_get_nodes(self) -> Self:
        if (self.reservation is not None) + self.flex_start + self.spot != 1:
            raise ValueError("give exactly one of reservation, flex_start and spot: the way to obtain the GPUs")
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
    release: Word = "soperator-v1.20.1-2"
    """Release of Nebius' solutions library."""

    @model_validator(mode="after")
    def _sets_of_workers_are_known(self) -> Self:
        if self.release.startswith("soperator-v1.") and len(self.workers) > 1:
            raise ValueError(f"release {self.release} has one set of workers: give one, or a newer release")
        return self


class GcpVmSpec(_GcpSpec):
    """One VM with a GPU on Google Cloud."""

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


AnySpec = GcpSlurmSpec | SoperatorSpec | GcpVmSpec
_SPECS: dict[str, type[AnySpec]] = {"soperator": SoperatorSpec, "gcp-vm-l4": GcpVmSpec}
"""By kind; the others are Slurm on Google Cloud."""


def read_spec(kind: Kind, file: Path | None, overrides: Iterable[str]) -> AnySpec:
    """Read a file with settings, apply `key=value` overrides, and validate the result."""
    layers = Layers() if file is None else read_yaml(file)
    for override in overrides:
        layers = parse_override(override).over(layers)
    spec = _SPECS.get(kind, GcpSlurmSpec)
    required = [name for name, field in spec.model_fields.items() if field.is_required() and name not in layers.values]
    if required:
        message = f"is required for a cluster of kind '{kind}'."
        raise ConfigError([Problem(COMMAND_LINE, name, message, f"Add {name}=…") for name in required])
    return validate(spec, layers)


def restore_spec(kind: Kind, settings: Mapping[str, object]) -> AnySpec:
    return _SPECS.get(kind, GcpSlurmSpec).model_validate(settings)
