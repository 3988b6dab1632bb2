"""Conversations and plain texts; read turns in the styles of OpenAI's API and of ShareGPT.

Unknown fields raise a DataError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, get_args

from ftkit.config.data import CALL_ROLES, ROLES, Role, normalized_role
from ftkit.errors import DataError, closest

PICTURE: Final = "\ufdd1"
"""Placeholder of a picture in a turn's content: a Unicode noncharacter, which texts don't contain."""
JsonObject = Mapping[str, Any]
TemplateTurn = dict[str, Any]  # a turn as chat templates expect it
_MAX_SHOWN = 80
MAX_SHOWN_ROLES = 8
_SHORT_ID = 9  # length of a tool call id for templates that require it (Mistral's)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant turn makes; several in one turn are parallel calls."""

    name: str
    arguments: JsonObject
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None  # templates call it `reasoning_content` or `thinking`
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None  # of the speaker, or of the tool that returned this result
    tool_call_id: str | None = None  # of the call whose result this is
    trained: bool | None = None  # whether the turn counts in the loss, if the data says so
    pictures: tuple[object, ...] = ()
    """The source of each `PICTURE` in the content: a path, a `data:` URI or bytes; an index into the row's column of
    pictures; or None for the next picture of that column."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and the tools that the assistant may call."""

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()  # as OpenAI's API takes them: `{"type": "function", "function": {...}}`
    num_prompt: int | None = None  # number of turns in the prompt, if the data has prompts and completions


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text without turns, for continued pretraining."""

    text: str


def trained_turns(conversation: Conversation, train_on: str | list[Role]) -> list[int]:
    messages, num_prompt = conversation.messages, conversation.num_prompt
    assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if train_on == "completion" and num_prompt is None:
        raise DataError(
            "data.train_on is 'completion', but the data has no prompts and completions",
            fix="set data.train_on to 'assistant' or 'last'",
        )
    if train_on == "last":
        chosen = assistant[-1:]
    elif isinstance(train_on, list):
        chosen = [index for index, message in enumerate(messages) if message.role in train_on]
    else:
        chosen = [index for index in assistant if train_on != "completion" or index >= (num_prompt or 0)]
    trained = [
        index
        for index, message in enumerate(messages)
        if message.trained or (message.trained is None and index in chosen)
    ]
    if not trained:
        raise DataError(
            f"nothing to train on in the turns {', '.join(message.role for message in messages[:MAX_SHOWN_ROLES])}",
            meaning="data.train_on, or the weights of the turns, exclude all turns",
            fix="correct data.format or data.train_on, or skip these examples",
        )
    return trained


def for_template(message: Message, *, in_parts: bool) -> TemplateTurn:
    """Return a turn as templates expect it. Keys without a value are omitted, since some templates test for keys."""
    pieces = re.split(f"({PICTURE})", message.content) if message.pictures else [message.content]
    parts = [{"type": "image"} if each == PICTURE else {"type": "text", "text": each} for each in pieces if each]
    turn: TemplateTurn = {"role": message.role, "content": parts if in_parts or message.pictures else message.content}
    if message.reasoning is not None:
        turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            turn[key] = value
    return turn


def with_short_ids(conversation: Conversation) -> Conversation:
    """Replace the ids of tool calls with ids of nine letters or digits, and match results to their calls in order."""
    numbers = count()
    waiting: list[str] = []
    messages = []
    for message in conversation.messages:
        calls = tuple(replace(call, id=_short_id(call.id or f"call {next(numbers)}")) for call in message.tool_calls)
        waiting += [str(call.id) for call in calls]
        result = message.tool_call_id
        if message.role == "tool":
            result = _short_id(result) if result else next(iter(waiting), None)
            waiting = [each for each in waiting if each != result]
        messages.append(replace(message, tool_calls=calls, tool_call_id=result))
    return replace(conversation, messages=tuple(messages))


def _short_id(text: str) -> str:
    is_short = len(text) == _SHORT_ID and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]


_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
"""Types of text parts in OpenAI's chat API, and in requests and responses of its Responses API."""
PICTURE_PARTS = frozenset(("image", "image_url", "input_image"))
PICTURE_KEYS = ("image", "image_url", "url", "bytes", "base64", "path")
"""Keys that hold the source of a picture, in content parts and in objects such as Parquet's `{bytes, path}`."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINED = ("weight", "train")
_KEYS = {
    "openai": {"role", "content", "name", "tool_calls", "function_call", "tool_call_id", *_REASONING, *_TRAINED},
    "sharegpt": {"from", "value", "name", *_REASONING, *_TRAINED},
}
_CALL_KEYS = frozenset(("id", "type", "index", "function", "name", "arguments"))
_GLAIVE = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*}\s*)""", re.DOTALL)
"""Arguments in single quotes, as in data derived from Glaive's function calls."""
_WRAPPED_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


