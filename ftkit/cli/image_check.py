"""Check a run's image before its job is submitted, and check imported images."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftkit import __version__
from ftkit.checkout import own_checkout, read_commit
from ftkit.cli.arguments import image_store, registry_of
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import duration, gib, short_path
from ftkit.cli.terminal.progress_view import ProgressView
from ftkit.config.image_reference import ImageFile, NamedImage, RegistryImage, parse_image, parse_name
from ftkit.config.recipe import SINK_PACKAGES, sinks_without_package
from ftkit.errors import ConfigError, ImageError, NotFoundError, Problem
from ftkit.files import read_json_if_valid
from ftkit.images import docker_engine
from ftkit.images.image_store import manifest_file, manifest_if_intact, sbom_file
from ftkit.images.import_image import ImportRequest, ImportResult, import_image, select_source
from ftkit.images.inside import python_packages
from ftkit.images.signatures import require_beside
from ftkit.images.verify import verify, verify_inside
from ftkit.launch.code import DEV_CODE
from ftkit.planning.plan import JobPlan, RunPlan


def missing_image(plan: JobPlan) -> NotFoundError | None:
    """Return the error for a missing image file, with the command that creates it; None if it exists."""
    file = plan.image_file
    if file is None or file.is_file():
        return None
    if plan.image == str(file):
        return NotFoundError(
            f"image file {file} not found",
            meaning="the path is wrong, or its file system is not mounted here",
            fix="give the path of a .sqsh or .sif file; a relative path is relative to the file that sets it",
        )
    imported = sorted(path.name for path in file.parent.glob(f"*{file.suffix}"))
    command = f"ftkit import {plan.image} --cluster {plan.cluster.name}"
    if not registry_of(None):  # a build that is up to date is skipped
        command = f"ftkit build {plan.image} && {command}"
    return NotFoundError(
        f"{plan.image} is not imported for cluster {plan.cluster.name}: there is no file {file}",
        meaning=f"images in {file.parent}: {', '.join(imported)}" if imported else f"no images in {file.parent}",
        fix=f"{command}; or run with --import, or with --image and a .sqsh file or a docker:// address",
    )


def check_image(plan: JobPlan, terminal: Terminal, *, import_missing: bool = False) -> dict[str, str]:
    """Check a run's image and return its entries for the run's manifest; with `import_missing`, import it first."""
    if plan.container_image is None or plan.image is None:
        return {}
    if plan.cluster.runtime == "docker":
        with docker_engine.connect() as client:
            built = docker_engine.inspect_required(client, plan.container_image, f"build it: ftkit build {plan.image}")
        _warn_about_other_version(built.config.labels, plan, terminal)
        return {"image_id": built.id} | _lock_digest(built.config.labels)
    if plan.image_file is None:
        return {}  # a registry address: the nodes pull it
    image = parse_image(plan.image, plan.workspace)
    if import_missing and missing_image(plan) and isinstance(image, NamedImage):
        run_import(ImportRequest(image, registry_of(None), plan.cluster, plan.cluster.image_format), terminal)
    if missing := missing_image(plan):
        raise missing
    return _check_file(plan, plan.image_file, terminal)


def require_same_image(plan: JobPlan, terminal: Terminal) -> dict[str, str]:
    """Check that a resumed run gets the image of its first job; return the image's entries for the run's manifest."""
    facts = check_image(plan, terminal)
    recorded = read_json_if_valid(plan.layout.manifest, dict[str, Any]) or {}
    if Path(str(recorded.get("container_image"))).suffix != Path(str(plan.container_image)).suffix:
        recorded.pop("image_sha256", None)  # another cluster's format: the same image in another file
    differing = [name for name, value in facts.items() if recorded.get(name, value) != value]
    if differing:
        name = differing[0]
        raise ImageError(
            f"{plan.container_image} is not the image that the run started with: "
            f"{name} is {facts[name]}, was {recorded[name]}",
            meaning="the image was built or imported again, or its file was replaced",
            fix="restore the first image, or start a new run with the new one",
        )
    return facts


def run_import(request: ImportRequest, terminal: Terminal, *, force: bool = False) -> ImportResult:
    started, name = time.monotonic(), request.name.reference
    with ProgressView(terminal) as view:
        source = select_source(request, view.report)
        imported = import_image(name, source, image_store(), force=force, report=view.report)
    where = short_path(imported.link)
    if request.public_key:
        terminal.say(f"signed, by {short_path(request.public_key)}")
    if imported.is_new:
        took = duration(time.monotonic() - started)
        terminal.say(Styled(f"imported {name} as {where} ({gib(imported.manifest.size / 2**30)}) in {took}", "bold"))
    else:
        terminal.say(f"{where} is already imported: the same image")
    return imported


def _lock_digest(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the digest that the trainer compares with the lock in its container."""
    return {"image_lock_sha256": labels[docker_engine.LOCK_LABEL]} if docker_engine.LOCK_LABEL in labels else {}


