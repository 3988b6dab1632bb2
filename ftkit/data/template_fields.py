"""The fields of a conversation that a chat template may omit, and small conversations that show whether it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from ftkit.data.conversations import Conversation, Message, ToolCall
from ftkit.data.private_apis import compile_chat_template

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PROBE: Final = "ftkitprobe"
"""Text of the field in each conversation of `probes`."""
LONG_TEXT: Final = "\n".join(
    f"{number}. Été <b>&</b> \"a\" 'b' {{c}} [d] (e) \\ $f #g\n\n\tftkitprobe  AbC;" for number in range(400)
)
"""A text of about 20,000 characters, with those that a template might escape or replace."""
CONTENTS: Final = Conversation((Message("user", PROBE), Message("assistant", PROBE)))
"""A conversation with `PROBE` as the content of each turn."""
_LATE_SYSTEM = "system turns after the first turn"


def fields_of(conversation: Conversation) -> set[str]:
    """Return the fields of a conversation that a template may omit, by their names in error messages."""
    messages = conversation.messages
    fields = {field for message in messages for field in _fields_of_turn(message)}
    if conversation.tools:
        fields.add("tools")
    num_leading = len(list(takewhile(lambda message: message.role == "system", messages)))
    if any(message.role == "system" for message in messages[num_leading:]):
        fields.add(_LATE_SYSTEM)
    return fields


def _fields_of_turn(message: Message) -> Iterator[str]:
    if message.reasoning:
        yield "reasoning"
    if message.name and message.role != "tool":
        yield "names of speakers"
    if message.role in ("system", "developer", "tool"):
        yield f"{message.role} turns"
    else:
        yield f"contents of {message.role} turns"
    if message.tool_calls:
        yield "tool calls"
        if message.content:
            yield "text beside tool calls"
        if len(message.tool_calls) > 1:
            yield "parallel tool calls"


def find_unread(variables: Collection[str], *templates: str) -> list[str]:
    """Return the variables that none of these chat templates reads; none if one is invalid, which rendering reports."""
    from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers
    from jinja2.meta import find_undeclared_variables  # noqa: PLC0415

    try:
        parsed = [compile_chat_template(template).environment.parse(template) for template in templates]
        read = set().union(*map(find_undeclared_variables, parsed))
    except TemplateError:
        return []
    return sorted(set(variables) - read)


def content_probes() -> dict[str, Conversation]:
    """Return for each role a conversation with `LONG_TEXT` as the content of its turn."""
    user, answer = Message("user", "hi"), Message("assistant", "ok")
    return {
        "system": Conversation((Message("system", LONG_TEXT), user, answer)),
        "user": Conversation((Message("user", LONG_TEXT), answer)),
        "assistant": Conversation((user, Message("assistant", LONG_TEXT))),
    }


def probes() -> dict[str, Conversation]:
    """Return for each field a conversation that has `PROBE` only there."""
    tool = {"type": "function", "function": {"name": "f", "description": PROBE, "parameters": {"type": "object",
            "properties": {"a": {"type": "string", "description": "a"}}}}}  # fmt: skip
    call, plain = ToolCall("f", {"a": PROBE}), ToolCall("f", {"a": "b"})
    user, answer = Message("user", "hi"), Message("assistant", "ok")
    return {
        "contents of user turns": Conversation((Message("user", PROBE), answer)),
        "contents of assistant turns": Conversation((user, Message("assistant", PROBE))),
        "system turns": Conversation((Message("system", PROBE), user, answer)),
        _LATE_SYSTEM: Conversation((user, answer, Message("system", PROBE), user, answer)),
        "developer turns": Conversation((Message("developer", PROBE), user, answer)),
        "tools": Conversation((user, answer), (tool,)),
        "reasoning": Conversation((user, replace(answer, reasoning=PROBE))),
        "names of speakers": Conversation((replace(user, name=PROBE), answer)),
        "tool calls": Conversation((user, Message("assistant", "", tool_calls=(call,)))),
        "text beside tool calls": Conversation((user, Message("assistant", PROBE, tool_calls=(plain,)))),
        "parallel tool calls": Conversation((user, Message("assistant", "", tool_calls=(plain, call)))),
        "tool turns": Conversation(
            (user, Message("assistant", "", tool_calls=(plain,)), Message("tool", PROBE, name="f"), answer)
        ),
    }
