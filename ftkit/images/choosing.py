"""Which way an image is imported: from the engine or a registry, by enroot or by ftkit itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import (
    ImageFile,
    NamedImage,
    RegistryImage,
    check_name,
    local_name,
    parse_image,
    parse_reference,
)
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, Problem
from ftkit.images import engine, enroot, squashfs
from ftkit.images.oci import credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.push import remote_reference
from ftkit.images.sources import EngineSource, EnrootSource, RegistrySource

if TYPE_CHECKING:
    from ftkit.images.progress import Report
    from ftkit.images.sources import ImageSource

Method = Literal["auto", "enroot", "ftkit"]
_OF_THE_ENGINE = "dockerd://"


@dataclass(frozen=True)
class ImportRequest:
    """What was asked for.

    Args:
        wanted: `NAME:TAG`, `HOST/PATH:TAG` with or without `docker://`, or `dockerd://NAME:TAG`.
        registry: where a `NAME:TAG` that the engine does not have was pushed to.
        cluster: the cluster that it is for.
        on_node: let enroot work on a compute node.
        method: who makes the file.
    """

    wanted: str
    registry: str | None
    cluster: ClusterProfile
    on_node: bool = False
    method: Method = "auto"


def name_of(wanted: str) -> str:
    """Return the `NAME:TAG` that an import is called: of an address, its last part."""
    image = _parse(wanted)
    if isinstance(image, RegistryImage):
        return f"{image.path.rpartition('/')[2]}:{image.tag}"
    check_name(image.reference)
    return image.reference


def _parse(wanted: str) -> NamedImage | RegistryImage:
    """Parse what is to be imported.

    Raises:
        ConfigError: it is nothing that can be.
    """
    if wanted.startswith(_OF_THE_ENGINE):
        return parse_reference(wanted.removeprefix(_OF_THE_ENGINE))
    image = parse_image(wanted, Path.cwd(), key="NAME:TAG|URI")
    if isinstance(image, ImageFile):
        raise ConfigError(
            [Problem("", "NAME:TAG|URI", f"{wanted} is a file already: there is nothing to import.",
                     f"Run in it as it is: ftkit run --image {wanted}")]
        )  # fmt: skip
    return image


def remote_of(wish: ImportRequest) -> RegistryImage | None:
    """Return where the image is in a registry; None: nothing says that it is in one."""
    if wish.wanted.startswith(_OF_THE_ENGINE):
        return None
    image = _parse(wish.wanted)
    if isinstance(image, RegistryImage):
        return image
    return remote_reference(image.reference, wish.registry) if wish.registry else None


def choose_source(wish: ImportRequest, report: Report) -> ImageSource:
    """Return the source to import from.

    Raises:
        NotFoundError: neither engine nor registry has the image.
        PrerequisiteError: something that the wish needs is not there.
    """
    if wish.on_node:
        return _on_node(wish, report)
    known = _engine_source(wish) or _registry_source(wish, report)
    is_left_to_enroot = wish.method == "auto" and enroot.is_there() and not squashfs.has_packer()
    return EnrootSource(known) if wish.method == "enroot" or is_left_to_enroot else known


def _on_node(wish: ImportRequest, report: Report) -> EnrootSource:
    if wish.cluster.scheduler != "slurm":
        raise ConfigError(
            [Problem(f"cluster {wish.cluster.name}", "--on-node", "this cluster has no Slurm.", "Leave --on-node out.")]
        )
    if remote_of(wish) is None:
        raise ConfigError(
            [Problem("", "--on-node", "a compute node can't reach this machine's docker engine.",
                     "Push the image, and give --registry or a docker:// address.")]
        )  # fmt: skip
    return EnrootSource(_registry_source(wish, report), enroot.node_of(wish.cluster))


def _engine_source(wish: ImportRequest) -> EngineSource | None:
    """Return the image in the docker engine; None if there is no engine, or it has no such image."""
    is_named = wish.wanted.startswith(_OF_THE_ENGINE)
    if not is_named and isinstance(_parse(wish.wanted), RegistryImage):
        return None
    name = wish.wanted.removeprefix(_OF_THE_ENGINE) if is_named else local_name(wish.wanted)
    try:
        with engine.connected() as client:
            image = engine.inspect(client, name)
    except PrerequisiteError:
        if is_named:
            raise
        return None
    if image is None and is_named:
        raise NotFoundError(f"the docker engine has no image {name}", fix="see 'docker images'")
    return EngineSource(name, image) if image else None


def _registry_source(wish: ImportRequest, report: Report) -> RegistrySource:
    remote = remote_of(wish)
    if remote is None:
        raise NotFoundError(
            f"{wish.wanted} was not built on this machine, and nothing says in which registry it is",
            meaning="no docker engine here has it, and neither --registry nor 'registry:' in ftkit.yaml is given",
            fix=f"ftkit build {wish.wanted} here, or ftkit import {wish.wanted} --registry HOST/PATH",
        )
    return RegistrySource(remote, Registry(remote, credentials.find(remote.host), report))
