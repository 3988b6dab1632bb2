"""Job scripts of each shipped profile, compared byte for byte with golden files.

After an intended change: `FTKIT_UPDATE_GOLDEN=1 pytest tests/unit/launch/render/test_golden.py`, and read the diff.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.launch.render import (
    NodeChecks,
    SideJob,
    render_array,
    render_checks,
    render_job,
    render_preparation,
    render_side_job,
)
from ftkit.launch.side_jobs import serve_command
from ftkit.launch.user_script import accelerate_config
from ftkit.planning.plan import CodePlan, JobPlan, Script, ScriptPlan

if TYPE_CHECKING:
    from job_scripts import PlanMaker

    from ftkit.planning.plan import RunPlan

SHIPPED_ONLY = Context(Path("/nonexistent"), Path("/nonexistent"), {})
GOLDEN = Path(__file__).parents[3] / "golden"
CASES = [
    ("slurm", 1),
    ("slurm", 2),
    ("a3-megagpu-8g", 1),
    ("a3-megagpu-8g", 2),
    ("a3-ultragpu-8g", 2),
    ("a4-highgpu-8g", 2),
    ("soperator", 2),
    ("aws-p5", 2),
    ("dev", 2),
    ("local", 1),
    ("docker", 1),
    ("gcp-l4", 1),
    ("apptainer", 2),
]

SIDE_JOBS = ["a4-highgpu-8g", "dev", "apptainer"]
PREPARATIONS = ["slurm", "a4-highgpu-8g", "dev", "apptainer"]
SCRIPTS = ["a4-highgpu-8g", "dev", "local"]
CHECKS = ["a3-megagpu-8g", "apptainer"]
ARRAYS = ["array-a4-highgpu-8g.sbatch", "array-dev.sbatch", "prepare-array-dev.sbatch"]
NAMES = [
    *(f"doctor-{name}.sh" for name in CHECKS),
    *ARRAYS,
    *(f"script-{cluster}.sbatch" for cluster in SCRIPTS),
    *(f"{cluster}-{num_nodes}.sbatch" for cluster, num_nodes in CASES),
    *(f"prepare-{name}.sbatch" for name in PREPARATIONS),
    *(f"{kind}-{name}.sbatch" for kind in ("evaluate", "serve", "verify") for name in SIDE_JOBS),
]


@pytest.mark.parametrize(("cluster", "num_nodes"), CASES)
def test_the_job_script_matches_the_golden_file(cluster: str, num_nodes: int, make_plan: PlanMaker) -> None:
    make_plan.recipe = load_recipe("olmo3-7b-full", SHIPPED_ONLY)
    plan = replace(
        make_plan(cluster, num_nodes), fingerprint="0123456789abcdef"
    )  # the preparation script has its own tests
    compare(render_job(plan), f"{cluster}-{num_nodes}.sbatch")


@pytest.mark.parametrize("name", ARRAYS)
def test_the_script_of_a_sweeps_job_array_matches_the_golden_file(name: str, make_plan: PlanMaker) -> None:
    kind, _, cluster = name.removesuffix(".sbatch").rpartition("array-")
    make_plan.recipe = load_recipe("olmo3-7b-full", SHIPPED_ONLY, (f"resources.preflight={cluster != 'dev'}",))
    for number in (3, 14):
        plan = make_plan.in_sweep(cluster, number)
        script = plan.layout.preparation_script if kind else plan.layout.script
        compare(render_array(plan, script, render_preparation(plan) if kind else render_job(plan)), name)


@pytest.mark.parametrize("cluster", SCRIPTS)
def test_the_job_that_runs_a_users_script_matches_the_golden_file(cluster: str, make_plan: PlanMaker) -> None:
    stage = {"stage": "local"} if cluster == "a4-highgpu-8g" else {}  # the image is staged on the nodes' disks as well
    plan = make_script_plan(make_plan(cluster, 1 if cluster == "local" else 2, **stage), can_restart=cluster == "dev")
    script = render_job(plan)
    compare(script, f"script-{cluster}.sbatch")
    assert "ftkit.data" not in script


@pytest.mark.parametrize("cluster", PREPARATIONS)
def test_the_preparation_script_matches_the_golden_file_and_requests_no_gpu(cluster: str, make_plan: PlanMaker) -> None:
    script = render_preparation(replace(make_plan(cluster, 2), fingerprint="0123456789abcdef"))
    compare(script, f"prepare-{cluster}.sbatch")
    assert not re.search(r"#SBATCH.*(gpu|gres|exclusive)", script)


@pytest.mark.parametrize("cluster", SIDE_JOBS)
def test_the_evaluation_script_matches_the_golden_file(cluster: str, make_plan: PlanMaker) -> None:
    plan = replace(make_plan(cluster, 2), fingerprint="0123456789abcdef")
    layout, training_job = plan.layout, None if cluster == "apptainer" else "4711"
    job = SideJob("evaluate", plan, 2, layout.logs / "evaluation.log", "2:00:00",
                  ("/data of mine",), training_job=training_job)  # fmt: skip
    settings = '{"metrics": ["calls"], "file": "/data of mine/rows.jsonl"}'
    script = render_side_job(job, settings=settings).script
    compare(script, f"evaluate-{cluster}.sbatch")
    assert ("--exclusive" in script) == (
        plan.cluster.processes_per_node == 2
    )  # other jobs may use the node's remaining GPUs


@pytest.mark.parametrize("cluster", SIDE_JOBS)
def test_the_serving_script_matches_the_golden_file(cluster: str, make_plan: PlanMaker) -> None:
    plan = replace(make_plan(cluster, 2), fingerprint="0123456789abcdef")
    if plan.container_image:
        plan = replace(plan, container_image="/shared/ftkit/images/vllm-0.33.sqsh")
    log = plan.layout.logs / "serving.log"
    job = SideJob("serve", plan, 2, log, environment=("VLLM_API_KEY",))
    words = serve_command(plan.layout.export, plan, 2)
    port = 8000 if cluster == "dev" else None
    script = render_side_job(job, words=words, port=port).script
    compare(script, f"serve-{cluster}.sbatch")
    assert ("VLLM_API_KEY" in script) == (plan.cluster.runtime != "none")


@pytest.mark.parametrize("cluster", SIDE_JOBS)
def test_the_verification_script_matches_the_golden_file(cluster: str, make_plan: PlanMaker) -> None:
    plan = replace(make_plan(cluster, 2), fingerprint="0123456789abcdef")
    job = SideJob("verify", plan, 2, plan.layout.logs / "verification.log")
    image = plan.container_image and "/shared/ftkit/images/vllm-0.33.sqsh"
    words, options = serve_command(plan.layout.export, plan, 2), ["--", "--max-model-len", "8 k"]
    values = {"words": words, "options": options, "folder": plan.layout.export, "engine_image": image, "port": None}
    script = render_side_job(job, project=None, **values).script
    compare(script, f"verify-{cluster}.sbatch")
    assert (str(image) in script) == (plan.cluster.runtime != "none")


@pytest.mark.parametrize("cluster", CHECKS)
def test_the_node_check_script_matches_the_golden_file(cluster: str, make_plan: PlanMaker) -> None:
    plan = make_plan(cluster, 2)
    folder = plan.workspace / "checks"
    image = plan.container_image
    script = render_checks(NodeChecks(plan.cluster, plan.placement, plan.workspace, plan.python, image, folder))
    compare(script, f"doctor-{cluster}.sh")


def make_script_plan(base: RunPlan, *, can_restart: bool) -> ScriptPlan:
    script = Script("train.py", ("--lr", "1e-4"), "/home/me/my code", accelerate_config(base), "TERM",
                    can_restart, base.resources, "olmo3-7b-full")  # fmt: skip
    code = (
        CodePlan("script", "/home/me/my code", "ab" * 32, None, False),
        CodePlan("with-mylib", "/home/me/mylib", "cd" * 32, None, False),
    )
    same = {field.name: getattr(base, field.name) for field in fields(JobPlan)} | {"code": code}
    return ScriptPlan(**same, script=script)


def compare(script: str, name: str) -> None:
    golden = GOLDEN / name
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        golden.write_text(script, encoding="utf-8")
    assert script == golden.read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_test() -> None:
    scripts = {
        path.name for path in GOLDEN.iterdir() if path.is_file() and not path.name.startswith("cluster-")
    }  # tested elsewhere
    assert scripts == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bash_can_parse_the_golden_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(GOLDEN / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
