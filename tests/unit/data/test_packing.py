from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.packing import (
    IGNORED,
    REJECTED,
    Document,
    DocumentBatch,
    Packer,
    assign_packs,
    build_pack,
    find_padding,
    mismatch_completions,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
def test_the_number_of_packs_is_at_most_eleven_ninths_of_the_optimum_plus_one(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    fewest_possible = -(-sum(lengths) // capacity)
    # A lower bound of the optimum: from the total size, and from documents over half a pack, which cannot share one.
    fewest_possible = max(fewest_possible, sum(length > capacity / 2 for length in lengths))
    assert len(assign_packs(lengths, capacity)) <= 3 * fewest_possible / 2 + 1


def test_a_document_longer_than_a_pack_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"11.* 10"):
        assign_packs([3, 11], 10)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(60, 400))
def test_packing_in_windows_keeps_every_document_complete_and_once(lengths: list[int], window: int) -> None:
    documents = [
        DocumentBatch(
            np.full(length, number, np.uint32),
            np.array([length]),
            np.array([number % 7], np.uint16),
            np.zeros(1, np.int64),
            np.array([[number, number + 1]]),
        )
        for number, length in enumerate(lengths)
    ]
    packer = Packer(50, window)
    written = [pack for document in documents for pack in packer.add(document)] + list(packer.finish())
    seen: list[int] = []
    for batch, sizes in written:
        assert sum(sizes) == len(batch.lengths)
        ends = np.cumsum(sizes)
        assert all(batch.lengths[end - size : end].sum() <= 50 for end, size in zip(ends, sizes, strict=True))
        starts = np.cumsum(batch.lengths) - batch.lengths
        seen += batch.tokens[starts].tolist()
        assert np.array_equal(batch.tokens, np.repeat(batch.tokens[starts], batch.lengths))
        assert np.array_equal(batch.sources, batch.tokens[starts] % 7)
        assert np.array_equal(batch.records[:, 0], batch.tokens[starts])
    assert sorted(seen) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 25), min_size=2, max_size=80), st.integers(60, 400))
def test_both_sides_of_a_pair_are_in_the_same_pack_in_their_order(lengths: list[int], window: int) -> None:
    lengths = lengths[: len(lengths) // 2 * 2]
    packer = Packer(50, window, documents_per_sample=2)
    marks = np.array([0, REJECTED], np.uint16)
    pairs = [
        DocumentBatch(
            np.repeat([2 * pair, 2 * pair + 1], sides).astype(np.uint32),
            np.array(sides),
            marks,
            np.zeros(2, np.int64),
            np.zeros((2, 2), np.int64),
        )
        for pair, sides in enumerate(zip(lengths[::2], lengths[1::2], strict=True))
    ]
    written = [pack for pair in pairs for pack in packer.add(pair)] + list(packer.finish())
    seen = []
    for batch, sizes in written:
        starts = np.cumsum(batch.lengths) - batch.lengths
        numbers = batch.tokens[starts]
        assert all(size % 2 == 0 for size in sizes)
        assert np.array_equal(numbers[::2] + 1, numbers[1::2])
        assert np.array_equal(batch.sources >= REJECTED, numbers % 2 == 1)
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_windows_hardly_increase_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 20_000).clip(8, 4096).astype(np.int64)
    packer = Packer(4096, window_tokens=256 * 4096)
    num_packs = 0
    for length in np.split(lengths, 100):
        sources, records = np.zeros((2, len(length)), np.uint16), np.zeros((len(length), 2), np.int64)
        batch = DocumentBatch(np.zeros(length.sum(), np.uint32), length, *sources, records)
        num_packs += sum(len(sizes) for _, sizes in packer.add(batch))
    num_packs += sum(len(sizes) for _, sizes in packer.finish())
    assert lengths.sum() / (num_packs * 4096) > 0.99


