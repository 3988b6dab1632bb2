"""Run an imported image's self-check inside it, with whatever can start the file here."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.build import SELF_CHECK
from ftkit.images.progress import Progress, Report

if TYPE_CHECKING:
    from ftkit.images.store import ImportManifest

_TIMEOUT_SECONDS = 1800
_ON_A_NODE = "run it on a node of the cluster: srun --container-image=FILE python3 -m ftkit.images.self_check"
_IN_CHROOT = """set -eu
mkdir -p "$0/dev" "$0/proc"
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
exec chroot "$0" /usr/bin/env -i "$@"
"""
"""In a mount namespace of its own, so that nothing stays mounted; `env -i` because the host's variables don't count."""


def check_deep(file: Path, manifest: ImportManifest, report: Report) -> None:
    """Run the self-check in the file itself.

    Raises:
        PrerequisiteError: nothing here can start it.
        ImageError: with everything that is wrong.
    """
    report(Progress(f"checking {file.name} from inside"))
    done = _run_inside(file.resolve())
    if done.returncode != 0:
        lines = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).strip().splitlines()[-20:])
        if not done.stdout.strip():  # the self-check says what it finds there
            raise ImageError(
                f"the self-check of {manifest.reference} did not start:\n{lines}",
                meaning="the file is as it was imported, but can't be run on this machine, or has no python3",
                fix=_ON_A_NODE,
            )
        raise ImageError(
            f"{manifest.reference} fails its self-check:\n{lines}",
            meaning="the image is as it was imported, but not as its definition says",
            fix=f"build it again: ftkit build {manifest.reference}",
        )


def _run_inside(file: Path) -> process.ProgramOutput:
    for program in ("apptainer", "singularity"):
        if shutil.which(program):
            command = [program, "exec", "--contain", "--no-home", str(file), *SELF_CHECK]
            return process.run(command, timeout_seconds=_TIMEOUT_SECONDS)
    if file.suffix == ".sqsh" and shutil.which("enroot"):
        return _with_enroot(file)
    if file.suffix == ".sqsh" and shutil.which("unsquashfs") and shutil.which("unshare") and os.geteuid() == 0:
        return _with_chroot(file)
    raise PrerequisiteError(
        f"nothing on this machine can start {file.name}",
        meaning="looked for apptainer, singularity, enroot, and (as root) unsquashfs with unshare",
        fix=_ON_A_NODE,
    )


def _with_enroot(file: Path) -> process.ProgramOutput:
    name = f"ftkit-verify-{file.stem[-12:]}"
    made = process.run(
        ["enroot", "create", "--force", "--name", name, "--", str(file)], timeout_seconds=_TIMEOUT_SECONDS
    )
    if made.returncode != 0:
        return made
    try:
        return process.run(["enroot", "start", "--", name, *SELF_CHECK], timeout_seconds=_TIMEOUT_SECONDS)
    finally:
        process.run(["enroot", "remove", "--force", "--", name])


def _with_chroot(file: Path) -> process.ProgramOutput:
    """Unpack the file into a temporary folder and start the check there: for root, where nothing better is."""
    with tempfile.TemporaryDirectory(prefix="ftkit-verify-") as folder:
        root = Path(folder, "root")
        unpacked = process.run(["unsquashfs", "-q", "-n", "-d", str(root), str(file)], timeout_seconds=_TIMEOUT_SECONDS)
        if unpacked.returncode != 0:
            return unpacked
        variables = (root / "etc/environment").read_text(encoding="utf-8").splitlines()
        return process.run(
            ["unshare", "--mount", "sh", "-c", _IN_CHROOT, str(root), *variables, *SELF_CHECK],
            timeout_seconds=_TIMEOUT_SECONDS,
        )
