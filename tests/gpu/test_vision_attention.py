"""The attention of vision encoders within chunks, by one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from ftkit.train.model.vision import attend_in_chunks, vision_encoders

pytestmark = pytest.mark.gpu

ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def test_one_kernel_for_all_chunks_rounds_as_sdpa() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    text: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": ROPE}
    tower = {"hidden_size": 1280, "out_hidden_size": 64, "depth": 4, "num_heads": 16, "fullatt_block_indexes": [3]}
    config = Qwen2_5_VLConfig(text_config={**text, **heads, **ids}, vision_config=tower, **ids)
    with torch.device("cuda"):
        model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    (encoder,) = vision_encoders(model)
    grids = torch.tensor([[1, 64, 64], [1, 30, 46]], device="cuda")
    pixels = torch.randn(int(grids.prod(dim=1).sum()), 1176, dtype=torch.bfloat16, device="cuda")
    weight = encoder.blocks[0].attn.qkv.weight  # type: ignore[union-attr, index]

    def computed() -> tuple[torch.Tensor, torch.Tensor]:
        states = encoder(pixels, grids).last_hidden_state.float()
        return states, torch.autograd.grad(states.square().mean(), weight)[0].float()  # type: ignore[call-overload, no-any-return]

    expected = computed()
    attend_in_chunks(model, torch.device("cuda"), torch.bfloat16)
    for one, other in zip(computed(), expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.03
