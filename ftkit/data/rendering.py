"""Render conversations with the chat template, within limits, and find the trained spans of the text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any, get_args

from ftkit.config.data import Role
from ftkit.data import template_probes as probes
from ftkit.data.conversations import (
    MAX_SHOWN_ROLES,
    PICTURE,
    Conversation,
    JsonObject,
    Message,
    TemplateTurn,
    ToolCall,
    for_template,
    trained_turns,
    with_short_ids,
)
from ftkit.data.labels import Completions, Rendering, any_of
from ftkit.data.limits import MAX_TEXT, LimitReachedError, Template, run_limited
from ftkit.data.private_apis import compile_chat_template
from ftkit.data.tokenizers import special_tokens_of
from ftkit.errors import DataError, plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftkit.config.data import DataSpec

_TODAY = datetime(2025, 1, 1, tzinfo=UTC)
"""Date for templates that write the current date (gpt-oss, Llama 3), so that data prepared twice are equal, and exports
render as in training on any day."""
_WINDOW = 16
_CUT = "\ufdd0"
"""Mark inside a special token in the text of the data: a Unicode noncharacter, which texts don't contain."""


def render_turns(
    template: str,
    variables: Mapping[str, object],
    turns: Sequence[Mapping[str, object]],
    tools: Sequence[JsonObject] = (),
    *,
    open_turn: bool,
) -> str:
    """Render turns as `apply_chat_template` does, but on a fixed date. Raises whatever a template raises."""
    given = {"messages": turns, "tools": list(tools) or None, "documents": None, "add_generation_prompt": open_turn}
    return str(compile_chat_template(template).render({**variables, **given, "strftime_now": _TODAY.strftime}))


