from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.encoding import IGNORED, Document
from ftkit.data.packing import assign_packs, build_pack, find_padding

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


@given(lengths_and_capacity)
def test_every_document_is_in_exactly_one_pack_and_no_pack_overflows(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packs = assign_packs(lengths, capacity)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in pack) <= capacity for pack in packs)


@given(lengths_and_capacity)
def test_packs_are_at_most_eleven_ninths_of_the_fewest_possible_and_one(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    fewest_possible = -(-sum(lengths) // capacity)
    # The fewest that capacity allows bounds the true optimum from below; halves that don't pair are counted too.
    fewest_possible = max(fewest_possible, sum(length > capacity / 2 for length in lengths))
    assert len(assign_packs(lengths, capacity)) <= 3 * fewest_possible / 2 + 1


def test_a_document_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit a pack of 10"):
        assign_packs([3, 11], 10)


def test_positions_restart_with_each_document_and_padding_has_no_labels() -> None:
    first = Document(np.array([5, 6, 7], np.int32), np.array([IGNORED, 7, IGNORED], np.int32))
    second = Document(np.array([8, 9], np.int32), np.array([9, IGNORED], np.int32))
    tokens, labels, positions = build_pack([first, second], 8, pad=0)
    assert tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert labels.tolist() == [IGNORED, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_padding_is_told_from_documents() -> None:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    learned = Document(tokens, np.array([6, 7, IGNORED], dtype=np.int32))
    unlearned = Document(tokens, np.full(3, IGNORED, dtype=np.int32))
    rows = ([learned], [learned, learned], [learned, unlearned])
    packs = np.stack([build_pack(row, 6, pad=0) for row in rows])
    assert find_padding(packs).sum(axis=1).tolist() == [3, 0, 0]
    assert find_padding(packs)[0].tolist() == [False] * 3 + [True] * 3
