"""Parse turns and tools of conversations in the styles of OpenAI's API and ShareGPT. Unknown fields are refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ftkit.data.conversations import Message, ToolCall
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ftkit.config.data import Role
    from ftkit.data.conversations import JsonObject

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot", "ai", "bard", "bing", "claude"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "function_result", "tool_result", "tool_output"), "tool"),
}
_CALLS = ("function_call", "function_calls", "tool_call", "tool_calls")
"""ShareGPT roles whose text is the JSON of tool calls."""
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
"""Types of a content's text parts: OpenAI's chat API, and the requests and results of its Responses API."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINED = ("weight", "train")
_OPENAI_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "function_call", "tool_call_id", *_REASONING, *_TRAINED)
)
_SHAREGPT_KEYS = frozenset(("from", "value", "name", *_REASONING, *_TRAINED))
_CALL_KEYS = frozenset(("id", "type", "index", "function", "name", "arguments"))
_GLAIVE = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*}\s*)""", re.DOTALL)
"""Arguments in single quotes, as in data derived from Glaive's function calls."""
_WRAPPED_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)
_MAX_SHOWN = 80


def is_turn(value: object, style: str) -> bool:
    """Tell whether a value looks like a turn of a style."""
    keys = {"role"} if style == "openai" else {"from", "value"}
    return isinstance(value, dict) and keys <= value.keys()


def read_turns(turns: object, column: str, style: str, ignored: Collection[str]) -> Iterator[Message]:
    """Yield the turns of a column.

    Args:
        turns: the column's value; tables often have it as JSON text.
        column: name of the column, for errors.
        style: `openai` or `sharegpt`.
        ignored: keys of turns that the recipe ignores.

    Raises:
        DataError: the value is not a list of turns, or a turn can't be parsed; with its number.
    """
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _parse_json(turns, f"column '{column}'")
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"column '{column}' is not a list of turns",
            fix="set data.format.column to the column with the conversation, or remove this example",
        )
    read = _openai_turn if style == "openai" else _sharegpt_turn
    known = _OPENAI_KEYS if style == "openai" else _SHAREGPT_KEYS
    for number, turn in enumerate(turns, start=1):
        try:
            yield read(_known_values(turn, known, ignored, style))
        except DataError as error:
            raise DataError(f"turn {number}: {error.what}", meaning=error.meaning, fix=error.fix) from error


def _known_values(turn: object, known: frozenset[str], ignored: Collection[str], style: str) -> JsonObject:
    """Return the keys of a turn that have a value: tables give all turns the keys of each."""
    if not isinstance(turn, dict):
        raise DataError(f"not a mapping: {_shown(turn)}", fix="correct the data")
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
    return _message(role, turn, _content(turn.get("content"), role, is_optional=bool(calls)), calls)


def _sharegpt_turn(turn: JsonObject) -> Message:
    name = _normalized(turn.get("from"))
    if name in _CALLS:
        return _message("assistant", turn, "", [_read_call(call) for call in _parse_calls(turn.get("value"))])
    role = _role(name)
    content = _content(turn.get("value"), role, is_optional=False)
    wrapped = _WRAPPED_RESULT.fullmatch(content) if role == "tool" else None
    # A template with tools writes this wrapper itself; several results in one wrapper stay unchanged.
    return _message(role, turn, wrapped[1] if wrapped and "<tool_response>" not in wrapped[1] else content, [])


def _message(role: Role, turn: JsonObject, content: str, calls: list[ToolCall]) -> Message:
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), None)
    for key, value in (("reasoning_content", reasoning), ("name", turn.get("name"))):
        if value is not None and not isinstance(value, str):
            raise DataError(f"{key} is not text: {_shown(value)}", fix="correct the data")
    if role != "assistant" and (reasoning or calls):
        raise DataError(f"a turn of {role} has reasoning or tool calls", fix="correct the role of this turn")
    call_id = turn.get("tool_call_id")
    trained = _trained(turn)
    if role == "assistant" and trained is not False and not content.strip() and not calls:
        raise DataError(
            "an assistant turn is blank",
            meaning="the model would be trained to end its turn immediately",
            fix="correct data.format, or remove this example",
        )
    return Message(
        role, content, reasoning, tuple(calls), turn.get("name") or None, str(call_id) if call_id else None, trained
    )


def _normalized(role: object) -> str:
    return str(role).strip().lower().replace("-", "_").replace(" ", "_")


def _role(value: object) -> Role:
    role = _ROLES.get(_normalized(value))
    if role is None:
        raise DataError(
            f"a turn's role is {str(value)[:_MAX_SHOWN]!r}",
            meaning=f"known roles: {', '.join([*_ROLES, *_CALLS])}",
            fix="correct data.format.style, or the data",
        )
    return role


