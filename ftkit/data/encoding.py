"""From conversations to tokens, with a mark on each token that counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftkit.data.conversations import Message
from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED = -100
"""The label of a token that does not count: PyTorch's default `ignore_index`."""
_WINDOW = 16
_ROLES_SHOWN = 8

_SHORT_CONVERSATION = (Message("user", "Hello"), Message("assistant", "Hello"))


@dataclass(frozen=True)
class Document:
    """One conversation as tokens.

    `tokens` and `labels` have the same length; `labels[i]` is the token that the model should say
    after `tokens[i]`, or `IGNORED`. The last token has no label: what follows is another document.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


def render(tokenizer: Any, messages: Sequence[Message], *, open_answer: bool) -> str:
    """Return the text of a conversation; with `open_answer`, up to where the assistant begins to speak.

    Raises:
        DataError: the chat template does not take it.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=open_answer))
    except Exception as error:  # a template may raise anything: Jinja's errors, its own, Python's
        roles = [message.role for message in messages[:_ROLES_SHOWN]] + ["…"] * (len(messages) > _ROLES_SHOWN)
        raise DataError(
            f"the chat template can't render the turns {', '.join(roles) or '(none)'}: {one_line(error)}",
            meaning="most templates want at most one system turn, then user and assistant in turn, user first",
            fix="correct or remove this example, or choose another data.chat_template",
        ) from error


def _render_to_end(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Return the text of a conversation to the end of its last turn, without the line breaks that follow it."""
    return render(tokenizer, messages, open_answer=False).rstrip()


def find_answer_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after an assistant turn.

    It is the last label of each turn that is trained, so it is what ends an answer of the trained model, in evaluation
    and wherever the model goes: not the tokenizer's `eos_token`, which base models have for the end of a text.

    Returns:
        None: the template ends a turn with ordinary text.
    """
    text = _render_to_end(tokenizer, _SHORT_CONVERSATION)
    last: int = tokenizer(text, add_special_tokens=False)["input_ids"][-1]
    return last if last in tokenizer.added_tokens_decoder else None


def encode(tokenizer: Any, messages: Sequence[Message], *, all_tokens: bool) -> Document:
    """Tokenize a conversation.

    What counts is all, or each assistant turn with its end-of-turn token. Turns are found by rendering what comes
    before each of them, so any chat template works that only ever adds text.

    Raises:
        DataError: the template refuses the conversation or rewrites earlier turns, the assistant speaks first, or there
            is nothing to train on.
    """
    text = render(tokenizer, messages, open_answer=False)
    spans = [(0, len(text))] if all_tokens else _assistant_spans(tokenizer, messages, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
    begins, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    # Of the spans, which are in order, the last that begins at or before a token is the one that may hold it.
    last = np.searchsorted(begins, starts, side="right") - 1
    counts = (last >= 0) & (starts < np.append(ends, 0)[last])
    labels = np.full(len(tokens), IGNORED, dtype=np.int32)
    labels[:-1] = np.where(counts[1:], tokens[1:], IGNORED)
    document = Document(tokens, labels)
    if document.num_targets == 0:
        raise DataError(
            f"a conversation has nothing to train on: {text[:80]!r}",
            meaning="it has no assistant turn, or an empty one",
            fix="correct data.format, or leave such examples out",
        )
    return document


def _assistant_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Return where each assistant turn begins and ends in the text, end-of-turn token included.

    Rendering all that comes before each turn would take time in the square of their number, so after `_WINDOW`
    turns what comes before is the leading system turn and the turns just before. What they add is compared with
    the text, piece after piece: a template to which the distance matters is refused, not misread.
    """
    if messages[0].role == "assistant":
        raise DataError(
            "the conversation starts with the assistant, so nothing tells where its words begin",
            meaning="a chat template opens an answer to what was said before",
            fix="put a system or user turn before it, remove this example, or set data.train_on to 'all'",
        )
    spans: list[tuple[int, int]] = []
    position = begin = 0  # the text and the turns that were dealt with
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        context = _context(messages, begin)
        done = _render_to_end(tokenizer, context) if context else ""
        before = render(tokenizer, [*context, *messages[begin:index]], open_answer=True)
        through = _render_to_end(tokenizer, [*context, *messages[begin : index + 1]])
        added = through[len(done) :]
        if not (before.startswith(done) and through.startswith(before) and text.startswith(added, position)):
            raise DataError(
                "the chat template rewrites earlier turns, so the assistant's words can't be told from the rest",
                fix="set data.train_on to 'all', or choose another data.chat_template",
            )
        spans.append((position + len(before) - len(done), position + len(added)))
        position, begin = position + len(added), index + 1
    return spans


def _context(messages: Sequence[Message], end: int) -> Sequence[Message]:
    """Return the turns before `end`; of many, the leading system turns and the last ones, from a user's turn on."""
    if end <= _WINDOW:
        return messages[:end]
    system = list(takewhile(lambda message: message.role == "system", messages[:_WINDOW]))
    recent = messages[end - _WINDOW : end]
    first_user = next((index for index, message in enumerate(recent) if message.role == "user"), 0)
    return [*system, *recent[first_user:]]
