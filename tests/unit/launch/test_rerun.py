"""Plans of reruns: identical on the same cluster, with the same global batch size elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.context import Context
from ftkit.errors import ConfigError
from ftkit.launch.rerun import (
    changed_inputs,
    changes_between_starts,
    check_inputs,
    plan_rerun,
    repetition_record,
)
from ftkit.launch.resolve import RunArgs
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import PlanError, plan_to_json, read_plan
from ftkit.runs.manifest import build_manifest
from ftkit.runs.repeat import Original, read_original

if TYPE_CHECKING:
    from conftest import RunMaker

    from ftkit.planning.layout import Workspace
    from ftkit.planning.plan import RunPlan


@pytest.fixture
def original(make_run: RunMaker, tmp_path: Path) -> Original:
    """A run on four processes of a cluster without GPUs, with an automatic micro-batch size."""
    layout = make_run().layout
    plan = read_plan(layout)
    execution = replace(plan.execution, chosen=("micro_batch_size",))
    cluster = plan.cluster.model_copy(update={"setup": ("module load x",)})
    plan = replace(plan, execution=execution, cluster=cluster, ftkit_version="0.0.1")
    layout.plan.write_text(plan_to_json(plan))
    manifest = build_manifest(plan, ["ftkit"], tmp_path) | {"image_id": "sha256:1"}
    layout.manifest.write_text(json.dumps(manifest))
    return read_original(str(layout.root))


def rerun(original: Original, workspace: Workspace, *, is_own: bool = True, **args: Any) -> RunPlan:
    ctx = Context(Path("/nowhere"), Path("/nowhere"), {"CUDA_VISIBLE_DEVICES": ""})
    return plan_rerun(original, RunArgs(**args), ctx, workspace, None, is_own=is_own)


def test_a_rerun_on_the_same_cluster_has_the_same_plan(original: Original, workspace: Workspace) -> None:
    plan = rerun(original, workspace)
    before = read_plan(RunLayout(workspace.runs / original.run.id))
    same = {"engine": plan.engine.name}
    assert plan.recipe.training.model_copy(update=same) == before.recipe.training.model_copy(update=same)
    assert (plan.batch, plan.engine.name, plan.cluster) == (before.batch, before.engine.name, before.cluster)
    assert (plan.name, plan.fingerprint) == ("demo-rerun", before.fingerprint)
    assert plan.id != before.id
    assert [each.key for each in changed_inputs(original, plan, original.manifest)] == ["ftkit"]  # another version


def test_a_rerun_elsewhere_keeps_the_global_batch_size(original: Original, workspace: Workspace) -> None:
    plan = rerun(original, workspace, processes_per_node=4)
    assert plan.batch.global_batch_size == original.manifest["resolved_recipe"]["training"]["global_batch_size"]
    assert plan.placement.world_size == 4
    assert plan.execution.chosen == ("micro_batch_size",)
    changed = changed_inputs(original, plan, original.manifest)
    assert ("cluster", "processes_per_node") in [(each.section, each.key) for each in changed]
    check_inputs(changed, [])


def test_naming_the_original_cluster_keeps_the_number_of_processes(original: Original, workspace: Workspace) -> None:
    original.manifest["placement"]["processes_per_node"] = 4
    assert rerun(original, workspace, cluster=original.manifest["cluster"]).placement.world_size == 4


def test_a_profile_from_elsewhere_is_not_used(original: Original, workspace: Workspace) -> None:
    assert rerun(original, workspace).cluster.setup == ("module load x",)
    assert rerun(original, workspace, is_own=False, processes_per_node=1).cluster.setup == ()


def test_another_image_or_other_data_is_rejected_unless_allowed(original: Original, workspace: Workspace) -> None:
    plan = rerun(original, workspace)
    changed = changed_inputs(original, plan, original.manifest | {"image_id": "sha256:2"})
    with pytest.raises(ConfigError) as caught:
        check_inputs(changed, [])
    assert "image: image_id: is sha256:2, was sha256:1." in str(caught.value)
    assert "--allow image" in str(caught.value)
    check_inputs(changed, ["image"])
    with pytest.raises(ConfigError, match="can differ"):
        check_inputs([], ["everything"])


@pytest.mark.parametrize("key", ["resolved_recipe", "cluster_profile"])
def test_a_manifest_that_cannot_be_read_is_an_error(key: str, original: Original, workspace: Workspace) -> None:
    damaged = replace(original, manifest=original.manifest | {key: {"name": 3}})
    with pytest.raises(PlanError, match=f"the manifest's {key} can't be read"):
        rerun(damaged, workspace)


def test_the_data_of_the_original_is_that_of_its_last_start_that_was_not_refused(original: Original) -> None:
    starts = [{"data": {"train": "a"}}, {"data": {"train": "b"}}, {"data": {}}]
    refused = replace(original, manifest=original.manifest | {"starts": starts})
    assert repetition_record(refused, [])["data"] == {"train": "b"}
    assert repetition_record(original, [])["data"] == {}


def test_a_change_of_the_originals_training_on_the_way_is_said(original: Original) -> None:
    def changed(step: int, **values: object) -> dict[str, object]:
        return {
            "from_step": step,
            "changes": {f"training.{key}": {"before": 20, "after": value} for key, value in values.items()},
        }

    training = original.manifest["resolved_recipe"]["training"]
    for submission, schedule, keys in (
        (changed(20, max_steps=40), "cosine", ["training.max_steps=40"]),
        (changed(20, max_steps=40), "constant", []),
        (changed(0, max_steps=40), "cosine", []),  # nothing was trained before
        (changed(5, log_every_steps=1, learning_rate=1e-4), "constant", ["training.learning_rate=0.0001"]),
    ):
        training["schedule"] = schedule
        original.manifest["submissions"] = [changed(0), submission]
        found = changes_between_starts(original)
        assert [text.partition(" with ")[2].partition(",")[0] for text in found] == keys
    original.manifest["submissions"] = "damaged"
    assert changes_between_starts(original) == []
