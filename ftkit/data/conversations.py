"""What a row becomes: a conversation, or a plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.config.data import Role

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant turn makes; several in one turn are parallel calls."""

    name: str
    arguments: JsonObject
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        reasoning: what the assistant thought before it spoke; templates call it `reasoning_content` or `thinking`.
        name: who speaks, or the tool whose result this is.
        tool_call_id: the call whose result this is.
        trained: whether the turn counts in the loss, if the data says so.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and the tools that the assistant may call.

    Attributes:
        tools: JSON schemas as OpenAI's API takes them: `{"type": "function", "function": {...}}`.
        num_prompt: the turns that are the prompt, where the data has prompts and completions.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    num_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text without turns, for continued pretraining."""

    text: str


Example = Conversation | PlainText


def texts_of(example: Example) -> list[str]:
    """Return the texts that are said in an example."""
    if isinstance(example, PlainText):
        return [example.text]
    return [message.content for message in example.messages]
