"""Four families × methods: an export loaded in a fresh process matches the checkpoint in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import try_exports
from transformers import AutoModelForCausalLM
from waiting import PATIENCE_SECONDS

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.evaluate.checkpoint_export import ExportRequest, export_run
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.source import TrainedStep
from ftkit.train.components.generation import Generation
from ftkit.train.model.hf_model import make_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

    from ftkit.train.world import World

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft

TINY = Path(__file__).with_name("tiny.yaml")
TRY = Path(try_exports.__file__)
PROMPT = "CREATE TABLE pets (name TEXT) How many pets?"
FAMILIES = ("olmo3", "llama", "gemma3_text", "qwen3")
METHODS = {
    "full": ("training.learning_rate=0.005",),
    "lora": ("training.method=lora", "training.lora={rank: 4}", "training.learning_rate=0.05"),
    "qlora": ("training.method=qlora", "training.lora={rank: 4, use_dora: true}", "training.learning_rate=0.05"),
}
ROUNDED = {"full": "bf16", "lora": "fp32", "qlora": "fp32"}
"""Precision of the second export, which is merged if there are adapters."""
SHORT = (
    "training.max_steps=2",
    "training.checkpoint_every_steps=2",
    "training.precision=fp32",
    "evaluation.generation=null",
    "training.global_batch_size=2",
)


def save_base(family: str, folder: Path) -> Path:
    """Save a model with random weights with transformers."""
    tokenizer = learn_tokenizer(["CREATE TABLE pets (name TEXT) SELECT COUNT(*) FROM pets"], 400, "gemma")
    own = load_recipe(str(TINY), Context.here(), [f"model.architecture.family={family}"]).model.architecture
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(make_config(own, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Generation.of(tokenizer, None).save(folder)
    return folder


@pytest.fixture(scope="module")
def matrix(
    make_run: Callable[..., Run], world: World, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Train and export each method on each family in this process; try all exports in one other process."""
    folder, cases = tmp_path_factory.mktemp("matrix"), {}
    for family in FAMILIES:
        base = save_base(family, folder / family)
        for method, settings in METHODS.items():
            weights = (f"model.weights={base}", f"model.architecture.family={family}")
            run = make_run(f"{family}-{method}-20260102T030405Z-ab12", *weights, *SHORT, *settings, processes=1)
            run.train_here(world)
            cases[f"{family} {method}"] = _export(run, folder / f"{family}-{method}")
    asked = json.dumps([PROMPT, *(str(path) for case in cases.values() for path in case["exports"].values())])
    done = subprocess.run(
        [sys.executable, str(TRY)], input=asked, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    fresh = json.loads(done.stdout)
    return {name: case | {"fresh": {kind: fresh[str(path)] for kind, path in case["exports"].items()}}
            for name, case in cases.items()}  # fmt: skip


def _export(run: Run, folder: Path) -> dict[str, Any]:
    """Export a checkpoint in another format than the run, and generate from the checkpoint itself."""
    training = run.plan.recipe.training
    request = ExportRequest("last", training.adapters is not None, ROUNDED[training.method], folder)
    export_run(run.layout, request, lambda _: None, lambda _: None)
    model = load_model(TrainedStep(run.layout, run.plan, 2), torch.device("cpu"))
    tokens = try_exports.generated_tokens(model, PROMPT)
    return {"exports": {"run": run.layout.export, "again": folder}, "tokens": tokens}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_loaded_in_a_fresh_process_matches_its_checkpoint(
    family: str, method: str, matrix: dict[str, dict[str, Any]]
) -> None:
    case = matrix[f"{family} {method}"]
    assert {name: fresh["failed"] for name, fresh in case["fresh"].items()} == {"run": [], "again": []}
    if method != "qlora":  # peft loads its adapters onto the unquantized base
        assert case["fresh"]["run"]["tokens"] == case["tokens"]
    if method != "full":
        assert case["fresh"]["again"]["tokens"] == case["tokens"]
