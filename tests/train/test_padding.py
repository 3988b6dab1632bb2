"""Documents of packs as padded rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.packing import IGNORED, MIN_WIDTH, count_row_tokens, row_width
from ftkit.train.components.batches import pad_documents

LENGTH = 300


def pack(lengths: list[int], first: int) -> np.ndarray:
    """Return a pack of documents numbered from `first`; tokens and labels encode the number."""
    values = np.zeros((3, LENGTH), dtype=np.int32)
    values[1], begin = IGNORED, 0
    for number, length in enumerate(lengths, start=first):
        values[0, begin : begin + length] = number
        values[1, begin : begin + length - 1] = number
        values[2, begin : begin + length] = np.arange(length)
        begin += length
    values[2, begin:] = np.arange(LENGTH - begin)
    return values


@given(
    st.lists(st.lists(st.integers(2, 75), min_size=1, max_size=4) | st.just([300]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_each_document_is_one_row_and_ranks_have_the_same_number_of_micro_batches(
    lengths: list[list[int]], micro_batch_size: int, num_ranks: int
) -> None:
    firsts = np.cumsum([1, *map(len, lengths)])
    packs = np.stack([pack(each, first) for each, first in zip(lengths, firsts, strict=False)])
    groups = pad_documents(packs, micro_batch_size * LENGTH, num_ranks)
    assert len(groups) % num_ranks == 0
    found = {}
    for group in groups:
        rows, _, width = group.values.shape
        assert rows * width <= micro_batch_size * LENGTH
        for values, length in zip(group.values, group.lengths, strict=True):
            assert (values[1, length:] == IGNORED).all()
            assert (values[0, length:] == packs[0, 0, 0]).all()
            if length:
                number = int(values[0, 0])
                assert number not in found
                assert (values[0, :length] == number).all()
                assert (values[1] != IGNORED).sum() == length - 1
                found[number] = int(length)
    assert found == dict(enumerate((length for each in lengths for length in each), start=1))
    longest = [group.lengths.max() for group in groups]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize(
    ("length", "longest", "width"),
    [(1, 4096, 128), (129, 4096, 256), (2049, 4096, 4096), (9, 100, 100), (76, 300, 150)],
)
def test_padded_rows_have_one_of_a_few_lengths(length: int, longest: int, width: int) -> None:
    assert row_width(length, longest) == width
    assert width >= min(MIN_WIDTH, longest)


def test_the_tokens_of_padded_rows_are_counted() -> None:
    lengths = np.array([1, 128, 129, 500, 129])
    assert count_row_tokens(lengths, 512) == 128 + 128 + 256 + 512 + 256
    assert count_row_tokens(lengths[:0], 512) == 0
