"""Vision encoders that attend within chunks give all of them to one kernel."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from ftkit.train.model import vision
from ftkit.train.model.attention import generation_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.train

GRIDS = torch.tensor([[1, 8, 12], [1, 6, 6]])
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def qwen() -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    text = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}
    tower = {**sizes, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = Qwen2_5_VLConfig(
        text_config={**text, **ids, "rope_parameters": ROPE}, vision_config={**tower, "window_size": 56}, **ids
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    return model


def attend_each_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, *_: object
) -> torch.Tensor:
    """Compute what torch's kernel, which is for GPUs only, computes: [T, H, D]."""
    ends = offsets.tolist()
    chunks = [
        functional.scaled_dot_product_attention(*(each[begin:end].transpose(0, 1) for each in (query, key, value)))
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(chunks, dim=1).transpose(0, 1)


def test_all_chunks_at_once_give_the_features_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen()
    (encoder,) = vision.vision_encoders(model)
    pixels = torch.randn(int(GRIDS.prod(dim=1).sum()), 3 * 2 * 14 * 14)
    expected = encoder(pixels, GRIDS).last_hidden_state
    calls: list[int] = []

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(len(arguments[3]) - 1)
        return attend_each_chunk(*arguments)

    monkeypatch.setattr(vision, "varlen_attn", counted)
    vision.attend_in_chunks(model, torch.device("cuda"), torch.bfloat16)
    torch.testing.assert_close(encoder(pixels, GRIDS).last_hidden_state, expected)
    assert len(calls) == 2  # a call for each layer
    assert max(calls) > len(GRIDS)  # windows of a picture
    with generation_attention(model):
        pass
    torch.testing.assert_close(encoder(pixels, GRIDS).last_hidden_state, expected)
    assert len(calls) == 4  # generation leaves the encoder's attention as it was


def test_without_a_gpu_the_encoder_stays_as_it_is() -> None:
    model = qwen()
    vision.attend_in_chunks(model, torch.device("cpu"), torch.bfloat16)
    assert [each.config._attn_implementation for each in vision.vision_encoders(model)] == ["sdpa"]
