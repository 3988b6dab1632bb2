"""Checks of a run's image before submission."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.cli.image_check import _require_sinks, check_image, missing_image, require_same_image
from ftkit.cli.terminal.console import Terminal
from ftkit.config.image_reference import NamedImage
from ftkit.config.recipe import TrackingSpec
from ftkit.errors import ConfigError, ImageError, NotFoundError
from ftkit.files import write_json
from ftkit.images.inside import make_sbom

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.layout import Workspace
    from ftkit.planning.plan import RunPlan


def with_sinks(plan: RunPlan, *sinks: str) -> RunPlan:
    tracking = TrackingSpec.model_validate({"sinks": sinks})
    return replace(plan, recipe=plan.recipe.model_copy(update={"tracking": tracking}))


def test_a_tracker_without_its_package_in_the_image_file_is_rejected(plan: RunPlan, tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    tracked = with_sinks(plan, "tensorboard", "mlflow")
    _require_sinks(tracked, image)  # unknown without a package list
    document = make_sbom()
    names = ("tensorboard", "mlflow-skinny")
    document["components"] = [one for one in document["components"] if one["name"].lower() not in names]
    sbom = image.with_name("image.sqsh.sbom.json")
    sbom.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"tensorboard, mlflow-skinny"):
        _require_sinks(tracked, image)
    for name in names:
        document["components"].append({"name": name, "purl": f"pkg:pypi/{name}@1"})
    sbom.write_text(json.dumps(document))
    _require_sinks(tracked, image)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"components": 7}', '{"components": [{}]}', '{"components": []}', "[" * 99999]
)
def test_an_invalid_package_list_is_ignored(plan: RunPlan, tmp_path: Path, text: str) -> None:
    (tmp_path / "image.sqsh.sbom.json").write_text(text)
    _require_sinks(with_sinks(plan, "wandb"), tmp_path / "image.sqsh")


@pytest.fixture
def begun(plan: RunPlan, tmp_path: Path) -> RunPlan:
    """A run on an image file without a manifest."""
    file = tmp_path / "mine.sqsh"
    file.write_bytes(b"hsqs")
    cluster = plan.cluster.model_copy(update={"runtime": "pyxis"})
    begun = replace(plan, cluster=cluster, image=str(file), container_image=str(file))
    begun.layout.root.mkdir(parents=True)
    write_json(begun.layout.manifest, dict(check_image(begun, Terminal())))
    return begun


def test_an_unchanged_image_file_is_accepted(begun: RunPlan) -> None:
    require_same_image(begun, Terminal())


def test_a_replaced_image_file_is_rejected(begun: RunPlan) -> None:
    os.utime(str(begun.container_image), (1, 1))
    with pytest.raises(ImageError, match="image_modified"):
        require_same_image(begun, Terminal())


def test_a_removed_image_file_is_reported(begun: RunPlan) -> None:
    os.unlink(str(begun.container_image))  # noqa: PTH108 - already a string
    with pytest.raises(NotFoundError, match=r"mine\.sqsh"):
        require_same_image(begun, Terminal())


def test_runs_of_an_older_ftkit_without_an_image_record_resume(begun: RunPlan) -> None:
    begun.layout.manifest.unlink()
    require_same_image(begun, Terminal())


def test_a_missing_image_is_reported_with_imported_images_and_the_import_command(
    plan: RunPlan, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    file = workspace.image_file(NamedImage("olmo3:25.02"), "sqsh")
    here = replace(plan, image="olmo3:25.02", container_image=str(file))
    missing = missing_image(here)
    assert missing
    assert str(file) in missing.what
    assert missing.meaning == f"no images in {workspace.images}"
    assert missing.fix.startswith("ftkit build olmo3:25.02 && ftkit import olmo3:25.02 --cluster local; or")
    file.parent.mkdir(parents=True)
    (file.parent / "other.sqsh").touch()
    missing = missing_image(here)
    assert missing
    assert "other.sqsh" in missing.meaning
    file.touch()
    assert missing_image(here) is None


def test_an_image_address_is_left_to_the_container_runtime(plan: RunPlan) -> None:
    pulled = replace(plan, image="docker://h#p:t", container_image="docker://h#p:t")
    assert missing_image(pulled) is None
    assert check_image(pulled, Terminal()) == {}
