"""Check that an imported file is unchanged, and that the image in it passes its self-check."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ftkit import process
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, plural
from ftkit.files import open_regular
from ftkit.images.build import SELF_CHECK
from ftkit.images.events import ByteCounter, ProgressEvent, Report, ignore_progress
from ftkit.images.image_store import ImportManifest, manifest_file, read_manifest
from ftkit.images.inside import PASSED

_MAX_SHOWN_RANGES = 5


def verify(file: Path, report: Report = ignore_progress, *, name: str = "NAME:TAG") -> ImportManifest:
    """Return the manifest of a file, imported as `name`, after comparing all digests; ImageError lists differences."""
    if not file.exists():
        raise NotFoundError(f"there is no file {file}", fix=f"import it: ftkit import {name}")
    path = file.resolve()
    manifest = read_manifest(path)
    if manifest is None:
        raise ImageError(
            f"can't verify {file}: {manifest_file(path).name} is missing, damaged, or of another version",
            meaning="the file was not made by this version's 'ftkit import', or its manifest was removed",
            fix=f"import the image again: ftkit import {name} --force",
        )
    counter = ByteCounter(report, f"verifying {file.name}", path.stat().st_size)
    found = digest_file(path, manifest.block_size, counter.advance)
    differences = []
    if found.size != manifest.size:
        change = "truncated" if found.size < manifest.size else "longer than before"
        differences.append(f"size: {change}: {found.size} bytes, the manifest says {manifest.size}")
    block = manifest.block_size
    both = enumerate(zip(manifest.blocks, found.blocks, strict=False))
    ranges = [f"bytes {n * block} to {(n + 1) * block - 1}" for n, (old, new) in both if old != new]
    differences += [f"content: {part} differ" for part in ranges[:_MAX_SHOWN_RANGES]]
    if len(ranges) > _MAX_SHOWN_RANGES:
        differences.append(f"content: differs in {plural(len(ranges) - _MAX_SHOWN_RANGES, 'more range')}")
    if found.sha256 != manifest.sha256 and not differences:
        differences.append(f"sha256: {found.sha256}, the manifest says {manifest.sha256}")
    if path.name != manifest.file or not path.name.startswith(f"{manifest.image_id.file_name}."):
        differences.append(f"name: {path.name}, the manifest says {manifest.file} of {manifest.image_id}")
    if differences:
        raise ImageError(
            "\n    ".join((f"{file} differs from its manifest:", *differences)),
            meaning="the disk is faulty, copying damaged it, or somebody changed it",
            fix=f"import it again: ftkit import {manifest.reference} --force",
        )
    return manifest


BLOCK_SIZE: Final = 64 << 20
_CHUNK = 4 << 20


@dataclass(frozen=True)
class FileDigests:
    """Size in bytes and digests of one file: of all of it, and of each block."""

    size: int
    sha256: str
    blocks: tuple[str, ...]


def digest_file(
    path: Path, block_size: int = BLOCK_SIZE, advance: Callable[[int], None] = lambda _: None
) -> FileDigests:
    """Read a file once, and compute all digests; a second thread computes those of the blocks."""
    total, blocks, size = hashlib.sha256(), list[str](), 0
    block = hashlib.sha256()
    with open_regular(path) as file, ThreadPoolExecutor(1) as pool:
        while chunk := file.read(min(_CHUNK, block_size - size % block_size)):
            pending = pool.submit(block.update, chunk)
            total.update(chunk)
            pending.result()
            size += len(chunk)
            advance(len(chunk))
            if size % block_size == 0:
                blocks.append(block.hexdigest())
                block = hashlib.sha256()
    if size % block_size:
        blocks.append(block.hexdigest())
    return FileDigests(size, total.hexdigest(), tuple(blocks))


_TIMEOUT_SECONDS = 1800
_KEPT_VARIABLES = ("HOME", "PATH", "TMPDIR", "USER")
_RUN_ON_NODE = "run it on a node of the cluster: srun --container-image=FILE python3 -m ftkit.images.inside"
_IN_CHROOT = """set -eu
mkdir -p "$0/dev" "$0/proc"
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
exec chroot "$0" /usr/bin/env -i "$@"
"""
"""Runs in a private mount namespace, so that nothing stays mounted; `env -i` removes the host's variables."""


