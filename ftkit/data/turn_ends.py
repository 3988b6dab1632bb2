"""Where an assistant turn ends: the one owner of the last trained token, at which generation stops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ftkit.data.conversations import Conversation, JsonObject, Message, ToolCall
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

_ASKED, _SAID, _NEXT, _ID = "Qz0000001", "Qz0000002", "Qz0000003", "Qz0000004"
"""Words that no template writes."""
_TOOL: JsonObject = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object",
         "properties": {"a": {"type": "string", "description": "a"}}}}}  # fmt: skip


class Template(Protocol):
    """What renders the turns."""

    def render(self, conversation: Conversation, *, open_turn: bool = False) -> str: ...


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends a turn.

    Attributes:
        token: the last trained token; None if the template writes no special token there.
        final: what the template writes after it only if no turn follows, as Phi's does.
        opening: the end of the turn that only the next turn writes: GLM's models stop at the token that opens it.
    """

    token: str | None = None
    final: str = ""
    opening: str = ""

    def cut(self, text: str) -> str:
        """Return a text that ends with a turn to the token that ends the turn."""
        if self.opening:
            return text + self.opening
        text = text.rstrip()
        return text.removesuffix(self.final).rstrip() if self.final else text


def find_turn_ends(template: Template, special: Collection[str], stops: Collection[str]) -> tuple[TurnEnd, TurnEnd]:
    """Return how a template ends answers, and turns with tool calls.

    Args:
        template: what renders the turns.
        special: the special tokens.
        stops: those at which generation stops, by the tokenizer and the model's generation configuration.

    Raises:
        DataError: the template refuses a question and its answer.
    """
    asked = Message("user", _ASKED)
    answers = _find(template, [asked, Message("assistant", _SAID), Message("user", _NEXT)], (), special, stops)
    call = Message("assistant", "", tool_calls=(ToolCall("f", {"a": _SAID}, _ID),))
    result = Message("tool", _NEXT, name="f", tool_call_id=_ID)
    try:
        calls = _find(template, [asked, call, result], (_TOOL,), special, stops)
    except DataError:  # it refuses tool calls
        return answers, answers
    return answers, calls if calls.token else answers


def _find(
    template: Template,
    messages: list[Message],
    tools: tuple[JsonObject, ...],
    special: Collection[str],
    stops: Collection[str],
) -> TurnEnd:
    """Return how a template ends the turn before the last message.

    The first token at which generation stops ends it. A token that follows only the last turn ends the conversation
    instead, if the turn has another one.
    """
    pattern = re.compile("|".join(sorted(map(re.escape, {*special, *stops}), key=len, reverse=True)) or "(?!)")
    last = _after(template.render(Conversation(tuple(messages[:-1]), tools)))
    try:
        between = _after(template.render(Conversation(tuple(messages), tools))).partition(_NEXT)[0]
    except DataError:  # it allows one question only
        between = ""
    written, followed = list(pattern.finditer(last)), list(pattern.finditer(between))
    num_common = 0
    for one, other in zip(written, followed, strict=False):
        if one[0] != other[0]:
            break
        num_common += 1
    stopping = next((number for number, found in enumerate(written) if found[0] in stops), None)
    if stopping is None and num_common == len(written) < len(followed) and followed[num_common][0] in stops:
        if not between.startswith(last):
            return TurnEnd()
        end = followed[num_common]
        return TurnEnd(end[0], opening=between[len(last) : end.end()])
    if not written:
        return TurnEnd()
    if num_common and (stopping is None or stopping >= num_common):
        stopping = num_common - 1
    end = written[-1 if stopping is None else stopping]
    return TurnEnd(end[0], final=last[end.end() :].strip())


def _after(text: str) -> str:
    """Return the text after the last place of the turn's word; all of it if a template drops the word."""
    return text.rpartition(_SAID)[2]
