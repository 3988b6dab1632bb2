"""The fields of a conversation that a chat template may omit, and small conversations that show whether it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from ftkit.data.conversations import Conversation, Message, ToolCall
from ftkit.data.limits import NamedTemplate, run_limited
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
_TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "a"},
                                     "n": {"type": "integer", "description": "n"}}}}}  # fmt: skip
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


def shapes(special_token: str) -> dict[str, Conversation]:
    """Return conversations of many shapes, in which templates differ; each is named by the letters of its turns.

    s system, u user, a assistant, r with reasoning, c tool call, C beside text, p two calls, R after reasoning, t tool;
    w and W spaces at both ends, k and K a special token inside, h and H a thought inside, i the names of its tags.
    """
    return {turns: _conversation(turns, special_token) for turns in _SHAPES.split()}


_SHAPES: Final = """
ua sua uaua suaua uauaua ur sur urur suruaur urua uaur ururua uct ucta suctua uCta uptta suptta suctaua uctcta uRta
uRtr uRtRtr uRtRta suRtrur urct uauctaua uaa urr ura uar uua suua uuaa usua ssua uw Wa uwWw uk Ka ukKk uh Ha uhHh ui
uruw uruk
"""


def _conversation(turns: str, token: str) -> Conversation:
    messages: list[Message] = []
    ids: list[str] = []
    for number, letter in enumerate(turns):
        text = f"text {number}"
        special = {
            "w": f" \n{text} \n\n", "k": f"a {token} in {text}", "h": f"<think>\nhm {number}\n</think>\n\n{text}",
            "i": f"the tags <think> and </think> of {text}",
        }  # fmt: skip
        content = "" if letter in "cpR" else special.get(letter.lower(), text)
        if letter in "suWKH":
            messages.append(Message("system" if letter == "s" else "user", content))
        elif letter == "t":
            messages.append(Message("tool", text, name="f", tool_call_id=ids.pop(0) if ids else None))
        else:
            ids = [f"id{number}{part:06d}" for part in range({"p": 2, "c": 1, "C": 1, "R": 1}.get(letter, 0))]
            calls = tuple(ToolCall("f", {"a": f"{text} of {each}", "n": 3}, each) for each in ids)
            reasoning = f"reason {number}" if letter in "rR" else None
            messages.append(Message("assistant", content, reasoning=reasoning, tool_calls=calls))
    return Conversation(tuple(messages), (_TOOL,) if "t" in turns else ())


def find_unread(variables: Collection[str], *templates: str) -> list[str]:
    """Return the variables that none of these chat templates reads; none if one is invalid, which rendering reports."""
    return run_limited(NamedTemplate("the chat template", "".join(templates)), _find_unread, variables, templates)


def _find_unread(variables: Collection[str], templates: Collection[str]) -> list[str]:
    from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers
    from jinja2.meta import find_undeclared_variables  # noqa: PLC0415

    try:
        parsed = [compile_chat_template(template).environment.parse(template) for template in templates]
        read = set().union(*map(find_undeclared_variables, parsed))
    except (TemplateError, RecursionError):
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
    tool = {"type": "function", "function": _TOOL["function"] | {"description": PROBE}}
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
