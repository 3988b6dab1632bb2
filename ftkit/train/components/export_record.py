"""The record of an export: its expected logits, template output, and files, which `ftkit verify-export` compares.

ftkit's modules compute the record from the weights of the checkpoint, before anything is written; the check loads the
files with transformers and peft, in another process. So the two share only the tokenizer's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from ftkit.config.training import Precision
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.model.build import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NUM_COLUMNS = 256
_SIGNIFICANT_DIGITS = 7
_CONVERSATIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "List the primes below 20, and add them up."),),
    (("user", "Hello!"), ("assistant", "Hi. What can I do?"), ("user", "SELECT 1 + 1;")),
    (("user", "Name a color."), ("assistant", "Blue, 青, bleu: 3 words.\n")),
)
"""Fixed prompts without training data, since an export may be published."""
_PLAIN_TEXTS = ("The quick brown fox jumps over 13 lazy dogs.\n", "def add(a, b):\n    return a + b")


@dataclass(frozen=True)
class Prompt:
    """A conversation as the chat template of training renders it; without turns, a plain text.

    Attributes:
        turns: role and content of each.
        text: the rendered conversation, with a generation prompt after a user's turn.
        tokens: token ids of the text.
    """

    turns: tuple[tuple[str, str], ...]
    text: str
    tokens: tuple[int, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns in the form of a chat template's input."""
        return [{"role": role, "content": content} for role, content in self.turns]

    @property
    def asks(self) -> bool:
        """Whether the assistant's turn is next."""
        return bool(self.turns) and self.turns[-1][0] == "user"


@dataclass(frozen=True)
class ExportRecord:
    """The source of an export, and its expected logits: ftkit-export.json.

    Attributes:
        run: the id of the run.
        step: number of training steps of its weights.
        kind: a whole model, or adapters in peft's layout.
        precision: dtype of the weights.
        base: hub id or folder of the pretrained model; None if training began with random weights.
        revision: commit of the base model on the hub.
        end_tokens: tokens that end a completion; the trained one is the first.
        prompts: fixed texts.
        trained: per prompt and token, logits of `columns` of the vocabulary, and the log-sum-exp of all of them; None
            if there is no base model to compute them with.
        untrained: the same for the base model.
        files: the weight files.
        exported: the same for the trained weights rounded to `precision`; None if that changes nothing, and in records
            of earlier versions.
    """

    run: str
    step: int
    kind: Literal["model", "adapters"]
    precision: Precision
    base: str | None
    revision: str | None
    end_tokens: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    trained: list[list[list[float]]] | None
    untrained: list[list[list[float]]] | None
    files: dict[str, SavedFile]
    exported: list[list[list[float]]] | None = None


def make_prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[Prompt, ...]:
    """Render the fixed conversations with a tokenizer's chat template; without one, use plain texts."""
    if tokenizer.chat_template is None:
        return tuple(Prompt((), text, tuple(tokenizer(text)["input_ids"])) for text in _PLAIN_TEXTS)
    prompts = []
    for turns in _CONVERSATIONS:
        empty = Prompt(turns, "", ())
        text = render(tokenizer, empty)
        prompts.append(Prompt(turns, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return tuple(prompts)


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Render a conversation with a tokenizer's chat template."""
    text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=prompt.asks)
    return str(text)


@torch.no_grad()
def sample_logits(model: Any, prompts: Sequence[Prompt]) -> list[list[list[float]]]:
    """Compute the logits of prompts in one batch, and return a sample that depends on the full vocabulary.

    Rows are padded on their right without a mask: in a causal model no token sees what follows.

    Returns:
        Per prompt and token: logits of evenly spaced tokens of the vocabulary, then the log-sum-exp of all.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows = [[*prompt.tokens, *[0] * (longest - len(prompt.tokens))] for prompt in prompts]
    logits: torch.Tensor = model(input_ids=torch.tensor(rows), use_cache=False).logits.float()
    kept = torch.cat([logits[..., sample_columns(logits.shape[-1])], logits.logsumexp(-1, keepdim=True)], -1).tolist()
    return [
        [[float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in values] for values in row[: len(prompt.tokens)]]
        for row, prompt in zip(kept, prompts, strict=True)
    ]


def sample_columns(vocab_size: int) -> torch.Tensor:
    """Return the tokens whose logits are kept."""
    return torch.linspace(0, vocab_size - 1, min(vocab_size, _NUM_COLUMNS)).long()


def streamed_logits(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], prompts: Sequence[Prompt]
) -> list[list[list[float]]]:
    """Compute `sample_logits` in fp32 on the CPU, with one decoder layer at a time in memory.

    Args:
        model: a transformers model on the meta device, with adapters or without.
        tensors: its parameters, and the buffers that are in files, by its names.
        prompts: the inputs.
    """
    layers = find_decoder_layers(model)
    prefixes = {name: module for name, module in model.named_modules() if any(module is layer for layer in layers)}
    names: dict[str, list[str]] = {prefix: [] for prefix in ("", *prefixes)}
    for name, _ in model.named_parameters():  # lists a tied parameter once
        names[next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), "")].append(name)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
    hooks = []
    for prefix, layer in prefixes.items():
        own = names[prefix]
        hooks.append(layer.register_forward_pre_hook(lambda *_, own=own: _fill(model, tensors, own)))
        hooks.append(layer.register_forward_hook(lambda *_, own=own: _empty(model, own)))
    model.eval()
    try:
        _fill(model, tensors, names[""])
        cast("PreTrainedModel", model).tie_weights()
        return sample_logits(model, prompts)
    finally:
        for hook in hooks:
            hook.remove()
        for own in names.values():
            _empty(model, own)
        cast("PreTrainedModel", model).tie_weights()


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    for name in names:
        _set(model, name, tensors[name].float())


def _empty(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        _set(model, name, torch.empty_like(model.get_parameter(name), device="meta"))


def _set(model: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, nn.Parameter(values, requires_grad=False))
