"""The record of an export: fixed prompts, and the trained model's logits for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from ftkit.config.training import Precision
from ftkit.data.limits import Template, run_limited
from ftkit.data.pictures import load_processor
from ftkit.data.rendering import name_of_template, render_turns
from ftkit.models.folder import ADAPTER_CONFIG
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.model.hf_model import find_decoder_layers

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONVERSATIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "List the primes below 20, and add them up."),),
    (("user", "Hello!"), ("assistant", "Hi. What can I do?"), ("user", "SELECT 1 + 1;")),
    (("user", "Name a color."), ("assistant", "Blue, 青, bleu: 3 words.\n")),
)
"""Fixed prompts without training data, because an export may be published."""
_PLAIN_TEXTS = ("The quick brown fox jumps over 13 lazy dogs.\n", "def add(a, b):\n    return a + b")
_QUESTION = " What is in the picture?"
_NUM_AFTER_PICTURE = 8
"""Tokens at the end of the prompt with a picture whose logits are recorded: after the picture, which has many."""
_NUM_COLUMNS = 256
_SIGNIFICANT_DIGITS = 7
ResultT = TypeVar("ResultT")
Logits = list[list[list[float]]]
"""Per prompt and token: logits of some tokens of the vocabulary, then the log-sum-exp of all."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the chat template renders it, with a generation prompt after a user's turn; or plain text."""

    turns: tuple[tuple[str, str], ...]
    text: str
    tokens: tuple[int, ...]

    @property
    def asks(self) -> bool:
        return bool(self.turns) and self.turns[-1][0] == "user"


@dataclass(frozen=True)
class QuantizedFiles:
    """A quantized file or model, and its metrics on rows of the validation split (`ftkit.evaluate.quantized`).

    `files` are its files in the export, by path; `note` describes peculiarities.
    """

    name: str
    files: dict[str, SavedFile]
    metrics: dict[str, float]
    note: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(file.size for name, file in self.files.items() if name.endswith((".gguf", ".safetensors")))


@dataclass(frozen=True)
class ExportRecord:
    """The source of an export, and its expected logits: ftkit-export.json."""

    run: str
    step: int
    kind: Literal["model", "adapters"]
    precision: Precision
    base: str | None  # hub id or folder of the pretrained model; None if training began with random weights
    revision: str | None
    end_tokens: tuple[int, ...]  # tokens that end a completion; the trained one is the first
    prompts: tuple[Prompt, ...]
    trained: Logits | None  # None if there is no base model to compute them with
    untrained: Logits | None  # of the base model
    files: dict[str, SavedFile]
    exported: Logits | None  # of the trained weights rounded to `precision`; None if rounding changes nothing
    columns: tuple[int, ...]  # tokens of the vocabulary whose logits are recorded
    tokenizer: dict[str, str]
    version: Literal[1]  # of the record's fields and their meaning; a record with another version is refused
    picture: tuple[int, ...] | None = None  # tokens of a prompt with a picture, whose logits are the last; None without
    merged: tuple[float, float, int] | None = None  # losses with training's 4-bit base, and unquantized; documents
    quantized: tuple[QuantizedFiles, ...] = ()  # measured files, including the unquantized ones
    settings: dict[str, SavedFile] | None = None  # of model, tokenizer and generation; None in an earlier version's


def settings_in(folder: Path, weights: Iterable[str]) -> dict[str, SavedFile]:
    """Return the other files that libraries read, except adapters' settings: the folder of their base may change."""
    paths = [path for ending in ("json", "jinja", "model") for path in folder.glob(f"*.{ending}")]
    return {path.name: SavedFile.of(path) for path in sorted(paths) if path.name not in (ADAPTER_CONFIG, *weights)}