def verify_inside(file: Path, manifest: ImportManifest, report: Report) -> str:
    """Run the self-check inside the imported file; return a message about a container to remove manually, if any."""
    report(ProgressEvent(f"checking {file.name} from inside"))
    path, left = file.resolve(), ""
    apptainer = shutil.which("apptainer") or shutil.which("singularity")
    if apptainer:
        command = [apptainer, "exec", "--contain", "--cleanenv", "--no-home", str(path), *SELF_CHECK]
        done = process.run(command, timeout_seconds=_TIMEOUT_SECONDS)
    elif path.suffix == ".sqsh" and shutil.which("enroot"):
        done, left = _with_enroot(path, report)
    elif path.suffix == ".sqsh" and shutil.which("unsquashfs") and shutil.which("unshare") and os.geteuid() == 0:
        done = _with_chroot(path)
    else:
        raise PrerequisiteError(
            f"no program on this machine can run {path.name}",
            meaning="looked for apptainer, singularity, enroot, and (as root) unsquashfs with unshare",
            fix=_RUN_ON_NODE,
        )
    if done.returncode == 0 and PASSED in done.stdout:
        return left
    output = (done.stdout + done.stderr + left).strip() or f"exit status {done.returncode}, no output"
    lines = "\n".join(f"    {line}" for line in output.splitlines()[-20:])
    if done.returncode != 1 or not done.stdout.strip():  # otherwise the self-check ran, and printed what differs
        raise ImageError(
            f"the self-check of {manifest.reference} did not start:\n{lines}",
            meaning="the file is unchanged, but can't be run on this machine, or has no python3",
            fix=_RUN_ON_NODE,
        )
    raise ImageError(
        f"{manifest.reference} fails its self-check:\n{lines}",
        meaning="the file is unchanged, but the image differs from its definition",
        fix=f"build it again: ftkit build {manifest.reference}",
    )


def _with_enroot(file: Path, report: Report) -> tuple[process.ProgramOutput, str]:
    """Only enroot's variables are passed: it passes all on, and the check would use the host's PYTHONPATH."""
    name = f"ftkit-verify-{file.stem[-12:]}-{os.getpid()}"
    environment = {key: value for key, value in os.environ.items()
                   if key in _KEPT_VARIABLES or key.startswith(("ENROOT_", "XDG_"))}  # fmt: skip
    environment["ENROOT_LOGIN_SHELL"] = "no"  # /etc/profile would reset the image's PATH
    create = ["enroot", "create", "--force", "--name", name, "--", str(file)]
    remove = ["enroot", "remove", "--force", "--", name]
    try:
        done = process.run_stoppable(create, timeout_seconds=_TIMEOUT_SECONDS)
        if done.returncode == 0:
            start = ["enroot", "start", "--", name, *SELF_CHECK]
            done = process.run(start, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
    finally:
        report(ProgressEvent(f"removing the container of {file.name}"))
        try:
            removed = process.run(remove, timeout_seconds=_TIMEOUT_SECONDS)  # it takes minutes on a slow disk
            reason = removed.stderr.strip() if removed.returncode else ""
        except process.ProgramTimeoutError as error:
            reason = error.what
    if not reason or "No such file or directory" in reason:
        return done, ""
    return done, f"the check's container could not be removed ({reason}): {shlex.join(remove)}"


def _with_chroot(file: Path) -> process.ProgramOutput:
    """Unpack the file into a temporary folder and run the check there: for root, without a container runtime."""
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
