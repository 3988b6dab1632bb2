"""Read pairs: a chosen and a rejected completion of a prompt, as texts or as turns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ftkit.data.conversations import (
    Conversation,
    Message,
    PlainText,
    blank_turn,
    check_calls,
    is_turn,
    read_tools,
    read_turns,
    turns_in,
)
from ftkit.errors import DataError

if TYPE_CHECKING:
    from ftkit.config.data import PreferencesFormat
    from ftkit.data.rows import Columns

_SPEAKERS = re.compile(r"(?:\r?\n){2}(Human|Assistant):")
"""Turns in a text, as in HH-RLHF (Bai et al. 2022)."""
Turns = tuple[Message, ...]


class EqualSidesError(DataError):
    """Both sides of a pair are the same."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """A chosen completion and rejected ones of the same prompt, each as a conversation that ends with it."""

    chosen: Conversation
    rejected: tuple[Conversation, ...]

    @property
    def sides(self) -> Iterator[Conversation]:
        """The sides of the pairs: the chosen completion before each rejected one."""
        for each in self.rejected:
            yield from (self.chosen, each)


Example = Conversation | PlainText | Preferences


def conversations_of(example: Example) -> tuple[Conversation, ...]:
    """Return the conversations of an example, both sides of pairs; none of a plain text."""
    match example:
        case Preferences():
            return tuple(example.sides)
        case Conversation():
            return (example,)
        case _:
            return ()


def read_preferences(columns: Columns, form: PreferencesFormat, ignored: Collection[str]) -> Preferences:
    """Read the pairs of a row; the turns that its completions share at the beginning belong to the prompt."""
    _check_scores(columns, form)
    chosen, rejected = (columns.get(name) for name in (form.chosen, form.rejected))
    several = rejected if isinstance(rejected, list) and rejected and not _are_turns(rejected) else [rejected]
    sides = [_turns_of(chosen, form.chosen, ignored), *(_turns_of(each, form.rejected, ignored) for each in several)]
    prompt: Turns = ()
    if (asked := columns.get(form.prompt)) not in (None, "", []):
        prompt = _turns_of(asked, form.prompt, ignored)
        if isinstance(asked, str) and len(prompt) == 1 and prompt[0].role == "assistant":
            prompt = (Message("user", prompt[0].content),)  # a text without turns
    shared = tuple(both[0] for both in takewhile(_is_same, zip(*(side[:-1] for side in sides), strict=False)))
    if shared:
        if prompt and not all(map(_is_same, zip(prompt, shared[-len(prompt) :], strict=False))):
            raise DataError(
                f"column '{form.prompt}' is not the end of the turns that '{form.chosen}' and '{form.rejected}' share",
                fix=f"correct this example, or leave the column out: data.ignore_columns=[{form.prompt}]",
            )
        prompt, sides = shared, [side[len(shared) :] for side in sides]
    system = columns.get("system")
    if isinstance(system, str) and system and "system" not in ignored and prompt and prompt[0].role != "system":
        prompt = (Message("system", system), *prompt)
    if not prompt or prompt[-1].role == "assistant" or any(side[0].role != "assistant" for side in sides):
        raise DataError(
            f"'{form.chosen}' and '{form.rejected}' are not completions of the same prompt",
            meaning="both are completions of a prompt in a column of its own, or conversations whose first turns are "
            "the same and that differ from a turn of the assistant on",
            fix="correct data.format, or remove this example",
        )
    if any(_texts(sides[0]) == _texts(side) for side in sides[1:]):
        raise EqualSidesError(
            f"'{form.chosen}' and '{form.rejected}' are the same",
            meaning="nothing is preferred; white space around a turn does not count",
            fix="correct or remove this example, or set data.contradictions=drop",
        )
    tools = read_tools(columns["tools"]) if "tools" in columns and "tools" not in ignored else ()
    untrained = tuple(replace(message, trained=False) for message in prompt)
    found = [Conversation((*untrained, *side), tools, num_prompt=len(prompt)) for side in sides]
    for conversation in found:
        check_calls(conversation.messages, tools)
    return Preferences(found[0], tuple(found[1:]))


def _check_scores(columns: Columns, form: PreferencesFormat) -> None:
    chosen, rejected = (columns.get(name) for name in form.scores)
    if isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen < rejected:
        raise DataError(
            f"the chosen completion has the lower score: {chosen:g}, the rejected one {rejected:g}",
            meaning="the columns may be swapped",
            fix=f"correct or remove this example, or set data.ignore_columns=[{', '.join(form.scores)}]",
        )


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and any(is_turn(value[0], style) for style in ("openai", "sharegpt"))


def _turns_of(value: Any, column: str, ignored: Collection[str]) -> Turns:
    """Return a completion, or a conversation that ends with it."""
    if isinstance(value, dict):
        value = [value]
    turns = turns_in(value)
    if _are_turns(turns):
        style = "openai" if is_turn(turns[0], "openai") else "sharegpt"
        return tuple(read_turns(turns, column, style, ignored))
    if not isinstance(value, str):
        raise DataError(
            f"column '{column}' is neither text nor a list of turns: {str(value)[:80]}",
            fix="correct data.format, or remove this example",
        )
    if not value.strip():
        raise blank_turn()
    beginning, *parts = _SPEAKERS.split(value)
    if beginning.strip() or not parts:
        return (Message("assistant", value),)
    messages = tuple(
        Message("user" if speaker == "Human" else "assistant", text.strip())
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    )
    if not messages[-1].content:
        raise blank_turn()
    return messages


def _is_same(messages: Sequence[Message]) -> bool:
    return all(message == messages[0] for message in messages)


def _texts(turns: Turns) -> list[tuple[object, ...]]:
    return [(each.role, each.content.strip(), (each.reasoning or "").strip(), each.tool_calls) for each in turns]
