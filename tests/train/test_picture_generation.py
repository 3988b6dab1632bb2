"""Completions and losses with pictures are those of the model's own class and processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_processors import write_model
from transformers import AutoModelForImageTextToText

from ftkit.cli.main import main
from ftkit.config.data import DataSpec
from ftkit.data.cases import make_evaluation_set
from ftkit.data.packing import IGNORED
from ftkit.data.rows import Row
from ftkit.errors import DataError, PrerequisiteError
from ftkit.evaluate.engines import Setup, Vllm
from ftkit.evaluate.generate import ChatSession, Decoding, generate_rows
from ftkit.evaluate.loaded_model import LoadedModel, load_model
from ftkit.evaluate.served_model import ServedModel
from ftkit.evaluate.source import ModelFolder

QUESTION = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module", params=["llava", "idefics3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers matter, and two pictures."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    write_model(folder, request.param, has_weights=True)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    model.save_pretrained(folder)
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(ModelFolder(folder, "tiny"), torch.device("cpu"))


def own_inputs(folder: Path, model: LoadedModel, *names: str, end: str = "") -> dict[str, torch.Tensor]:
    """Return the inputs of one question by the model's own processor."""
    processor = model.input.processor(is_needed=True)
    assert processor is not None
    turns = [{"role": "user", "content": [*({"type": "image"} for _ in names), QUESTION]}]
    text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    pictures = [Image.open(folder / name) for name in names]
    return dict(processor.processor(images=[pictures], text=[text + end], return_tensors="pt"))


def row(folder: Path, *names: str) -> Row:
    parts = [{"type": "image", "path": name} for name in names]
    return Row({"messages": [{"role": "user", "content": [*parts, QUESTION]}]}, "rows.jsonl:1", str(folder))


def test_completions_are_those_of_the_models_own_inputs(folder: Path, model: LoadedModel) -> None:
    rows = [
        row(folder, "a.png"),
        Row({"prompt": "hi"}, "rows.jsonl:2"),
        row(folder, "b.png"),
        row(folder, "a.png", "b.png"),
    ]
    decoding = Decoding(max_new_tokens=8)
    done = [each["completion"] for batch in generate_rows(model, rows, None, {}, decoding, 4) for each in batch]
    for names, completion in ((("a.png",), done[0]), (("b.png",), done[2]), (("a.png", "b.png"), done[3])):
        inputs = own_inputs(folder, model, *names)
        with torch.no_grad():
            found: Any = model.hf_model.generate(**inputs, generation_config=decoding.config(model))  # type: ignore[operator]
        tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
        assert completion == model.generation.text_of(model.tokenizer, tokens)
    session = ChatSession(model, decoding, {})
    assert session.ask("What is it?", None, [folder / "b.png"]).text == done[2]
    session.ask("And now?")  # the conversation keeps its picture
    assert len(session.messages[0].pictures) == 1


@pytest.mark.parametrize("data", [DataSpec.model_validate({"source": "./rows.jsonl", "pictures": True}), None])
def test_losses_are_those_of_the_models_own_inputs(folder: Path, model: LoadedModel, data: DataSpec | None) -> None:
    columns = {"question": "What is it?", "answer": "a cat"}
    rows = [("", Row({**columns, "image": str(folder / name)}, "rows.jsonl:1")) for name in ("a.png", "b.png")]
    found = make_evaluation_set(model.input, rows, data, print)
    sums = model.losses([document for _, document in found.documents])
    for name, (loss, number, _), (_, document) in zip(("a.png", "b.png"), sums, found.documents, strict=True):
        inputs = own_inputs(folder, model, name, end="a cat<|im_end|>")
        assert inputs["input_ids"][0].tolist() == document.tokens[: inputs["input_ids"].shape[1]].tolist()
        with torch.no_grad():
            logits = model.hf_model(**inputs, use_cache=False).logits[0]
        labels = torch.from_numpy(document.labels[: len(logits)].astype(np.int64))
        expected = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        assert number == int((document.labels != IGNORED).sum())
        assert loss == pytest.approx(float(expected), rel=1e-5)


def test_a_picture_for_a_model_that_sees_none_is_refused(folder: Path, model: LoadedModel) -> None:
    blind = LoadedModel(model.label, model.tokenizer, model.generation, model.hf_model, model.device)
    with pytest.raises(DataError, match="picture"):
        list(generate_rows(blind, [row(folder, "a.png")], None, {}, Decoding(), 1))
    with pytest.raises(DataError, match="tiny sees no pictures"):
        ChatSession(blind, Decoding(), {}).ask("?", None, [folder / "a.png"])


def test_turns_before_a_later_picture_are_reported_as_not_completed(folder: Path, model: LoadedModel) -> None:
    turns = []
    for name in ("a.png", "b.png"):
        turns.append({"role": "user", "content": [{"type": "image", "path": name}, QUESTION]})
        turns.append({"role": "assistant", "content": "a cat"})
    said: list[str] = []
    rows = [("", Row({"messages": turns}, f"rows.jsonl:{number}", str(folder))) for number in (1, 2)]
    found = make_evaluation_set(model.input, rows, None, said.append)
    assert [case.number for case in found.cases] == [0, 1]
    assert said == ["not completed, but in the loss: 2 turns before later pictures"]


def test_vllm_gets_no_pictures(folder: Path, model: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    engine = Vllm(Setup(folder, folder, "", (), "", None, folder))
    served = ServedModel("tiny", model.tokenizer, model.generation, engine)
    with pytest.raises(PrerequisiteError, match="no pictures"):
        next(generate_rows(served, [row(folder, "a.png")], None, {}, Decoding(), 1))
    assert served.input.processor(is_needed=False) is None
    assert main(["chat", str(folder), "--image", str(folder / "a.png"), "--engine", "vllm"]) == 5
    assert "ftkit gives vLLM's engine no pictures" in capfd.readouterr().err
