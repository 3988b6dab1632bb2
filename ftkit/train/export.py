"""The trained model in Hugging Face's layout: what `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict

from ftkit.train.model import plain_config

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ftkit.specs.training import Precision
    from ftkit.train.engine import Engine
    from ftkit.train.world import World


def export_model(
    engine: Engine,
    config: PretrainedConfig,
    class_name: str,
    tokenizer: PreTrainedTokenizerBase,
    target: tuple[Path, Precision],
    world: World,
) -> None:
    """Write weights, configuration and tokeniser into a folder, in the precision that was trained in.

    Every rank must call it. The folder takes its final name when all is written.
    """
    folder, precision = target
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    weights = engine.full_weights()
    if world.is_first:
        temporary = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        kept = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items() if name not in tied}
        save_torch_state_dict(kept, temporary)
        plain_config(config, class_name, dtype).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    world.barrier()
