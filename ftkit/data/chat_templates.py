"""Chat templates shipped with ftkit for tokenizers without one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that ftkit ships.

    Attributes:
        name: its name, which is also its file's in `ftkit/data/templates`.
        end_of_turn: the special token after a turn of the assistant.
        begin: the special token at the start of a text.
        other_tokens: the other special tokens that it writes.
    """

    name: str
    end_of_turn: str
    begin: str | None
    other_tokens: tuple[str, ...]

    @property
    def template(self) -> str:
        """The template, in Jinja."""
        return resources.files("ftkit.data").joinpath("templates", f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def special_tokens(self) -> list[str]:
        """Tokens that the tokenizer must have as special tokens."""
        return [*([self.begin] if self.begin else []), self.end_of_turn, *self.other_tokens]

    def missing_tokens(self, known: Collection[str]) -> list[str]:
        """Return the special tokens that a tokenizer lacks."""
        return [token for token in self.special_tokens if token not in known]


_LLAMA_HEADER = ("<|start_header_id|>", "<|end_header_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
TEMPLATES: dict[str, ChatTemplate] = {
    template.name: template
    for template in (
        ChatTemplate("chatml", "<|im_end|>", None, ("<|im_start|>",)),
        ChatTemplate("gemma", "<end_of_turn>", "<bos>", ("<start_of_turn>",)),
        ChatTemplate("llama3", "<|eot_id|>", "<|begin_of_text|>", _LLAMA_HEADER),
        ChatTemplate("mistral", "</s>", "<s>", _MISTRAL),
        ChatTemplate("olmo", "<|im_end|>", None, ("<|im_start|>",)),
        ChatTemplate("phi4", "<|im_end|>", None, ("<|im_start|>", "<|im_sep|>")),
    )
}

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
"""File in which transformers 4 saved the chat template of a multimodal model's processor, unknown to its tokenizer."""


def missing_template(source: str) -> DataError:
    """Return the error that a tokenizer has no template, and the recipe sets none."""
    return DataError(
        f"the tokenizer of '{source}' has no chat template",
        meaning="base models often have none",
        fix=f"set data.chat_template to {', '.join(TEMPLATES)} or a file of your own; or train on plain text "
        "(data.format=text)",
    )


def no_default_template(source: str, names: Collection[str]) -> DataError:
    """Return the error that a tokenizer has several templates, and none that programs use by default."""
    return DataError(
        f"the tokenizer of '{source}' has several chat templates, and none of them is the default: "
        + ", ".join(sorted(names)),
        meaning="transformers uses the template named 'default' if a program selects none",
        fix="write the right one to a file: data.chat_template=./FILE.jinja",
    )


def missing_tokens(source: str, name: str, missing: Collection[str]) -> DataError:
    """Return the error that a tokenizer lacks special tokens of a shipped template."""
    return DataError(
        f"the tokenizer of '{source}' lacks {', '.join(missing)} of the '{name}' chat template",
        meaning="the template belongs to another model family; its markers would be ordinary text to this model",
        fix="set data.chat_template to the template that this model was trained with, or to 'model'; if the "
        f"tokenizer has none, write a {TEMPLATE_FILE} beside its files. With training.method=full, the missing tokens "
        "can be learned: model.added_tokens",
    )
