"""What a chat template does, shown by small conversations: which fields it omits, and how it ends turns.

The end of an assistant turn is the last trained token, at which generation stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from traceback import extract_tb
from typing import TYPE_CHECKING, Final

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from ftkit.data.conversations import Conversation, JsonObject, Message, ToolCall
from ftkit.data.labels import any_of
from ftkit.data.limits import Template, run_limited
from ftkit.data.private_apis import compile_chat_template
from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from ftkit.data.rendering import ChatRenderer

PROBE: Final = "ftkitprobe"  # text of the field in each conversation of `_probes`
CONTENTS: Final = Conversation((Message("user", PROBE), Message("assistant", PROBE)))
"""A conversation with `PROBE` as the content of each turn."""
_TOOL: Final[JsonObject] = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "a"},
                                     "n": {"type": "integer", "description": "n"}}}}}  # fmt: skip
_LATE_SYSTEM = "system turns after the first turn"
_USER, _ANSWER = Message("user", "hi"), Message("assistant", "ok")


def fields_of(conversation: Conversation) -> set[str]:
    """Return the fields of a conversation that a template may omit, by their names in error messages."""
    messages = conversation.messages
    fields = {"tools"} if conversation.tools else set[str]()
    for message in messages:
        is_turn = message.role in ("system", "developer", "tool")
        present = {
            f"{message.role} turns" if is_turn else f"contents of {message.role} turns": True,
            "reasoning": message.reasoning,
            "names of speakers": message.name and message.role != "tool",
            "tool calls": message.tool_calls,
            "text beside tool calls": message.tool_calls and message.content,
            "parallel tool calls": len(message.tool_calls) > 1,
        }
        fields |= {name for name, is_there in present.items() if is_there}
    roles = [message.role for message in messages]
    if any(before != "system" and role == "system" for before, role in pairwise(roles)):
        fields.add(_LATE_SYSTEM)
    return fields


def find_dropped(renderer: ChatRenderer) -> Iterator[str]:
    """Yield the fields that a template omits: it renders a small conversation without the field's text."""
    for name, conversation in _probes().items():
        text = renderer.try_render(conversation)  # None: if the data has such turns, an error says so
        if text is not None and PROBE not in text:
            yield name


def _probes() -> dict[str, Conversation]:
    """Return for each field a conversation that has `PROBE` only there."""
    tool = {"type": "function", "function": _TOOL["function"] | {"description": PROBE}}
    # With ids of nine letters and digits, as Mistral's templates require.
    call, plain = ToolCall("f", {"a": PROBE}, "id0000001"), ToolCall("f", {"a": "b"}, "id0000002")
    asked = Message("assistant", "", tool_calls=(plain,))
    found = {
        "contents of user turns": (Message("user", PROBE), _ANSWER),
        "contents of assistant turns": (_USER, Message("assistant", PROBE)),
        "system turns": (Message("system", PROBE), _USER, _ANSWER),
        _LATE_SYSTEM: (_USER, _ANSWER, Message("system", PROBE), _USER, _ANSWER),
        "developer turns": (Message("developer", PROBE), _USER, _ANSWER),
        "reasoning": (_USER, replace(_ANSWER, reasoning=PROBE)),
        "names of speakers": (replace(_USER, name=PROBE), _ANSWER),
        "tool calls": (_USER, replace(asked, tool_calls=(call,))),
        "text beside tool calls": (_USER, replace(asked, content=PROBE)),
        "parallel tool calls": (_USER, replace(asked, tool_calls=(plain, call))),
        "tool turns": (_USER, asked, Message("tool", PROBE, name="f", tool_call_id="id0000002"), _ANSWER),
    }
    return {name: Conversation(turns) for name, turns in found.items()} | {
        "tools": Conversation((_USER, _ANSWER), (tool,))
    }


