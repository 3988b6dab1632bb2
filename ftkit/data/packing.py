"""Tokenized documents, their assignment to packs in windows, and the order of packs in training."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of a token that does not count in the loss: PyTorch's default `ignore_index`."""
TRAINED: Final = np.uint32(1 << 31)  # bit of a stored token that marks it as trained
REJECTED: Final = np.uint16(1 << 15)
"""Bit of a stored document's source that marks the rejected side of a pair, or an undesirable completion."""


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized rendering.

    `tokens` and `labels` have the same length; `labels[i]` is the token that the model should predict
    after `tokens[i]`, or `IGNORED`. The last token has no label, since the next token belongs to another document.
    With `start` > 0, the document begins with the first `start` tokens of the preceding document, which are not
    repeated here. `pictures` is the record of the arrays of its pictures; empty if it has none.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    is_text: bool = False
    is_rejected: bool = False
    start: int = 0
    pictures: bytes = b""

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORED).sum())


def shorten(document: Document, length: int, too_long: str, end_of_turn: int | None) -> list[Document]:
    """Apply `data.too_long` to a document; one that fits is returned unchanged.

    `drop` and `error` return no document. `truncate` cuts after the last trained turn that fits; it returns none if no
    turn fits or if the document has pictures. Plain text is cut anywhere, and only plain text can be `split`: each part
    begins with the last token of the one before, so every token is a label once.
    `end_of_turn` marks the ends of turns in documents that are trained on all tokens.
    """
    if len(document.tokens) <= length:
        return [document]
    if too_long in ("drop", "error") or document.pictures:
        return []
    if document.is_text:
        starts = range(0, len(document.tokens) - 1, max(1, length - 1)) if too_long == "split" else (0,)
        return [_part(document, start, min(start + length, len(document.tokens))) for start in starts]
    counts = np.append(False, document.labels != IGNORED)
    last_of_turn = counts[:-1] & (~counts[1:] | (document.tokens == end_of_turn))
    ends = np.flatnonzero(last_of_turn[:length]) + 1
    return [_part(document, 0, int(ends[-1]))] if len(ends) else []


def _part(document: Document, start: int, end: int) -> Document:
    labels = document.labels[start:end].copy()
    labels[-1] = IGNORED
    return Document(document.tokens[start:end], labels, document.is_text)


def share_prompts(documents: Sequence[Document]) -> list[Document]:
    """Return both sides of pairs in turn, without the shared beginning in the rejected side.

    The last token of the prompt is not shared: each side predicts its first trained token from its own copy.
    """
    return [_rest_of(each, documents[place - 1]) if each.is_rejected else each for place, each in enumerate(documents)]


def _rest_of(rejected: Document, chosen: Document) -> Document:
    num = min(len(chosen.tokens), len(rejected.tokens))
    is_shared = chosen.tokens[:num] == rejected.tokens[:num]
    for side in (chosen, rejected):
        is_shared &= side.labels[:num] == IGNORED
    start = int(is_shared.argmin())
    return replace(rejected, tokens=rejected.tokens[start:], labels=rejected.labels[start:], start=start)


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents."""

    tokens: NDArray[np.uint32]  # of all documents; with the bit `TRAINED` on tokens in the loss
    lengths: NDArray[np.int64]
    sources: NDArray[np.uint16]
    """Index of each document's source in `data.source`; with the bit `REJECTED` on the second document of each pair."""
    starts: NDArray[np.int64]  # tokens that each document shares with the one before it, `Document.start`
    records: NDArray[np.int64]
    """[documents, 2]: begin and end of the record of each document's pictures; equal if it has none."""
    pictures: bytes = field(default=b"", kw_only=True)
    """The records; empty once `PackWriter.keep_pictures` has written them to a file."""

    @classmethod
    def of(cls, documents: Sequence[Document], source: int = 0) -> Self:
        lengths = np.array([len(document.tokens) for document in documents], np.int64)
        tokens = np.empty(lengths.sum(dtype=np.int64), np.uint32)
        end = 0
        for document in documents:
            begin, end = end, end + len(document.tokens)
            tokens[begin:end] = document.tokens
            tokens[begin + 1 : end][document.labels[:-1] != IGNORED] |= TRAINED
        sides = np.array([REJECTED if document.is_rejected else 0 for document in documents], np.uint16)
        starts = np.array([document.start for document in documents], np.int64)
        sizes = np.array([len(document.pictures) for document in documents], np.int64)
        records = np.cumsum(sizes)[:, None] - np.stack([sizes, np.zeros_like(sizes)], axis=1)
        pictures = b"".join(document.pictures for document in documents)
        return cls(tokens, lengths, sides | np.uint16(source), starts, records, pictures=pictures)

    @classmethod
    def join(cls, batches: Sequence[DocumentBatch]) -> DocumentBatch:
        if len(batches) == 1:
            return batches[0]
        begins = np.cumsum([0, *(len(batch.pictures) for batch in batches)])
        rows = (
            (batch.tokens, batch.lengths, batch.sources, batch.starts, batch.records + begin)
            for batch, begin in zip(batches, begins, strict=False)
        )
        pictures = b"".join(batch.pictures for batch in batches)
        return DocumentBatch(*map(np.concatenate, zip(*rows, strict=True)), pictures=pictures)

    @property
    def num_rejected(self) -> int:
        return int((self.sources >= REJECTED).sum())

    def count_tokens(self, source: int) -> tuple[int, int]:
        """Return the tokens of a source, and how many of them count in the loss."""
        is_from_source = np.repeat(self.sources & ~REJECTED == source, self.lengths)
        return int(is_from_source.sum()), int((self.tokens[is_from_source] >= TRAINED).sum())

    def take(self, indices: Sequence[int]) -> DocumentBatch:
        ends = np.cumsum(self.lengths)
        begins = ends - self.lengths
        pieces = [self.tokens[begins[index] : ends[index]] for index in indices]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        at = np.asarray(indices, np.int64)
        lengths, sources, starts, records = self.lengths[at], self.sources[at], self.starts[at], self.records[at]
        return DocumentBatch(tokens, lengths, sources, starts, records, pictures=self.pictures)

    @cached_property
    def digests(self) -> list[bytes]:
        """The SHA-256 of each document, over its tokens with the bit `TRAINED` and its pictures."""
        tokens, pictures = self.tokens.astype("<u4", copy=False), memoryview(self.pictures)
        ends = np.cumsum(self.lengths)
        bounds = zip(ends - self.lengths, ends, self.records, strict=True)
        return [
            sha256(tokens[begin:end].tobytes() + pictures[first:last]).digest() for begin, end, (first, last) in bounds
        ]


