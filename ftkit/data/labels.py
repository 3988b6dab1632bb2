"""Find the assistant turn in a rendered text by rendering the conversation with unique words in place of its strings.

A completion alternates between literals of the template and strings of the turn: a `CompletionFrame`. Rendering the
conversation with a unique word in place of each string reveals the frame, so no string is searched for by its content.
A real turn must match a frame of its shape with its own strings, from the end of the inference prompt to the
end-of-turn token. Text of another turn can't match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from ftkit.errors import DataError

if TYPE_CHECKING:
    from ftkit.data.conversations import Conversation, Message
    from ftkit.data.rendering import ChatRenderer

_EMPTY_THINKING = re.compile(
    r"(<think>\s*</think>|<\|channel>thought\s*<channel\|>|\[THINK]\s*\[/THINK]|<\|START_THINKING\|><\|END_THINKING\|>"
    r"|<\|begin\|>assistant<\|think\|><\|end\|>)\s*\Z"
)
"""An empty thought at the end of a generation prompt; some templates omit it when they render the turn itself."""
_FIRST_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+]|<[^<>\s]+")
_LAST_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+])\s*\Z")
_TAGS = re.compile(r"</?\w+>|<\|?[\w/:▁]+\|?>|\[/?[A-Z_]+]|/no_?think\b|/think\b")
"""Markers that a template may look for in contents."""
_LOOK_BACK = 80
_MAX_FRAMES = 32  # frames per shape: a template's text may depend on the position of the turn

REPEATED_MARKER: Final = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\1{2,}")
"""A special token at least three times in a row, which represents a picture."""
WORD: Final = re.compile(r"Qz\d{7}|71\d{7}|73\d{7}\.0")
"""Unique words: nine letters and digits, which some templates require of ids; nine digits in place of integers, and of
other numbers."""


@dataclass(slots=True)
class _Strings:
    """The strings of a turn as text, and words in place of them if there are `numbers`.

    Matches of `tags` stay in contents. A template may omit `optional` words, which are ids of tool calls. `shape`
    describes the turn apart from its strings.
    """

    numbers: Iterator[int] | None = None
    tags: re.Pattern[str] | None = None
    values: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    shape: list[object] = field(default_factory=list)

    def of_turn(self, message: Message) -> Message:
        """Add the strings of a turn; return the turn with words in their place."""
        reasoning = None if message.reasoning is None else self.take(message.reasoning)
        content = self._take_parts(message.content)
        calls = []
        for call in message.tool_calls:
            self.shape.append("call")
            name, arguments = self.take(call.name), self._take_leaves(call.arguments)
            identity = None if call.id is None else self.take(call.id)
            if identity is not None and identity != call.id:
                self.optional.add(identity)
            calls.append(replace(call, name=name, arguments=arguments, id=identity))
        if self.numbers is None:
            return message
        return replace(message, reasoning=reasoning, content=content, tool_calls=tuple(calls))

    def take(self, value: str) -> str:
        """Add a string and return its word; a blank string stays as it is and becomes part of the shape."""
        if not value.strip():
            self.shape.append(value)
            return value
        self.shape.append(True)
        self.values.append(value)
        if self.numbers is None:
            return value
        self.words.append(f"Qz{next(self.numbers):07d}")
        return self.words[-1]

    def _take_parts(self, value: str) -> str:
        """Add a string in parts between markers of the template."""
        if self.tags is None:
            return self.take(value)
        found = self.tags.findall(value)
        self.shape += found
        taken = [self.take(part) for part in self.tags.split(value)]
        return "".join(part + tag for part, tag in zip(taken, [*found, ""], strict=True))

    def _take_leaves(self, value: Any) -> Any:
        """Add the strings and numbers of a JSON value at any depth."""
        if isinstance(value, str):
            return self.take(value)
        if isinstance(value, Mapping):
            self.shape.append(tuple(value))
            return {key: self._take_leaves(inner) for key, inner in value.items()}
        if isinstance(value, list):
            self.shape.append(len(value))
            return [self._take_leaves(inner) for inner in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.shape.append(repr(value))
            return value
        self.shape.append(type(value))
        self.values.append(json.dumps(value))
        if self.numbers is None:
            return value
        word = type(value)(f"{71 if isinstance(value, int) else 73}{next(self.numbers):07d}")
        self.words.append(str(word))
        return word


def _with_words(conversation: Conversation, tags: re.Pattern[str] | None) -> tuple[Conversation, _Strings]:
    """Return a conversation with a word in place of each string, and the strings of its last turn."""
    numbers = count(1)
    messages: list[Message] = []
    ids: dict[str | None, str | None] = {}
    names: dict[str | None, str | None] = {}
    last = _Strings()
    for message in conversation.messages:
        last = _Strings(numbers, tags)
        marked, others = last.of_turn(message), _Strings(numbers)
        name, call_id = message.name, message.tool_call_id
        if message.role == "tool":
            name = name and (names.get(name) or others.take(name))
            call_id = call_id and (ids.get(call_id) or others.take(call_id))
        elif name:
            name = others.take(name)
        for call, marked_call in zip(message.tool_calls, marked.tool_calls, strict=True):
            ids[call.id], names[call.name] = marked_call.id, marked_call.name
        messages.append(replace(marked, name=name, tool_call_id=call_id))
    return replace(conversation, messages=tuple(messages)), last


@dataclass(frozen=True, slots=True)
class CompletionFrame:
    """The texts of a template around the strings of an assistant turn.

    If the template renders the text before the completion unlike the inference prompt, `opening` is that text and
    `prompt_end` the end of the prompt, and both are compared.
    """

    literals: tuple[str, ...]  # the template's texts, one more than there are slots
    slots: tuple[int, ...]  # for each slot between literals, the index of the turn's string
    opening: str
    prompt_end: str

    def start_in(self, text: str, prompt: str, strings: Sequence[str]) -> int | None:
        """Return the start of the completion at the end of a text; None if the text does not match the frame."""
        start = self._start_of_exact(text, strings)
        if start is None:
            start = self._start(text, len(text), len(self.slots), strings)
        if start is None or text.startswith(prompt):
            return start if start == len(prompt) else None
        is_shown = self.opening and prompt.endswith(self.prompt_end) and text.endswith(self.opening, 0, start)
        return start if is_shown else None

    def _start_of_exact(self, text: str, strings: Sequence[str]) -> int | None:
        """Match all strings unchanged, backward and without recursion: most templates write them unchanged."""
        end = len(text)
        for number in range(len(self.slots), 0, -1):
            literal, value = self.literals[number], strings[self.slots[number - 1]]
            if not text.endswith(literal, 0, end) or not text.endswith(value, 0, end - len(literal)):
                return None
            end -= len(literal) + len(value)
        return end - len(self.literals[0]) if text.endswith(self.literals[0], 0, end) else None

    def _start(self, text: str, end: int, number: int, strings: Sequence[str]) -> int | None:
        """Match the literal before slot `number` and all before it, backward from `end`."""
        literal = self.literals[number]
        if not text.endswith(literal, 0, end):
            return None
        end -= len(literal)
        if not number:
            return end
        starts = _starts_of(text, end, strings[self.slots[number - 1]])
        found = (self._start(text, start, number - 1, strings) for start in starts)
        return next((start for start in found if start is not None), None)


def _starts_of(text: str, end: int, value: str) -> Iterator[int]:
    """Yield the possible starts of a string that ends at `end`: unchanged, stripped, or written as JSON or Python."""
    if text.endswith(value, 0, end):
        yield end - len(value)
    core = value.strip()
    leading, trailing = value[: -len(value.lstrip())], value[len(value.rstrip()) :]
    for length in range(len(trailing), -1, -1):
        if text.endswith(core + trailing[:length], 0, end):
            start = end - len(core) - length
            yield start
            if leading and text.endswith(leading, 0, start):
                yield start - len(leading)
    for form in {value, core}:
        plain = json.dumps(form, ensure_ascii=False)[1:-1]
        for written in dict.fromkeys(
            (plain, json.dumps(form)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(form)[1:-1])
        ):
            if written not in (value, core) and text.endswith(written, 0, end):
                yield end - len(written)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered text with its trained spans."""

    text: str
    spans: tuple[tuple[int, int], ...]  # start and end of trained turns, in order, with the end-of-turn token
    cuts: tuple[int, ...] = ()  # inside special tokens that the data contains as text; no token may cross them
    pictures: tuple[tuple[int, object], ...] = ()  # positions of the tokens of pictures, each with the source
    untrained: tuple[tuple[int, int], ...] = ()  # start and end of expanded pictures
    record: bytes = b""  # the arrays of the pictures, for `Document.pictures`