def make_prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[Prompt, ...]:
    if tokenizer.chat_template is None:
        return tuple(Prompt((), text, tuple(tokenizer(text)["input_ids"])) for text in _PLAIN_TEXTS)
    texts = {turns: render(tokenizer, Prompt(turns, "", ())) for turns in _CONVERSATIONS}
    return tuple(
        Prompt(turns, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
        for turns, text in texts.items()
    )


def picture_inputs(folder: Path) -> dict[str, torch.Tensor]:
    """Return the inputs of a model for a fixed picture and a question, by the processor in a folder."""
    rows, columns, channels = np.indices((96, 64, 3))
    picture = (rows * (channels + 1) + 3 * columns).astype(np.uint8)
    processor = load_processor(str(folder))
    text = f"{processor.image_token}{_QUESTION}"
    return dict(processor(images=[[picture]], text=[text], return_tensors="pt"))


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    template = Template(name_of_template(tokenizer), tokenizer.get_chat_template())
    return run_limited(template, _render, tokenizer, prompt)


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    messages = [{"role": role, "content": content} for role, content in prompt.turns]
    return render_turns(tokenizer.get_chat_template(), tokenizer.special_tokens_map, messages, open_turn=prompt.asks)


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the SHA-256 of a tokenizer's chat template and of its vocabulary, of which the prompts use only a part."""
    parts = {"chat template": tokenizer.chat_template, "vocabulary": sorted(tokenizer.get_vocab().items())}
    return {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}


def sample_columns(vocab_size: int, end_tokens: Sequence[int]) -> tuple[int, ...]:
    evenly_spaced = torch.linspace(0, vocab_size - 1, min(vocab_size, _NUM_COLUMNS)).long().tolist()
    return tuple(sorted({*evenly_spaced, *(token for token in end_tokens if token < vocab_size)}))


@torch.no_grad()
def sample_logits(
    model: PreTrainedModel, record: ExportRecord, picture: Mapping[str, torch.Tensor] | None = None
) -> Logits:
    """Compute the logits of a record's prompts in one batch; return a sample that depends on the full vocabulary.

    With the inputs of `picture_inputs`, those of the last tokens of that prompt follow.
    """
    prompts = record.prompts
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows = [[*prompt.tokens, *[0] * (longest - len(prompt.tokens))] for prompt in prompts]
    computed = [*model(input_ids=torch.tensor(rows), use_cache=False).logits]
    lengths = [len(prompt.tokens) for prompt in prompts]
    if picture is not None:
        computed.append(model(**picture, use_cache=False).logits[0, -_NUM_AFTER_PICTURE:])
        lengths.append(_NUM_AFTER_PICTURE)
    sampled = []
    for row, length in zip(computed, lengths, strict=True):
        logits = row[:length].float()
        kept = torch.cat([logits[:, list(record.columns)], logits.logsumexp(-1, keepdim=True)], -1)
        sampled.append([[float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in each] for each in kept.tolist()])
    return sampled


@torch.no_grad()
def streamed(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], compute: Callable[[PreTrainedModel], ResultT]
) -> ResultT:
    """Compute in fp32 on the CPU, with one decoder layer, or one embedding, at a time in memory.

    `model` is on the meta device; `tensors` are its parameters, and the buffers that are in files, by its names.
    """

    def fill(names: Mapping[str, str]) -> None:
        for name, first_name in names.items():
            _set(model, name, tensors[first_name].float())

    def empty(names: Mapping[str, str]) -> None:
        for name in names:
            _set(model, name, torch.empty_like(model.get_parameter(name), device="meta"))

    resident, units = _units(model)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
    hooks = []
    for prefix, own in units.items():
        module = model.get_submodule(prefix)
        hooks.append(module.register_forward_pre_hook(lambda *_, own=own: fill(own)))
        hooks.append(module.register_forward_hook(lambda *_, own=own: empty(own)))
    model.eval()
    try:
        fill(resident)
        return compute(model)
    finally:
        for hook in hooks:
            hook.remove()
        for own in (resident, *units.values()):
            empty(own)
        model.tie_weights()


def streamed_bytes(model: nn.Module) -> int:
    """Return the peak bytes of weights that `streamed` holds."""
    resident, units = _units(model)
    held = [sum(model.get_parameter(name).numel() for name in own) for own in units.values()]
    return 4 * (max(held) + sum(model.get_parameter(name).numel() for name in resident))


def _units(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Group parameters into resident ones, and those of each decoder layer and each embedding.

    Each name comes with the first name of its parameter: embeddings may be tied, and layers may share parameters.
    """
    first_names: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first_names.setdefault(id(parameter), name) for name, parameter in named}
    owners = [*find_decoder_layers(model), model.get_input_embeddings(), model.get_output_embeddings()]
    prefixes = [prefix for prefix, module in model.named_modules() if any(module is owner for owner in owners)]
    units = {
        prefix: {name: first for name, first in names.items() if name.startswith(f"{prefix}.")} for prefix in prefixes
    }
    resident = {name: first for name, first in names.items() if not any(name in own for own in units.values())}
    return resident, units


def _set(model: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, nn.Parameter(values, requires_grad=False))
