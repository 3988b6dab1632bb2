"""Pack whole documents into packs of a fixed length, one window of documents at a time; the order of training."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ftkit.data.documents import IGNORED, DocumentBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ftkit.data.documents import Document

WINDOW_TOKENS = 8 << 20
"""Tokens of a window: 32 MiB, with enough documents to fill the packs."""
_MIN_PACKS_OF_WINDOW = 128
_FULL = 0.995
"""Minimum fill ratio; the documents of an emptier pack wait for the next window."""
_MAX_WAITING = 0.5
"""Fraction of a window that may wait. With documents as long as a pack, a quarter would waste 0.3% of the tokens."""

MIN_WIDTH = 128
"""Minimum width of padded rows. Flex attention has no training kernel for fewer tokens."""


def assign_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign documents to packs by best-fit decreasing; deterministic for the same lengths.

    Every document is in exactly one pack, and no pack is longer than `capacity`. Best fit needs at most 11/9 OPT + 1
    packs (Johnson 1974).

    Raises:
        ValueError: a document is longer than `capacity`.
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
    """Packs a stream of documents in the memory of one window; the result depends on the documents alone.

    Documents of packs that are not full wait for the next window, so windows waste no tokens.
    """

    capacity: int
    window_tokens: int = 0
    _waiting: list[DocumentBatch] = field(default_factory=list)
    _num_tokens: int = 0

    def __post_init__(self) -> None:
        self.window_tokens = self.window_tokens or max(WINDOW_TOKENS, _MIN_PACKS_OF_WINDOW * self.capacity)

    def add(self, documents: DocumentBatch) -> Iterator[tuple[DocumentBatch, list[int]]]:
        """Add documents; yield those of full packs, in order, and the number in each pack."""
        self._waiting.append(documents)
        self._num_tokens += len(documents.tokens)
        if self._num_tokens >= self.window_tokens:
            yield from self._pack(is_last=False)

    def finish(self) -> Iterator[tuple[DocumentBatch, list[int]]]:
        """Yield the remaining packs."""
        if self._num_tokens:
            yield from self._pack(is_last=True)

    def _pack(self, *, is_last: bool) -> Iterator[tuple[DocumentBatch, list[int]]]:
        window = DocumentBatch.join(self._waiting)
        lengths = window.lengths.tolist()
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
        self._waiting = [window.take(sorted(waiting))]
        self._num_tokens = len(self._waiting[0].tokens)
        if packs:
            yield window.take([index for pack in packs for index in pack]), [len(pack) for pack in packs]


def row_width(length: int, longest: int) -> int:
    """Return the width of a document's padded row, for packs of `longest` tokens: few widths, so few compilations."""
    width = longest
    while (half := -(-width // 2)) >= max(length, MIN_WIDTH):
        width = half
    return width


def count_row_tokens(lengths: NDArray[np.int64], longest: int) -> int:
    """Return the tokens of all rows, padding included, if each document had its own row."""
    distinct, counts = np.unique(lengths, return_counts=True)
    return sum(row_width(int(length), longest) * int(count) for length, count in zip(distinct, counts, strict=True))


def find_padding(packs: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask of the padding of packs: the repeated token at the end, without labels. [B, 4, T] -> [B, T]."""
    tokens, labels, positions = packs[:, 0], packs[:, 1], packs[:, 2]
    place = np.arange(packs.shape[2])
    last_start = np.where(positions == 0, place, 0).max(axis=1, keepdims=True)
    is_last = place >= last_start
    is_blank = (labels == IGNORED) & (tokens == tokens[:, -1:])
    is_padding: NDArray[np.bool_] = is_last & (is_blank | ~is_last).all(axis=1, keepdims=True)
    return is_padding


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
