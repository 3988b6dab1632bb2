"""Where images exist - built, pushed, imported - and which ones may be removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ftkit.config.image_reference import ImageFormat, NamedImage
from ftkit.errors import PrerequisiteError
from ftkit.files import remove
from ftkit.images import docker_engine
from ftkit.images.docker_engine import DockerImage
from ftkit.images.image_store import ImageStore, ImportManifest, manifest_file, read_manifest, sbom_file
from ftkit.images.verify import manifest_if_intact
from ftkit.runs.signing import signature_file


@dataclass(frozen=True)
class ImportedFile:
    """A link to an imported file; `manifest` is None if the file is damaged, or was not made by ftkit."""

    link: Path
    size: int
    manifest: ImportManifest | None


@dataclass(frozen=True)
class ImageStatus:
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
    statuses = []
    for reference, image in zip(references, built, strict=True):
        links = [link for each in get_args(ImageFormat) if (link := store.link(reference, each)).is_file()]
        files = (ImportedFile(link, link.stat().st_size, manifest_if_intact(link.resolve())) for link in links)
        statuses.append(ImageStatus(reference, image, tuple(files)))
    return statuses, has_docker


def is_unpinned(image: DockerImage) -> bool:
    return image.labels.get(docker_engine.UNPINNED_LABEL) == "true"


@dataclass(frozen=True)
class Removable:
    """Files, or an image of the docker engine with its `docker_id`, that may be removed."""

    name: str
    reason: str
    size: int
    paths: tuple[Path, ...] = ()
    docker_id: str = ""


def find_removable(store: ImageStore, in_use: Iterable[Path]) -> list[Removable]:
    """Return what may be removed: images that no link and no run uses, what killed imports left, and older builds."""
    kept = {path.resolve() for path in (*in_use, *(link for link in store.files("*") if link.is_symlink()))}
    found = []
    for path in store.files("sha256-*"):
        if path.resolve() not in kept:
            manifest = read_manifest(path)
            name = manifest.reference if manifest else path.name
            files = (path, manifest_file(path), sbom_file(path), signature_file(manifest_file(path)))
            found.append(Removable(name, "no name points to it", path.stat().st_size, files))
    for path in store.leftovers():
        size = sum(inner.stat().st_size for inner in (path, *path.rglob("*")) if inner.is_file())
        found.append(Removable(path.name, "a killed import left it", size, (path,)))
    try:
        with docker_engine.connect() as client:
            docker_engine.remove_abandoned(client)  # otherwise docker refuses to remove their images
            images = client.images(filters={"label": docker_engine.REFERENCE_LABEL, "dangling": True})
    except PrerequisiteError:
        return found
    for image in images:
        reference = (image.get("Labels") or {}).get(docker_engine.REFERENCE_LABEL, "")
        reason = "an older build, in the docker engine"
        found.append(Removable(reference, reason, int(image.get("Size") or 0), docker_id=str(image["Id"])))
    return found


def remove_all(removables: Iterable[Removable]) -> int:
    """Remove them, and return the freed bytes; images that are in use are skipped."""
    freed = 0
    for removable in removables:
        for path in removable.paths:
            remove(path)
        if removable.docker_id:
            try:
                with docker_engine.connect() as client:
                    client.remove_image(removable.docker_id)
            except docker_engine.docker_sdk().errors.APIError:
                continue
        freed += removable.size
    return freed
