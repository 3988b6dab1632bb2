"""Documents of packs as padded rows, for models that can't isolate packed documents.

A step takes the same packs either way, and its loss is a sum over the same tokens: order, resuming and world size don't
depend on it. Only the computation differs: each document becomes one row, padded on the right to the width of its
micro-batch. Documents are sorted by length within the step, so that rows of a micro-batch have similar lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ftkit.data.encoding import IGNORED
from ftkit.data.packing import find_padding, row_width


@dataclass(frozen=True)
class PaddedRows:
    """Rows of one document each.

    Attributes:
        values: int32 [B, R, T], the rows of packs (tokens, labels, positions, ...) with padding on the right: a token
            of the data, as in packs.
        lengths: int64 [B], tokens of each row's document; 0 for a row without one.
        offsets: int64 [B], of each row's first token among those of the packs, one after the other.
    """

    values: NDArray[np.int32]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]


def pad_documents(packs: NDArray[np.int32], tokens_per_micro_batch: int, num_ranks: int) -> list[PaddedRows]:
    """Divide the documents of packs into micro-batches of padded rows.

    Widths are the packs' length, half of it, a quarter and so on, so that only a few shapes are compiled; rows times
    width is at most `tokens_per_micro_batch`.

    Args:
        packs: int32 [P, R, T], at least one pack; those of all ranks.
        tokens_per_micro_batch: tokens of a micro-batch, T or more.
        num_ranks: the number of micro-batches is a multiple of it, at least one each. The last ones may be empty.
    """
    documents = _find_documents(packs)
    documents.sort(key=lambda each: (each.begin - each.end, each.pack, each.begin))
    groups: list[PaddedRows] = []
    while documents or not groups or len(groups) % num_ranks:
        width = row_width(documents[0].length if documents else 1, packs.shape[2])
        num_rows = tokens_per_micro_batch // width
        groups.append(_pad(packs, documents[:num_rows], num_rows, width))
        documents = documents[num_rows:]
    return groups


@dataclass(frozen=True)
class _Span:
    """A document in a pack."""

    pack: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def _find_documents(packs: NDArray[np.int32]) -> list[_Span]:
    is_padding = find_padding(packs)
    found = []
    for pack, positions in enumerate(packs[:, 2]):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        found += [_Span(pack, begin, end) for begin, end in pairwise(starts) if not is_padding[pack, begin]]
    return found


def _pad(packs: NDArray[np.int32], documents: list[_Span], num_rows: int, width: int) -> PaddedRows:
    values = np.zeros((num_rows, packs.shape[1], width), dtype=np.int32)
    values[:, 0], values[:, 1] = packs[0, 0, 0], IGNORED
    values[:, 2] = np.arange(width)
    lengths, offsets = np.zeros((2, num_rows), dtype=np.int64)
    for row, document in enumerate(documents):
        values[row, :, : document.length] = packs[document.pack, :, document.begin : document.end]
        lengths[row] = document.length
        offsets[row] = document.pack * packs.shape[2] + document.begin
    return PaddedRows(values, lengths, offsets)
