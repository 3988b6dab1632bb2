"""The folders of this machine that a job in a container needs, with the keys that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.config.paths import fixed_folder, is_address, is_path
from ftkit.config.sources import HubSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.config.cluster import ClusterProfile, NcclSpec
    from ftkit.config.recipe import RecipeSpec


def nccl_for(cluster: ClusterProfile, num_nodes: int) -> NcclSpec | None:
    """Return what NCCL needs from a job on so many nodes; None if it needs nothing."""
    nccl = cluster.nccl
    is_empty = not (nccl.environment or nccl.profile_script or nccl.library_dir)
    return None if is_empty or (nccl.multi_node_only and num_nodes == 1) else nccl


def mounted_folders(
    recipe: RecipeSpec, cluster: ClusterProfile, workspace: Path, num_nodes: int
) -> Iterator[tuple[str, str]]:
    """Yield each folder that a job reads or writes, after the key that names it; a folder can be named twice."""
    yield "workspace", str(workspace)
    yield "node_local_dir", cluster.node_local_dir
    nccl = nccl_for(cluster, num_nodes)
    if nccl and nccl.library_dir:
        yield "nccl.library_dir", nccl.library_dir
    model = recipe.model
    for key, path in (("model.weights", model.weights), ("model.tokenizer.source", model.tokenizer.source)):
        if is_path(path):
            yield key, path
    for key, file in recipe.data.files:
        if not is_address(file):
            yield key, str(fixed_folder(file))
    for source in recipe.data.sources:
        if isinstance(source, HubSource) and is_path(source.dataset):
            yield "data.source.dataset", source.dataset
