"""Special tokens in the text of the data, such as `<|im_end|>` in a user's question: they stay text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.data.conversations import Conversation

CUT = "\ufdd0"
"""Mark inside a special token in the text: a Unicode noncharacter, which texts don't contain."""


def special_tokens_of(tokenizer: Any) -> tuple[str, ...]:
    """Return a tokenizer's special tokens, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return tuple(sorted((token for token in special if len(token) > 1), key=lambda token: (-len(token), token)))


@lru_cache(maxsize=8)
def token_pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds any of the tokens in a text."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def typed_texts(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of a conversation: contents, reasoning, arguments and schemas."""
    for message in conversation.messages:
        yield message.content
        if message.reasoning:
            yield message.reasoning
        for call in message.tool_calls:
            yield from _strings(call.arguments)
    for tool in conversation.tools:
        yield from _strings(tool)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def cut(value: Any, pattern: re.Pattern[str]) -> Any:
    """Insert a cut after the first character of each special token in texts, at any depth."""
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + CUT + found[0][1:], value)
    if isinstance(value, dict):
        return {cut(key, pattern): cut(inner, pattern) for key, inner in value.items()}
    if isinstance(value, list):
        return [cut(inner, pattern) for inner in value]
    return value
