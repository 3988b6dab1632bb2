"""Read pairs of a chosen and a rejected completion, as texts or as turns; insert the pictures of examples."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.data.conversations import (
    PICTURE,
    PICTURE_KEYS,
    PICTURE_PARTS,
    Conversation,
    Message,
    PlainText,
    blank_turn,
    check_calls,
    picture_source,
    read_tools,
    read_turns,
    style_of,
    turns_in,
)
from ftkit.errors import DataError, plural
from ftkit.paths import is_address

if TYPE_CHECKING:
    from ftkit.config.data import DataSpec, PreferencesFormat
    from ftkit.data.rows import Columns

PICTURE_COLUMNS = ("images", "image")
_PICTURE_MARK = re.compile(r"\n<image>\Z|<image>\n?")
"""LLaVA's and ShareGPT's placeholder, with the line break next to it, since templates write their own."""
_SPEAKERS = re.compile(r"(?:\r?\n){2}(Human|Assistant):")
"""Turns in a text, as in HH-RLHF (Bai et al. 2022)."""
Turns = tuple[Message, ...]


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
    """Return the conversations of an example: both sides of each pair; empty for plain text."""
    match example:
        case Preferences():
            return tuple(example.sides)
        case Conversation():
            return (example,)
        case _:
            return ()


def first_picture(columns: Columns, ignored: Collection[str] = ()) -> object:
    """Return the source of a row's first picture, from a turn or the column of pictures; None if there is none.

    Empty if a content part has a picture without a source.
    """
    used = {name: value for name, value in columns.items() if name not in ignored}
    turns = [turn for value in used.values() for turn in turns_in(value) if isinstance(turn, dict)]
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    own = [part for part in parts if isinstance(part, dict) and part.get("type") in PICTURE_PARTS]
    listed = [each for name in PICTURE_COLUMNS for each in turns_in(used.get(name)) or [used.get(name)]]
    sources = []
    for each in filter(None, [*own, *listed]):
        with suppress(DataError):  # preparation reports it
            sources.append(picture_source(each))
    return next((source for source in sources if source or source == 0), "" if own else None)


def with_pictures(example: Example, columns: Columns, data: DataSpec) -> Example:
    """Assign the pictures of the row's column `images` or `image` to the turns of an example.

    Raises DataError: the example has pictures, but the recipe's model takes none.
    """
    if not data.pictures:
        numbered = (turn for each in conversations_of(example) for turn in enumerate(each.messages, start=1))
        for number in (number for number, message in numbered if message.pictures):
            raise DataError(
                f"turn {number}: a picture, and data.pictures is not true",
                meaning="the model sees no pictures then, only text",
                fix="choose a multimodal model and set data.pictures=true, or remove this example",
            )
        return example
    turns = (turn for each in conversations_of(example) for turn in each.messages)
    if any(turn.content.count(PICTURE) != len(turn.pictures) for turn in turns):
        raise DataError("the text has U+FDD1, which is not a character", fix="correct or remove this example")
    found = [name for name in PICTURE_COLUMNS if name not in data.ignore_columns and columns.get(name)]
    if len(found) > 1:
        raise DataError("there are pictures in both 'images' and 'image'", fix="data.ignore_columns=[image]")
    column = found[0] if found else PICTURE_COLUMNS[0]
    sources = [picture_source(each) for each in turns_in(columns.get(column)) or [columns.get(column)] if each]
    match example:
        case Preferences(chosen, rejected):
            sides = (_place_pictures(side, sources, column) for side in rejected)
            return Preferences(_place_pictures(chosen, sources, column), tuple(sides))
        case Conversation():
            return _place_pictures(example, sources, column)
        case _ if sources:
            raise DataError(
                f"column '{column}' has pictures, and the row is a text without turns",
                fix=f"give data.format prompts and completions, or leave them out: data.ignore_columns=[{column}]",
            )
    return example


def _place_pictures(conversation: Conversation, sources: Sequence[object], column: str) -> Conversation:
    """Assign the pictures of a row's column to its turns, in order.

    They replace content parts without a source, or the placeholder `<image>` in texts. Without either, they are
    inserted before the text of the first user turn.
    """
    messages = list(conversation.messages)
    if not any(each.pictures for each in messages):
        marked = [_PICTURE_MARK.subn(PICTURE, each.content) for each in messages]
        if not sum(num for _, num in marked):
            first = next((place for place, each in enumerate(messages) if each.role == "user"), 0)
            marked[first] = PICTURE * len(sources) + messages[first].content, len(sources)
        messages = [
            replace(each, content=content, pictures=(None,) * num)
            for each, (content, num) in zip(messages, marked, strict=True)
        ]
    places = [source for each in messages for source in each.pictures if source is None or isinstance(source, int)]
    order = [number if place is None else place for number, place in enumerate(places)]
    if (num_open := len(places)) != len(sources):
        raise DataError(
            f"{plural(num_open, 'mark')} or parts of pictures without a source, and {plural(len(sources), 'picture')} "
            f"in column '{column}'",
            fix="correct or remove this example",
        )
    if sorted(order) != list(range(num_open)):
        raise DataError(
            f"the indices {', '.join(map(str, order))} of parts are not those of {plural(num_open, 'picture')}",
            fix=f"number them from 0 on in the order of column '{column}', or leave the indices out",
        )
    left = iter(order)

    def filled(source: object) -> object:
        return sources[next(left)] if source is None or isinstance(source, int) else source

    messages = [replace(each, pictures=tuple(map(filled, each.pictures))) for each in messages]
    return replace(conversation, messages=tuple(messages))


def portable(columns: Columns, folder: str) -> Columns:
    """Return a row that JSON in another folder can hold: picture paths are absolute, bytes are `data:` URIs."""
    parsed = {
        name: turns_in(value) if isinstance(value, str) and first_picture({name: value}) is not None else []
        for name, value in columns.items()
    }
    return {
        name: _portable(parsed[name] or value, folder, is_source=name in PICTURE_COLUMNS)
        for name, value in columns.items()
    }


def _portable(value: object, folder: str, *, is_source: bool) -> object:
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, list):
        return [_portable(each, folder, is_source=is_source) for each in value]
    if isinstance(value, dict):
        is_part = is_source or value.get("type") in PICTURE_PARTS
        if is_part and isinstance(value.get("base64"), str):
            value = {"type": "image", "image": picture_source({"base64": value["base64"]})}
        return {key: _portable(each, folder, is_source=is_part and key in PICTURE_KEYS) for key, each in value.items()}
    if is_source and isinstance(value, str) and not value.startswith("data:") and not is_address(value):
        return str(Path(folder, value).absolute())
    return value


def rejected_of(columns: Columns, form: PreferencesFormat) -> list[object]:
    """Return the rejected completions of a row, one for each pair."""
    rejected = columns.get(form.rejected)
    return rejected if isinstance(rejected, list) and rejected and not style_of(rejected) else [rejected]


def read_preferences(columns: Columns, form: PreferencesFormat, data: DataSpec) -> Preferences:
    """Read the pairs of a row, without those that `data.contradictions` drops for their equal sides.

    Leading turns that all completions share become part of the prompt.
    """
    _check_scores(columns, form)
    ignored = data.ignore_columns
    rejected = (_turns_of(each, form.rejected, ignored) for each in rejected_of(columns, form))
    sides = [_turns_of(columns.get(form.chosen), form.chosen, ignored), *rejected]
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
    different = [side for side in sides[1:] if _texts(side) != _texts(sides[0])]
    if len(different) < len(sides) - 1 and data.contradictions != "drop":
        raise DataError(
            f"'{form.chosen}' and '{form.rejected}' are the same",
            meaning="nothing is preferred; white space around a turn does not count",
            fix="correct or remove this example, or set data.contradictions=drop",
        )
    tools = read_tools(columns["tools"]) if "tools" in columns and "tools" not in ignored else ()
    untrained = tuple(replace(message, trained=False) for message in prompt)
    found = [Conversation((*untrained, *side), tools, num_prompt=len(prompt)) for side in (sides[0], *different)]
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


def _turns_of(value: Any, column: str, ignored: Collection[str]) -> Turns:
    if isinstance(value, dict):
        value = [value]
    turns = turns_in(value)
    if style := style_of(turns):
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
