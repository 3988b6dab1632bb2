"""A tiny model, packs of completions, and their exact log-probabilities, for tests of objectives on preferences."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED, REJECTED, Document, DocumentBatch, build_pack, share_prompts
from ftkit.data.prepared_data import PackStore, PackWriter
from ftkit.train.components.batches import to_micro_batch, with_completions, with_shared_prompts
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.lora import init_adapters, prepare_method

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

Completion = tuple[list[int], list[int], bool]
"""The tokens of a prompt and of a completion, and whether it is rejected."""


def pack_completions(packs: list[list[Completion]], length: int = 64) -> np.ndarray[Any, Any]:
    """Return packs as `PackStore.read` does."""
    rows = []
    for pack in packs:
        documents = [_document(prompt, completion) for prompt, completion, _ in pack]
        sources = np.zeros((1, length), np.int32)
        begin = 0
        for document, (*_, is_rejected) in zip(documents, pack, strict=True):
            end = begin + len(document.tokens)
            sources[0, begin:end] = REJECTED * is_rejected
            begin = end
        rows.append(np.concatenate([build_pack(documents, length), sources]))
    return np.stack(rows)


def _document(prompt: list[int], completion: list[int]) -> Document:
    tokens = np.array(prompt + completion, np.int32)
    labels = np.full(len(tokens), IGNORED, np.int32)
    labels[len(prompt) - 1 : -1] = completion
    return Document(tokens, labels)


def engine_of(
    objective: str, options: dict[str, Any], method: str, world: World, precision: str = "fp32", **settings: object
) -> Any:
    """Return an engine of a tiny model; its adapters change the model."""
    training = TrainingPlan.model_validate(
        {"objective": objective, objective: options, "method": method, "precision": precision, "max_steps": 1,
         "micro_batch_size": 2, "activation_checkpointing": "none", "attention": "sdpa", "compile": "none"} | settings
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    base = deepcopy(model).double().eval()
    prepare_method(model, training, world.device)
    engine = Fsdp2Engine(model, training, world, lambda sharded: init_adapters(sharded, 1))
    return engine, base


def change_adapters(engine: Any, scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, parameter in engine.model.hf_model.named_parameters():
        if ".lora_B" in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def change_weights(engine: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    for parameter in engine.model.hf_model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def log_probs_of(model: Any, rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed log-probabilities of completions, one padded row for each, and their numbers of tokens."""
    width = max(len(prompt) + len(side) for prompt, side in rows)
    ids, mask, is_target = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for row, (prompt, side) in enumerate(rows):
        end = len(prompt) + len(side)
        ids[row, :end], mask[row, :end] = torch.tensor(prompt + side), 1
        is_target[row, len(prompt) : end] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    per_token = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * is_target[:, 1:]
    return per_token.sum(1), is_target.sum(1).to(logits.dtype)


SIZES = [(9, 4, 7), (12, 1, 3), (1, 5, 2), (20, 6, 6)]
"""Tokens of the prompt, the chosen and the rejected completion of each pair."""


def draw_pairs() -> list[list[Document]]:
    """Return both sides of pairs; prompts of one token and of many."""
    rng, pairs = np.random.default_rng(3), []
    for num_prompt, *sizes in SIZES:
        prompt = rng.integers(0, 61, num_prompt)
        sides = []
        for number, size in enumerate(sizes):
            tokens = np.concatenate([prompt, rng.integers(0, 61, size)]).astype(np.int32)
            labels = np.append(np.where(np.arange(1, len(tokens)) < num_prompt, IGNORED, tokens[1:]), IGNORED)
            sides.append(Document(tokens, labels.astype(np.int32), is_rejected=number == 1))
        pairs.append(sides)
    return pairs


def store_of(folder: Path, length: int, *, is_shared: bool) -> PackStore:
    """Return a pack of each two pairs."""
    with PackWriter(folder) as writer:
        for first in range(0, len(SIZES), 2):
            documents = [side for pair in draw_pairs()[first : first + 2] for side in pair]
            writer.write(DocumentBatch.of(share_prompts(documents) if is_shared else documents), [4])
    return PackStore(folder, length)


def batch_of(store: PackStore, world: World, reference: np.ndarray[Any, Any] | None = None) -> MicroBatch:
    read = store.read(range(len(store)))
    batch = with_completions(to_micro_batch(read, world.device), read, 2, reference)
    return with_shared_prompts(batch, read) if store.shares_prompts else batch


def check_gradients(engine: Fsdp2Engine, expected: dict[str, torch.Tensor]) -> None:
    """Compare an engine's gradients, and their norm, with those in fp64; it takes a step."""
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    found = {name: each.grad for name, each in engine.model.hf_model.named_parameters() if each.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-5 * float(norm))
    assert float(engine.step(1e-3, 1e9)) == pytest.approx(float(norm), rel=1e-5)
