"""Adapters: only they are trained; they resume exactly and load in peft."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from validation_loss import validation_loss

from ftkit.errors import ConfigError, TrainingError
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.source import find_target
from ftkit.launch.model import resolve_model
from ftkit.launch.trained_model import check_adapter
from ftkit.models.architecture import ModelSpec
from ftkit.planning.layout import Workspace
from ftkit.runs.records import EvaluationRecord, StartRecord, VerificationRecord

if TYPE_CHECKING:
    from collections.abc import Callable

WITH_DROPOUT = ("training.method=lora", "training.lora={rank: 4, dropout: 0.2}", "training.learning_rate=0.02")


@pytest.fixture(scope="module")
def adapted(finished_run: Any, make_run: Callable[..., Any]) -> Any:
    """Adapters of 20 steps on top of the finished run's export. Tests copy it instead of changing it."""
    run = make_run(
        "adapted", f"model.weights={finished_run.layout.export}", *WITH_DROPOUT, "evaluation.generation=null"
    )
    run.train()
    return run


@pytest.mark.oldest
def test_only_adapters_are_trained_and_saved(adapted: Any) -> None:
    (proof,) = adapted.records(VerificationRecord)
    assert proof.checks["trainable parameters"] == 8_192
    before, after = adapted.records(EvaluationRecord)
    assert after.loss < before.loss
    kept = FileSystemReader(adapted.layout.checkpoint(20)).read_metadata().state_dict_metadata
    assert [name for name in kept if name.startswith("model.") and ".lora_" not in name] == []


@pytest.mark.oldest
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_the_export_and_merges_it_into_the_trained_model(adapted: Any, finished_run: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(finished_run.layout.export)
    model = PeftModel.from_pretrained(base, str(adapted.layout.export)).eval()
    trained = adapted.records(EvaluationRecord)[-1].loss
    assert validation_loss(model, adapted) == pytest.approx(trained, rel=1e-5)
    assert validation_loss(model.merge_and_unload(), adapted) == pytest.approx(trained, rel=1e-5)
    config = PeftModel.from_pretrained(base, str(adapted.layout.export)).peft_config["default"]
    assert config.base_model_name_or_path == str(finished_run.layout.export)
    assert AutoTokenizer.from_pretrained(adapted.layout.export).eos_token is not None


@pytest.mark.parametrize("method", ["lora", "full"])
def test_training_continues_from_the_model_of_an_earlier_run(
    method: str, adapted: Any, finished_run: Any, make_run: Callable[..., Any]
) -> None:
    earlier = {"lora": adapted, "full": finished_run}[method].copy_to(f"earlier-{method}-20260102T030405Z-ab12")
    settings = WITH_DROPOUT if method == "lora" else ()
    steps = ("training.max_steps=1", "evaluation.generation=null")
    continued = make_run(f"continued-{method}", f"model=run:earlier-{method}", *settings, *steps)
    model = continued.plan.recipe.model
    assert model.source == f"run:earlier-{method}"
    assert model.adapter == (str(earlier.layout.export) if method == "lora" else None)
    continued.train()
    before = continued.records(EvaluationRecord)[0].loss
    assert before == pytest.approx(earlier.records(EvaluationRecord)[-1].loss, rel=1e-5)


def test_training_continues_from_a_checkpoint_of_an_earlier_run(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    earlier = finished_run.copy_to("stopped-20260102T030405Z-ab12")
    shutil.rmtree(earlier.layout.export)
    steps = ("training.max_steps=1", "evaluation.generation=null")
    continued = make_run("from-checkpoint", "model=run:stopped@last", *steps)
    model = continued.plan.recipe.model
    assert model.source == "run:stopped@last"
    assert (model.trained.run, model.trained.step) == (earlier.plan.id, 20)
    assert model.weights == model.trained.folder
    assert continued.plan.weights_to_export is None  # since preparation has written them
    continued.train()
    before = continued.records(EvaluationRecord)[0].loss
    assert before == pytest.approx(earlier.records(EvaluationRecord)[-1].loss, rel=1e-5)


def test_adapters_of_another_configuration_are_rejected(adapted: Any, make_run: Callable[..., Any]) -> None:
    adapted.copy_to("other-20260102T030405Z-ab12")
    with pytest.raises(ConfigError, match="'full' does not train the adapters of run:other"):
        make_run("never", "model=run:other")
    run = make_run("wide", "model=run:other", "training.method=lora", "training.lora={rank: 8}")
    with pytest.raises(ConfigError, match=r"training\.lora\.rank: 8 in the recipe, 4 there"):
        check_adapter(run.plan.recipe)
    run.train(expect=TrainingError.exit_code)
    assert "lora_A" in run.first_error().message
    checkpoint = resolve_model(ModelSpec(weights="run:other@10"), {}, Workspace(run.plan.workspace))
    assert checkpoint.trained is not None
    assert checkpoint.trained.folder == checkpoint.adapter
    recipe = run.plan.recipe.model_copy(update={"model": checkpoint})
    with pytest.raises(ConfigError, match=r"training\.lora\.rank: 8 in the recipe, 4 there"):
        check_adapter(recipe)


def test_repeated_steps_draw_the_same_dropout(adapted: Any) -> None:
    resumed = adapted.copy_to("adapted-resumed")
    resumed.forget_after(10)
    resumed.train()
    assert [record.resumed_from for record in resumed.records(StartRecord)] == [10]
    straight = adapted.losses()
    assert resumed.losses() == {step: straight[step] for step in range(11, 21)}
    name = "adapter_model.safetensors"
    assert (resumed.layout.export / name).read_bytes() == (adapted.layout.export / name).read_bytes()


@pytest.mark.oldest
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_qlora_adapters_with_dora_are_loaded_by_bitsandbytes_and_peft(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    overrides = ("training.method=qlora", "training.lora={rank: 4, use_dora: true}", "training.max_steps=3")
    run = make_run("quantized", f"model.weights={finished_run.layout.export}", *overrides, "evaluation.generation=null")
    run.train()
    before, after = run.records(EvaluationRecord)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        finished_run.layout.export, quantization_config=quantization, device_map="cpu", dtype=torch.float32
    )
    # In training mode: for inference on CPUs, bitsandbytes may compute in bf16 instead.
    assert validation_loss(base.train(), run) == pytest.approx(before.loss, rel=1e-5)
    model = PeftModel.from_pretrained(base, str(run.layout.export)).train()
    assert validation_loss(model, run) == pytest.approx(after.loss, rel=1e-5)

    target = find_target(str(run.layout.root), Workspace(run.plan.workspace))
    assert target.before is not None
    plain, adapted = (load_model(each, torch.device("cpu")) for each in (target.before, target.source))
    assert plain.label.endswith("@0, unquantized")
    exact = AutoModelForCausalLM.from_pretrained(finished_run.layout.export, dtype=torch.float32)
    loss, adapted_loss = (validation_loss(each.hf_model, run) for each in (plain, adapted))
    assert loss == pytest.approx(validation_loss(exact, run), rel=1e-5)
    assert adapted_loss < loss
