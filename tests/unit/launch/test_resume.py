"""Plans of resumed runs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit import assets
from ftkit.config.context import Context
from ftkit.errors import ConfigError, SubmitError
from ftkit.launch.resolve import RunArgs
from ftkit.launch.resume import replan
from ftkit.launch.submission import resume
from ftkit.planning.plan import parse_plan, plan_to_json, read_plan
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakePrograms, RunMaker

    from ftkit.planning.plan import RunPlan


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(tmp_path, tmp_path / "user", {})


def refusal(plan: RunPlan, args: RunArgs, ctx: Context, allowed: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        replan(plan, args, ctx, allowed=allowed)
    return " ".join(map(str, caught.value.problems))


def test_another_number_of_processes_does_not_change_the_optimization(plan: RunPlan, ctx: Context) -> None:
    read = parse_plan(plan_to_json(plan), "plan.json")
    changed = replan(read, RunArgs(processes_per_node=4), ctx)
    new = changed.plan
    assert (new.id, new.fingerprint, new.created) == (plan.id, plan.fingerprint, plan.created)
    assert (new.placement.world_size, new.batch.accumulation_steps) == (4, 1)
    assert new.batch.global_batch_size == plan.batch.global_batch_size
    assert new.recipe.training.model_dump(exclude={"engine"}) == plan.recipe.training.model_dump(exclude={"engine"})
    assert (new.recipe.model, new.recipe.data) == (plan.recipe.model, plan.recipe.data)
    assert [change.key for change in changed.changes] == ["processes per node"]
    again = replan(new, RunArgs(cluster=new.cluster.name), ctx)
    assert (again.plan.placement, again.changes) == (new.placement, ())


def test_a_plan_that_chose_the_micro_batch_chooses_it_again(plan: RunPlan, ctx: Context) -> None:
    training = plan.recipe.training.model_copy(update={"activation_checkpointing": "full", "checkpointed_layers": 1})
    plan = replace(plan, recipe=plan.recipe.model_copy(update={"training": training}))
    for chosen in (("micro_batch_size",), ("activation_checkpointing",), ()):
        left_open = replace(plan, execution=replace(plan.execution, chosen=chosen))
        assert replan(left_open, RunArgs(processes_per_node=4), ctx).plan.execution.chosen == chosen


def test_resuming_on_another_cluster_uses_its_profile(plan: RunPlan, ctx: Context, tmp_path: Path) -> None:
    folder = tmp_path / "clusters"
    folder.mkdir()
    text = "name: ours\nextends: slurm\nruntime: none\ngpus_per_node: 4\ngpu: h100-80gb\npartition: gpu\n"
    (folder / "ours.yaml").write_text(text)
    changed = replan(plan, RunArgs(gpus_per_node=4, cluster="ours", overrides=("resources.time_limit=02:00:00",)), ctx)
    new = changed.plan
    assert (new.cluster.partition, new.placement.device, new.placement.world_size) == ("gpu", "cuda", 4)
    assert {change.key for change in changed.changes} >= {"cluster", "device", "resources.time_limit"}


@pytest.mark.parametrize(
    "override",
    [
        "training.max_steps=500",
        "training.log_every_steps=1",
        "evaluation.every_steps=7",
        "training.keep_checkpoints=9",
        "training.shard_degree=2",
        "training.sync_gradients=every_micro_batch",
    ],
)
def test_changes_that_do_not_affect_the_result_are_accepted(override: str, plan: RunPlan, ctx: Context) -> None:
    changed = replan(plan, RunArgs(overrides=(override,)), ctx)
    assert [change.key for change in changed.changes] == [override.partition("=")[0]]
    assert bool(changed.warnings) == ("max_steps" in override)  # the cosine schedule is stretched


@pytest.mark.parametrize(
    "override", ["training.learning_rate=1e-9", "training.seed=9", "training.max_steps=300", "training.num_epochs=2"]
)
def test_changes_that_affect_the_result_must_be_allowed_by_key(override: str, plan: RunPlan, ctx: Context) -> None:
    key = override.partition("=")[0]
    assert f"--allow {key}" in refusal(plan, RunArgs(overrides=(override,)), ctx)
    changed = replan(plan, RunArgs(overrides=(override,)), ctx, allowed=(key,))
    assert key in " ".join(changed.warnings)


def test_more_epochs_are_accepted(plan: RunPlan, ctx: Context) -> None:
    two = replan(plan, RunArgs(overrides=("training.num_epochs=2",)), ctx, allowed=("training.num_epochs",)).plan
    more = replan(two, RunArgs(overrides=("training.num_epochs=2.5",)), ctx)
    assert [(change.key, change.after) for change in more.changes] == [("training.num_epochs", 2.5)]
    assert "--allow training.num_epochs" in refusal(two, RunArgs(overrides=("training.num_epochs=1",)), ctx)


def test_another_seed_keeps_the_order_of_the_data(plan: RunPlan, ctx: Context) -> None:
    changed = replan(plan, RunArgs(overrides=("training.seed=9",)), ctx, allowed=("training.seed",))
    training = changed.plan.recipe.training
    assert (training.seed, training.order_seed) == (9, plan.recipe.training.seed)
    assert [change.key for change in changed.changes] == ["training.seed"]
    assert f"seed {plan.recipe.training.seed}" in changed.warnings[0]
    again = replan(changed.plan, RunArgs(overrides=("training.seed=8",)), ctx, allowed=("training.seed",))
    assert again.plan.recipe.training.order_seed == plan.recipe.training.seed


def test_another_order_of_the_data_is_accepted_only_with_what_it_means(plan: RunPlan, ctx: Context) -> None:
    override = "training.data_seed=9"
    assert "--allow training.data_seed" in refusal(plan, RunArgs(overrides=(override,)), ctx)
    changed = replan(plan, RunArgs(overrides=(override,)), ctx, allowed=("training.data_seed",))
    assert (changed.plan.recipe.training.seed, changed.plan.recipe.training.order_seed) == (
        plan.recipe.training.seed,
        9,
    )
    assert "examples twice" in changed.warnings[0]
    same = f"training.data_seed={plan.recipe.training.seed}"
    assert not replan(plan, RunArgs(overrides=(same,)), ctx).changes


@pytest.mark.parametrize(
    "override",
    ["model.weights=a/b", "data.too_long=drop", "training.method=lora", "training.global_batch_size=64", "name=x"],
)
def test_changes_incompatible_with_checkpoints_are_rejected_even_if_allowed(
    override: str, plan: RunPlan, ctx: Context
) -> None:
    key = override.partition("=")[0]
    assert "can't change" in refusal(plan, RunArgs(overrides=(override,)), ctx, allowed=(key,))


def test_fewer_steps_than_the_newest_checkpoint_has_are_refused_before_the_job_waits(
    plan: RunPlan, ctx: Context
) -> None:
    plan.layout.checkpoint(120).mkdir(parents=True)
    allowed = ("training.max_steps",)
    assert "less than the 120" in refusal(plan, RunArgs(overrides=("training.max_steps=100",)), ctx, allowed)
    longer = replan(plan, RunArgs(overrides=("training.max_steps=120",)), ctx, allowed=allowed)
    assert longer.plan.num_steps == 120


def test_a_key_that_is_allowed_but_not_changed_is_a_mistake(plan: RunPlan, ctx: Context) -> None:
    assert "not requested" in refusal(plan, RunArgs(num_nodes=1), ctx, allowed=("training.seed",))


def test_an_indivisible_batch_is_rejected_without_advice_to_change_it(plan: RunPlan, ctx: Context) -> None:
    said = refusal(plan, RunArgs(processes_per_node=3), ctx)
    assert "global_batch_size" in said
    assert "global batch" in said
    assert "Use 3" not in said


def test_a_rejected_submission_does_not_change_plan_script_and_manifest(
    make_run: RunMaker, programs: FakePrograms, ctx: Context
) -> None:
    layout = make_run(job_id="1").layout
    plan = read_plan(layout)
    layout.manifest.write_text(json.dumps(build_manifest(plan, ["ftkit", "run"], ctx.project)))
    files = (layout.plan, layout.script, layout.manifest)
    before = [path.read_bytes() for path in files]
    changed = replan(plan, RunArgs(processes_per_node=4), ctx)
    part = ctx.project / "sbatch/parts/cache.sh.j2"
    part.parent.mkdir(parents=True)
    part.write_text((assets.JOB_TEMPLATES / "parts/cache.sh.j2").read_text() + "echo overridden\n")
    programs.answer("squeue")
    programs.answer("sbatch", stderr="sbatch: error: invalid partition specified: x\n", code=1)
    with pytest.raises(SubmitError, match="invalid partition"):
        resume(plan, os.environ, ["ftkit", "resume"], changed, project=ctx.project)
    assert [path.read_bytes() for path in files] == before
    programs.answer("sbatch", "2\n")
    resume(plan, os.environ, ["ftkit", "resume"], changed, project=ctx.project)
    assert "echo overridden" in layout.script.read_text()
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    assert json.loads(layout.manifest.read_text())["overridden_parts"] == {"parts/cache.sh.j2": digest}
    assert read_plan(layout) == changed.plan
    first, second = json.loads(layout.manifest.read_text())["submissions"]
    assert (first["processes_per_node"], second["processes_per_node"]) == (plan.placement.processes_per_node, 4)
    assert second["changes"] == {"processes per node": {"before": plan.placement.processes_per_node, "after": 4}}