class Completions:
    """Finds the completions of assistant turns, which end at one of `stops`, and caches the frames of their shapes."""

    def __init__(self, template: ChatRenderer, stops: frozenset[str]) -> None:
        self._template, self._stops = template, stops
        self._tags = any_of(frozenset(_TAGS.findall(template.source)))
        self._frames: dict[tuple[object, ...], list[CompletionFrame]] = {}
        """Frames by `_Strings.shape`."""

    def find(self, conversation: Conversation, chosen: Sequence[int], prompt: str, text: str) -> int:
        """Return where the completion of the last chosen turn starts in `text`, which ends with it.

        `text` renders the chosen turns; `prompt` all but the last with a generation prompt, as inference sends it.
        Raises DataError: the completion can't be shown to be exactly this turn.
        """
        turns = replace(conversation, messages=tuple(conversation.messages[each] for each in chosen))
        reason: DataError | None = None
        for tags in (None, self._tags):
            strings = _Strings(tags=tags)
            strings.of_turn(turns.messages[-1])
            frames = self._frames.setdefault(tuple(strings.shape), [])
            starts = (frame.start_in(text, prompt, strings.values) for frame in frames)
            start = next((start for start in starts if start is not None), None)
            if start is None:
                try:
                    frame = self._frame(turns, tags)
                except DataError as error:
                    reason = reason or error
                    continue
                start = frame.start_in(text, prompt, strings.values)
                if start is not None:
                    frames.insert(0, frame)
                    del frames[_MAX_FRAMES:]
            if start is not None:
                _check_start(turns, prompt, text, start)
                return start
        raise reason or _error(
            turns, "the chat template writes other text than the turn's own",
            "it omits, shortens or rewrites part of the turn, or treats its text as markup",
        )  # fmt: skip

    def _frame(self, conversation: Conversation, tags: re.Pattern[str] | None) -> CompletionFrame:
        """Find the frame of a conversation's last turn, by rendering it with words in place of its strings."""
        marked, strings = _with_words(conversation, tags)
        own = {word: number for number, word in enumerate(strings.words)}
        prompt = self._template.render(replace(marked, messages=marked.messages[:-1]), open_turn=True)
        text = self._template.to_end_of_turn(self._template.render(marked), marked.messages[-1])
        found = list(WORD.finditer(text))
        before = [match for match in found if match[0] not in own]
        first = next((match.start() for match in found if match[0] in own), len(text))
        if before and before[-1].end() > first:
            raise _error(
                conversation, "the chat template writes text of an earlier turn within or after this one",
                "the model would be trained on text that it has not written",
            )  # fmt: skip
        tail = before[-1].end() if before else 0
        opening, prompt_end = "", ""
        if text.startswith(prompt):
            start = len(prompt)
        else:
            before_prompt = list(WORD.finditer(prompt))
            if [match[0] for match in before_prompt[-1:]] != [match[0] for match in before[-1:]]:
                raise _other_opening(conversation, prompt)
            prompt_end = prompt[before_prompt[-1].end() if before_prompt else 0 :]
            start = tail + _length_of_opening(conversation, prompt_end, text[tail:first])
            opening = text[tail:start]
        if start > first or start < tail:
            raise _other_opening(conversation, prompt)
        inside = [match for match in found if match.start() >= start and match[0] in own]
        if {*strings.words} - strings.optional - {match[0] for match in inside}:
            raise _error(
                conversation, "the chat template drops part of this turn",
                "the model would be trained on text that differs from the data",
            )  # fmt: skip
        bounds = [start, *(place for match in inside for place in match.span()), len(text)]
        literals = tuple(text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
        self._check_end(conversation, literals)
        return CompletionFrame(literals, tuple(own[match[0]] for match in inside), opening, prompt_end)

    def _check_end(self, conversation: Conversation, literals: Sequence[str]) -> None:
        """Check that generation stops at the last token and at none before it."""
        ends = [match for literal in literals for match in any_of(self._stops).finditer(literal)]
        is_last = bool(ends) and literals[-1].endswith(ends[-1][0])
        if is_last and len(ends) == 1:
            return
        said = f"generation stops at {ends[0][0]!r} within this turn" if is_last else "no token ends this turn"
        raise _error(
            conversation, f"{said}, as the chat template writes it",
            "the trained model would stop too early, or not at all",
        )  # fmt: skip


@lru_cache(maxsize=8)
def any_of(texts: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest first."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check_start(conversation: Conversation, prompt: str, text: str, start: int) -> None:
    """Check that the completion neither repeats the end of the prompt nor opens a thought that it has closed."""
    end = prompt[-_LOOK_BACK:]
    tag, thought = _LAST_TAG.search(end), _EMPTY_THINKING.search(end)
    if thought and text[start : start + _LOOK_BACK].lstrip().startswith(_FIRST_TAG.findall(thought[1])[0]):
        raise _other_opening(conversation, prompt)
    if tag and text.startswith(tag[1], start):
        raise _error(
            conversation, f"the completion starts with {tag[1]!r}, with which inference opens this turn",
            "the model would learn to write it twice",
        )  # fmt: skip


def _length_of_opening(conversation: Conversation, prompt_end: str, rendered: str) -> int:
    """Return how much of the template's text before a turn is in the prompt of inference.

    Gemma 4's generation prompt has an empty thought that the rendered turn omits. DeepSeek V3.2's has a thought whose
    end the rendered turn repeats.
    """
    if rendered.startswith(prompt_end):
        return len(prompt_end)
    thought = _EMPTY_THINKING.search(prompt_end)
    header = prompt_end[: thought.start()] if thought else ""
    if not thought or not header or not rendered.startswith(header):
        raise _other_opening(conversation, prompt_end)
    rest = rendered[len(header) :]
    repeated = next((size for size in range(len(rest), 0, -1) if thought[0].endswith(rest[:size])), 0)
    if _FIRST_TAG.findall(thought[1])[0] in rest[repeated:]:
        raise _other_opening(conversation, prompt_end)
    return len(header) + repeated


def _other_opening(conversation: Conversation, prompt: str) -> DataError:
    last = conversation.messages[-1]
    what = (
        f"turn {len(conversation.messages)}: inference opens this turn with {prompt[-40:]!r}, but the chat template "
        "renders the turn without that"
    )
    if _EMPTY_THINKING.search(prompt) and (last.reasoning or last.content.lstrip()[:1] in "<["):
        return DataError(
            what,
            meaning="inference asks for an answer without reasoning, and the data has reasoning",
            fix="have inference ask for reasoning, e.g. data.template_options={enable_thinking: true}; or remove it",
        )
    return DataError(
        what,
        meaning="the model would be trained on text that differs from inference; thinking models' templates open each "
        "turn with <think>, which data without reasoning does not have",
        fix="add reasoning_content to the data, or set data.template_options or another data.chat_template",
    )


def _error(conversation: Conversation, said: str, meaning: str) -> DataError:
    return DataError(
        f"turn {len(conversation.messages)}: {said}",
        meaning=meaning,
        fix="correct or remove this example, or set data.template_options or another data.chat_template",
    )
