"""Arguments for vLLM and the cluster in `ftkit serve`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from ftkit.config.context import Context
from ftkit.config.image_reference import NamedImage
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError
from ftkit.launch.resolve import RunArgs, resolve
from ftkit.launch.side_jobs import plan_serving, serve_command, tunnel, wait_for_server

if TYPE_CHECKING:
    from conftest import FakePrograms, RunMaker

    from ftkit.planning.plan import RunPlan


@pytest.fixture
def slurm_plan(plan: RunPlan, tmp_path: Path) -> RunPlan:
    changes = {"scheduler": "slurm", "runtime": "pyxis", "device": "cuda", "gpu": "h100-80gb", "gpus_per_node": 8}
    return replace(plan, cluster=plan.cluster.model_copy(update=changes), workspace=tmp_path)


def adapters(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 24, "use_dora": False} | config))
    return folder


def with_base(plan: RunPlan, weights: str) -> RunPlan:
    model = plan.recipe.model.model_copy(update={"weights": weights, "revision": "abc"})
    return replace(plan, recipe=plan.recipe.model_copy(update={"model": model}))


def test_adapters_are_served_on_their_base_with_the_tokenizer_and_end_tokens_of_the_export(
    slurm_plan: RunPlan, tmp_path: Path
) -> None:
    folder = adapters(tmp_path / "a,b=c")
    words = serve_command(folder, with_base(slurm_plan, "org/base"), 4)
    assert words[:3] == ["vllm", "serve", "org/base"]
    given = dict(pairwise(words))
    assert given["--tokenizer"] == given["--generation-config"] == str(folder)
    assert given["--max-lora-rank"] == "32"
    assert json.loads(given["--lora-modules"]) == {"name": slurm_plan.name, "path": str(folder)}
    assert (given["--revision"], given["--tensor-parallel-size"]) == ("abc", "4")


@pytest.mark.parametrize(("weights", "config"), [("random", {}), ("org/base", {"use_dora": True}), ("o/b", {"r": 513})])
def test_adapters_that_vllm_cannot_serve_are_rejected_before_submission(
    weights: str, config: dict[str, Any], slurm_plan: RunPlan, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"ftkit export .* --merge"):
        serve_command(adapters(tmp_path / "export", **config), with_base(slurm_plan, weights), 1)


def served(plan: RunPlan, image: str | None = None, **args: Any) -> str:
    chosen = NamedImage(image) if image else None
    return plan_serving(plan, plan.cluster, chosen, Path("/m"), Context.here(), **args).script


@pytest.mark.parametrize("words", [("--port", "8001"), ("--port=8001",)])
def test_a_port_that_the_job_script_would_replace_is_refused(words: tuple[str, ...], slurm_plan: RunPlan) -> None:
    with pytest.raises(ConfigError) as caught:
        served(slurm_plan, words=words)
    assert [problem.key for problem in caught.value.problems] == ["-- --port"]


def test_serving_uses_as_many_gpus_as_the_weights_need(slurm_plan: RunPlan) -> None:
    with pytest.raises(NotFoundError, match=r"vllm:0\.33 is not"):
        served(slurm_plan)
    images = slurm_plan.workspace / "images"
    images.mkdir()
    link = images / NamedImage("vllm:0.33").file_name("sqsh")
    link.touch()
    assert "--tensor-parallel-size 1 " in served(slurm_plan)
    large = replace(slurm_plan, num_parameters=140 * 10**9)
    with pytest.raises(ConfigError, match="attention heads"):
        served(large)  # 4 heads do not divide among 8 GPUs
    assert "--tensor-parallel-size 2 " in served(large, num_gpus=2, words=("--max-model-len", "8 k"))
    assert "'8 k'" in served(large, num_gpus=2, words=("--max-model-len", "8 k"))
    assert str(link) in served(slurm_plan)
    with pytest.raises(ConfigError, match="9 GPUs requested"):
        served(slurm_plan, num_gpus=9)


def test_serving_requires_a_serving_image_and_training_a_training_image(slurm_plan: RunPlan) -> None:
    with pytest.raises(ConfigError, match="training image"):
        served(slurm_plan, "olmo3:25.02")
    with pytest.raises(ConfigError, match="can't train them"):
        resolve(RunArgs(recipe="demo", image="vllm:0.33", cluster="slurm"), Context.here())
    local = replace(slurm_plan, cluster=slurm_plan.cluster.model_copy(update={"scheduler": "local"}))
    with pytest.raises(PrerequisiteError, match="cluster 'local'"):
        served(local)


def test_an_unanswered_query_does_not_end_the_wait_for_a_server(
    make_run: RunMaker, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, job = make_run(), Mock(address_file=tmp_path / "address")
    job.plan.layout = run.layout
    programs.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "address-9").write_text("http://n1:8000\n"))
    assert wait_for_server(job, "9", lambda _: None) == "http://n1:8000"
    assert len(programs.calls("squeue")) == 1


def test_the_ssh_tunnel_leads_to_the_server() -> None:
    assert tunnel("http://n17:20004", "login.site", "me") == "ssh -L 20004:n17:20004 me@login.site"
