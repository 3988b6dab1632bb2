"""Exports of models that see pictures: transformers and peft compute the recorded logits of a prompt with a picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from tiny_processors import write_model
from transformers import AutoModelForImageTextToText

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.data.prepare import prepare
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.evaluate.verify_export import verify_export
from ftkit.launch.inputs import count_documents
from ftkit.launch.model import resolve_model, with_vision
from ftkit.launch.resolve import RunArgs, resolve
from ftkit.models.architecture import ModelSpec
from ftkit.models.parameters import count_model
from ftkit.planning.choices import least_memory
from ftkit.planning.layout import Workspace
from ftkit.train.components import exporter
from ftkit.train.components.export_record import picture_inputs
from ftkit.train.components.exporter import ExportedParts, Exporter, build_export_model
from ftkit.train.components.generation import Generation
from ftkit.train.model.hf_model import build_empty, read_config
from ftkit.train.model.pretrained import open_pretrained

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.plan import RunPlan


def write_export(root: Path, family: str, *words: str) -> Path:
    """Write the export of a run that changed all weights that it trains, without training."""
    folder, export, nothing = root / "model", root / "export", Context(root, root, {})
    folder.mkdir()
    export.mkdir()
    torch.manual_seed(0)
    write_model(folder, family, has_weights=True)
    (folder / "video_preprocessor_config.json").write_text("{}")
    recipe = load_recipe("demo", nothing, ("data.pictures=true", *words))
    model = resolve_model(ModelSpec(weights=str(folder)), {}, Workspace(root))
    recipe_plan = RecipePlan.extend(recipe, model=model, training=least_memory(recipe.training))
    config = read_config(folder, model.architecture, pictures=True)
    tokenizer = load_saved_tokenizer(folder)
    parts = ExportedParts(recipe_plan, config, tokenizer, Generation.of(tokenizer, folder), folder)
    built: Any = build_export_model(parts)
    base = open_pretrained(build_empty(config.text, "eager"), folder, None)
    trained = {}
    for name, parameter in built.named_parameters():
        if "lora_" in name:
            trained[name] = torch.randn(parameter.shape) * 0.2
        elif recipe.training.method == "full" or (recipe.training.vision != "frozen" and "projector" in name):
            trained[name] = base[name] * (6 if parameter.ndim > 1 else 1.3)  # a model whose layers matter
    writer = Exporter(parts, built, trained)
    writer.write(writer.with_logits(writer.record("tiny", 1, "bf16", merges=False)), export, None)  # type: ignore[arg-type]
    return export


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "write_card", lambda *_: None)


def failed(export: Path) -> list[str]:
    return [check.name for check in verify_export(export, lambda _: None) if not check.passed]


@pytest.mark.parametrize("family", ["gemma3", "llava", "idefics3"])
def test_the_plan_counts_the_vision_part_on_the_class(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, family, has_weights=True)
    workspace = Workspace(tmp_path)
    model = with_vision(resolve_model(ModelSpec(weights=str(tmp_path)), {}, workspace), {}, workspace)
    vision = model.architecture.vision
    assert vision is not None
    assert vision.is_counted
    whole: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert count_model(model.architecture).total + vision.total == sum(each.numel() for each in whole.parameters())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3", ("training.method=full",)),
        ("llava", ("training.method=full",)),
        ("idefics3", ("training.method=lora",)),
        ("gemma3", ("training.method=lora", "training.vision=projector")),
    ],
)
def test_an_export_computes_the_recorded_logits_of_a_picture(
    family: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    export = write_export(tmp_path, family, *words)
    has_adapters = (export / "adapter_config.json").is_file()
    assert has_adapters == (words == ("training.method=lora",))  # files of adapters have no place for a projector
    assert (export / "video_preprocessor_config.json").is_file()  # as processors of Qwen need
    assert not failed(export)
    record = json.loads((export / "ftkit-export.json").read_text())
    assert len(record["trained"]) == len(record["prompts"]) + 1


def test_an_export_whose_processor_differs_is_found(tmp_path: Path) -> None:
    export = write_export(tmp_path, "llava", "training.method=full")
    path = export / "processor_config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "image_processor": {**stored["image_processor"], "image_mean": [0.9] * 3}}))
    assert failed(export) == ["settings", "logits and the trained model's"]
    path.write_text(json.dumps({**stored, "patch_size": 28}))
    assert failed(export)[:2] == ["settings", "processor of pictures"]
    path.unlink()
    assert failed(export)[:2] == ["settings", "processor of pictures"]


def count_rows(root: Path, model: str) -> RunPlan:
    """Return the plan of a run on two rows, one with a picture, with the numbers of their documents."""
    Image.new("RGB", (40, 30)).save(root / "a.png")
    rows = [{"question": "?", "answer": "!", "image": "a.png"}, {"question": "?", "answer": "!"}]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "mine.yaml").write_text(f"model: {model}\ndata: ./rows.jsonl\n")
    environment = {"FTKIT_WORKSPACE": str(root / "w"), "CUDA_VISIBLE_DEVICES": ""}
    args = RunArgs(str(root / "mine.yaml"), ("training.sequence_length=64",))
    (counted,) = count_documents([resolve(args, Context(root, root / "user", environment))], {})
    return counted


def test_the_plan_counts_the_tokens_of_pictures_of_a_downloaded_model(tmp_path: Path) -> None:
    snapshot = Workspace(tmp_path / "w").hub_home / "hub" / "models--org--seen" / "snapshots" / "main"
    write_model(snapshot, "llava", has_weights=True)
    found = count_rows(tmp_path, "org/seen").documents
    assert found is not None
    assert found.num_fitting == 2


def test_the_plan_counts_the_tokens_of_pictures(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llava", has_weights=True)
    counted = count_rows(tmp_path, "./model")
    manifest = PreparedData(prepare(counted, lambda _: None, 1).root).read_manifest()
    assert counted.documents is not None
    assert counted.documents.num_fitting == manifest.num_train_documents == 2
    assert counted.documents.longest == manifest.max_seqlen


def test_a_processor_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "llava")
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        settings |= {"processor_class": "OwnProcessor", "auto_map": {"AutoProcessor": "own.OwnProcessor"}}
        (tmp_path / name).write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("class OwnProcessor:\n    pass\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        picture_inputs(tmp_path)
    assert asked == []
