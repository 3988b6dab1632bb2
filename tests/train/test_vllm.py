"""vLLM, if installed: exports compute the same in its engine, and its server accepts our arguments.

CONTRIBUTING.md says how to install it on a CPU.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.evaluate.certificate import certify
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.scoring import measure_target
from ftkit.evaluate.served_model import served_by_vllm
from ftkit.evaluate.source import MeasureSettings, ModelFolder, Target, TrainedStep
from ftkit.evaluate.verify_export import read_record
from ftkit.launch.side_jobs import serve_command
from ftkit.models.folder import ADAPTER_FILE
from ftkit.train.components.generation import Generation
from ftkit.train.model.hf_model import make_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

    from ftkit.train.world import World

pytest.importorskip("vllm", reason="needs an environment with vLLM: see CONTRIBUTING.md")
pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]  # vLLM's own

SHAPE = ("model.architecture.family=llama", "model.architecture.head_dim=32")
SHORT = (
    "training.max_steps=6",
    "training.checkpoint_every_steps=6",
    "training.learning_rate=0.02",
    "evaluation.generation=null",
)


@pytest.fixture(scope="module")
def runs(make_run: Callable[..., Run], world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Train all weights, and adapters, of a model whose head size vLLM's kernels support."""
    base = tmp_path_factory.mktemp("vllm") / "base"
    tokenizer = learn_tokenizer(["CREATE TABLE pets (name TEXT) SELECT COUNT(*) FROM pets"], 400, "gemma")
    recipe = load_recipe(str(Path(__file__).with_name("tiny.yaml")), Context.here(), list(SHAPE))
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(make_config(recipe.model.architecture, tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    Generation.of(tokenizer, None).save(base)
    methods = {"full": (), "lora": ("training.method=lora", "training.lora={rank: 4}")}
    found = {}
    for method, settings in methods.items():
        own = (f"model.weights={base}", *SHAPE, *SHORT, *settings)
        found[method] = make_run(f"vllm-{method}-20260102T030405Z-ab12", *own, processes=1)
        found[method].train_here(world)
    return found


@pytest.fixture(autouse=True)
def small_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


def failed_checks(folder: Path) -> list[str]:
    result = certify("vllm", folder, read_record(folder), print, (), sys.executable, None, "", {})
    assert len(result.checks) == 4
    return [check.name for check in result.checks if not check.passed]


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("model.layers", "model.language_model.layers"): each for name, each in tensors.items()}


def clear(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in tensors.items()}


def leave_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if ".layers.0." in name}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_export_computes_the_same_in_vllm(method: str, runs: dict[str, Run]) -> None:
    assert failed_checks(runs[method].layout.export) == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_evaluations_with_vllm_and_transformers_agree(method: str, runs: dict[str, Run]) -> None:
    run = runs[method]
    target = Target(ModelFolder(run.layout.export, "it"), run.plan, TrainedStep(run.layout, run.plan, 0))
    settings = MeasureSettings(limit=6, max_new_tokens=8)
    by_vllm = measure_target(target, settings, lambda source: served_by_vllm(source, print), print)
    expected = measure_target(
        target, settings, lambda source: nullcontext(load_model(source, torch.device("cpu"))), print
    )
    for one, other in ((by_vllm.after, expected.after), (by_vllm.before, expected.before)):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(torch.tensor(one.loss[:, :2]), torch.tensor(other.loss[:, :2]), rtol=1e-3, atol=1e-3)
        assert abs(one.loss[:, 2] - other.loss[:, 2]).sum() <= 2  # adapters are rounded differently: near ties
        if method == "full":
            assert one.completions == other.completions
            assert one.scores == other.scores
    assert not torch.equal(torch.tensor(by_vllm.after.loss), torch.tensor(by_vllm.before.loss))


@pytest.mark.parametrize("change", [rename, clear, leave_out])
def test_adapters_that_vllm_silently_ignores_fail_the_check(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], runs: dict[str, Run], tmp_path: Path
) -> None:
    export = shutil.copytree(runs["lora"].layout.export, tmp_path / "export")
    save_file(change(load_file(export / ADAPTER_FILE)), export / ADAPTER_FILE, metadata={"format": "pt"})
    assert "log-probabilities" in failed_checks(export)


def test_a_different_end_token_fails_the_check(runs: dict[str, Run], tmp_path: Path) -> None:
    export = shutil.copytree(runs["full"].layout.export, tmp_path / "export")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = (export / name).read_text()
        end = read_record(export).end_tokens[0]
        (export / name).write_text(
            content.replace(f'"eos_token_id": {end}', '"eos_token_id": 3').replace(
                '"eos_token": "<end_of_turn>"', '"eos_token": "<unk>"'
            )
        )
    assert failed_checks(export) == ["end of turn"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_server_accepts_the_arguments_of_the_serving_job(method: str, runs: dict[str, Run]) -> None:
    arguments: Any = import_module("vllm.utils.argparse_utils")
    entry: Any = import_module("vllm.entrypoints.launchers.cli_args")
    run = runs[method]
    words = serve_command(run.layout.export, run.plan, 1)
    assert words[:2] == ["vllm", "serve"]
    parser = entry.make_arg_parser(arguments.FlexibleArgumentParser())
    parsed = parser.parse_args([*words[2:], "--port", "8000"])
    entry.validate_parsed_serve_args(parsed)
    assert parsed.model_tag == words[2]
    modules = [(each.name, each.path) for each in parsed.lora_modules or []]
    assert modules == ([(run.plan.name, str(run.layout.export))] if method == "lora" else [])