def test_positions_restart_with_each_document_and_padding_repeats_the_first_token_without_labels() -> None:
    first = Document(np.array([5, 6, 7], np.int32), np.array([IGNORED, 7, IGNORED], np.int32))
    second = Document(np.array([8, 9], np.int32), np.array([9, IGNORED], np.int32))
    tokens, labels, positions = build_pack([first, second], 8)
    assert tokens.tolist() == [5, 6, 7, 8, 9, 5, 5, 5]
    assert labels.tolist() == [IGNORED, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_padding_is_distinguished_from_documents() -> None:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    learned = Document(tokens, np.array([6, 7, IGNORED], dtype=np.int32))
    unlearned = Document(tokens, np.full(3, IGNORED, dtype=np.int32))
    rows = ([learned], [learned, learned], [learned, unlearned])
    packs = np.stack([build_pack(row, 6) for row in rows])
    assert find_padding(packs).sum(axis=1).tolist() == [3, 0, 0]
    assert find_padding(packs)[0].tolist() == [False] * 3 + [True] * 3


def _pack(*documents: tuple[list[int], list[int]], length: int = 24) -> NDArray[np.int32]:
    """Return one pack of prompts with completions."""
    rows = []
    for prompt, completion in documents:
        labels = [IGNORED] * (len(prompt) - 1) + completion + [IGNORED]
        rows.append(Document(np.array(prompt + completion, np.int32), np.array(labels, np.int32)))
    pack = build_pack(rows, length)
    sizes = [len(each.tokens) for each in rows]
    sources = np.repeat([3 | REJECTED, *[3] * len(sizes)], [*sizes, length - sum(sizes)]).astype(np.int32)
    return np.concatenate([pack, sources[None]])[None]


def _documents(pack: NDArray[np.int32]) -> list[tuple[list[int], list[int], bool]]:
    """Return the prompts, the completions, and the marks of the documents of a pack, without its padding."""
    tokens, labels, positions, sources = pack[0]
    starts = [*np.flatnonzero(positions == 0).tolist(), len(tokens)]
    found = []
    for begin, end in pairwise(starts):
        places = np.flatnonzero(labels[begin:end] != IGNORED) + begin
        if len(places):
            assert places.tolist() == list(range(places[0], end - 1))
            assert np.array_equal(tokens[places + 1], labels[places])
            found.append(
                (tokens[begin : places[0] + 1].tolist(), labels[places].tolist(), bool(sources[begin] >= REJECTED))
            )
    return found


def test_a_prompt_gets_the_completion_of_the_next_one_of_its_pack() -> None:
    pack = _pack(([1, 2], [3]), ([4], [5, 6, 7]), ([8, 9, 10], [11, 12]))
    found = mismatch_completions(pack)
    assert _documents(found) == [([1, 2], [5, 6, 7], False), ([4], [11, 12], False), ([8, 9, 10], [3], False)]
    assert np.array_equal(find_padding(found), find_padding(pack))
    assert (found[0, 3, :12] == 3).all()


def test_equal_prompts_get_completions_of_others_and_own_ones_are_marked() -> None:
    pack = _pack(([1], [2]), ([1], [3]), ([4], [5]), ([1], [6]), ([7], [8]), ([9], [10]))
    pairs = [(prompt[0], completion[0]) for prompt, completion, _ in _documents(mismatch_completions(pack))]
    assert pairs == [(1, 5), (1, 8), (4, 2), (1, 10), (7, 3), (9, 6)]
    more = _documents(mismatch_completions(_pack(([1], [2]), ([1], [3]), ([4], [5]))))
    assert [(*completion, is_own) for _, completion, is_own in more] == [(5, False), (2, True), (3, False)]
    assert _documents(mismatch_completions(_pack(([1], [2])))) == [([1], [2], True)]


def test_a_pack_without_documents_stays_as_it_is() -> None:
    empty = _pack(([1], [2]))
    empty[:, 1], empty[:, 2] = IGNORED, np.arange(24)
    assert np.array_equal(mismatch_completions(empty), empty)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=12))
def test_mismatched_completions_are_a_permutation_of_those_of_the_pack(sizes: list[tuple[int, int, int]]) -> None:
    documents = [([kind] * one, [100 + place] * two) for place, (one, two, kind) in enumerate(sizes)]
    found = _documents(mismatch_completions(_pack(*documents, length=120)))
    assert [prompt for prompt, *_ in found] == [prompt for prompt, _ in documents]
    assert sorted(completion for _, completion, _ in found) == sorted(completion for _, completion in documents)
    owner = {completion[0]: prompt for prompt, completion in documents}
    assert [is_own for *_, is_own in found] == [owner[completion[0]] == prompt for prompt, completion, _ in found]
    if max(Counter(map(tuple, owner.values())).values()) * 2 <= len(documents):
        assert not any(is_own for *_, is_own in found)
