"""What is found out about an image before a run is submitted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.cli.image_check import _require_sinks
from ftkit.config.tracking import TrackingSpec
from ftkit.errors import ConfigError
from ftkit.images.packages import make_sbom

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.plan import RunPlan


def with_sinks(plan: RunPlan, *sinks: str) -> RunPlan:
    tracking = TrackingSpec.model_validate({"sinks": sinks})
    return replace(plan, recipe=plan.recipe.model_copy(update={"tracking": tracking}))


def test_a_tracker_whose_package_the_file_lacks_is_refused(plan: RunPlan, tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    tracked = with_sinks(plan, "tensorboard", "mlflow")
    _require_sinks(tracked, image)  # without a list nobody knows
    document = make_sbom()
    names = ("tensorboard", "mlflow-skinny")
    document["components"] = [one for one in document["components"] if one["name"].lower() not in names]
    sbom = image.with_name("image.sqsh.sbom.json")
    sbom.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"no package tensorboard, mlflow-skinny"):
        _require_sinks(tracked, image)
    for name in names:
        document["components"].append({"name": name, "purl": f"pkg:pypi/{name}@1"})
    sbom.write_text(json.dumps(document))
    _require_sinks(tracked, image)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"components": 7}', '{"components": [{}]}', '{"components": []}', "[" * 99999]
)
def test_a_list_of_packages_that_says_nonsense_is_none(plan: RunPlan, tmp_path: Path, text: str) -> None:
    (tmp_path / "image.sqsh.sbom.json").write_text(text)
    _require_sinks(with_sinks(plan, "wandb"), tmp_path / "image.sqsh")