WINDOW_TOKENS = 8 << 20  # tokens of a window: 32 MiB, with enough documents to fill the packs
_MIN_PACKS_OF_WINDOW = 128
_FULL = 0.995  # minimum fill ratio; documents of packs below it wait for the next window
_MAX_WAITING = 0.5
"""Maximum fraction of a window that waits. With 0.25 and documents as long as packs, 0.3% of tokens are padding."""

MIN_WIDTH = 128
"""Minimum width of padded rows. Flex attention has no training kernel for fewer tokens."""


def assign_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign documents to packs by best-fit decreasing; deterministic for the same lengths.

    Every document is in exactly one pack, and no pack is longer than `capacity`. Best fit needs at most 11/9 OPT + 1
    packs (Johnson 1974).
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a document of {max(lengths)} tokens does not fit a pack of {capacity}")
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        tightest = bisect_left(free, (length, -1))
        if tightest == len(free):
            left, pack = capacity, len(packs)
            packs.append([])
        else:
            left, pack = free.pop(tightest)
        packs[pack].append(document)
        if left > length:
            insort(free, (left - length, pack))
    return packs


def build_pack(documents: Sequence[Document], length: int) -> NDArray[np.int32]:
    """Concatenate documents: int32 [3, length] of tokens, labels, positions, as `PackStore.read` returns them."""
    pack = np.empty((3, length), dtype=np.int32)
    pack[0], pack[1] = documents[0].tokens[0], IGNORED
    start = 0
    for document in documents:
        end = start + len(document.tokens)
        pack[0, start:end] = document.tokens
        pack[1, start:end] = document.labels
        pack[2, start:end] = np.arange(end - start)
        start = end
    pack[2, start:] = np.arange(length - start)
    return pack


@dataclass
class Packer:
    """Packs a stream of documents, one window in memory at a time; the result depends on the documents alone.

    Documents of packs that are not full wait for the next window, so window boundaries add little padding. The
    documents of a sample stay in one pack.
    """

    capacity: int
    window_tokens: int = 0
    documents_per_sample: int = 1
    _waiting: list[DocumentBatch] = field(default_factory=list)
    _num_tokens: int = 0

    def __post_init__(self) -> None:
        self.window_tokens = self.window_tokens or max(WINDOW_TOKENS, _MIN_PACKS_OF_WINDOW * self.capacity)

    def add(self, documents: DocumentBatch) -> Iterator[tuple[DocumentBatch, list[int]]]:
        """Add documents; yield the documents of full packs in order, and the number of documents in each pack."""
        self._waiting.append(documents)
        self._num_tokens += len(documents.tokens)
        if self._num_tokens >= self.window_tokens:
            yield from self._pack(is_last=False)

    def finish(self) -> Iterator[tuple[DocumentBatch, list[int]]]:
        if self._num_tokens:
            yield from self._pack(is_last=True)

    def _pack(self, *, is_last: bool) -> Iterator[tuple[DocumentBatch, list[int]]]:
        window = DocumentBatch.join(self._waiting)
        num = self.documents_per_sample
        lengths = window.lengths.reshape(-1, num).sum(axis=1).tolist()
        packs = assign_packs(lengths, self.capacity)
        waiting: list[int] = []
        if not is_last:
            done, left = [], _MAX_WAITING * self.window_tokens
            for pack in reversed(packs):  # the packs opened last are the emptiest
                size = sum(lengths[index] for index in pack)
                if size < _FULL * self.capacity and left >= size:
                    left -= size
                    waiting += pack
                else:
                    done.append(pack)
            packs = done[::-1]
        self._waiting = [window.take(_documents_of(sorted(waiting), num))]
        self._num_tokens = len(self._waiting[0].tokens)
        if packs:
            chosen = _documents_of((index for pack in packs for index in pack), num)
            yield window.take(chosen), [num * len(pack) for pack in packs]


