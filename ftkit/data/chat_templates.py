"""The chat templates that ftkit ships, for tokenizers that bring none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template in Hugging Face's dialect, and the special tokens that it uses."""

    template: str
    end_of_turn: str
    begin: str | None
    other_tokens: tuple[str, ...]

    @property
    def special_tokens(self) -> list[str]:
        """All tokens that a tokenizer must keep whole."""
        return [*([self.begin] if self.begin else []), self.end_of_turn, *self.other_tokens]


# Gemma knows no system turn: its text goes before the first user turn.
_GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% if turns and turns[0]['role'] == 'assistant' %}"
    "{{ raise_exception('after the system turn comes the user, in whose turn its text is') }}{% endif %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}"
    "<start_of_turn>{{ 'model' if turn['role'] == 'assistant' else turn['role'] }}\n"
    "{{ (prefix if loop.first else '') + turn['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_CHATML = (
    "{% for turn in messages %}"
    "<|im_start|>{{ turn['role'] }}\n{{ turn['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES: dict[str, ChatTemplate] = {
    "gemma": ChatTemplate(_GEMMA, "<end_of_turn>", "<bos>", ("<start_of_turn>",)),
    "chatml": ChatTemplate(_CHATML, "<|im_end|>", None, ("<|im_start|>",)),
}

_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")
TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FILES = ("chat_template.*", "additional_chat_templates", "tekken.json")


def missing_template(source: str) -> DataError:
    """Return the error that a tokenizer has no template, and the recipe names none."""
    return DataError(
        f"the tokenizer of '{source}' brings no chat template",
        meaning="base models often have none",
        fix=f"set data.chat_template to {' or '.join(TEMPLATES)}, if it has their tokens; or write a {TEMPLATE_FILE} "
        "beside the tokenizer's files",
    )


def check_tokenizer_folder(folder: Path, template_name: str) -> None:
    """Check by its files that a folder has a tokenizer, and the chat template that is asked of it.

    Raises:
        DataError: it has not.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise DataError(
            f"{folder} holds no tokenizer",
            meaning="it was not saved beside the weights, or not copied with them",
            fix="tokenizer.save_pretrained(FOLDER), or set model.tokenizer.source to a folder or hub id that has it",
        )
    if template_name == "model" and not any(any(folder.glob(pattern)) for pattern in _TEMPLATE_FILES):
        try:
            stored = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            stored = {}
        except (OSError, ValueError):
            return  # transformers says what is wrong with it
        if isinstance(stored, dict) and not stored.get("chat_template"):
            raise missing_template(str(folder))
