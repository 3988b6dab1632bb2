"""Make prompts from a text, or from rows of a file in any training format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ftkit.config.data import JinjaFormat, PromptCompletionFormat
from ftkit.data.conversations import Conversation, Message
from ftkit.data.formats import read_prompt
from ftkit.data.limits import TemplateLimitError, run_in_fork
from ftkit.data.rendering import ChatRenderer
from ftkit.data.rows import errors_at
from ftkit.data.turns import is_turn, read_tools, read_turns
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.config.data import Format
    from ftkit.data.rows import Row

_TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text")
_MORE_COLUMNS = ("input", "context")
"""Columns that add to the column 'instruction'."""
_TOOL_COLUMNS = ("tools", "functions")


class PromptedModel(Protocol):
    """A model's tokenizer, and its name in errors."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def label(self) -> str: ...


def conversation_of(columns: Mapping[str, Any], form: Format | None) -> Conversation:
    """Return the turns of a row's prompt.

    Args:
        columns: the row.
        form: the recipe's format, used if the row has its columns; otherwise turns, or a column with a prompt.

    Raises:
        DataError: the row has no prompt.
    """
    if isinstance(form, PromptCompletionFormat | JinjaFormat):
        prompt_only = form.model_copy(update={"completion": form.prompt})
        if all(name in columns for name in prompt_only.columns):
            return read_prompt(columns, form)
    for style in ("openai", "sharegpt"):
        for name, value in columns.items():
            if isinstance(value, list) and value and all(is_turn(turn, style) for turn in value):
                return _open_turns(columns, tuple(read_turns(value, name, style, ())))
    for name in _TEXT_COLUMNS:
        if isinstance(columns.get(name), str):
            more = [str(columns[each]) for each in _MORE_COLUMNS if name == "instruction" and columns.get(each)]
            return Conversation((Message("user", "\n\n".join([columns[name], *more])),))
    raise DataError(
        f"there is no prompt in the columns {', '.join(columns) or '(none)'}",
        meaning=f"a prompt is a list of turns (messages, conversations), or one of {', '.join(_TEXT_COLUMNS)}",
        fix='rename a column: each line is e.g. {"prompt": "..."}',
    )


def _open_turns(columns: Mapping[str, Any], messages: tuple[Message, ...]) -> Conversation:
    """Return the turns up to the last that is not the assistant's, with the row's tools."""
    end = max((number for number, each in enumerate(messages, start=1) if each.role != "assistant"), default=0)
    if not end:
        raise DataError("all turns are the assistant's", fix="add the user's turn before them")
    schemas = tuple(tool for name in _TOOL_COLUMNS if columns.get(name) for tool in read_tools(columns[name]))
    return Conversation(messages[:end], schemas)


def renderer_of(model: PromptedModel, options: Mapping[str, Any]) -> ChatRenderer:
    """Return the renderer of a model's chat template.

    Raises:
        DataError: its tokenizer has none.
    """
    if model.tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer of {model.label} has no chat template",
            meaning="it is a base model, which was not trained on conversations",
            fix="try a model that was trained on conversations",
        )
    return ChatRenderer.of(model.tokenizer, options)


def encode_prompt(model: PromptedModel, renderer: ChatRenderer, conversation: Conversation) -> list[int]:
    """Return a prompt's tokens, including the header of the assistant turn."""
    return _tokens_of(model, renderer.render(conversation, open_turn=True))


def encode_prompts(
    model: PromptedModel, renderer: ChatRenderer, rows: Sequence[Row], form: Format | None
) -> list[list[int] | DataError]:
    """Return the tokens of each row's prompt, or its error with file and line."""
    texts = run_in_fork(renderer, _render_prompts, renderer, rows, form)
    return [text if isinstance(text, DataError) else _tokens_of(model, text) for text in texts]


def _render_prompts(renderer: ChatRenderer, rows: Sequence[Row], form: Format | None) -> list[str | DataError]:
    texts: list[str | DataError] = []
    for row in rows:
        try:
            with errors_at(row):
                texts.append(renderer.render(conversation_of(row.columns, form), open_turn=True))
        except TemplateLimitError:
            raise
        except DataError as error:
            texts.append(error)
    return texts


def _tokens_of(model: PromptedModel, text: str) -> list[int]:
    tokens: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
