"""Exports of tiny models with random weights, as `ftkit export` writes them, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from ftkit.data.tokenizers import learn_tokenizer
from ftkit.files import write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.components.export_record import (
    ExportRecord,
    make_prompts,
    sample_columns,
    sample_logits,
    tokenizer_digests,
)
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["CREATE TABLE pets (name TEXT) SELECT COUNT(*) FROM pets", "The quick brown fox jumps over 13 lazy dogs."]
SPREAD = 6.0
"""Times the initial weights: a model whose layers matter, as those of a trained one."""


def write_model(folder: Path, config: PretrainedConfig, template: str = "chatml", tokenizer: Any = None) -> Any:
    """Write a model with random weights and return it."""
    torch.manual_seed(5)
    tokenizer = tokenizer or learn_tokenizer(TEXTS, 300, template)
    config.max_position_embeddings = 2048
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.mul_(SPREAD)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            tensor.copy_(tensor.bfloat16())
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = (tokenizer.eos_token_id, 0)
    Generation(ends, {"eos_token_id": [*ends], "pad_token_id": 0}).save(folder)
    return model.eval(), tokenizer


def write_export(folder: Path, config: PretrainedConfig, template: str = "chatml", tokenizer: Any = None) -> Path:
    """Write the export of a full model in fp32, whose weights are exact in bf16."""
    model, tokenizer = write_model(folder, config, template, tokenizer)
    _write_record(folder, model, tokenizer, None)
    return folder


def write_adapters(
    folder: Path, base: Path, config: PretrainedConfig, template: str = "chatml", tokenizer: Any = None
) -> Path:
    """Write the export of adapters in fp32 and their base model."""
    model, tokenizer = write_model(base, config, template, tokenizer)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_B" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = (tokenizer.eos_token_id, 0)
    Generation(ends, {"eos_token_id": [*ends], "pad_token_id": 0}).save(folder)
    _write_record(folder, adapted.eval(), tokenizer, base)
    return folder


def _write_record(folder: Path, model: Any, tokenizer: Any, base: Path | None) -> None:
    ends = (tokenizer.eos_token_id, 0)
    prompts = make_prompts(tokenizer)
    record = ExportRecord(
        run="tiny", step=1, kind="adapters" if base else "model", precision="fp32", base=base and str(base),
        revision=None, end_tokens=ends, prompts=prompts, trained=None, untrained=None, exported=None,
        files={path.name: SavedFile.of(path) for path in folder.glob("*.safetensors")},
        columns=sample_columns(model.config.vocab_size, ends), tokenizer=tokenizer_digests(tokenizer),
        version=1,
    )  # fmt: skip
    untrained = None
    if base:
        with model.disable_adapter():
            untrained = sample_logits(model, record)
    write_json(folder / EXPORT_RECORD, replace(record, trained=sample_logits(model, record), untrained=untrained))
