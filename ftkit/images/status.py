"""The status of images: built, pushed, imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.image_reference import NamedImage
from ftkit.errors import PrerequisiteError
from ftkit.images import docker_engine, labels
from ftkit.images.docker_engine import DockerImage
from ftkit.images.store import ImportManifest
from ftkit.images.verify import manifest_if_intact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.images.store import ImageStore


@dataclass(frozen=True)
class ImportedFile:
    """A link to an imported file; `manifest` is None if the file is damaged, or was not made by ftkit."""

    link: Path
    size: int
    manifest: ImportManifest | None


@dataclass(frozen=True)
class ImageStatus:
    """Where an image exists."""

    reference: str
    built: DockerImage | None
    imported: tuple[ImportedFile, ...]

    @property
    def pushed(self) -> tuple[str, ...]:
        """Repositories that have it, each with its digest there."""
        return tuple(f"{repository}@{digest}" for repository, digest in self.built.repo_digests) if self.built else ()

    @property
    def is_current(self) -> bool:
        """Whether the imported files are of the built image; true if it was not imported, or not built."""
        ids = {file.manifest.image_id for file in self.imported if file.manifest}
        return not ids or self.built is None or ids == {self.built.id}


def image_statuses(references: Sequence[str], store: ImageStore) -> tuple[list[ImageStatus], bool]:
    """Return the status of each image, and whether a docker engine responded."""
    try:
        with docker_engine.connect() as client:
            built = [docker_engine.inspect(client, NamedImage(reference).docker_name) for reference in references]
        has_docker = True
    except PrerequisiteError:
        built, has_docker = [None] * len(references), False
    both = zip(references, built, strict=True)
    return [ImageStatus(reference, image, _imported(reference, store)) for reference, image in both], has_docker


def _imported(reference: str, store: ImageStore) -> tuple[ImportedFile, ...]:
    found = []
    for image_format in ("sqsh", "sif"):
        link = store.link(reference, image_format)
        if link.is_file():
            found.append(ImportedFile(link, link.stat().st_size, manifest_if_intact(link.resolve())))
    return tuple(found)


def is_unpinned(image: DockerImage) -> bool:
    """Tell whether an image was built on a base without a digest."""
    return image.labels.get(labels.UNPINNED) == "true"
