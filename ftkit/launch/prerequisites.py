"""What must be there before a job is worth its place in the queue."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.launch.data_files import check_examples, named_paths
from ftkit.layout import Workspace
from ftkit.specs.tracking import check_access, check_packages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.plan import RunPlan
    from ftkit.specs.cluster import ClusterProfile


def check_prerequisites(plan: RunPlan) -> None:
    """Check that the image, and what trains on this machine, are there.

    Raises:
        NotFoundError: the image is not.
        PrerequisiteError: the training packages are not.
    """
    _check_image(plan)
    _check_packages(plan)


def check_trackers(plan: RunPlan, environment: Mapping[str, str]) -> list[str]:
    """Check that the job's trackers will have their keys and addresses, and without a container their packages.

    Returns:
        Warnings, about what the profile's own lines of bash may set.

    Raises:
        PrerequisiteError: something is missing.
    """
    cluster, tracking = plan.cluster, plan.recipe.tracking
    if cluster.runtime == "none" and cluster.scheduler == "local":
        check_packages(tracking)
    try:
        check_access(tracking, {**environment, **cluster.environment}, sees_home=cluster.runtime == "none")
    except PrerequisiteError as error:
        if not cluster.setup:
            raise
        return [f"{error.what}, unless the lines under 'setup' of cluster {cluster.name} set it"]
    return []


def check_sources(plan: RunPlan, environment: Mapping[str, str]) -> list[str]:
    """Check that the job will get the files, the weights and the data that its recipe names.

    Returns:
        Warnings, about what can't be told from here.

    Raises:
        NotFoundError: a file, a folder, the weights or the data set are not there.
        PrerequisiteError: the weights or the data set are gated.
        ConfigError: `model.architecture` contradicts the weights' own configuration.
        DataError: one of the first rows of a local file can't be used as the recipe asks.
    """
    from ftkit import hub  # noqa: PLC0415 - HTTP, which only a submission needs

    unseen = {key: path for key, path in named_paths(plan.recipe) if not path.exists()}
    warnings: list[str | None] = [_check_unseen(key, path, plan.cluster) for key, path in unseen.items()]
    if not plan.is_data_prepared:
        check_examples(plan.recipe)
    environment, home = {**environment, **plan.cluster.environment}, Workspace(plan.workspace).hub_home
    if "model.weights" not in unseen:
        warnings.append(hub.check_weights(plan.recipe.model, environment, home))
    if not plan.is_data_prepared:
        warnings.append(hub.check_data(plan.recipe.data.source, environment, home))
    return [warning for warning in warnings if warning]


def _check_unseen(key: str, path: Path, cluster: ClusterProfile) -> str:
    """Refuse a path that should be here; return a warning about one that the nodes alone may have.

    Those are models on a file system that is not mounted here. Data must be here, where its changes are noticed.
    """
    mounts = [Path(mount.partition(":")[0]) for mount in cluster.mounts]
    within = next((mount for mount in mounts if path.is_relative_to(mount)), path.parent)
    if cluster.scheduler == "slurm" and key.startswith("model.") and not within.exists():
        return f"{key}: {path} is not to be seen from here, nor is {within}: the job will look for it on its nodes"
    raise NotFoundError(
        f"{key} names {path}, which is not there",
        meaning="the path is wrong, or its file system is not mounted on this machine",
        fix=f"give the right path: {key}=PATH; relative ones belong to the file that names them",
    )


def _check_packages(plan: RunPlan) -> None:
    """Without a container, a run on this machine uses the Python that this is."""
    if plan.cluster.runtime == "none" and plan.cluster.scheduler == "local" and find_spec("torch") is None:
        raise PrerequisiteError(
            "what trains is not installed: there is no torch in this Python",
            meaning=f"cluster '{plan.cluster.name}' has no container, so the run uses {plan.python}",
            fix="pip install 'ftkit[train]', or run in an image with --cluster docker",
        )


def _check_image(plan: RunPlan) -> None:
    wanted = plan.container_image
    if wanted is None or not wanted.startswith("/") or Path(wanted).is_file():
        return
    if plan.image == wanted:
        raise NotFoundError(
            f"there is no image file {wanted}",
            meaning="the path is wrong, or its file system is not mounted on this machine",
            fix="give the path of a .sqsh or .sif file; relative ones belong to the file that names them",
        )
    images = Workspace(plan.workspace).images
    there = sorted(path.name for path in images.glob("*.sqsh"))
    raise NotFoundError(
        f"image {plan.image} is not there: looked for {wanted}",
        meaning=f"images in {images}: {', '.join(there)}" if there else f"there are no images in {images}",
        fix=f"import it: ftkit import {plan.image}; or give --image with a .sqsh file or a docker:// address",
    )