def _content(value: object, role: str, *, is_optional: bool) -> str:
    """Return a turn's text; text parts are joined."""
    if isinstance(value, str):
        return value
    if value is None and is_optional:
        return ""
    parts = value if isinstance(value, list) and value else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS else None
             for part in parts]  # fmt: skip
    if all(isinstance(text, str) for text in texts):
        return "".join(str(text) for text in texts)
    kinds = sorted({str(part.get("type")) for part in parts if isinstance(part, dict)} - _TEXT_PARTS)
    raise DataError(
        f"the content of a turn of {role} is not text: {_shown(value)}",
        meaning=f"parts of type {', '.join(kinds)} can't be trained on: only text" if kinds else "",
        fix="remove this example" if kinds else "correct data.format.style, or the data",
    )


def _trained(turn: JsonObject) -> bool | None:
    values = [turn[key] for key in _TRAINED if turn.get(key) is not None]
    if any(value not in (0, 1) for value in values):
        raise DataError(
            f"a turn's weight is {_shown(values[0])}",
            meaning="a turn is trained or not: weight is 0 or 1, train is true or false",
            fix="correct the data",
        )
    if len(set(map(bool, values))) > 1:
        raise DataError("a turn's weight and train contradict each other", fix="correct the data")
    return bool(values[0]) if values else None


def _as_list(value: object, key: str) -> list[Any]:
    """Return a list, or one from JSON text."""
    if value in (None, "", [], {}):
        return []
    if isinstance(value, str):
        value = _parse_json(value, key)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{key} is not a list: {_shown(value)}", fix="correct the data")
    return value


def _parse_json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"can't read {key} as JSON: {_shown(text)}", meaning=str(error)[:_MAX_SHOWN], fix="correct the data"
        ) from error


def _parse_calls(value: object) -> list[Any]:
    """Return the calls in the text of a function_call turn."""
    glaive = _GLAIVE.search(value) if isinstance(value, str) else None
    if isinstance(value, str) and glaive:
        value = _GLAIVE.sub(lambda found: found[1] + json.dumps(found[2]) + found[3], value)
    calls = _as_list(value, "a function call")
    if not calls:
        raise DataError("a function call is empty", fix="correct or remove this example")
    return calls


def _read_call(call: object) -> ToolCall:
    if not isinstance(call, dict):
        raise DataError(f"a tool call is not a mapping: {_shown(call)}", fix="correct the data")
    unknown = [str(key) for key, value in call.items() if key not in _CALL_KEYS and value not in (None, "", [], {})]
    if unknown or call.get("type") not in (None, "function"):
        raise DataError(f"can't parse a tool call: {_shown(call)}", fix="correct or remove this example")
    inner: Mapping[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise DataError(f"a tool call has no name: {_shown(call)}", fix="correct or remove this example")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parse_json(arguments, f"the arguments of the call of {name}")
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(
            f"the arguments of the call of {name} are not an object: {_shown(arguments)}", fix="correct the data"
        )
    return ToolCall(name, arguments, str(call["id"]) if call.get("id") else None)


def read_tools(value: object) -> tuple[JsonObject, ...]:
    """Read the schemas of tools: OpenAI's, or the bare functions; a list or JSON text of one.

    Raises:
        DataError: a schema can't be parsed.
    """
    return tuple(_read_tool(tool) for tool in _as_list(value, "tools"))


def _read_tool(tool: object) -> JsonObject:
    if isinstance(tool, str):
        tool = _parse_json(tool, "a tool")
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool has no schema with a name: {_shown(tool)}", fix="correct or remove this example")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise DataError(
            f"the parameters of tool {function['name']} are not a JSON schema: {_shown(parameters)}",
            fix="correct or remove this example",
        )
    return tool if "function" in tool else {"type": "function", "function": tool}


def check_calls(messages: tuple[Message, ...], tools: tuple[JsonObject, ...]) -> None:
    """Check that each call is for one of the tools, if the data has tools.

    Raises:
        DataError: a call is for an unknown tool.
    """
    names = {tool["function"]["name"] for tool in tools}
    for number, message in enumerate(messages, start=1):
        unknown = [call.name for call in message.tool_calls if call.name not in names] if names else []
        if unknown:
            raise DataError(
                f"turn {number}: a tool is called that is not in tools: {', '.join(unknown)[:_MAX_SHOWN]}",
                meaning=f"the tools of this example: {', '.join(sorted(names))[:200]}",
                fix="add its schema, or remove this example",
            )


def _shown(value: object) -> str:
    return str(value)[:_MAX_SHOWN]
