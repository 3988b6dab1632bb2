"""Read the tool calls in a completion, in the notations that chat templates write."""

from __future__ import annotations

import json
import re
from typing import Any

Call = tuple[str, Any]
"""A tool's name, and its arguments."""

_XML = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_NAME_BEFORE = re.compile(r"(?:\[TOOL_CALLS\]\s*|functions\.)([\w.-]+)[^{}]*?(?=\{)")
"""Mistral's `[TOOL_CALLS]name[ARGS]{…}` and gpt-oss's `to=functions.name … {…}`."""
_DECODER = json.JSONDecoder()


def read_calls(text: str) -> list[Call]:
    """Return the calls in an assistant turn, special tokens included; none if there are none, or they are broken.

    Notations: Qwen's and Hermes's JSON in `<tool_call>`, Llama's and Mistral's JSON, a name before its arguments
    (newer Mistral, gpt-oss), and Qwen 3.5's `<function=…>`.
    """
    xml = [(name, _xml_arguments(body)) for name, body in _XML.findall(text)]
    return xml or _after_names(text) or _in_json(text)


def same_calls(left: list[Call], right: list[Call]) -> bool:
    """Tell whether both have the same calls with the same arguments, in any order."""
    left = list(left)
    for call in right:
        if call not in left:
            return False
        left.remove(call)
    return not left


def _xml_arguments(body: str) -> dict[str, Any]:
    return {name: _value(value.strip("\n")) for name, value in _XML_PARAMETER.findall(body)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _after_names(text: str) -> list[Call]:
    found = ((match[1], _decode(text, match.end())) for match in _NAME_BEFORE.finditer(text))
    return [(name, arguments) for name, (arguments, _) in found if isinstance(arguments, dict)]


def _in_json(text: str) -> list[Call]:
    calls, place = [], 0
    while (place := text.find("{", place)) >= 0:
        value, end = _decode(text, place)
        call = _as_call(value)
        if call is not None:
            calls.append(call)
        place = max(end, place + 1)
    return calls


def _decode(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _as_call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    return function["name"], _value(arguments) if isinstance(arguments, str) else arguments
