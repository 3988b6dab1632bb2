"""Data with pictures in the layouts of public data sets, prepared as the model's own processor gives it."""

from __future__ import annotations

import base64
import io
import json
import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_processors
from PIL import Image

from ftkit.cli.main import main
from ftkit.config.context import Context
from ftkit.config.data import AutoFormat, DataSpec, MessagesFormat
from ftkit.config.data_sources import HubSource
from ftkit.data.encoding import RowEncoder
from ftkit.data.packing import IGNORED, Document
from ftkit.data.pictures import PictureProcessor, from_record
from ftkit.data.prepare import prepare
from ftkit.data.readers import read_json_lines
from ftkit.data.row_formats import DETECTION_ROWS, resolve_format
from ftkit.data.selection import load_from_hub
from ftkit.data.source_files import read_file
from ftkit.data.tokenizers import load_tokenizer
from ftkit.errors import DataError
from ftkit.launch.resolve import RunArgs
from ftkit.launch.sweep import expand, plan_sweep
from ftkit.models.architecture import ModelSpec

datasets: Any = pytest.importorskip("datasets")

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.data.rows import Row

NAMES = list(tiny_processors.PROCESSORS)
Rows = list[dict[str, Any]]
SIZES = ((40, 60), (60, 40), (31, 31))
"""Width and height of the pictures 0.png, 1.png and 2.png."""


def draw(number: int) -> Image.Image:
    height, width = SIZES[number][::-1]
    pixels = np.random.default_rng(number).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def png(number: int) -> bytes:
    file = io.BytesIO()
    draw(number).save(file, "png")
    return file.getvalue()


