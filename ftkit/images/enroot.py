"""Let enroot import an image: here, or on a compute node through Slurm."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.errors import ImageError
from ftkit.images import squashfs

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.specs.cluster import ClusterProfile

_TIMEOUT_SECONDS: Final = 4 * 3600

_ON_NODE: Final = """set -eu
folder=$1/ftkit-import-$UID-$$
trap 'rm -rf -- "$folder"' EXIT
(umask 077 && mkdir -p -- "$folder/temp" "$folder/cache")
export ENROOT_TEMP_PATH=$folder/temp ENROOT_CACHE_PATH=$folder/cache
enroot import --output "$2" -- "$3"
"""
"""enroot's temporary folders go to the node's own disk: shared file systems can't hold them (whiteouts)."""


@dataclass(frozen=True)
class ComputeNode:
    """How to get at a compute node."""

    srun_options: tuple[str, ...]
    local_folder: str


def is_there() -> bool:
    """Tell whether this machine has enroot."""
    return shutil.which("enroot") is not None


def node_of(cluster: ClusterProfile) -> ComputeNode:
    """Return how to get at a compute node of a cluster."""
    options = ["--nodes=1", "--ntasks=1", "--job-name=ftkit-import", "--export=ALL"]
    named = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "cpus-per-task": cluster.cpus_per_node,
    }
    options += [f"--{key}={value}" for key, value in named.items() if value]
    options += ["--exclusive"] if cluster.exclusive else []
    return ComputeNode(tuple(options), cluster.node_local_dir)


def import_to(output: Path, uri: str, *, created: int, node: ComputeNode | None = None) -> None:
    """Import `uri` into a file that is not there yet.

    Raises:
        PrerequisiteError: enroot or srun is not there.
        ImageError: it failed.
    """
    settings = {"ENROOT_SQUASH_OPTIONS": squashfs.ENROOT_OPTIONS, "SOURCE_DATE_EPOCH": str(created)}
    if node is None:
        settings["ENROOT_MAX_PROCESSORS"] = str(len(os.sched_getaffinity(0)))
        command = ["enroot", "import", "--output", str(output), "--", uri]
    else:
        command = ["srun", *node.srun_options, "bash", "-c", _ON_NODE, "ftkit", node.local_folder, str(output), uri]
    done = process.run(command, timeout_seconds=_TIMEOUT_SECONDS, environment={**os.environ, **settings})
    if done.returncode != 0 or not output.is_file():
        raise _explain(uri, done.stdout + done.stderr, output)
    squashfs.check_whole(output)


def _explain(uri: str, said: str, output: Path) -> ImageError:
    """Turn enroot's last words into an error: it says nothing at all when credentials are wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    is_silent = any(word in last for word in ("Authenticating with user", "Using credentials from file"))
    if is_silent or "401" in last or "403" in last:
        host = uri.removeprefix("docker://").partition("#")[0]
        return ImageError(
            f"enroot could not log in to {host}",
            meaning="the line for it in enroot's .credentials is missing, has a port, or its password is wrong",
            fix=f"write 'machine {host.partition(':')[0]} login USER password SECRET' into ~/.config/enroot/"
            ".credentials; NGC wants a second line for authn.nvidia.com",
        )
    return squashfs.explain_failure("enroot", said, output)