@dataclass(frozen=True)
class ChatRenderer(Template):
    """A tokenizer's chat template. Its public methods run it within limits of CPU time and memory."""

    template: str
    tool_template: str  # for conversations with tools; the same for most tokenizers
    variables: JsonObject
    special_tokens: frozenset[str]  # they stay text if the data contains them
    stops: frozenset[str] = frozenset()  # tokens at which generation stops, from tokenizer and generation configuration
    needs_short_ids: bool = False  # whether it requires tool call ids of nine letters or digits
    needs_parts: bool = False  # whether it requires contents as lists of parts, as some multimodal models do
    picture_token: str = ""  # its text for a picture, which the model's processor expands
    dropped: frozenset[str] = frozenset()  # fields of turns that it silently omits
    answer_end: probes.TurnEnd = field(default_factory=probes.TurnEnd)
    call_end: probes.TurnEnd = field(default_factory=probes.TurnEnd)  # of turns with tool calls
    completions: Completions = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "completions", Completions(self, self.stops | {*self.end_tokens}))

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, options: JsonObject, end_tokens: Collection[int] = (), mark: str = ""
    ) -> ChatRenderer:
        """Inspect a tokenizer's template: find which fields of turns it omits, and how it ends turns.

        `end_tokens` are the model's end tokens, at which generation stops; `mark` is the `picture_token`.
        """
        template, tool_template = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])
        added = tokenizer.added_tokens_decoder
        stops = {str(added[token]) for token in end_tokens if token in added} | {tokenizer.eos_token} - {None}
        renderer = cls(
            name_of_template(tokenizer), template + tool_template, template, tool_template,
            variables={**tokenizer.special_tokens_map, **options},
            special_tokens=special_tokens_of(tokenizer) | {mark} - {""},
            stops=frozenset(stops),
            picture_token=mark,
        )  # fmt: skip
        return run_limited(renderer, renderer.inspected)

    def inspected(self) -> ChatRenderer:
        """Return this renderer with its fields set from renderings of small conversations."""
        probes.check_syntax(self.name, {self.template, self.tool_template})
        renderer, in_parts = self, replace(self, needs_parts=True)
        if not renderer.writes_contents() and in_parts.writes_contents():
            renderer = in_parts
        call = Conversation((Message("user", "hi"), Message("assistant", "", tool_calls=(ToolCall("f", {}),))))
        if renderer.try_render(call) is None and renderer.try_render(with_short_ids(call)) is not None:
            renderer = replace(renderer, needs_short_ids=True)
        answer_end, call_end = probes.find_turn_ends(renderer)
        dropped = frozenset(probes.find_dropped(renderer))
        if self.picture_token:
            renderer.render(Conversation((Message("user", f"{PICTURE}hi", pictures=("",)), Message("assistant", "ok"))))
        return replace(renderer, dropped=dropped, answer_end=answer_end, call_end=call_end)

    @property
    def end_tokens(self) -> list[str]:
        """The tokens that end a turn, the one of answers first."""
        return list(dict.fromkeys(end.token for end in (self.answer_end, self.call_end) if end.token))

    def writes_contents(self) -> bool:
        text = self.try_render(probes.CONTENTS) or ""
        has_all = text.count(probes.PROBE) == len(probes.CONTENTS.messages)
        return has_all and "{'type':" not in text  # the parts, not as Python

    def render(self, conversation: Conversation, *, open_turn: bool = False) -> str:
        """Return the text of a conversation; with `open_turn`, followed by the header of an assistant turn."""
        given = with_short_ids(conversation) if self.needs_short_ids else conversation
        return run_limited(self, lambda: self._render(self._turns_of(given), given.tools, open_turn=open_turn))

    def try_render(self, conversation: Conversation, *, open_turn: bool = False) -> str | None:
        """Return the text of a conversation as `render` does; None if the template refuses it."""
        try:
            return self.render(conversation, open_turn=open_turn)
        except DataError:
            return None

    def _turns_of(self, conversation: Conversation) -> list[TemplateTurn]:
        return [for_template(message, in_parts=self.needs_parts) for message in conversation.messages]

    def to_end_of_turn(self, text: str, last: Message) -> str:
        """Cut a text after the end of its last turn: drop line breaks and the end of the conversation."""
        if last.role != "assistant":
            return replace(self.answer_end, opening="").cut(text)
        return (self.call_end if last.tool_calls else self.answer_end).cut(text)

    def renderings(self, conversation: Conversation, data: DataSpec) -> list[Rendering]:
        """Render a conversation so that each trained turn has the form that inference will see.

        At inference, the template renders the turns before an assistant turn, and the model generates the turn. Some
        templates rewrite earlier turns once later ones follow (Qwen 3 drops their thinking, gpt-oss their analysis and
        end token), so one text can't have all turns in that form. Each text therefore ends with a trained turn, and
        contains the earlier trained turns that stay the same.
        """
        return run_limited(self, self._renderings, conversation, data)

    def _renderings(self, conversation: Conversation, data: DataSpec) -> list[Rendering]:
        conversation, has_cuts = self._prepared(conversation)
        turns = self._turns_of(conversation)
        if data.train_on == "all":
            text = self._render(turns, conversation.tools, open_turn=False)
            found = [Rendering(text, self._spans_of_all(text, conversation, turns))]
        else:
            trained = trained_turns(conversation, data.train_on)
            messages = [(each + 1, conversation.messages[each]) for each in trained]
            for turn in (turn for turn, message in messages if message.role == "assistant" and message.pictures):
                what = f"turn {turn}: a trained turn of the assistant has a picture"
                raise DataError(what, meaning="the model writes only text", fix="correct or remove this example")
            found = self._grouped(conversation, turns, trained)
        found = [self._with_pictures(each, conversation) for each in found]
        return [_without_cuts(rendering) for rendering in found] if has_cuts else found

    def _spans_of_all(
        self, text: str, conversation: Conversation, turns: list[TemplateTurn]
    ) -> tuple[tuple[int, int], ...]:
        """Return the spans of a conversation's text without the turns whose own weight excludes them."""
        left_out = [index for index, message in enumerate(conversation.messages) if message.trained is False]
        if not left_out:
            return ((0, len(text)),)
        trained_turns(conversation, [*get_args(Role)])  # refuses a conversation without any
        shown = self._grouped(conversation, turns, left_out)
        if not all(text.startswith(each.text) for each in shown):
            raise DataError(
                "the chat template writes a turn with weight 0 in another way if more turns follow",
                meaning="its tokens in the whole text, which data.train_on: all trains, are not known",
                fix=f"set data.train_on: [{', '.join(get_args(Role))}]",
            )
        edges = [0, *(edge for each in shown for span in each.spans for edge in span), len(text)]
        return tuple((begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end)

    def prompt(self, conversation: Conversation) -> Rendering:
        """Return the text that a model completes. Raises DataError if the template drops some of the conversation."""
        if lost := self._dropped_of(conversation) - {"reasoning"}:  # many templates drop it in earlier turns
            raise DataError(
                f"the chat template drops {', '.join(sorted(lost))}",
                meaning="the model would not see them",
                fix="leave them out, or choose a model with a chat template that writes them",
            )
        return self._with_pictures(Rendering(self.render(conversation, open_turn=True), ()), conversation)

    def _with_pictures(self, rendering: Rendering, conversation: Conversation) -> Rendering:
        """Add the positions of pictures; the text may have only the first turns of the conversation."""
        if not (sources := [source for message in conversation.messages for source in message.pictures]):
            return rendering
        places = (found.start() for found in re.finditer(re.escape(self.picture_token), rendering.text))
        return replace(rendering, pictures=tuple(zip(places, sources, strict=False)))

    def find_unproven(self) -> dict[str, DataError]:
        """Return the shapes of conversations whose labels can't be proven right; rows of such a shape are refused.

        Shapes that the template refuses to render are left out.
        """
        return run_limited(self, self._find_unproven)

    def _find_unproven(self) -> dict[str, DataError]:
        found: dict[str, DataError] = {}
        tried = 0
        for name, conversation in probes.shapes(next(iter(self.end_tokens), "")).items():
            if self.try_render(conversation) is None:
                continue
            tried += 1
            try:
                prepared, _ = self._prepared(conversation)
                self._grouped(prepared, self._turns_of(prepared), trained_turns(prepared, "assistant"))
            except DataError as error:
                found[name] = error
        if found and tried == len(found):
            first = next(iter(found.values()))
            first.what = f"no conversation can be trained on with the chat template: {first.what}"
            raise first
        return found

    def _dropped_of(self, conversation: Conversation) -> set[str]:
        return probes.fields_of(conversation) & self.dropped if self.dropped else set()

    def _prepared(self, conversation: Conversation) -> tuple[Conversation, bool]:
        """Check that the template writes all fields; cut special tokens in texts, and return whether there are any."""
        if lost := self._dropped_of(conversation):
            raise DataError(
                f"the chat template drops {', '.join(sorted(lost))}",
                meaning="the model would be trained on text that differs from the data",
                fix="choose a data.chat_template that writes them, or correct the data",
            )
        if self.needs_short_ids:
            conversation = with_short_ids(conversation)
        pattern = any_of(self.special_tokens)
        given = conversation.messages
        texts = [text for each in given for text in (each.content, each.reasoning or "")]
        texts += _strings([*(call.arguments for each in given for call in each.tool_calls), *conversation.tools])
        if not any(map(pattern.search, texts)):
            return conversation, False
        if any(_CUT in text for text in texts):
            raise DataError("the text has U+FDD0, which is not a character", fix="correct or remove this example")
        messages = tuple(
            replace(
                message,
                content=_cut(message.content, pattern),
                reasoning=_cut(message.reasoning, pattern),
                tool_calls=tuple(replace(call, arguments=_cut(call.arguments, pattern)) for call in message.tool_calls),
            )
            for message in given
        )
        return replace(conversation, messages=messages, tools=tuple(_cut(list(conversation.tools), pattern))), True

    def _render(self, turns: Sequence[TemplateTurn], tools: Sequence[JsonObject], *, open_turn: bool) -> str:
        template = self.tool_template if tools else self.template
        try:
            text = render_turns(template, self.variables, turns, tools, open_turn=open_turn)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything: Jinja's errors, its own, Python's
            roles = [turn["role"] for turn in turns[:MAX_SHOWN_ROLES]] + ["…"] * (len(turns) > MAX_SHOWN_ROLES)
            raise probes.explain_failure(error, ", ".join(roles) or "(none)") from error
        if len(text) > MAX_TEXT:
            raise LimitReachedError(f"writes {len(text):,} characters")
        contents = (turn["content"] for turn in turns if isinstance(turn["content"], list))
        num_pictures = sum(part["type"] == "image" for content in contents for part in content)
        num_tokens = text.count(self.picture_token) if self.picture_token else 0
        if num_tokens != num_pictures:
            raise DataError(
                f"the chat template writes {plural(num_tokens, 'token')} {self.picture_token!r} for "
                f"{plural(num_pictures, 'picture')}",
                meaning="it is not the template of this multimodal model, or the model is one of text",
                fix="set data.chat_template=model, or choose a model whose template writes pictures",
            )
        return text

    def _grouped(
        self, conversation: Conversation, turns: list[TemplateTurn], trained: Sequence[int]
    ) -> list[Rendering]:
        """Return the fewest texts, each ending with a trained turn, that show all trained turns as at inference."""
        in_windows = self._in_windows(conversation, turns, trained) if len(turns) > _WINDOW else None
        if in_windows is not None:
            return [in_windows]
        found: list[Rendering] = []
        for turn in trained:
            text, begin = self._through(conversation, turns, range(turn + 1))
            spans: tuple[tuple[int, int], ...] = ((begin, len(text)),)
            if found and text.startswith(found[-1].text):
                spans = (*found.pop().spans, *spans)
            found.append(Rendering(text, spans))
        return found

    def _in_windows(
        self, conversation: Conversation, turns: list[TemplateTurn], trained: Sequence[int]
    ) -> Rendering | None:
        """Render a long conversation in time linear in its turns.

        Each turn is rendered with the leading system turns and the turns just before it. Returns None unless the
        concatenated pieces equal the rendering of the whole conversation, and the text before the last trained turn
        equals the inference prompt.
        """
        messages, tools = conversation.messages, conversation.tools
        parts, length, spans, done = list[str](), 0, [], 0
        for turn in trained:
            context = _context(turns, done)
            try:
                before = self._render([turns[each] for each in context], tools, open_turn=False) if context else ""
                before = self.to_end_of_turn(before, messages[context[-1]]) if context else before
                through, begin = self._through(conversation, turns, [*context, *range(done, turn + 1)])
            except DataError:
                return None
            if not through.startswith(before) or begin < len(before):
                return None
            parts.append(through[len(before) :])
            spans.append((length + begin - len(before), length + len(parts[-1])))
            length, done = length + len(parts[-1]), turn + 1
        text = "".join(parts)
        expected = self._render(turns[:done], tools, open_turn=False)
        is_same = self.to_end_of_turn(expected, messages[done - 1]) == text
        last = trained[-1]
        if is_same and messages[last].role == "assistant":
            is_same = text[: spans[-1][0]] == self._render(turns[:last], tools, open_turn=True)
        return Rendering(text, tuple(spans)) if is_same else None

    def _through(
        self, conversation: Conversation, turns: Sequence[TemplateTurn], chosen: Sequence[int]
    ) -> tuple[str, int]:
        """Return the text of chosen turns up to the end of the last one, and the start of the last one in the text.

        The text before an assistant turn is the inference prompt.
        """
        rendered, tools = [turns[each] for each in chosen], conversation.tools
        last = conversation.messages[chosen[-1]]
        text = self.to_end_of_turn(self._render(rendered, tools, open_turn=False), last)
        is_assistant = last.role == "assistant"
        if len(chosen) == 1:
            if is_assistant:
                raise DataError(
                    "the conversation starts with an assistant turn, so the start of its completion is unknown",
                    meaning="a chat template opens an assistant turn after earlier turns",
                    fix="put a system or user turn before it, remove this example, or set data.train_on to 'all'",
                )
            return text, 0
        before = self._render(rendered[:-1], tools, open_turn=is_assistant)
        if is_assistant:
            start = self.completions.find(conversation, chosen, before, text)
            return (text, start) if text.startswith(before) else (before + text[start:], len(before))
        before = self.to_end_of_turn(before, conversation.messages[chosen[-2]])
        if not text.startswith(before):
            raise DataError(
                f"turn {chosen[-1] + 1}: the chat template rewrites the turns before it, so its start is unknown",
                fix="set data.train_on to 'assistant' or 'last', or choose another data.chat_template",
            )
        return text, len(before)


def name_of_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a tokenizer's chat template in errors."""
    return f"the chat template of '{source}'" if (source := tokenizer.name_or_path) else "the chat template"


def _context(turns: list[TemplateTurn], end: int) -> list[int]:
    """Return the turns before `end`: all, or the leading system turns and the last turns, starting at a user turn."""
    if end <= _WINDOW:
        return list(range(end))
    system = takewhile(lambda each: turns[each]["role"] == "system", range(_WINDOW))
    recent = range(end - _WINDOW, end)
    first_user = next((each for each in recent if turns[each]["role"] == "user"), recent[0])
    return [*system, *range(first_user, end)]


def _without_cuts(rendering: Rendering) -> Rendering:
    places = [found.start() for found in re.finditer(_CUT, rendering.text)]
    spans = tuple(
        (begin - bisect_left(places, begin), end - bisect_left(places, end)) for begin, end in rendering.spans
    )
    cuts = tuple(place - number for number, place in enumerate(places))
    pictures = tuple((place - bisect_left(places, place), source) for place, source in rendering.pictures)
    return Rendering(rendering.text.replace(_CUT, ""), spans, cuts, pictures)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def _cut(value: Any, pattern: re.Pattern[str]) -> Any:
    """Insert a cut after the first character of each special token in texts, at any depth."""
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + _CUT + found[0][1:], value)
    if isinstance(value, dict):
        return {_cut(key, pattern): _cut(inner, pattern) for key, inner in value.items()}
    return [_cut(inner, pattern) for inner in value] if isinstance(value, list) else value
