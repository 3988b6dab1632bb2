"""Run an imported image's self-check inside it, with whatever can start the file here."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import ImageError, PrerequisiteError
from ftkit.images.build import SELF_CHECK
from ftkit.images.progress import Progress, Report
from ftkit.images.self_check import PASSED

if TYPE_CHECKING:
    from ftkit.images.store import ImportManifest

_TIMEOUT_SECONDS = 1800
_KEPT = ("HOME", "PATH", "TMPDIR", "USER")
_ON_A_NODE = "run it on a node of the cluster: srun --container-image=FILE python3 -m ftkit.images.self_check"
_IN_CHROOT = """set -eu
mkdir -p "$0/dev" "$0/proc"
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
exec chroot "$0" /usr/bin/env -i "$@"
"""
"""In a mount namespace of its own, so that nothing stays mounted; `env -i` because the host's variables don't count."""


def check_deep(file: Path, manifest: ImportManifest, report: Report) -> str:
    """Run the self-check in the file itself; return what is left to do by hand afterwards, mostly nothing.

    Raises:
        PrerequisiteError: nothing here can start it.
        ImageError: with everything that is wrong.
    """
    report(Progress(f"checking {file.name} from inside"))
    done, left = _run_inside(file.resolve(), report)
    if done.returncode != 0 or PASSED not in done.stdout:
        said = (done.stdout + done.stderr + left).strip() or f"it ended with {done.returncode} and said nothing"
        lines = "\n".join(f"    {line}" for line in said.splitlines()[-20:])
        if done.returncode != 1 or not done.stdout.strip():  # the self-check ends so, and says what it finds
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
    return left


def _run_inside(file: Path, report: Report) -> tuple[process.ProgramOutput, str]:
    """Return what the check said, and what is left to do by hand."""
    for program in ("apptainer", "singularity"):
        if shutil.which(program):
            command = [program, "exec", "--contain", "--cleanenv", "--no-home", str(file), *SELF_CHECK]
            return process.run(command, timeout_seconds=_TIMEOUT_SECONDS), ""
    if file.suffix == ".sqsh" and shutil.which("enroot"):
        return _with_enroot(file, report)
    if file.suffix == ".sqsh" and shutil.which("unsquashfs") and shutil.which("unshare") and os.geteuid() == 0:
        return _with_chroot(file), ""
    raise PrerequisiteError(
        f"nothing on this machine can start {file.name}",
        meaning="looked for apptainer, singularity, enroot, and (as root) unsquashfs with unshare",
        fix=_ON_A_NODE,
    )


def _with_enroot(file: Path, report: Report) -> tuple[process.ProgramOutput, str]:
    """Run the check in a container of its own."""
    name = f"ftkit-verify-{file.stem[-12:]}-{os.getpid()}"
    try:
        done = process.run_stoppable(
            ["enroot", "create", "--force", "--name", name, "--", str(file)], timeout_seconds=_TIMEOUT_SECONDS
        )
        if done.returncode == 0:
            done = process.run(
                ["enroot", "start", "--", name, *SELF_CHECK], timeout_seconds=_TIMEOUT_SECONDS,
                environment=_for_enroot(),
            )  # fmt: skip
    finally:
        report(Progress(f"removing the container of {file.name}"))
        left = _remove_container(name)
    return done, left


def _for_enroot() -> dict[str, str]:
    """Return enroot's own variables: it hands all others on, and a PYTHONPATH of the host would be checked instead."""
    own = {key: value for key, value in os.environ.items() if key in _KEPT or key.startswith(("ENROOT_", "XDG_"))}
    return own | {"ENROOT_LOGIN_SHELL": "no"}  # /etc/profile would reset the image's PATH


def _remove_container(name: str) -> str:
    """Remove a container, which takes minutes on a slow disk; what it can't do says nothing of the image."""
    command = ["enroot", "remove", "--force", "--", name]
    try:
        done = process.run(command, timeout_seconds=_TIMEOUT_SECONDS)
    except process.ProgramTimeoutError as error:
        said = error.what
    else:
        said = done.stderr.strip()
        if done.returncode == 0 or "No such file or directory" in said:
            return ""
    return f"the check's container is still there ({said}): {shlex.join(command)}"


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
