"""Plans of user scripts."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ftkit.cli.page.run_report import read_report
from ftkit.config.context import Context
from ftkit.errors import ConfigError, SubmitError
from ftkit.launch.code import files_of
from ftkit.launch.render import render_job
from ftkit.launch.resolve import RunArgs
from ftkit.launch.resume import ResumedPlan, renew_code
from ftkit.launch.scheduler import LocalScheduler
from ftkit.launch.submission import NewJob, resume, submit
from ftkit.launch.user_script import ScriptArgs, accelerate_json, resolve_script
from ftkit.planning.plan import PlanError, ScriptPlan, plan_to_json, read_job_plan, read_plan
from ftkit.runs.job import Submission
from ftkit.runs.manifest import build_manifest


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    (tmp_path / "my train.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    return Context(tmp_path, tmp_path / "user", {"FTKIT_CLUSTER": "local"})


def plan_of(ctx: Context, words: RunArgs, **about: object) -> ScriptPlan:
    return resolve_script(ScriptArgs(Path("my train.py"), **about), words, [], ctx)[0]  # type: ignore[arg-type]


def test_a_script_needs_no_recipe_and_its_plan_can_be_read_back(ctx: Context) -> None:
    plan = plan_of(ctx, RunArgs(processes_per_node=2, overrides=("resources.time_limit=1:00:00",)), args=("--lr", "1"))
    assert (plan.name, plan.placement.world_size, plan.resources.time_limit) == ("my-train", 2, "1:00:00")
    assert (plan.script.folder, plan.script.accelerate) == (str(ctx.project), None)
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    assert read_job_plan(plan.layout) == plan
    with pytest.raises(PlanError, match="of a script"):
        read_plan(plan.layout)


def test_a_script_is_proved_only_on_request(ctx: Context) -> None:
    assert not plan_of(ctx, RunArgs()).script.is_proved
    assert plan_of(ctx, RunArgs(), is_proved=True).script.is_proved


def test_a_recipe_sets_cluster_resources_and_accelerates_configuration(ctx: Context) -> None:
    words = RunArgs("gemma3-12b-sql-qlora", cluster="a4-highgpu-8g", image="gemma3:26.05", num_nodes=2)
    plan = plan_of(ctx, words)
    assert (plan.script.recipe, plan.placement.world_size, plan.cluster.name) == (words.recipe, 16, "a4-highgpu-8g")
    config = json.loads(accelerate_json(plan))
    assert (config["distributed_type"], config["num_processes"], config["num_machines"]) == ("FSDP", 16, 2)
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert plan.script.asks_for_sharding


def test_an_accelerate_configuration_gets_this_runs_number_of_processes(ctx: Context) -> None:
    file = ctx.project / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 16\nnum_machines: 2\n")
    config = json.loads(accelerate_json(plan_of(ctx, RunArgs(processes_per_node=2), accelerate_config=file)))
    assert (config["num_processes"], config["num_machines"], config["mixed_precision"]) == (2, 1, "no")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (RunArgs(num_nodes=2), "single machine"),
        (RunArgs(cluster="slurm"), "needs an image"),
        (RunArgs(image="olmo3:25.02"), "no effect"),
        (RunArgs(cluster="slurm", image="olmo3:25.02", gpus_per_node=99), "a node has"),
        (RunArgs(overrides=("training.max_steps=1",)), "key of a recipe"),
        (RunArgs(overrides=("resources.nodes=1",)), "resources.nodes"),
    ],
)
def test_scripts_that_cannot_be_started_are_rejected(ctx: Context, words: RunArgs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(ctx, words)


@pytest.mark.parametrize("recipe", [None, "olmo3-7b-full"])
def test_a_folder_that_containers_cannot_mount_is_rejected(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, recipe: str | None
) -> None:
    for name in ("a,b", "a\nb"):
        folder = ctx.project / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "my train.py").write_text("print()")
        with pytest.raises(ConfigError, match="--script: pyxis can't mount"):
            plan_of(ctx, RunArgs(recipe, cluster="slurm", image="olmo3:25.02"))


def test_the_report_of_a_scripts_run_shows_its_command(ctx: Context) -> None:
    plan = plan_of(ctx, RunArgs(processes_per_node=2), args=("--lr", "1"))
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    report = read_report(plan.layout, "completed")
    assert (report["name"], report["summary"]) == ("my-train", "my train.py --lr 1; 2 processes, local")


@pytest.fixture
def failed(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> ScriptPlan:
    """A script's run that has failed, whose script has been corrected since."""
    plan, copies = resolve_script(ScriptArgs(Path("my train.py")), RunArgs(), [], ctx)
    submission = Submission("local", "4194305", 0.0, socket.gethostname())  # above the largest pid of Linux
    monkeypatch.setattr(LocalScheduler, "submit", lambda *_, **__: submission)
    submit(NewJob(plan, render_job(plan), build_manifest(plan, [], ctx.project), {}, files=files_of(copies)))
    plan.layout.job_exit_code(submission.job_id).write_text("1")
    (ctx.project / "my train.py").write_text("print('corrected')")
    return plan


def test_a_resumed_script_is_the_runs_copy_unless_a_new_one_is_allowed(ctx: Context, failed: ScriptPlan) -> None:
    copy = failed.layout.code / "script" / "my train.py"
    resume(failed, {})
    assert copy.read_text() == "print()"
    failed.layout.job_exit_code("4194305").write_text("1")
    (ctx.project / "added.py").write_text("")
    resume(failed, {}, changed=renew_code(ResumedPlan(failed)))
    assert copy.read_text() == "print('corrected')"
    assert copy.with_name("added.py").is_file()
    (new,) = read_job_plan(failed.layout).code
    assert new.sha256 != failed.code[0].sha256
    changes = json.loads(failed.layout.manifest.read_text())["submissions"][-1]["changes"]
    assert changes == {"code: script": {"before": failed.code[0].sha256[:12], "after": new.sha256[:12]}}


def test_the_runs_copy_stays_if_the_new_one_is_not_submitted(
    ctx: Context, failed: ScriptPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SubmitError("no")

    monkeypatch.setattr(LocalScheduler, "submit", refuse)
    (ctx.project / "added.py").write_text("")
    with pytest.raises(SubmitError):
        resume(failed, {}, changed=renew_code(ResumedPlan(failed)))
    assert [path.name for path in (failed.layout.code / "script").iterdir()] == ["my train.py"]
    assert (failed.layout.code / "script" / "my train.py").read_text() == "print()"
    assert read_job_plan(failed.layout) == failed


def test_a_run_without_code_of_the_user_has_none_to_renew(failed: ScriptPlan) -> None:
    with pytest.raises(ConfigError, match="--allow code"):
        renew_code(ResumedPlan(replace(failed, code=())))
