"""Checks for every kind of job: nodes, GPUs, image, and folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.config.cluster import format_time_limit, parse_time_limit
from ftkit.config.image_reference import ImageFile
from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import Problem, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.request import RunRequest


def check_placement(
    cluster: ClusterProfile, request: RunRequest, num_nodes: int, processes_per_node: int, spare: int
) -> Iterator[Problem]:
    """Yield the reasons why the cluster does not have these nodes and GPUs, spare nodes included."""
    where = COMMAND_LINE if request.num_nodes or request.gpus_per_node else f"cluster {cluster.name}"
    nodes = "resources.num_nodes" if request.num_nodes is None else "--nodes"
    gpus = "resources.gpus_per_node" if request.gpus_per_node is None else "--gpus-per-node"
    if num_nodes < 1 or processes_per_node < 1:
        yield Problem(COMMAND_LINE, "--nodes, --gpus-per-node", "must be at least 1.")
    if cluster.scheduler == "local" and num_nodes > 1:
        yield Problem(
            where, nodes, f"cluster '{cluster.name}' is a single machine, got {num_nodes} nodes.",
            "Use --nodes 1, or a Slurm cluster with --cluster.",
        )  # fmt: skip
    elif cluster.scheduler == "local" and spare:
        yield Problem(
            COMMAND_LINE, "resources.spare_nodes", f"cluster '{cluster.name}' is a single machine.", "Omit it."
        )
    elif cluster.max_nodes is not None and num_nodes + spare > cluster.max_nodes:
        requested = plural(num_nodes, "node") + (f" and {spare} spare" if spare else "")
        yield Problem(where, nodes, f"{requested} requested, the cluster has {cluster.max_nodes}.")
    if cluster.device == "cuda" and processes_per_node > cluster.gpus_per_node:
        yield Problem(
            where, gpus,
            f"{plural(processes_per_node, 'GPU')} requested, a node has {cluster.gpus_per_node}.",
            f"Use at most {cluster.gpus_per_node}, and more --nodes.",
        )  # fmt: skip


def check_time_limit(cluster: ClusterProfile, wanted: str | None) -> Iterator[Problem]:
    """Yield the reason why a job would be asked to stop as soon as it starts, again after each requeue.

    Slurm may send the signal up to a minute early (`sbatch --signal`).
    """
    limit = cluster.limit_time(wanted)
    seconds = parse_time_limit(limit) if limit else None
    shortest = cluster.stop_signal_seconds + 60
    if cluster.scheduler == "slurm" and cluster.stop_signal_seconds and seconds and seconds <= shortest:
        is_wanted = wanted is not None and limit == wanted
        yield Problem(
            COMMAND_LINE if is_wanted else f"cluster {cluster.name}",
            "resources.time_limit" if is_wanted else "time_limit",
            f"{limit} is too short: Slurm asks the job to stop {cluster.stop_signal_seconds} s before its end "
            "(stop_signal_seconds in the profile), or a minute earlier, so it would never train for long.",
            f"Use more than {format_time_limit(shortest)}.",
        )


def check_image(cluster: ClusterProfile, request: RunRequest) -> Iterator[Problem]:
    """Yield the reasons why the cluster can't start containers from the image."""
    if cluster.runtime == "none" and request.image_is_explicit:
        yield Problem(
            COMMAND_LINE, "--image", f"cluster '{cluster.name}' has runtime 'none': the image would have no effect.",
            "Omit --image, or use a cluster whose profile has another runtime.",
        )  # fmt: skip
    if cluster.runtime != "none" and request.image is None:
        yield Problem(
            f"cluster {cluster.name}", "runtime", f"'{cluster.runtime}' needs an image, and none is set.",
            "Give --image NAME:TAG, or set 'image:' in ftkit.yaml.",
        )  # fmt: skip
    where, key = image_origin(request)
    if cluster.runtime == "docker" and isinstance(request.image, ImageFile):
        yield Problem(
            where,
            key,
            f"docker can't run a file: {request.image}.",
            "Use NAME:TAG, built by ftkit build.",
        )
    if cluster.runtime == "pyxis" and isinstance(request.image, ImageFile) and request.image.is_sif:
        yield Problem(
            where, key, f"pyxis can't run a SIF file: {request.image}.",
            "Use a .sqsh file ('ftkit import' makes one), or a cluster whose profile has runtime 'apptainer'.",
        )  # fmt: skip


def check_mounts(
    cluster: ClusterProfile, workspace: Path, folders: Iterable[tuple[str, str, str]]
) -> Iterator[Problem]:
    """Yield the reasons why a job can't mount its folders.

    Args:
        cluster: the profile.
        workspace: the shared folder.
        folders: folders to mount: for each, the spec of its key, the key, and the path.
    """
    if _has_control_characters(str(workspace)):
        yield Problem("settings", "workspace", f"a path can't contain control characters: {str(workspace)!r}.")
    if cluster.runtime == "none":
        return
    for owner, key, folder in folders:
        if "," in folder or ":" in folder:
            yield Problem(
                owner, key, f"{cluster.runtime} can't mount a path with a comma or a colon: {folder}.",
                "Use another folder, or a symbolic link without them.",
            )  # fmt: skip
        if _has_control_characters(folder) and key != "workspace":
            yield Problem(owner, key, f"{cluster.runtime} can't mount a path with control characters: {folder!r}.")
    for mount in cluster.mounts:
        if "," in mount or not all(part.startswith("/") for part in mount.split(":")[:2]):
            yield Problem(
                f"cluster {cluster.name}", "mounts", f"not an absolute PATH or FROM:TO without commas: {mount!r}."
            )


def _has_control_characters(path: str) -> bool:
    return any(ord(character) < ord(" ") for character in path)


def image_origin(request: RunRequest) -> tuple[str, str]:
    """Return the origin and the key of the image, for messages."""
    return (COMMAND_LINE, "--image") if request.image_is_explicit else ("", "image")
