"""Verify exports and generate from each, in a process that has only their folders.

Reads `[prompt, folder, ...]` as JSON; writes the failed checks, the generated tokens and all checks per folder.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers.utils import logging

from ftkit.data.cases import Prompt, encode_text, renderer_of
from ftkit.data.conversations import Conversation, Message
from ftkit.evaluate.generate import Decoding
from ftkit.evaluate.loaded_model import LoadedModel, load_model
from ftkit.evaluate.source import ModelFolder
from ftkit.evaluate.verify_export import verify_export

NUM_TOKENS = 12


def generated_tokens(model: LoadedModel, text: str) -> list[int]:
    """Return the most probable tokens after a prompt; an untrained model may start with the end token."""
    renderer = renderer_of(model.tokenizer, model.label, {})
    prompt = encode_text(model.tokenizer, renderer.render(Conversation((Message("user", text),)), open_turn=True))
    config = Decoding(max_new_tokens=NUM_TOKENS).config(model)
    config.min_new_tokens = NUM_TOKENS
    (completion,) = model.complete([Prompt(prompt)], config)
    return completion


def try_export(folder: Path, prompt: str) -> dict[str, object]:
    checks = verify_export(folder, lambda _: None)
    model = load_model(ModelFolder(folder, str(folder)), torch.device("cpu"))
    failed = [check for check in checks if not check.passed]
    return {
        "failed": [f"{check.name}: {check.found}" for check in failed],
        "tokens": generated_tokens(model, prompt),
        "checks": {check.name: check.found for check in checks},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    prompt, *folders = json.load(sys.stdin)
    json.dump({folder: try_export(Path(folder), prompt) for folder in folders}, sys.stdout)
