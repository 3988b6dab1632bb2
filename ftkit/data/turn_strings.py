"""The strings of a turn, and unique words in place of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.data.conversations import Conversation, Message

WORD: Final = re.compile(r"Qz\d{7}|71\d{7}")
"""The words: nine letters and digits, as some templates require of ids; nine digits in place of numbers."""

Shape = tuple[object, ...]


@dataclass(slots=True)
class Strings:
    """The strings of a turn, and words in place of them.

    Attributes:
        values: the strings, as text.
        words: the word of each.
        is_optional: whether a template may omit it: ids of tool calls.
        shape: what the template may see of the turn besides its strings.
    """

    values: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    is_optional: list[bool] = field(default_factory=list)
    shape: list[object] = field(default_factory=list)

    def take(self, value: str, numbers: Iterator[int] | None, *, is_optional: bool = False) -> str:
        """Add a string, and return its word; blank strings stay, and belong to the shape."""
        if not value.strip():
            self.shape.append(value)
            return value
        self.shape.append(True)
        self.values.append(value)
        if numbers is None:
            return value
        self.words.append(f"Qz{next(numbers):07d}")
        self.is_optional.append(is_optional)
        return self.words[-1]

    def take_parts(self, value: str, numbers: Iterator[int] | None, tags: re.Pattern[str] | None) -> str:
        """Add a string in parts: markers of the template in it stay."""
        if tags is None:
            return self.take(value, numbers)
        parts = tags.split(value)
        found = tags.findall(value)
        self.shape += found
        taken = [self.take(part, numbers) for part in parts]
        return "".join(part + tag for part, tag in zip(taken, [*found, ""], strict=True))

    def take_leaves(self, value: Any, numbers: Iterator[int] | None) -> Any:
        """Add the strings and numbers of a JSON value at any depth."""
        if isinstance(value, str):
            return self.take(value, numbers)
        if isinstance(value, Mapping):
            self.shape.append(tuple(value))
            return {key: self.take_leaves(inner, numbers) for key, inner in value.items()}
        if isinstance(value, list):
            self.shape.append(len(value))
            return [self.take_leaves(inner, numbers) for inner in value]
        if isinstance(value, bool) or value is None or not isinstance(value, int | float):
            self.shape.append(repr(value))
            return value
        self.shape.append(type(value))
        self.values.append(json.dumps(value))
        if numbers is None:
            return value
        word = int(f"71{next(numbers):07d}")
        self.words.append(str(word) if isinstance(value, int) else str(float(word)))
        self.is_optional.append(False)
        return word if isinstance(value, int) else float(word)


def strings_of(
    message: Message, numbers: Iterator[int] | None, tags: re.Pattern[str] | None
) -> tuple[Strings, Message]:
    """Return the strings of a turn, and the turn with words in their place if `numbers` are given."""
    taken = Strings()
    reasoning = None if message.reasoning is None else taken.take(message.reasoning, numbers)
    content = taken.take_parts(message.content, numbers, tags)
    calls = []
    for call in message.tool_calls:
        taken.shape.append("call")
        name = taken.take(call.name, numbers)
        arguments = taken.take_leaves(call.arguments, numbers)
        identity = None if call.id is None else taken.take(call.id, numbers, is_optional=True)
        calls.append(replace(call, name=name, arguments=arguments, id=identity))
    if numbers is None:
        return taken, message
    return taken, replace(message, reasoning=reasoning, content=content, tool_calls=tuple(calls))


def quick_strings(message: Message) -> tuple[Shape, list[str]]:
    """Return the shape and the strings of a turn; those of turns without tool calls, which most are, quickly."""
    if message.tool_calls or message.content.isspace() or (message.reasoning or "").isspace():
        strings, _ = strings_of(message, None, None)
        return (None, *strings.shape), strings.values
    values = [text for text in (message.reasoning, message.content) if text]
    return (message.reasoning and True, message.content and True), values


def with_words(conversation: Conversation, tags: re.Pattern[str] | None) -> tuple[Conversation, Strings]:
    """Return a conversation with a word in place of each string, and the strings of its last turn."""
    numbers = count(1)
    messages: list[Message] = []
    ids: dict[str | None, str | None] = {}
    names: dict[str | None, str | None] = {}
    last = Strings()
    for message in conversation.messages:
        last, marked = strings_of(message, numbers, tags)
        if message.role == "tool":
            fresh = Strings()
            marked = replace(
                marked,
                name=message.name and (names.get(message.name) or fresh.take(message.name, numbers)),
                tool_call_id=message.tool_call_id
                and (ids.get(message.tool_call_id) or fresh.take(message.tool_call_id, numbers)),
            )
        elif message.name:
            marked = replace(marked, name=Strings().take(message.name, numbers))
        for call, marked_call in zip(message.tool_calls, marked.tool_calls, strict=True):
            ids[call.id], names[call.name] = marked_call.id, marked_call.name
        messages.append(marked)
    return replace(conversation, messages=tuple(messages)), last
