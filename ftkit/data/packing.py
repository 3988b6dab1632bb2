"""Put whole documents into packs of a fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from ftkit.data.encoding import IGNORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftkit.data.encoding import Document


def assign_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Say which documents go into which pack: best-fit decreasing, the same for the same lengths.

    Every document is in exactly one pack, and no pack is longer than `capacity`. Best fit needs at most
    11/9 of the best possible number of packs, and one (Johnson 1974).

    Raises:
        ValueError: a document is longer than `capacity`.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a document of {max(lengths)} tokens does not fit a pack of {capacity}")
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        tightest = bisect_left(rooms, (length, -1))
        if tightest == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(tightest)
        packs[pack].append(document)
        insort(rooms, (room - length, pack))
    return packs


def build_pack(documents: Sequence[Document], length: int, pad: int) -> NDArray[np.int32]:
    """Lay documents one after another.

    Returns:
        int32 array of shape [3, length]: tokens, labels, positions. Positions restart at 0 with each document,
        which is how the model tells them apart; the padding at the end is a document without labels.
    """
    pack = np.empty((3, length), dtype=np.int32)
    pack[0], pack[1] = pad, IGNORED
    start = 0
    for document in documents:
        end = start + len(document.tokens)
        pack[0, start:end] = document.tokens
        pack[1, start:end] = document.labels
        pack[2, start:end] = np.arange(end - start)
        start = end
    pack[2, start:] = np.arange(length - start)
    return pack


def find_padding(packs: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Tell which tokens of packs, int32 [B, 3, T], are padding: one token again and again at the end, without labels.

    Returns:
        bool array of shape [B, T].
    """
    tokens, labels, positions = packs[:, 0], packs[:, 1], packs[:, 2]
    place = np.arange(packs.shape[2])
    last_start = np.where(positions == 0, place, 0).max(axis=1, keepdims=True)
    is_last = place >= last_start
    is_blank = (labels == IGNORED) & (tokens == tokens[:, -1:])
    is_padding: NDArray[np.bool_] = is_last & (is_blank | ~is_last).all(axis=1, keepdims=True)
    return is_padding
