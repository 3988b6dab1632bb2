"""The loss of pictures, from a model's own processor on, equals that of transformers' processor and class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lone_world import lone_world
from PIL import Image
from transformers import AutoModelForImageTextToText

from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.data.encoding import RowEncoder
from ftkit.data.packing import IGNORED, build_pack
from ftkit.data.pictures import PictureProcessor, from_record
from ftkit.data.rows import Row
from ftkit.data.tokenizers import load_tokenizer
from ftkit.errors import DataError
from ftkit.models.architecture import ModelSpec
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.model.token_mixers import choose_token_mixers

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torchvision", reason="run by scripts/test with torchvision in a folder of its own")
processors: Any = importlib.import_module("torchvision_processors")
pytestmark = [pytest.mark.torchvision, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZES = ((30, 50), (20, 22), (64, 16))


@pytest.mark.parametrize("name", processors.PROCESSORS)
def test_rows_have_the_loss_of_transformers_processor_and_class(name: str, tmp_path: Path) -> None:
    processor = processors.write_model(tmp_path, name)
    spec = ModelSpec.model_validate({"weights": str(tmp_path)})
    tokenizer = load_tokenizer(spec, "model")
    pictures = PictureProcessor.of(spec, tokenizer)
    data = DataSpec.model_validate({"source": "./rows.jsonl", "pictures": True})
    images = [
        Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, other, 3), dtype=np.uint8))
        for side, other in SIZES
    ]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    conversations = []
    for chosen in ([0], [], [1, 2], [2]):
        parts = [
            *({"type": "image", "image": str(tmp_path / f"{number}.png")} for number in chosen),
            {"type": "text", "text": "what?"},
        ]
        conversations.append([{"role": "user", "content": parts}, {"role": "assistant", "content": "it is one"}])
    encoder = RowEncoder.of(tokenizer, data, MessagesFormat(), 512, pictures=pictures)
    encoded = encoder.encode([Row({"messages": turns}, 1) for turns in conversations])
    documents = [
        each for one in encoded for each in (one if not isinstance(one, DataError) else [pytest.fail(str(one))])
    ]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).train()
    with lone_world("cpu") as world:
        choose_token_mixers(model, world)
    expected, tolerance = [], 1e-5
    for turns, document in zip(conversations, documents, strict=True):
        for part in turns[0]["content"]:
            if part["type"] == "image":  # by path, transformers would decode it with torchvision's own library
                part["image"] = Image.open(part["image"])
        inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        is_rounded = inputs.get("pixel_values", torch.zeros(0)).dtype == torch.bfloat16  # Llama 4's
        tolerance = 1e-3 if is_rounded else tolerance
        inputs = {key: each.float() if each.dtype == torch.bfloat16 else each for key, each in inputs.items()}
        length = len(document.tokens)
        assert inputs["input_ids"][0, :length].tolist() == document.tokens.tolist()
        logits = model(**inputs, use_cache=False).logits[0, :length]
        expected.append(
            torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(document.labels.astype(np.int64)), reduction="sum", ignore_index=IGNORED
            )
        )
    feed = PictureFeed.of(model, pictures.inputs)
    assert feed is not None
    pack = build_pack(documents, 1024)
    packs = np.concatenate([pack, np.zeros_like(pack[:1])])[None]
    batch = feed.add(
        to_micro_batch(packs, torch.device("cpu")),
        packs,
        [from_record(each.pictures) for each in documents if each.pictures],
    )
    assert CausalLM(model)(batch=batch).item() == pytest.approx(torch.stack(expected).sum().item(), rel=tolerance)