def is_turn(value: object, style: str) -> bool:
    keys = {"role"} if style == "openai" else {"from", "value"}
    return isinstance(value, dict) and keys <= value.keys()


def style_of(turns: Sequence[object]) -> str | None:
    """Return the style of turns, judged by the first; None if the first is not a turn."""
    return next((style for style in ("openai", "sharegpt") if turns and is_turn(turns[0], style)), None)


def turns_in(value: object) -> list[object]:
    """Return the turns of a column, a list or JSON text of one; empty if it holds no list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, list) else []


def read_turns(turns: object, column: str, style: str, ignored: Collection[str]) -> Iterator[Message]:
    """Yield the turns of a column, a list or JSON text of one, without the keys in `ignored`."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _parse_json(turns, f"column '{column}'")
    if turns == []:
        raise DataError(f"column '{column}' is an empty list: it has no turns", fix="remove this example")
    if not isinstance(turns, list):
        raise DataError(
            f"column '{column}' is not a list of turns",
            fix="set data.format.column to the column with the conversation, or remove this example",
        )
    read = _openai_turn if style == "openai" else _sharegpt_turn
    for number, turn in enumerate(turns, start=1):
        try:
            yield read(_known_values(turn, ignored, style))
        except DataError as error:
            raise DataError(f"turn {number}: {error.what}", meaning=error.meaning, fix=error.fix) from error


def _known_values(turn: object, ignored: Collection[str], style: str) -> JsonObject:
    """Return the keys of a turn that have a value: in a table, every turn has the keys of all turns."""
    if not isinstance(turn, dict):
        raise _bad("a turn is not a mapping", turn)
    known = _KEYS[style]
    if turn.keys() <= known and not ignored:
        return turn
    values = {key: value for key, value in turn.items() if key not in ignored}
    unknown = [str(key) for key, value in values.items() if key not in known and value not in (None, "", [], {})]
    if unknown:
        other = "sharegpt" if style == "openai" else "openai"
        raise DataError(
            f"a turn has unknown keys: {', '.join(unknown)}",
            meaning=f"style '{style}' reads {', '.join(sorted(known))}",
            fix=f"set data.format.style to {other}"
            if is_turn(turn, other)
            else f"leave them out: data.ignore_columns=[{', '.join(unknown)}]; or correct the data",
        )
    return values


def _openai_turn(turn: JsonObject) -> Message:
    role = _role(turn.get("role"))
    calls = [_read_call(call) for call in _as_list(turn.get("tool_calls"), "tool_calls")]
    if turn.get("function_call"):
        calls.append(_read_call(turn["function_call"]))
    content, pictures = _content(turn.get("content"), role, is_optional=bool(calls))
    return replace(_message(role, turn, content, calls), pictures=pictures)


def _sharegpt_turn(turn: JsonObject) -> Message:
    name, value = turn.get("from"), turn.get("value")
    if normalized_role(str(name)) in CALL_ROLES:
        if isinstance(value, str):
            value = _GLAIVE.sub(lambda found: found[1] + json.dumps(found[2]) + found[3], value)
        calls = [_read_call(call) for call in _as_list(value, "a function call")]
        if not calls:
            raise _bad("a function call is empty", value)
        return _message("assistant", turn, "", calls)
    role = _role(name)
    content, pictures = _content(value, role, is_optional=False)
    wrapped = _WRAPPED_RESULT.fullmatch(content) if role == "tool" else None
    # A template with tools writes this wrapper itself; several results in one wrapper stay unchanged.
    content = wrapped[1] if wrapped and "<tool_response>" not in wrapped[1] else content
    return replace(_message(role, turn, content, []), pictures=pictures)


def _message(role: Role, turn: JsonObject, content: str, calls: list[ToolCall]) -> Message:
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), None)
    for key, value in (("reasoning_content", reasoning), ("name", turn.get("name"))):
        if value is not None and not isinstance(value, str):
            raise _bad(f"{key} is not text", value)
    if role != "assistant" and (reasoning or calls):
        raise DataError(f"a turn of {role} has reasoning or tool calls", fix="correct the role of this turn")
    call_id = turn.get("tool_call_id")
    weights = [turn[key] for key in _TRAINED if turn.get(key) is not None]
    if any(weight not in (0, 1) for weight in weights) or len(set(map(bool, weights))) > 1:
        raise DataError(
            f"a turn's weight is {' and '.join(map(_shown, weights))}",
            meaning="a turn is trained or not: weight is 0 or 1, train is true or false, and both agree",
            fix="correct the data",
        )
    trained = bool(weights[0]) if weights else None
    if role == "assistant" and trained is not False and not content.strip() and not calls:
        raise blank_turn()
    return Message(
        role, content, reasoning, tuple(calls), turn.get("name") or None, str(call_id) if call_id else None, trained
    )


