"""Before a run: is its image there, and whole? If not, which command is missing?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit import __version__
from ftkit.cli.image_arguments import registry_of
from ftkit.config.image_reference import NamedImage, local_name, parse_image
from ftkit.config.tracking import SINK_PACKAGES, sinks_without_package
from ftkit.errors import ConfigError, ImageError, NotFoundError, PrerequisiteError, Problem
from ftkit.files import read_json_if_valid
from ftkit.images import docker_engine
from ftkit.images import labels as image_labels
from ftkit.images.packages import python_packages
from ftkit.images.sources import ImportRequest
from ftkit.images.store import MANIFEST_VERSION, manifest_file, sbom_file
from ftkit.images.verify import manifest_if_intact
from ftkit.launch.preflight import check_image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.cli.terminal.console import Terminal
    from ftkit.images.store import Format
    from ftkit.planning.plan import RunPlan


def ensure_image(plan: RunPlan, terminal: Terminal, *, does_import: bool) -> dict[str, str]:
    """Return what the run's manifest says of its image; import it first if asked to.

    Raises:
        NotFoundError: it is not there; with the command that is missing.
        ImageError: it is damaged.
        ConfigError: it lacks a tracker's package.
    """
    wanted, runtime = plan.container_image, plan.cluster.runtime
    if wanted is None or plan.image is None:
        return {}
    if runtime == "docker":
        with docker_engine.connect() as client:
            image = docker_engine.inspect_required(client, wanted, f"build it: ftkit build {plan.image}")
        _warn_of_other_code(image.labels, plan, terminal)
        return {"image_id": image.id} | _lock_of(image.labels)
    if not wanted.startswith("/"):
        return {}  # an address: the cluster fetches it
    file = Path(wanted)
    if not file.exists() and isinstance(parse_image(plan.image, plan.workspace), NamedImage):
        if not does_import:
            raise _missing(plan, file)
        _import(plan, terminal)
    return _facts(plan, file, terminal) if file.exists() else {}


def require_same_image(plan: RunPlan, terminal: Terminal) -> None:
    """Check that a resumed run gets the image that it began with.

    Raises:
        NotFoundError: it is not there any more.
        ImageError: it is damaged, or another one.
    """
    facts = ensure_image(plan, terminal, does_import=False)
    check_image(plan)
    recorded = read_json_if_valid(plan.layout.manifest, dict[str, Any]) or {}
    differing = [name for name, value in facts.items() if recorded.get(name, value) != value]
    if differing:
        name = differing[0]
        raise ImageError(
            f"{plan.container_image} is another image than the run began with: "
            f"{name} is {facts[name]}, it was {recorded[name]}",
            meaning="it was built or imported again, or the file was replaced",
            fix="put the former one back, or start a new run with the new one",
        )


def _lock_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return what the trainer compares with what it finds in its container."""
    return {"image_lock_sha256": labels[image_labels.LOCK]} if image_labels.LOCK in labels else {}


def _import(plan: RunPlan, terminal: Terminal) -> None:
    from ftkit.cli.import_ import run_import  # noqa: PLC0415 - needed in this case only

    image_format: Format = "sif" if plan.cluster.runtime == "apptainer" else "sqsh"
    request = ImportRequest(str(plan.image), registry=registry_of(None), cluster=plan.cluster)
    run_import(request, image_format, terminal)


def _facts(plan: RunPlan, file: Path, terminal: Terminal) -> dict[str, str]:
    """Check size and head of the file, in a moment: `ftkit verify` reads all of it."""
    final = file.resolve()
    manifest = manifest_if_intact(final)
    if manifest:
        _warn_of_other_code(manifest.labels, plan, terminal)
        if manifest.version < MANIFEST_VERSION:
            terminal.warn(
                f"{file} was imported by an older ftkit, which did not compare all of it: 'ftkit import {plan.image}' "
                "imports it anew"
            )
        _require_sinks(plan, final)
        return {"image_id": manifest.image_id, "image_sha256": manifest.sha256} | _lock_of(manifest.labels)
    if manifest_file(final).exists():
        raise ImageError(
            f"{file} is not what was imported: its size or its head differs from its manifest",
            meaning="a copy of it was interrupted, the disk was full, or someone changed it",
            fix=f"see what differs with 'ftkit verify {file}'; import it again: ftkit import {plan.image} --force",
        )
    terminal.warn(f"{file} has no manifest: nothing says what is in it")
    found = final.stat()
    return {"image_size": str(found.st_size), "image_modified": str(found.st_mtime_ns)}


def _require_sinks(plan: RunPlan, final: Path) -> None:
    """Refuse a recipe that names a tracker whose package is not in the image, by the list beside the file."""
    packages = python_packages(sbom_file(final))
    missing = [] if packages is None else sinks_without_package(plan.recipe.tracking.sinks, packages)
    if missing:
        names = ", ".join(SINK_PACKAGES[sink][0] for sink in missing)
        raise ConfigError(
            [Problem(f"recipe {plan.recipe.name}", "tracking.sinks", f"the image file has no package {names}.",
                     f"Build and import {plan.image} anew if its definition lists them by now, or leave out "
                     f"{', '.join(missing)}.")]
        )  # fmt: skip


def _warn_of_other_code(labels: Mapping[str, str], plan: RunPlan, terminal: Terminal) -> None:
    """Say so if the image holds another ftkit than the one that made the plan: it may not be able to read it."""
    if image_labels.REFERENCE not in labels:
        return  # not built by ftkit
    here = image_labels.checkout_commit()
    inside = labels.get("ftkit.version", ""), labels.get("org.opencontainers.image.revision", "")
    if inside != (__version__, here.commit):
        terminal.warn(
            f"{plan.image} holds ftkit {_version_words(*inside)}, this is "
            f"{_version_words(__version__, here.commit)}: build and import it again if the "
            "job can't read its plan"
        )


def _version_words(version: str, commit: str) -> str:
    return f"{version} at {commit[:12]}" if commit else version


def _missing(plan: RunPlan, file: Path) -> NotFoundError:
    command = f"ftkit import {plan.image} --cluster {plan.cluster.name}"
    if not registry_of(None) and not _is_built(str(plan.image)):
        command = f"ftkit build {plan.image} && {command}"
    return NotFoundError(
        f"{plan.image} is not imported for cluster {plan.cluster.name}: {file} is not there",
        meaning="it was never imported into this workspace",
        fix=f"{command}; or give --import",
    )


def _is_built(reference: str) -> bool:
    try:
        with docker_engine.connect() as client:
            return docker_engine.inspect(client, local_name(reference)) is not None
    except PrerequisiteError:
        return False
