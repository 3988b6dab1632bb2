from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ftkit.data.encoding import WordCache

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WAYS = {
    "gpt2": (None, [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama3": (None, [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen3": (normalizers.NFC(), [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
    "learned": (
        None,
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    ),
    "gemma": (normalizers.Replace(" ", "▁"), [pre_tokenizers.Split(" ", "merged_with_previous")]),
    "spaces": (None, [pre_tokenizers.ByteLevel(add_prefix_space=True)]),
}
"""How tokenizers find words; those of the last two are not told from their settings, or are not independent."""
CORPUS = ["It's the 1234567 words  of'LL every\n\n language: çà, été, 日本語, שלום 😀.\t" * 30]


@cache
def backend(name: str) -> Any:
    normalizer, steps = WAYS[name]
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken("<|end|>", special=True), AddedToken("<|endoftext|>", special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<think>", normalized=False)])
    return tokenizer


pieces = st.text(max_size=12) | st.sampled_from(
    [
        "<|end|>",
        "<|endoftext|>",
        "<tool>",
        "<think",
        "'S",
        "'\u017f",
        "\r\n",
        "\x1c ",
        "  \n ",
        " \u3000",
        "e\u0301",
        "\u0378",
        "½",
        "x" * 80,
    ]
)
texts = st.lists(pieces, max_size=10).map("".join)


@pytest.mark.parametrize("name", WAYS)
@given(st.lists(texts, max_size=5))
def test_cached_tokens_match_the_tokenizer(name: str, given_texts: list[str]) -> None:
    tokenizer = backend(name)
    own = [tokenizer.encode(text, add_special_tokens=False).ids for text in given_texts]
    words = WordCache.of(tokenizer)
    assert words.encode(given_texts) == own
    assert words.encode(given_texts) == own  # now all words are cached


@pytest.mark.parametrize(("name", "is_known"), [("gpt2", True), ("qwen3", True), ("gemma", False), ("spaces", False)])
def test_words_are_cached_only_for_supported_tokenizers(name: str, is_known: bool) -> None:
    words = WordCache.of(backend(name))
    words.encode(["every language"])
    assert bool(words._words) == is_known
