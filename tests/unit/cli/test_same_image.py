"""A run that goes on gets the image that it began with."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.cli.image_check import ensure_image, require_same_image
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import ImageError, NotFoundError
from ftkit.files import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.plan import RunPlan


@pytest.fixture
def begun(plan: RunPlan, tmp_path: Path) -> RunPlan:
    """A run on an image file that nothing but itself describes."""
    file = tmp_path / "mine.sqsh"
    file.write_bytes(b"hsqs")
    cluster = plan.cluster.model_copy(update={"runtime": "pyxis"})
    begun = replace(plan, cluster=cluster, image=str(file), container_image=str(file))
    begun.layout.root.mkdir(parents=True)
    write_json(begun.layout.manifest, dict(ensure_image(begun, Terminal(), does_import=False)))
    return begun


def test_the_same_file_is_fine(begun: RunPlan) -> None:
    require_same_image(begun, Terminal())


def test_a_file_that_was_replaced_is_refused(begun: RunPlan) -> None:
    os.utime(str(begun.container_image), (1, 1))
    with pytest.raises(ImageError, match="another image than the run began with: image_modified"):
        require_same_image(begun, Terminal())


def test_a_file_that_is_gone_is_named(begun: RunPlan) -> None:
    os.unlink(str(begun.container_image))  # noqa: PTH108 - a string already
    with pytest.raises(NotFoundError, match=r"mine\.sqsh"):
        require_same_image(begun, Terminal())


def test_runs_of_an_older_ftkit_recorded_nothing_and_go_on(begun: RunPlan) -> None:
    begun.layout.manifest.unlink()
    require_same_image(begun, Terminal())
