"""Whole runs on pictures, with prepared data that has random ones."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_processors
import torch
from peft import PeftModel
from picture_families import class_loss, make_documents, picture_inputs, tiny_picture_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from ftkit.config.context import Context
from ftkit.data.packing import IGNORED, Document, DocumentBatch
from ftkit.data.pictures import to_record
from ftkit.data.prepare import prepare
from ftkit.data.prepared_data import PackWriter, PreparedData
from ftkit.launch.model import resolve_model
from ftkit.launch.resolve import RunArgs
from ftkit.launch.sweep import expand, plan_sweep
from ftkit.models.architecture import ModelSpec
from ftkit.planning.layout import Workspace
from ftkit.runs.records import EvaluationRecord, VerificationRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from picture_families import PictureDocument

    from ftkit.planning.plan import RunPlan

NUM_VALIDATION = 3
SETTINGS = (
    "model.architecture.vocab_size=320", "model.tokenizer.vocab_size=300", "evaluation.generation=null",
    "training.max_steps=6", "training.global_batch_size=4", "training.micro_batch_size=1",
    "training.checkpoint_every_steps=3", "training.learning_rate=0.01",
)  # fmt: skip


def save_model(name: str, folder: Path) -> Path:
    tiny_picture_model(name).save_pretrained(folder)
    return folder


def packs_of(name: str) -> list[list[PictureDocument]]:
    """Return the documents of packs, every other of which has no picture."""
    model = tiny_picture_model(name)
    return [make_documents(model, name, seed, (0, 0) if seed % 2 else (1, 0, 1)) for seed in range(15)]


def as_batch(documents: list[PictureDocument]) -> DocumentBatch:
    return DocumentBatch.of(
        [
            Document(each.tokens, each.labels, pictures=to_record(each.arrays) if each.arrays else b"")
            for each in documents
        ]
    )


def write_packs(folder: Path, documents: list[list[PictureDocument]]) -> int:
    shutil.rmtree(folder)
    with PackWriter(folder) as writer:
        for pack in documents:
            writer.write(as_batch(pack), [len(pack)])
    return writer.num_targets


def make_picture_run(
    make_run: Callable[..., Any],
    run_name: str,
    name: str,
    weights: Path,
    *overrides: str,
    processes: int = 2,
    **vision: object,
) -> Any:
    """Return a run on 12 packs, of which every other one has no picture, and 3 for validation."""
    run = make_run(run_name, *SETTINGS, *overrides, processes=processes)
    packs = packs_of(name)
    text = PreparedData(run.plan.data.root)
    planned = run.plan.recipe
    spec = ModelSpec(weights=str(weights), tokenizer=planned.model.tokenizer)
    of_data = planned.data.model_copy(update={"pictures": True})
    resolved = resolve_model(spec, {}, Workspace(weights))
    recipe = planned.model_copy(
        update={"model": resolved, "data": of_data, "training": planned.training.model_copy(update=vision)}
    )
    run.plan = replace(run.plan, recipe=recipe, fingerprint=f"{run.plan.fingerprint}-{name}")
    data = PreparedData(run.plan.data.root)
    if not data.is_complete:
        shutil.copytree(text.root, data.root, ignore=shutil.ignore_patterns(text.manifest_path.name))
        write_packs(data.train, packs[:-NUM_VALIDATION])
        write_packs(data.validation, packs[-NUM_VALIDATION:])
        data.write_manifest(
            replace(text.read_manifest(), fingerprint=run.plan.fingerprint, pictures=picture_inputs(name))
        )
    return run


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gemma3", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def trained(make_run: Callable[..., Any], gemma: Path) -> Any:
    """A finished run on two processes: in each step, one of them has no picture. Tests copy it."""
    settings: dict[str, Any] = {"vision": "full", "vision_learning_rate": 0.002}
    run = make_picture_run(make_run, "pictures", "gemma3", gemma, "training.precision=fp32", **settings)
    run.train()
    return run


def validation_loss(model: Any, name: str) -> float:
    documents = [document for pack in packs_of(name)[-NUM_VALIDATION:] for document in pack]
    num = sum(int((each.labels != IGNORED).sum()) for each in documents)
    with torch.no_grad():
        return sum(class_loss(model, name, each).item() for each in documents) / num


def test_a_full_fine_tune_of_tower_and_text_is_exported_as_the_multimodal_class(trained: Any) -> None:
    before, after = trained.records(EvaluationRecord)
    assert validation_loss(tiny_picture_model("gemma3"), "gemma3") == pytest.approx(before.loss, rel=1e-5)
    exported = AutoModelForImageTextToText.from_pretrained(trained.layout.export)
    assert validation_loss(exported, "gemma3") == pytest.approx(after.loss, rel=1e-5)
    initial = dict(tiny_picture_model("gemma3").named_parameters())
    changed = {name for name, each in exported.named_parameters() if not torch.equal(each, initial[name])}
    assert {name for name in initial if ".layers." in name} <= changed


def test_the_checks_before_step_1_change_pixels(trained: Any) -> None:
    checks = trained.records(VerificationRecord)[0].checks
    assert checks["pixels of other documents"] == "difference 0"
    assert checks["pixels of the own"] != "difference 0"


def test_a_run_on_pictures_is_resumed_exactly(trained: Any) -> None:
    resumed = trained.copy_to("pictures-resumed")
    resumed.forget_after(3)
    resumed.train()
    straight = trained.losses()
    assert resumed.losses() == {step: straight[step] for step in range(4, 7)}


def test_one_process_that_recomputes_layers_computes_the_same_as_two(
    make_run: Callable[..., Any], gemma: Path, trained: Any
) -> None:
    settings: dict[str, Any] = {"vision": "full", "vision_learning_rate": 0.002}
    recomputed = ("training.precision=fp32", "training.activation_checkpointing=full")
    alone = make_picture_run(make_run, "pictures-alone", "gemma3", gemma, *recomputed, **settings, processes=1)
    alone.train()
    for step, found in alone.losses().items():
        assert found == pytest.approx(trained.losses()[step], rel=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("vision", ["frozen", "projector"])
def test_adapters_of_the_text_model_are_exported_for_the_multimodal_class(
    vision: str, make_run: Callable[..., Any], gemma: Path
) -> None:
    lora = ("training.method=lora", "training.lora={rank: 4}", "training.precision=fp32")
    run = make_picture_run(make_run, f"pictures-lora-{vision}", "gemma3", gemma, *lora, vision=vision)
    run.train()
    before, after = run.records(EvaluationRecord)
    assert after.loss != before.loss
    if vision == "frozen":
        loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(gemma), run.layout.export)
        assert not any("lora_" in name and "vision" in name for name, _ in loaded.named_parameters())
        model = loaded.eval().base_model.model
    else:
        model = AutoModelForImageTextToText.from_pretrained(run.layout.export)
    assert validation_loss(model, "gemma3") == pytest.approx(after.loss, rel=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_frozen_weights_of_the_vision_part_are_those_of_the_model_rounded(
    processes: int, make_run: Callable[..., Any], gemma: Path
) -> None:
    name = f"pictures-bf16-{processes}"
    run = make_picture_run(make_run, name, "gemma3", gemma, "training.precision=bf16", processes=processes)
    run.train()
    before, after = run.records(EvaluationRecord)
    assert validation_loss(tiny_picture_model("gemma3"), "gemma3") == pytest.approx(before.loss, rel=2e-2)
    assert math.isfinite(after.loss)
    exported = AutoModelForImageTextToText.from_pretrained(run.layout.export)
    initial = dict(tiny_picture_model("gemma3").named_parameters())
    same = {key for key, each in exported.named_parameters() if torch.equal(each, initial[key].bfloat16())}
    assert same == {key for key in initial if "vision_tower" in key or "projector" in key}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_target_that_only_the_vision_tower_has_is_adapted_there(make_run: Callable[..., Any], tmp_path: Path) -> None:
    weights = save_model("qwen2_5_vl", tmp_path)
    lora = ("training.method=lora", "training.lora={rank: 4, targets: [q_proj, gate_proj]}", "training.precision=fp32")
    run = make_picture_run(make_run, "pictures-tower-lora", "qwen2_5_vl", weights, *lora)
    training = run.plan.recipe.training
    targets = training.model_copy(update={"lora": training.lora.model_copy(update={"targets": ("q_proj", "qkv")})})
    run.plan = replace(run.plan, recipe=run.plan.recipe.model_copy(update={"training": targets}))
    run.train()
    _, after = run.records(EvaluationRecord)
    loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(weights), run.layout.export)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "qkv"}
    assert validation_loss(loaded.eval().base_model.model, "qwen2_5_vl") == pytest.approx(after.loss, rel=1e-5)


def test_positions_of_three_axes_are_trained_as_the_class_computes_them(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_picture_run(
        make_run, "pictures-qwen", "qwen2_5_vl", save_model("qwen2_5_vl", tmp_path), "training.precision=fp32",
        vision="projector",
    )  # fmt: skip
    run.train()
    before, after = run.records(EvaluationRecord)
    assert validation_loss(tiny_picture_model("qwen2_5_vl"), "qwen2_5_vl") == pytest.approx(before.loss, rel=1e-5)
    exported = AutoModelForImageTextToText.from_pretrained(run.layout.export)
    assert validation_loss(exported, "qwen2_5_vl") == pytest.approx(after.loss, rel=1e-5)
    initial = dict(tiny_picture_model("qwen2_5_vl").named_parameters())
    changed = {name for name, each in exported.named_parameters() if not torch.equal(each, initial[name])}
    assert {name for name in changed if "visual" in name} == {name for name in initial if "visual.merger" in name}


def write_recipe(folder: Path, family: str) -> Any:
    """Write a model and rows with drawn pictures, some without; return the model's processor."""
    torch.manual_seed(1)
    processor = tiny_processors.write_model(folder / "model", family, has_weights=True)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(folder / "model")
    rows = []
    for number in range(24):
        size = (30 + 7 * (number % 3), 40)
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        marks = "<image>" * (number % 3)
        images = [f"{number}.png"] * (number % 3)
        turns = [
            {"role": "user", "content": f"{marks}what is {number}?"},
            {"role": "assistant", "content": "it is " + "x" * number},
        ]
        rows.append({"messages": turns, "images": images})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": family, "model": {"weights": str(folder / "model")},
        "evaluation": {"every_steps": None, "generation": None},
        "data": {"source": str(folder / "rows.jsonl"), "validation": {"count": 6}},
        "training": {
            "sequence_length": 256, "global_batch_size": 4, "micro_batch_size": 1, "max_steps": 4,
            "precision": "fp32", "vision": "full",
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return processor


def loss_of_rows(model: Any, processor: Any, data: PreparedData) -> float:
    """Return the mean loss of the validation rows, each alone, by the class and the processor of transformers."""
    total, num = 0.0, 0
    for _, row in data.read_validation_rows():
        user, assistant = row.columns["messages"]
        images = [Image.open(path) for path in row.columns["images"]]
        parts = [
            *({"type": "image", "image": image} for image in images),
            {"type": "text", "text": user["content"].replace("<image>", "")},
        ]
        turns = [{"role": "user", "content": parts}, assistant]
        inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        end = processor.tokenizer(assistant["content"], add_special_tokens=False)["input_ids"]
        ids = inputs["input_ids"][0]
        length = next(place for place in range(len(ids), 0, -1) if ids[place - 1] == processor.tokenizer.eos_token_id)
        begin = length - 1 - len(end)
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        total += float(
            torch.nn.functional.cross_entropy(logits[begin - 1 : length - 1], ids[begin:length], reduction="sum")
        )
        num += length - begin
    return total / num


@pytest.mark.parametrize("family", ["gemma3", "llava", "idefics3"])
def test_rows_with_pictures_have_the_loss_of_transformers_own_processor_and_class(
    family: str, tmp_path: Path, run_of: Callable[[RunPlan], Any]
) -> None:
    processor = write_recipe(tmp_path, family)
    ctx = Context(tmp_path, tmp_path / "user", {"FTKIT_WORKSPACE": str(tmp_path / "w"), "PATH": ""})
    (plan,) = plan_sweep(expand(RunArgs(str(tmp_path / "recipe.yaml"), cluster="local", num_nodes=1), ctx), ctx)
    data = prepare(plan, lambda _: None)
    run = run_of(plan)
    run.train()
    before, after = run.records(EvaluationRecord)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    assert loss_of_rows(base, processor, data) == pytest.approx(before.loss, rel=1e-5)
    exported = AutoModelForImageTextToText.from_pretrained(run.layout.export).eval()
    own = AutoProcessor.from_pretrained(run.layout.export)
    assert loss_of_rows(exported, own, data) == pytest.approx(after.loss, rel=1e-5)
    assert after.loss < before.loss
