"""A cache of the tokens of words: the same result as the tokenizer, several times as fast.

A tokenizer spends most of its time on finding words and on the offsets of tokens. Words repeat: here one regular
expression finds them, and they are looked up. A tokenizer with another structure is called directly.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import regex

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_WORDS: Final = 1 << 17
"""Maximum number of cached words: about 30 MB."""
_MAX_WORD_LENGTH: Final = 64
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Words of `ByteLevel` with `use_regex`: those of GPT-2, from tokenizers' documentation."""

_ASCII: Final = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
"""ASCII characters of Unicode categories."""
_ODD_BLANKS: Final = "\x1c\x1d\x1e\x1f"
"""Characters that only some regular expression engines treat as blanks."""


@dataclass(frozen=True)
class _Pattern:
    """A regular expression that finds words; the text between two of them is a word as well."""

    pattern: regex.Pattern[str]
    for_ascii: re.Pattern[str] | None

    @classmethod
    def of(cls, pattern: str) -> _Pattern:
        compiled = regex.compile(f"({pattern})")
        if compiled.groups > 1:
            raise regex.error(f"groups in {pattern}")
        return cls(compiled, _ascii_pattern(pattern))

    def split(self, text: str, *, is_ascii: bool) -> list[str]:
        """Return all words."""
        if is_ascii and self.for_ascii:
            words: list[str] = self.for_ascii.findall(text)
            if sum(map(len, words)) == len(text):
                return words
        return [word for word in self.pattern.split(text) if word]


@dataclass
class WordCache:
    """Tokenizes texts as `backend.encode(text, add_special_tokens=False)` does.

    Attributes:
        backend: a `tokenizers.Tokenizer` without truncation and padding.
        added: finds added tokens, which are split off first; None if there are none.
        patterns: find the words, applied in order; None if the tokenizer's settings don't determine them.
        needs_nfc: whether the tokenizer normalizes texts to Unicode's NFC first.
    """

    backend: Any
    added: regex.Pattern[str] | None
    patterns: tuple[_Pattern, ...] | None
    needs_nfc: bool
    _words: dict[str, list[int]] = field(default_factory=dict)
    _uncacheable: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, backend: Any) -> WordCache:
        """Derive the patterns of words from a tokenizer's settings."""
        normalizer, tokens = _settings(backend.normalizer), list(backend.get_added_tokens_decoder().values())
        is_known = normalizer in (None, {"type": "NFC"}) and not any(
            token.lstrip or token.rstrip or token.single_word or (token.normalized and normalizer) for token in tokens
        )
        contents = sorted((token.content for token in tokens), key=len, reverse=True)
        added = regex.compile(f"({'|'.join(map(regex.escape, contents))})") if contents else None
        patterns = _patterns(_settings(backend.pre_tokenizer)) if is_known else None
        return cls(backend, added, patterns, normalizer is not None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        found = [self._find_words(text) for text in texts]
        known = [self._look_up(words) for words in found]
        new = {word for words, ids in zip(found, known, strict=True) if ids is None for word in words or ()}
        if new:
            self._add_words(new)
            known = [self._look_up(words) if ids is None else ids for words, ids in zip(found, known, strict=True)]
        rest = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        others = iter(self.backend.encode_batch_fast(rest, add_special_tokens=False))
        return [next(others).ids if ids is None else ids for ids in known]

    def _look_up(self, words: list[str] | None) -> list[int] | None:
        try:
            return None if words is None else list(chain.from_iterable(map(self._words.__getitem__, words)))
        except KeyError:
            return None

    def _find_words(self, text: str) -> list[str] | None:
        """Return the words and added tokens of a text; None if they can't be determined with certainty."""
        if self.patterns is None:
            return None
        is_ascii = text.isascii() and not any(blank in text for blank in _ODD_BLANKS)
        if not is_ascii and not self._is_well_known(text):
            return None
        words: list[str] = []
        for number, part in enumerate(self.added.split(text) if self.added else [text]):
            if number % 2:
                words.append(part)
                continue
            pieces = [part] if part else []
            for pattern in self.patterns:
                pieces = [piece for piece_before in pieces for piece in pattern.split(piece_before, is_ascii=is_ascii)]
            words += pieces
        return words

    def _is_well_known(self, text: str) -> bool:
        """Return whether all characters are in Python's version of Unicode, so that all libraries agree on them."""
        new = set(text) - self._known
        if any(unicodedata.category(character) == "Cn" for character in new):
            return False
        self._known |= new
        return not self.needs_nfc or unicodedata.is_normalized("NFC", text)

    def _add_words(self, words: set[str]) -> None:
        """Cache the tokens of words, except long words and words that the tokenizer splits."""
        if len(self._words) + len(self._uncacheable) > _MAX_WORDS:
            self._words.clear()
            self._uncacheable.clear()
        new = sorted(
            word for word in words - self._uncacheable if word not in self._words and len(word) <= _MAX_WORD_LENGTH
        )
        for word, encoding in zip(new, self.backend.encode_batch(new, add_special_tokens=False), strict=True):
            if len(set(encoding.word_ids)) == 1:
                self._words[word] = encoding.ids
            else:
                self._uncacheable.add(word)


def _settings(component: Any) -> Any:
    """Return the settings of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    return None if component is None else json.loads(component.__getstate__())


def _patterns(settings: Any) -> tuple[_Pattern, ...] | None:
    """Return the regular expressions of a pre-tokenizer; None if there is another part in it."""
    steps = settings["pretokenizers"] if settings and settings["type"] == "Sequence" else [settings]
    patterns = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
                patterns += [_GPT2] if uses_regex else []
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case _:
                return None
    try:
        return tuple(map(_Pattern.of, patterns)) or None
    except regex.error:
        return None


def _ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return an equivalent pattern for ASCII texts and Python's `re`, which is twice as fast."""
    depth, parts, place = 0, [], 0
    for found in re.finditer(r"\\p\{(\w+)\}|\\.|\[|\]", pattern):
        parts.append(pattern[place : found.start()])
        place = found.end()
        depth += (found[0] == "[") - (found[0] == "]")
        if found[1] is None:
            parts.append(found[0])
        elif found[1] in _ASCII:
            parts.append(_ASCII[found[1]] if depth else f"[{_ASCII[found[1]]}]")
        else:
            return None
    try:
        compiled = re.compile("".join([*parts, pattern[place:]]), re.ASCII)
    except re.error:
        return None
    return None if compiled.groups else compiled