def _documents_of(samples: Iterable[int], num: int) -> list[int]:
    return [num * sample + place for sample in samples for place in range(num)]


def row_width(length: int, longest: int) -> int:
    """Return the width of a document's padded row, at most `longest`. There are few widths, to limit recompilation."""
    width = longest
    while (half := -(-width // 2)) >= max(length, MIN_WIDTH):
        width = half
    return width


def count_row_tokens(lengths: NDArray[np.int64], longest: int) -> int:
    """Return the total tokens, padding included, of one row per document."""
    distinct, counts = np.unique(lengths, return_counts=True)
    return sum(row_width(int(length), longest) * int(count) for length, count in zip(distinct, counts, strict=True))


def document_begins(positions: NDArray[np.signedinteger]) -> NDArray[np.bool_]:
    """Return a mask of the first tokens of documents, where positions restart: [..., T] -> [..., T]."""
    begins: NDArray[np.bool_] = np.diff(positions, prepend=-2) != 1
    return begins


def visible_until(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return for each token of packs the index of the first later token that can't attend to it: [P, T] -> [P, T].

    This is the end of its document, or of the next document if that document shares the prompt. One number per token
    thus encodes a tree mask (FlashMask: Wang et al. 2024).
    """
    until = np.empty_like(positions)
    for row, own in zip(until, positions, strict=True):
        begins = np.flatnonzero(document_begins(own))
        ends = np.append(begins[1:], len(own))
        row[:] = np.repeat(ends, ends - begins)
        for number in np.flatnonzero(own[begins]):
            first = begins[number - 1]
            row[first : first + own[begins[number]]] = ends[number]
    return until


def find_padding(packs: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask of the padding of packs: the repeated token at the end, without labels. [B, 4, T] -> [B, T]."""
    tokens, labels, positions = packs[:, 0], packs[:, 1], packs[:, 2]
    place = np.arange(packs.shape[2])
    is_last = place >= np.where(positions == 0, place, 0).max(axis=1, keepdims=True)
    is_blank = (labels == IGNORED) & (tokens == tokens[:, -1:])
    is_padding: NDArray[np.bool_] = is_last & (is_blank | ~is_last).all(axis=1, keepdims=True)
    return is_padding


def mismatch_completions(packs: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return packs with each prompt followed by the completion of another prompt of its pack: int32 [P, 4, L].

    The order of documents and the length of packs stay the same. Each prompt gets the completion of the next document,
    as in KTO (Ethayarajh et al. 2024). If prompts repeat, documents are sorted by prompt and shifted by the count of
    the most frequent prompt. `REJECTED` marks documents that still have a completion of their own prompt.
    """
    mismatched = packs.copy()
    for pack, (tokens, labels, positions, sources) in zip(mismatched, packs, strict=True):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        spans = [(begin, np.flatnonzero(labels[begin:end] != IGNORED), end) for begin, end in pairwise(starts)]
        parts = [(begin, begin + int(found[0]) + 1, end) for begin, found, end in spans if len(found)]
        prompts = [tokens[begin:cut].tobytes() for begin, cut, _ in parts]
        first = dict(zip(reversed(prompts), reversed(range(len(prompts))), strict=True))
        order = sorted(range(len(prompts)), key=lambda number: first[prompts[number]])
        distance = max(Counter(prompts).values(), default=0)
        other = {one: order[(place + distance) % len(order)] for place, one in enumerate(order)}
        start = 0
        for number, (begin, cut, _) in enumerate(parts):
            _, middle, last = parts[other[number]]
            end = start + cut - begin + last - middle
            pack[0, start:end] = np.append(tokens[begin:cut], tokens[middle:last])
            pack[1, start:end] = np.append(labels[begin : cut - 1], labels[middle - 1 : last])
            pack[2, start:end] = np.arange(end - start)
            is_own = prompts[number] == prompts[other[number]]
            pack[3, start:end] = sources[begin] & ~REJECTED | (REJECTED if is_own else 0)
            start = end
    return mismatched


@lru_cache(maxsize=2)
def _permutation(num_packs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_packs)


def pack_at(index: int, num_packs: int, seed: int) -> int:
    """Return the number of the `index`-th pack in training order, counting over all epochs.

    Each pack occurs once in each epoch. The order is independent of world size, batch size and restarts, so a run that
    continues on another number of GPUs sees each pack as often as an uninterrupted run.
    """
    epoch, position = divmod(index, num_packs)
    return int(_permutation(num_packs, seed, epoch)[position])