def say(role: str, *parts: str | int) -> dict[str, Any]:
    """Return a turn as transformers takes it: texts, and pictures by their numbers."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": draw(part)}
        for part in parts
    ]
    return {"role": role, "content": content}


def llava(folder: Path) -> tuple[Path, list[Rows]]:
    rows = [
        {"id": "1", "image": "0.png", "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "a."},
            {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}]},
        {"id": "2", "image": "1.png", "conversations": [
            {"from": "human", "value": "Describe it.\n<image>"}, {"from": "gpt", "value": "b."}]},
        {"id": "3", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]  # fmt: skip
    (folder / "llava.json").write_text(json.dumps(rows))
    return folder / "llava.json", [
        [say("user", 0, "What is it?"), say("assistant", "a."), say("user", "Sure?"), say("assistant", "Yes.")],
        [say("user", "Describe it.", 1), say("assistant", "b.")],
        [say("user", "Hi"), say("assistant", "Hello")],
    ]


def sharegpt(folder: Path) -> tuple[Path, list[Rows]]:
    """Several pictures, in the middle of texts and in an observation."""
    rows = [
        {"images": ["0.png", "1.png"], "conversations": [
            {"from": "human", "value": "Compare <image> and <image>."}, {"from": "gpt", "value": "same"}]},
        {"images": ["2.png"], "conversations": [
            {"from": "human", "value": "Look"}, {"from": "gpt", "value": "I do"},
            {"from": "observation", "value": "Here: <image>"}, {"from": "gpt", "value": "ok"}]},
    ]  # fmt: skip
    (folder / "sharegpt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "sharegpt.jsonl", [
        [say("user", "Compare ", 0, " and ", 1, "."), say("assistant", "same")],
        [say("user", "Look"), say("assistant", "I do"), say("tool", "Here: ", 2), say("assistant", "ok")],
    ]


def openai(folder: Path) -> tuple[Path, list[Rows]]:
    uri = f"data:image/png;base64,{base64.b64encode(png(0)).decode()}"
    turns = [
        {"role": "system", "content": "Be brief: <boi> and <image> are text."},
        {"role": "user", "content": [
            {"type": "text", "text": "first"}, {"type": "image_url", "image_url": {"url": uri, "detail": "low"}},
            {"type": "input_image", "image_url": uri}, {"type": "image", "path": "1.png"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]  # fmt: skip
    (folder / "openai.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return folder / "openai.jsonl", [[say("user", "first", 0, 0, 1), say("assistant", "done")]]


def image_feature(folder: Path) -> tuple[Path, list[Rows]]:
    columns = {"image": [{"bytes": png(0), "path": None}, {"bytes": png(2), "path": "lost.png"}],
               "question": ["q", "r"], "answer": ["a", "b"]}  # fmt: skip
    features = {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(folder / "vqa.parquet")
    return folder / "vqa.parquet", [
        [say("user", 0, "q"), say("assistant", "a")], [say("user", 2, "r"), say("assistant", "b")],
    ]  # fmt: skip


def trl(folder: Path) -> tuple[Path, list[Rows]]:
    """Turns with parts that have no source, and a column with the pictures."""

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    mark = {"type": "image", "text": None}
    messages = [
        [{"role": "user", "content": [mark, mark, text("two")]}, {"role": "assistant", "content": [text("yes")]}],
        [{"role": "user", "content": [text("none")]}, {"role": "assistant", "content": [text("no")]}],
    ]
    images = [[{"bytes": png(1), "path": None}, {"bytes": png(1), "path": None}], []]
    part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
    turns = [{"role": datasets.Value("string"), "content": [part]}]
    features = datasets.Features({"messages": turns, "images": [datasets.Image()]})
    table = datasets.Dataset.from_dict({"messages": messages, "images": images}, features)
    table.to_parquet(folder / "trl.parquet")
    return folder / "trl.parquet", [
        [say("user", 1, 1, "two"), say("assistant", "yes")], [say("user", "none"), say("assistant", "no")],
    ]  # fmt: skip


LAYOUTS = (llava, sharegpt, openai, image_feature, trl)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    processor = tiny_processors.write_model(folder, request.param)
    return ModelSpec.model_validate({"weights": str(folder)}), processor


def encode(spec: ModelSpec, file: Path, **fields: object) -> list[list[Document] | DataError]:
    for number in range(len(SIZES)):
        draw(number).save(file.parent / f"{number}.png")
    rows: list[Row] = [row for raw in read_file(str(file), "data.source") if (row := raw.parse())]
    data = DataSpec.model_validate({"source": str(file), "pictures": True, **fields})
    tokenizer = load_tokenizer(spec, "model")
    form = resolve_format(AutoFormat(), rows[:DETECTION_ROWS])
    return RowEncoder.of(tokenizer, data, form, 512, pictures=PictureProcessor.of(spec, tokenizer)).encode(rows)


def normalized(inputs: Any, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shape = (-1, *[1] * (-1 - inputs.channel_axis))
    scale, offset = (np.array(each).reshape(shape) for each in (inputs.scale, inputs.offset))
    return np.asarray(pixels * scale + offset)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_public_layouts_are_prepared_as_the_processor_itself_gives_them(
    model: tuple[ModelSpec, Any], layout: Any, train_on: str, tmp_path: Path
) -> None:
    spec, processor = model
    file, conversations = layout(tmp_path)
    inputs = PictureProcessor.of(spec, load_tokenizer(spec, "model")).inputs
    encoded = encode(spec, file, train_on=train_on)
    assert len(encoded) == len(conversations)
    for documents, turns in zip(encoded, conversations, strict=True):
        assert not isinstance(documents, DataError), documents
        (document,) = documents
        tokens = document.tokens.tolist()
        if layout is openai:  # its system turn has special tokens as text, which transformers would take for them
            text = processor.tokenizer.decode(tokens)
            assert "Be brief: <boi> and <image> are text." in text
            ends = [place for place, token in enumerate(tokens) if token == processor.tokenizer.eos_token_id]
            tokens = tokens[ends[0] + 2 :]
        expected = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="np")
        own = expected["input_ids"][0].tolist()
        assert tokens == own[: len(tokens)]
        assert not processor.tokenizer.decode(own[len(tokens) :]).strip()
        assert not set(inputs.token_ids) & set(document.labels.tolist())
        is_trained = (document.labels != IGNORED).sum()
        assert is_trained < len(document.labels) - np.isin(document.tokens, inputs.token_ids).sum()
        if "pixel_values" not in expected:
            assert document.pictures == b""
            continue
        arrays = from_record(document.pictures)
        assert arrays["pixel_values"].dtype == np.uint8
        found = {**arrays, "pixel_values": normalized(inputs, arrays["pixel_values"])}
        assert set(found) == {
            name for name in expected if name not in ("input_ids", "attention_mask", "token_type_ids")
        }
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3"])
def test_any_number_of_processes_prepares_the_same_bytes(name: str, tmp_path: Path) -> None:
    tiny_processors.write_model(tmp_path / "model", name, has_weights=True)
    rows = []
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(png(number % len(SIZES)))
        turns = [say("user", f"what is {number}?"), say("assistant", "x" * number + "!")]
        turns[0]["content"].insert(0, {"type": "image", "image": f"{number}.png" if number != 5 else "absent.png"})
        rows.append({"messages": turns})
    rows.append({"messages": [say("user", "hi"), say("assistant", "ho")]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": name, "model": {"weights": str(tmp_path / "model")}, "evaluation": {"every_steps": None},
        "data": {"source": str(tmp_path / "rows.jsonl"), "validation": {"count": 6}, "skip_bad": 1},
        "training": {"sequence_length": 128, "global_batch_size": 2},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    digests, said = [], list[str]()
    for num_workers in (1, 3):
        folder = tmp_path / f"w{num_workers}"
        ctx = Context(tmp_path, tmp_path / "user", {"FTKIT_WORKSPACE": str(folder), "PATH": ""})
        args = RunArgs(str(tmp_path / "recipe.yaml"), cluster="local", num_nodes=1)
        (plan,) = plan_sweep(expand(args, ctx), ctx)
        assert plan.recipe.data.pictures
        prepared = prepare(plan, said.append, num_workers)
        digests.append(prepared.read_manifest().digests)
    assert digests[0] == digests[1]
    assert any("absent.png" in each for each in said if each.startswith("skipped"))
    manifest = prepared.read_manifest()
    assert manifest.pictures is not None
    assert from_record(zlib.decompress(base64.b64decode(manifest.pictures.sample)))["pixel_values"].max() == 0
    store = prepared.read_train()
    packs = range(len(store))
    assert store.has_pictures
    num_tokens = np.isin(store.read(packs)[:, 0], manifest.pictures.token_ids).sum()
    assert num_tokens == 4 * len(store.pictures(packs))
    sources = [
        part["image"]
        for row in read_json_lines(prepared.validation_rows)
        for part in row.columns["messages"][0]["content"]
        if part["type"] == "image"
    ]
    assert sources
    assert all(source.startswith(str(tmp_path)) for source in sources)


def test_a_picture_that_the_template_drops_is_refused(tmp_path: Path) -> None:
    processor = tiny_processors.write_model(tmp_path / "model", "gemma3")
    spec = ModelSpec.model_validate({"weights": str(tmp_path / "model")})
    tokenizer = load_tokenizer(spec, "model")
    tokenizer.chat_template = tokenizer.chat_template.replace(processor.image_token, "")
    data = DataSpec.model_validate({"source": "./x.jsonl", "pictures": True})
    with pytest.raises(DataError, match=r"0 tokens '<boi>' for 1 picture"):
        RowEncoder.of(tokenizer, data, MessagesFormat(), 512, pictures=PictureProcessor.of(spec, tokenizer))


def test_data_show_and_check_have_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_processors.write_model(tmp_path / "model", "gemma3", has_weights=True)
    for number in range(len(SIZES)):
        draw(number).save(f"{number}.png")
    rows = [{"image": f"{number}.png", "question": "q?", "answer": "a"} for number in (0, 1, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"name": "p", "model": {"weights": "./model"}, "data": {"source": "./rows.jsonl"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"evaluation": {"every_steps": None}}))
    words = ("./recipe.yaml", "training.sequence_length=256")
    assert main(["data", "show", *words, "-n", "2", "--html", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    uris = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert [Image.open(io.BytesIO(base64.b64decode(uri))).size for uri in uris] == [SIZES[0], SIZES[1]]
    assert "&lt;img&gt; × 4" in page
    capsys.readouterr()
    assert main(["data", "show", *words, "-n", "1"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "picture 1: 40 x 60 pixels, 8 tokens" in lines
    assert "           <boi><img> × 4<eoi>↵" in lines
    assert next(line for line in lines if line.startswith("assistant")).endswith("<|im_start|>assistant↵")
    assert main(["data", "show", *words, "-n", "1", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["pictures"] == [{"width": 40, "height": 60, "num_tokens": 8}]
    (tmp_path / "1.png").write_bytes(png(1)[:200])
    assert main(["data", "check", *words]) != 0
    captured = capsys.readouterr()
    assert "1.png' can't be used: it can't be decoded" in captured.out + captured.err


def test_pictures_of_a_data_set_of_the_hub_are_decoded_within_our_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [{"bytes": png(0), "path": None}, {"bytes": b"no picture", "path": None}]
    nested = {"images": datasets.Sequence(datasets.Image()), "messages": [{"image": datasets.Image()}]}
    columns = {"images": [files, []], "messages": [[{"image": each}] for each in files]}
    table = datasets.Dataset.from_dict(columns, datasets.Features(nested))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: table)
    first, second = load_from_hub(HubSource(kind="hub", dataset="org/pictures-of-a-test"))
    assert [each["bytes"] for each in first["images"]] == [png(0), b"no picture"]
    assert second["messages"][0]["image"]["bytes"] == b"no picture"


def test_both_sides_of_a_pair_have_the_pictures_of_its_prompt(tmp_path: Path) -> None:
    tiny_processors.write_model(tmp_path / "model", "gemma3")
    row = {"prompt": "<image>What?", "chosen": "a", "rejected": "b", "images": ["0.png"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    (pair,) = encode(ModelSpec.model_validate({"weights": str(tmp_path / "model")}), tmp_path / "pairs.jsonl")
    assert not isinstance(pair, DataError)
    chosen, rejected = pair
    assert chosen.pictures == rejected.pictures != b""
    assert rejected.is_rejected
    (tmp_path / "equal.jsonl").write_text(json.dumps(row | {"rejected": "a"}) + "\n")
    model, file = ModelSpec.model_validate({"weights": str(tmp_path / "model")}), tmp_path / "equal.jsonl"
    assert encode(model, file, contradictions="drop") == [[]]
