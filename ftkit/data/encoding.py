"""From conversations to tokens, with a mark on each token that counts in the loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.data.conversations import Message

IGNORED = -100
"""The label of a token that does not count: PyTorch's default `ignore_index`."""


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
    """Return the text of a conversation; with `open_answer`, up to where the assistant begins to speak."""
    turns = [asdict(message) for message in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=open_answer))


def encode(tokenizer: Any, messages: Sequence[Message], *, all_tokens: bool) -> Document:
    """Tokenise a conversation.

    What counts is all, or each assistant turn with its end-of-turn token. Turns are found by rendering the
    conversation up to each of them, so any chat template works that only ever adds text.

    Raises:
        DataError: the template rewrites earlier turns, or there is nothing to train on.
    """
    text = render(tokenizer, messages, open_answer=False)
    spans = [(0, len(text))] if all_tokens else _assistant_spans(tokenizer, messages, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    counts = np.zeros(len(tokens), dtype=bool)
    for begin, end in spans:
        counts |= (starts >= begin) & (starts < end)
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
    """Return where each assistant turn begins and ends in the text, end-of-turn token included."""
    spans = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = render(tokenizer, messages[:index], open_answer=True)
        through = render(tokenizer, messages[: index + 1], open_answer=False).rstrip()
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                "the chat template rewrites earlier turns, so the assistant's words can't be told from the rest",
                fix="set data.train_on to 'all', or choose another data.chat_template",
            )
        spans.append((len(before), len(through)))
    return spans
