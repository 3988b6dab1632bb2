"""What must be there before a job is worth its place in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError
from ftkit.launch.data_files import named_paths
from ftkit.layout import Workspace

if TYPE_CHECKING:
    from ftkit.plan import RunPlan


def check_prerequisites(plan: RunPlan) -> None:
    """Check that the image and the files that the recipe names are there.

    Raises:
        NotFoundError: one is not.
    """
    _check_image(plan)
    for key, path in named_paths(plan.recipe):
        if not path.exists():
            raise NotFoundError(
                f"{key} names {path}, which is not there",
                meaning="the path is wrong, or its file system is not mounted on this machine",
                fix=f"give the right path: {key}=PATH; relative ones belong to the file that names them",
            )


def _check_image(plan: RunPlan) -> None:
    wanted = plan.container_image
    if wanted is None or not wanted.startswith("/") or Path(wanted).is_file():
        return
    images = Workspace(plan.workspace).images
    there = sorted(path.name for path in images.glob("*.sqsh"))
    raise NotFoundError(
        f"image {plan.image} is not there: looked for {wanted}",
        meaning=f"images in {images}: {', '.join(there)}" if there else f"there are no images in {images}",
        fix="import it to that path (enroot import -o FILE docker://HOST#PATH:TAG), or give --image with the path "
        "of a .sqsh file or a docker:// address",
    )