def blank_turn() -> DataError:
    return DataError(
        "an assistant turn is blank",
        meaning="the model would be trained to end its turn immediately",
        fix="correct data.format, or remove this example",
    )


def _role(value: object) -> Role:
    name = normalized_role(str(value))
    if role := ROLES.get(name):
        return role
    close = closest(name, ROLES)
    raise DataError(
        f"a turn's role is {str(value)[:_MAX_SHOWN]!r}",
        meaning=f"known roles: {', '.join([*ROLES, *CALL_ROLES])}",
        fix=f"did you mean '{close}'? correct the data"
        if close
        else f"correct data.format.style, or the data; the roles are {', '.join(get_args(Role))}",
    )


def _content(value: object, role: str, *, is_optional: bool) -> tuple[str, tuple[object, ...]]:
    """Join the parts of a turn's content; return its text and the sources of its pictures."""
    if isinstance(value, str):
        return value, ()
    if value is None and is_optional:
        return "", ()
    parts = value if isinstance(value, list) and value else [None]
    dicts = [part if isinstance(part, dict) else {"type": type(part).__name__} for part in parts]
    kinds = sorted({str(part.get("type", "text")) for part in dicts} - _TEXT_PARTS - PICTURE_PARTS)
    pictures = [part for part in dicts if part.get("type") in PICTURE_PARTS]
    texts = [PICTURE if part.get("type") in PICTURE_PARTS else part.get("text") for part in dicts]
    if not kinds and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts)), tuple(map(picture_source, pictures))
    raise DataError(
        f"the content of a turn of {role} is not text: {_shown(value)}",
        meaning=f"only text and pictures can be trained on, no parts of type {', '.join(kinds)}" if kinds else "",
        fix="remove this example, or correct data.format.style",
    )


def picture_source(value: object) -> object:
    """Return the source of a picture: the value itself, or that of a content part or of `{bytes, path}`.

    For a part without a source, return its index into the column of pictures, or None.
    """
    if not isinstance(value, dict):
        return value
    known = (*PICTURE_KEYS, "type", "text", "index", "detail")
    if unknown := [key for key in value if key not in known and value[key]]:
        raise _bad(f"a picture has unknown keys: {', '.join(map(str, unknown))}", value)
    key = next((key for key in PICTURE_KEYS if value.get(key)), "index")
    return f"data:;base64,{value[key]}" if key == "base64" else picture_source(value.get(key))


def _as_list(value: object, key: str) -> list[object]:
    if value in (None, "", [], {}):
        return []
    if isinstance(value, str | bytes):
        value = _parse_json(value, key)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise _bad(f"{key} is not a list", value)
    return value


def _parse_json(text: str | bytes, key: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"can't read {key} as JSON", text, str(error)[:_MAX_SHOWN]) from error


def _read_call(call: object) -> ToolCall:
    if not isinstance(call, dict):
        raise _bad("a tool call is not a mapping", call)
    unknown = [key for key, value in call.items() if key not in _CALL_KEYS and value not in (None, "", [], {})]
    if unknown or call.get("type") not in (None, "function"):
        raise _bad("can't parse a tool call", call)
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise _bad("a tool call has no name", call)
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parse_json(arguments, f"the arguments of the call of {name}")
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise _bad(f"the arguments of the call of {name} are not an object", arguments)
    return ToolCall(name, arguments, str(call["id"]) if call.get("id") else None)


def read_tools(value: object) -> tuple[JsonObject, ...]:
    """Read the schemas of tools: OpenAI's, or the bare functions; a list or JSON text of one."""
    tools: list[JsonObject] = []
    for given in _as_list(value, "tools"):
        tool = _parse_json(given, "a tool") if isinstance(given, str) else given
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad("a tool has no schema with a name", tool)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _bad(f"the parameters of tool {function['name']} are not a JSON schema", parameters)
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def check_calls(messages: tuple[Message, ...], tools: tuple[JsonObject, ...]) -> None:
    """Check that each call names one of the tools, if the data has tools."""
    names = {tool["function"]["name"] for tool in tools}
    for number, message in enumerate(messages, start=1):
        unknown = [call.name for call in message.tool_calls if call.name not in names] if names else []
        if unknown:
            raise DataError(
                f"turn {number}: a tool is called that is not in tools: {', '.join(unknown)[:_MAX_SHOWN]}",
                meaning=f"the tools of this example: {', '.join(sorted(names))[:200]}",
                fix="add its schema, or remove this example",
            )


def _bad(what: str, value: object, meaning: str = "") -> DataError:
    return DataError(f"{what}: {_shown(value)}", meaning=meaning, fix="correct or remove this example")


def _shown(value: object) -> str:
    return str(value)[:_MAX_SHOWN]
