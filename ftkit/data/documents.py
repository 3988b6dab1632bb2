"""Tokenized documents: tokens and labels, one by one and in batches."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IGNORED = -100
"""The label of a token that does not count in the loss: PyTorch's default `ignore_index`."""
TRAINED: Final = np.uint32(1 << 31)
"""Bit of a stored token that marks it as trained."""


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized rendering.

    `tokens` and `labels` have the same length; `labels[i]` is the token that the model should predict
    after `tokens[i]`, or `IGNORED`. The last token has no label, since the next token belongs to another document.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    is_text: bool = False

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


def shorten(document: Document, length: int, too_long: str, end_of_turn: int | None) -> list[Document]:
    """Apply `data.too_long` to a document; one that fits is returned unchanged.

    Args:
        document: the document.
        length: maximum tokens.
        too_long: `drop`; `truncate`, after the last trained turn that fits, or a text anywhere; `split`, text only.
        end_of_turn: the token that ends an assistant turn, for documents that are trained on all tokens.

    Returns:
        an empty list if the document is dropped, or if its first trained turn does not end within `length`.
    """
    if len(document.tokens) <= length:
        return [document]
    if too_long == "drop":
        return []
    if document.is_text:
        starts = range(0, len(document.tokens) - 1, length) if too_long == "split" else (0,)
        return [_part(document, start, min(start + length, len(document.tokens))) for start in starts]
    counts = np.append(False, document.labels != IGNORED)
    last_of_turn = counts[:-1] & (~counts[1:] | (document.tokens == end_of_turn))
    ends = np.flatnonzero(last_of_turn[:length]) + 1
    return [_part(document, 0, int(ends[-1]))] if len(ends) else []


def _part(document: Document, start: int, end: int) -> Document:
    labels = document.labels[start:end].copy()
    labels[-1] = IGNORED
    return Document(document.tokens[start:end], labels, document.is_text)


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents.

    Attributes:
        tokens: uint32, the documents one after another; with the bit `TRAINED` on tokens in the loss.
        lengths: int64, tokens of each document.
        sources: uint16, the source of each document, as its index in `data.source`.
    """

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    sources: NDArray[np.uint16]

    @classmethod
    def of(cls, documents: Sequence[Document], source: int = 0) -> Self:
        """Return documents of one source."""
        lengths = np.array([len(document.tokens) for document in documents], np.int64)
        tokens = np.empty(lengths.sum(dtype=np.int64), np.uint32)
        end = 0
        for document in documents:
            begin, end = end, end + len(document.tokens)
            tokens[begin:end] = document.tokens
            tokens[begin + 1 : end][document.labels[:-1] != IGNORED] |= TRAINED
        return cls(tokens, lengths, np.full(len(documents), source, np.uint16))

    @classmethod
    def join(cls, batches: Sequence[DocumentBatch]) -> DocumentBatch:
        """Concatenate batches."""
        if len(batches) == 1:
            return batches[0]
        columns = zip(*((batch.tokens, batch.lengths, batch.sources) for batch in batches), strict=True)
        return DocumentBatch(*map(np.concatenate, columns))

    def count_tokens(self, source: int) -> tuple[int, int]:
        """Return the tokens of a source, and how many of them count in the loss."""
        if (self.sources == source).all():
            return len(self.tokens), int((self.tokens >= TRAINED).sum())
        is_from_source = np.repeat(self.sources == source, self.lengths)
        return int(is_from_source.sum()), int((self.tokens[is_from_source] >= TRAINED).sum())

    def take(self, indices: Sequence[int]) -> DocumentBatch:
        """Return some of the documents, in the order of `indices`."""
        ends = np.cumsum(self.lengths)
        begins = ends - self.lengths
        pieces = [self.tokens[begins[index] : ends[index]] for index in indices]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        chosen = np.asarray(indices, np.int64)
        return DocumentBatch(tokens, self.lengths[chosen], self.sources[chosen])

    def digests(self) -> Iterator[bytes]:
        """Yield the SHA-256 of each document: of its tokens, some of them marked as trained."""
        tokens = self.tokens.astype("<u4", copy=False)
        ends = np.cumsum(self.lengths)
        for begin, end in zip(ends - self.lengths, ends, strict=True):
            yield sha256(tokens[begin:end].data).digest()
