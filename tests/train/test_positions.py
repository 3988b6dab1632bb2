"""RoPE scaling for longer contexts: in the model and in the export."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftkit.errors import ConfigError, TrainingError
from ftkit.models.architecture import ModelSpec
from ftkit.models.config_json import resolve_shape
from ftkit.train.model.hf_model import build_empty, check_positions, read_config

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def scaled(folder: Path, family: str, scaling: dict[str, Any], **fields: Any) -> Any:
    """Return the configuration that a run trains with."""
    AutoConfig.for_model(family, **SMALL | fields).save_pretrained(folder)
    model = ModelSpec.model_validate({"weights": str(folder), "architecture": {"rope_scaling": scaling}})
    shape = resolve_shape(model, json.loads((folder / "config.json").read_text()))
    assert shape.max_position_embeddings == 512
    config = read_config(folder, shape).text
    check_positions(build_empty(config, "sdpa"), shape)
    return config


@pytest.mark.oldest
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo3"])
def test_positions_are_scaled_as_by_transformers_and_exported(family: str, tmp_path: Path) -> None:
    config = scaled(tmp_path, family, {"rope_type": "yarn", "factor": 4.0})
    config.save_pretrained(tmp_path / "export")
    again = AutoConfig.from_pretrained(tmp_path / "export")
    assert again.max_position_embeddings == 512
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)).eval()
    trained, loaded = (AutoModelForCausalLM.from_config(each).eval() for each in (config, again))
    for each in (trained, loaded):
        each.load_state_dict(plain.state_dict())
    tokens = torch.arange(300)[None]
    with torch.no_grad():
        expected, same, other = (model(tokens, use_cache=False).logits for model in (trained, loaded, plain))
    assert torch.equal(expected, same)
    assert not torch.allclose(expected, other)


def test_weights_with_rope_scaling_are_not_scaled_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="yarn in the recipe, the weights were trained with yarn"):
        scaled(tmp_path, "gpt_oss", YARN, num_local_experts=4, num_experts_per_tok=2)


def test_a_model_without_rotary_positions_is_rejected(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SMALL).save_pretrained(tmp_path)
    shape = resolve_shape(ModelSpec.model_validate({"weights": str(tmp_path)}), {"model_type": "llama"} | SMALL)
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    spec = ModelSpec.model_validate({"weights": "x/y", "architecture": {"rope_scaling": YARN}})
    with pytest.raises(TrainingError, match=r"GPT2LMHeadModel .*'yarn'"):
        check_positions(gpt, shape.model_copy(update={"rope_scaling": spec.architecture.rope_scaling}))
