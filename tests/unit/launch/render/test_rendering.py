"""The job script of a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.cluster import NcclSpec
from ftkit.config.data_sources import FilesSource, HubSource
from ftkit.config.recipe import EvaluationSpec, ResourcesSpec
from ftkit.launch.render import render_job, render_preparation

if TYPE_CHECKING:
    from job_scripts import PlanMaker


def _directives(job: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in job.splitlines() if line.startswith("#SBATCH")]


def _mounts(job: str) -> list[str]:
    return job.partition("container_mounts=(\n")[2].partition("\n)")[0].split()


@pytest.mark.parametrize(
    ("request_by", "gpu_type", "directive"),
    [
        ("gpus-per-node", None, "--gpus-per-node=8"),
        ("gpus-per-node", "h100", "--gpus-per-node=h100:8"),
        ("gres", None, "--gres=gpu:8"),
        ("gres", "h100", "--gres=gpu:h100:8"),
        ("none", None, None),
    ],
)
def test_gpus_are_requested_in_the_sites_syntax(
    request_by: str, gpu_type: str | None, directive: str | None, make_plan: PlanMaker
) -> None:
    directives = _directives(render_job(make_plan("slurm", gpu_request=request_by, gpu_type=gpu_type)))
    assert [line for line in directives if "gpu" in line] == ([directive] if directive else [])


def test_cpus_are_requested_for_the_job_and_for_each_task(make_plan: PlanMaker) -> None:
    job = render_job(make_plan("slurm", cpus_per_node=96))
    assert "--cpus-per-task=96" in _directives(job)
    assert "\n    --cpus-per-task=96" in job


def test_a_shared_node_is_not_allocated_exclusively(make_plan: PlanMaker) -> None:
    directives = _directives(render_job(make_plan("slurm", exclusive=False)))
    assert not {"--exclusive", "--mem=0"} & set(directives)


def test_partition_account_and_qos_are_passed_to_slurm(make_plan: PlanMaker) -> None:
    names = {"partition": "p", "account": "a", "qos": "q", "reservation": "r"}
    directives = _directives(render_job(make_plan("slurm", **names)))
    assert {f"--{key}={value}" for key, value in names.items()} <= set(directives)


def test_the_recipes_time_limit_overrides_the_profiles(make_plan: PlanMaker) -> None:
    untimed = make_plan.recipe.model_copy(update={"resources": ResourcesSpec()})
    assert "--time=06:00:00" in _directives(render_job(make_plan("slurm", time_limit="1:00:00")))
    make_plan.recipe = untimed
    assert "--time=1:00:00" in _directives(render_job(make_plan("slurm", time_limit="1:00:00")))


def test_slurm_sends_no_signal_without_a_grace_period(make_plan: PlanMaker) -> None:
    assert "--signal=B:USR1@120" in _directives(render_job(make_plan("slurm")))
    directives = _directives(render_job(make_plan("slurm", stop_signal_seconds=0)))
    assert not [line for line in directives if line.startswith("--signal")]


def test_mpi_is_none_unless_the_profile_sets_another_or_leaves_it_to_the_site(make_plan: PlanMaker) -> None:
    jobs = [render_job(make_plan("slurm", **given)) for given in ({}, {"mpi": "pmi2"}, {"mpi": None})]
    assert [re.findall(r"\n    --mpi=(\w+)", job) for job in jobs] == [["none"], ["pmi2"], []]


PLUGIN = {"profile_script": "/p.sh", "library_dir": "/lib64/x", "environment": {"NCCL_NET": "x"}}
TRACES = {"/p.sh", "/lib64/x:/lib64/x", "NCCL_NET=x", "LD_LIBRARY_PATH="}


@pytest.mark.parametrize(("num_nodes", "multi_node_only"), [(1, False), (2, False), (2, True)])
def test_the_sites_network_plugin_is_set_up(num_nodes: int, multi_node_only: object, make_plan: PlanMaker) -> None:
    nccl = NcclSpec.model_validate({**PLUGIN, "multi_node_only": multi_node_only})
    script = render_job(make_plan("slurm", num_nodes, nccl=nccl))
    assert {trace for trace in TRACES if trace in script} == TRACES


def test_a_single_node_job_runs_without_a_missing_network_plugin(make_plan: PlanMaker) -> None:
    script = render_job(make_plan("slurm", 1, nccl=NcclSpec.model_validate(PLUGIN)))
    assert not {trace for trace in TRACES if trace in script}


def test_a_folder_inside_a_mounted_one_is_not_mounted_again(make_plan: PlanMaker) -> None:
    make_plan.workspace = "/fsx/team/ftkit"
    mounts = _mounts(render_job(make_plan("slurm", mounts=("/fsx", "/data:/fsx2:ro", "/fsx", "/fsx/a:/b"))))
    assert mounts[:-1] == ["/fsx:/fsx", "/data:/fsx2:ro", "/fsx/a:/b"]


SOURCES = [
    (FilesSource(kind="files", train="/d/train/a.jsonl", heldout="/d/test/b.jsonl"), ["/d/train", "/d/test"]),
    (HubSource(kind="hub", dataset="/d/set"), ["/d/set"]),
    (HubSource(kind="hub", dataset="org/set"), []),
]


@pytest.mark.parametrize(("source", "folders"), SOURCES)
def test_folders_in_the_recipe_are_mounted(source: Any, folders: list[str], make_plan: PlanMaker) -> None:
    recipe = make_plan.recipe
    model = recipe.model.model_copy(update={"weights": "/models/olmo"})
    data = recipe.data.model_copy(update={"source": source})
    evaluation = EvaluationSpec()
    make_plan.recipe = recipe.model_copy(update={"model": model, "data": data, "evaluation": evaluation})
    named = ["/models/olmo", *folders]
    assert _mounts(render_job(make_plan("slurm")))[2:] == [f"{folder}:{folder}" for folder in named]


def test_setup_lines_are_copied_verbatim(make_plan: PlanMaker) -> None:
    lines = ("module load cuda/12.8", 'source "$HOME/x y.sh" && echo $X')
    assert "\n".join(lines) in render_job(make_plan("dev", setup=lines))


def test_an_image_address_is_not_checked_as_a_file(make_plan: PlanMaker) -> None:
    plan = replace(make_plan("slurm"), container_image="docker://nvcr.io#nvidia/pytorch:25.02-py3")
    script = render_job(plan)
    assert "CONTAINER_IMAGE='docker://nvcr.io#nvidia/pytorch:25.02-py3'" in script
    assert "not exist" not in script


def test_the_job_script_contains_the_run_id(make_plan: PlanMaker) -> None:
    job = render_job(make_plan("local", 1))
    assert "/runs/olmo3-7b-full-20260102T030405Z-4f2a\n" in job
    assert job.startswith("#!/usr/bin/env bash\n")


def test_options_for_sbatch_follow_those_of_the_profile_and_are_quoted(make_plan: PlanMaker) -> None:
    plan = make_plan("slurm", sbatch_options=("constraint=a&b", "nice"))
    resources = plan.resources.model_copy(update={"sbatch_options": ("comment=two #words", "nice=5")})
    plan = replace(plan, recipe=plan.recipe.model_copy(update={"resources": resources}))
    lines = [line for line in _directives(render_job(plan)) if line.startswith(("--constraint", "--nice", "--comment"))]
    assert lines == ['--constraint="a&b"', "--nice", '--comment="two \\#words"', "--nice=5"]


def test_the_preparation_has_its_own_options_for_sbatch(make_plan: PlanMaker) -> None:
    own = make_plan("slurm").cluster.preparation.model_copy(update={"sbatch_options": ("licenses=tokens:1",)})
    job = render_preparation(make_plan("slurm", sbatch_options=("constraint=h200",), preparation=own))
    assert "--licenses=tokens:1" in _directives(job)
    assert "constraint" not in job