def _check_file(plan: JobPlan, file: Path, terminal: Terminal) -> dict[str, str]:
    """Check the size and the first bytes of the file, which is fast; `ftkit verify` reads all of it."""
    final = file.resolve()
    manifest = manifest_if_intact(final)
    if manifest:
        _warn_about_other_version(manifest.labels, plan, terminal)
        _require_sinks(plan, final)
        return {"image_id": manifest.image_id, "image_sha256": manifest.sha256} | _lock_digest(manifest.labels)
    if manifest_file(final).exists():
        raise ImageError(
            f"{file} differs from its manifest in size or in its first bytes",
            meaning="a copy was interrupted, the disk was full, or somebody changed the file",
            fix=f"list the differences: ftkit verify {file}; import it again: ftkit import {plan.image} --force",
        )
    terminal.warn(f"{file} has no manifest: its content is not verified")
    found = final.stat()
    return {"image_size": str(found.st_size), "image_modified": str(found.st_mtime_ns)}


def _require_sinks(plan: JobPlan, final: Path) -> None:
    if not isinstance(plan, RunPlan):
        return
    packages = python_packages(sbom_file(final))
    missing = [] if packages is None else sinks_without_package(plan.recipe.tracking.sinks, packages)
    if missing:
        names = ", ".join(SINK_PACKAGES[sink][0] for sink in missing)
        what = f"the image file lacks package {names}."
        again = f"build and import {plan.image} again"
        fix = f"If the image's definition lists it now, {again}; or remove {', '.join(missing)}."
        raise ConfigError([Problem(f"recipe {plan.recipe.name}", "tracking.sinks", what, fix)])


def _warn_about_other_version(labels: Mapping[str, str], plan: JobPlan, terminal: Terminal) -> None:
    if docker_engine.REFERENCE_LABEL not in labels or any(code.name == DEV_CODE for code in plan.code):
        return  # not built by ftkit, or another ftkit runs in it
    commit = read_commit(own_checkout())
    here = __version__, commit.id if commit else ""
    inside = labels.get("ftkit.version", ""), labels.get("org.opencontainers.image.revision", "")
    if inside != here:
        shown, this = (f"{version} at {id_[:12]}" if id_ else version for version, id_ in (inside, here))
        terminal.warn(
            f"{plan.image} has ftkit {shown}, this is {this}: if the job can't read its plan, build and import the "
            "image again"
        )


def verify_image(wanted: str, public_key: Path | None, *, deep: bool, as_json: bool) -> None:
    """Compare an imported image with its manifest, and show its facts; with `deep`, also run its self-check."""
    terminal = Terminal()
    image = parse_image(wanted, Path.cwd(), key="NAME:TAG|FILE|URI|DIR")
    if isinstance(image, ImageFile):
        file = image.path
    else:
        named = parse_name((image.named if isinstance(image, RegistryImage) else image).reference).reference
        sqsh, sif = image_store().link(named, "sqsh"), image_store().link(named, "sif")
        file = sif if sif.exists() and not sqsh.exists() else sqsh
    with ProgressView(terminal) as view:
        if public_key:
            require_beside(file, public_key)
        manifest = verify(file, view.report, name="NAME:TAG" if isinstance(image, ImageFile) else wanted)
        left = verify_inside(file, manifest, view.report) if deep else ""
    facts = {
        "file": str(file),
        "image": f"{manifest.reference}, {manifest.image_id}",
        "sha256": manifest.sha256,
        "size": gib(manifest.size / 2**30),
        "from": manifest.source,
    }
    if as_json:
        terminal.json({**facts, "size": manifest.size, "signed_by": str(public_key) if public_key else None})
    else:
        terminal.facts(tuple(facts.items()), is_data=True)
    terminal.say(Styled("the file matches its manifest", "green"))
    if public_key:
        terminal.say(Styled(f"the manifest is signed, by {short_path(public_key)}", "green"))
    if left:
        terminal.say(left)