def find_unread(variables: Collection[str], *templates: str) -> list[str]:
    """Return the variables that none of these chat templates reads; none if one is invalid, which rendering reports."""
    return run_limited(Template("the chat template", "".join(templates)), _find_unread, variables, templates)


def check_syntax(name: str, templates: Collection[str]) -> None:
    """Refuse chat templates, which `name` describes, that can't be parsed. Within limits only."""
    for template in templates:
        try:
            compile_chat_template(template)
        except TemplateSyntaxError as error:
            what = f"data.chat_template, line {error.lineno}: syntax error: {error.message}"
            raise DataError(what, meaning=f"this is {name}", fix="correct that line") from error
        except RecursionError:
            raise DataError("data.chat_template is nested too deeply", fix="choose another one") from None


def explain_failure(error: Exception, roles: str) -> DataError:
    what = f"the chat template can't render the turns {roles}"
    lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == "<template>"]
    if not lines or type(error) is TemplateError:  # by raise_exception
        return DataError(
            f"{what}: {one_line(error)}",
            meaning="most templates require at most one system turn, then alternating user and assistant turns",
            fix="change or leave out these turns, or choose another data.chat_template",
        )
    return DataError(
        f"{what}: line {lines[-1]}: {one_line(error)}",
        meaning=f"an expression of data.chat_template fails: {type(error).__name__}",
        fix="correct that line of it, or this example, or choose another data.chat_template",
    )


def _find_unread(variables: Collection[str], templates: Collection[str]) -> list[str]:
    try:
        parsed = [compile_chat_template(template).environment.parse(template) for template in templates]
        read = set().union(*map(find_undeclared_variables, parsed))
    except (TemplateError, RecursionError):
        return []
    return sorted(set(variables) - read)


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


_ASKED, _SAID, _NEXT, _ID = "Qz0000001", "Qz0000002", "Qz0000003", "Qz0000004"
"""Words that no template writes."""


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends a turn."""

    token: str | None = None  # the last trained token; None if the template writes no special token there
    final: str = ""  # what the template writes after it only if no turn follows, as Phi's does
    opening: str = ""  # the end that only the next turn writes: GLM's models stop at the token that opens it

    def cut(self, text: str) -> str:
        """Return a text that ends with a turn to the token that ends the turn."""
        if self.opening:
            return text + self.opening
        text = text.rstrip()
        return text.removesuffix(self.final).rstrip() if self.final else text


def find_turn_ends(renderer: ChatRenderer) -> tuple[TurnEnd, TurnEnd]:
    asked = Message("user", _ASKED)
    answers = _find_end(renderer, [asked, Message("assistant", _SAID), Message("user", _NEXT)])
    call = Message("assistant", "", tool_calls=(ToolCall("f", {"a": _SAID}, _ID),))
    result = Message("tool", _NEXT, name="f", tool_call_id=_ID)
    try:
        calls = _find_end(renderer, [asked, call, result], _TOOL)
    except DataError:  # it refuses tool calls
        return answers, answers
    return answers, calls if calls.token else answers


def _find_end(renderer: ChatRenderer, messages: list[Message], *tools: JsonObject) -> TurnEnd:
    """Return how a template ends the turn before the last message.

    The first token at which generation stops ends it. A token that follows only the last turn ends the conversation
    instead, if the turn has another one.
    """
    stops = renderer.stops
    pattern = any_of(renderer.special_tokens | stops)
    # The text after the last place of the turn's word; all of it if a template drops the word.
    last = renderer.render(Conversation(tuple(messages[:-1]), tools)).rpartition(_SAID)[2]
    try:
        between = renderer.render(Conversation(tuple(messages), tools)).rpartition(_SAID)[2].partition(_NEXT)[0]
    except DataError:  # it allows one question only
        between = ""
    written, followed = list(pattern.finditer(last)), list(pattern.finditer(between))
    num_common = len(list(takewhile(lambda pair: pair[0][0] == pair[1][0], zip(written, followed, strict=False))))
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
