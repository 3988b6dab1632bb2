"""Encode rows as token ids and labels."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import regex
from tokenizers import Tokenizer

from ftkit.config.data import DataSpec, Format, PreferencesFormat, TextFormat, label_of
from ftkit.data.conversations import Conversation, PlainText
from ftkit.data.labels import Rendering, any_of
from ftkit.data.limits import run_in_fork, try_rows
from ftkit.data.packing import IGNORED, Document, shorten
from ftkit.data.pictures import PictureProcessor
from ftkit.data.preferences import Preferences
from ftkit.data.rendering import ChatRenderer
from ftkit.data.row_formats import read_example, read_label
from ftkit.data.rows import Row, errors_at
from ftkit.data.tokenizers import check_tokens, special_tokens_of
from ftkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftkit.config.data import TooLong

MAX_CHARACTERS = 8 << 20
"""Maximum length of a rendering: about two million tokens, longer than any context. `tokenizers` needs 100 bytes per
character."""


def find_end_tokens(tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int] = ()) -> list[int]:
    """Return the special tokens that end assistant turns: first for answers, then for turns with tool calls.

    The last label of each trained turn is one of them, so the trained model ends completions with it, in evaluation
    and when deployed. They can differ from the tokenizer's `eos_token`, which ends a text in base models.
    The list is empty if the template ends a turn with ordinary text, or if there is no template.
    """
    if tokenizer.chat_template is None:
        return []
    return [tokenizer.convert_tokens_to_ids(token) for token in ChatRenderer.of(tokenizer, {}, end_tokens).end_tokens]


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows as documents."""

    tokenizer: Any
    data: DataSpec
    format: Format
    renderer: ChatRenderer | None  # None for plain text
    vocab_size: int  # number of rows of the model's embedding table
    adds_space: bool  # whether the tokenizer prepends a space to a text, as older SentencePiece tokenizers do
    words: WordCache
    begin: str  # the BOS token of a document of plain text, if the tokenizer adds one
    special_tokens: frozenset[str]  # they stay text if plain text contains them
    pictures: PictureProcessor | None = None  # None if the model takes no pictures

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: DataSpec,
        form: Format,
        vocab_size: int,
        end_tokens: Collection[int] = (),
        pictures: PictureProcessor | None = None,
    ) -> RowEncoder:
        options, token = data.template_options, pictures.token if pictures else ""
        renderer = None if form.kind == "text" else ChatRenderer.of(tokenizer, options, end_tokens, token)
        if renderer is not None and data.train_on != "all" and not renderer.end_tokens:
            raise DataError(
                "the chat template writes no special token after an assistant turn",
                meaning="the model would never learn to end a completion, and would generate up to the token limit",
                fix="set data.chat_template to a template whose tokens the tokenizer has",
            )
        if renderer is None and tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has no end token (eos_token), with which each text ends",
                fix="set eos_token in its tokenizer_config.json, or set model.tokenizer.source to another tokenizer",
            )
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()  # some tokenizer.json files set them
        backend.no_padding()
        joined, *parts = (backend.encode(text, add_special_tokens=False).ids for text in ("a\nHello", "a\n", "Hello"))
        has_begin = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        is_parsed = isinstance(form, TextFormat) and form.parse_special_tokens
        return cls(
            tokenizer, data, form, renderer, vocab_size,
            adds_space=joined != [*parts[0], *parts[1]],
            words=WordCache.of(backend),
            begin=tokenizer.bos_token if has_begin else "",
            special_tokens=frozenset() if is_parsed else special_tokens_of(tokenizer),
            pictures=pictures,
        )  # fmt: skip

    @cached_property
    def too_long(self) -> TooLong:
        return self.data.resolve_too_long(self.format)

    @cached_property
    def _end_of_turn(self) -> int | None:
        end = next(iter(self.renderer.end_tokens), None) if self.renderer else None
        return None if end is None else self.tokenizer.convert_tokens_to_ids(end)

    def fit(self, sample: Sequence[Document], length: int) -> tuple[str, Sequence[Document]]:
        """Return what `data.too_long` does to a document or a pair, empty if nothing, and what is trained on."""
        if sum(len(each.tokens) for each in sample) <= length:
            return "", sample
        parts = shorten(sample[0], length, self.too_long, self._end_of_turn) if len(sample) == 1 else []
        return self.too_long if parts or self.too_long == "error" else "drop", parts

    def encode(self, rows: Sequence[Row]) -> list[list[Document] | DataError]:
        """Return the documents of each row (several if the template rewrites earlier turns), or its error.

        A row has none if `data.contradictions` drops all its pairs.
        """
        if self.renderer:
            found = run_in_fork(self.renderer, try_rows, self._renderings, rows)
        else:
            found = try_rows(self._renderings, rows)
        if self.pictures:
            found = list(map(self.pictures.expand_row, rows, found))
        documents = iter(self._tokenize([each for part in found if isinstance(part, list) for each in part]))
        result: list[list[Document] | DataError] = []
        for row, part in zip(rows, found, strict=True):
            if isinstance(part, DataError):
                result.append(part)
                continue
            own = [next(documents) for _ in part]
            try:
                with errors_at(row):
                    own = self._checked(own)
                    if isinstance(self.format, PreferencesFormat):
                        own = [replace(document, is_rejected=number % 2 == 1) for number, document in enumerate(own)]
                    elif label := label_of(self.format):
                        own = [replace(own[0], is_rejected=not read_label(row.columns, label))]
                result.append(own)
            except DataError as error:
                result.append(error)
        return result

    def _checked(self, documents: list[Document]) -> list[Document]:
        """Return the documents of a row without dropped pairs."""
        for document in documents:
            check_tokens(self.tokenizer, document.tokens, self.vocab_size)
            if document.num_targets == 0:
                raise DataError("there is nothing to train on", fix="correct data.format, or skip these examples")
        if not isinstance(self.format, PreferencesFormat):
            return documents
        pairs = list(zip(documents[::2], documents[1::2], strict=True))
        kept = [(a, b) for a, b in pairs if not np.array_equal(a.tokens, b.tokens) or a.pictures != b.pictures]
        if len(kept) < len(pairs) and self.data.contradictions != "drop":
            fix = "correct or remove this example, or set data.contradictions=drop"
            raise DataError("both sides have the same tokens", fix=fix)
        return list(chain.from_iterable(kept))

    def _renderings(self, row: Row) -> list[Rendering]:
        example = read_example(row.columns, self.data, self.format)
        if isinstance(example, PlainText):
            found = [self._plain(example.text)]
        elif self.renderer is None:
            raise TypeError("conversations need a chat template")
        elif isinstance(example, Preferences):
            found = [self._side(self.renderer, side) for side in example.sides]
        elif label_of(self.format):
            found = [self._side(self.renderer, example)]
        else:
            found = self.renderer.renderings(example, self.data)
        longest = max((len(rendering.text) for rendering in found), default=0)
        if longest > MAX_CHARACTERS:
            raise DataError(
                f"a text of {longest:,} characters",
                meaning=f"ftkit tokenizes up to {MAX_CHARACTERS:,} at a time, more than any model's context",
                fix="split it into several rows, or skip it: data.skip_bad",
            )
        return found

    def _side(self, renderer: ChatRenderer, side: Conversation) -> Rendering:
        train_on = "last" if self.data.train_on == "last" else "completion"
        if side.num_prompt is None:
            end = max((place for place, turn in enumerate(side.messages, 1) if turn.role == "user"), default=0)
            side = replace(side, num_prompt=end)
        found = renderer.renderings(side, self.data.model_copy(update={"train_on": train_on}))
        if len(found) > 1:
            raise DataError(
                f"a completion of {len(found)} turns of the assistant, which the chat template rewrites",
                meaning="inference would see each turn in another form, so one text can't have all of them",
                fix="set data.train_on to 'last', or choose another data.chat_template",
            )
        return found[0]

    def _plain(self, text: str) -> Rendering:
        """Wrap a text in the begin and end tokens of a document; special tokens in the text stay text."""
        if not text.strip():
            raise DataError("the text is blank", fix="remove this example")
        cuts = tuple(len(self.begin) + found.start() + 1 for found in any_of(self.special_tokens).finditer(text))
        document = f"{self.begin}{text}{self.tokenizer.eos_token}"
        return Rendering(document, ((0, len(document)),), cuts)

    def _tokenize(self, renderings: Iterable[Rendering]) -> list[Document]:
        """Tokenize the pieces of texts between bounds of trained turns, so prompts have the tokens of inference."""
        pieces: list[str] = []
        trained: list[list[bool]] = []
        records: list[bytes] = []

        def is_in(spans: Iterable[tuple[int, int]], begin: int, end: int) -> bool:
            return any(first <= begin and end <= last for first, last in spans)

        for rendering in renderings:
            text, spans = rendering.text, rendering.spans
            hidden = [span for span in rendering.untrained if is_in(spans, *span)]
            bounds = sorted({0, len(text), *rendering.cuts, *chain.from_iterable((*spans, *hidden))})
            parts = list(pairwise(bounds))
            pieces += [text[begin:end] for begin, end in parts]
            trained.append([is_in(spans, *part) and not is_in(hidden, *part) for part in parts])
            records.append(rendering.record)
        is_first = [number == 0 for flags in trained for number in range(len(flags))]
        ids = iter(self._tokenize_pieces(pieces, is_first))
        documents = zip(trained, records, strict=True)
        return [self._document([(next(ids), flag) for flag in flags], record) for flags, record in documents]

    def _document(self, parts: Sequence[tuple[list[int], bool]], record: bytes) -> Document:
        tokens = np.array([token for ids, _ in parts for token in ids], dtype=np.int32)
        counts = np.repeat([flag for _, flag in parts], [len(ids) for ids, _ in parts])
        labels = np.full(len(tokens), IGNORED, dtype=np.int32)
        labels[:-1] = np.where(counts[1:], tokens[1:], IGNORED)
        return Document(tokens, labels, is_text=self.renderer is None, pictures=record)

    def _tokenize_pieces(self, pieces: list[str], is_first: list[bool]) -> list[list[int]]:
        if not self.adds_space:
            return self.words.encode(pieces)
        encode_batch = self.tokenizer.backend_tokenizer.encode_batch_fast
        plain = encode_batch(pieces, add_special_tokens=False)
        # The tokenizer prepends no space after a line break. The tokens of the line break are then removed.
        newline: list[int] = encode_batch(["\n"], add_special_tokens=False)[0].ids
        behind = encode_batch([f"\n{piece}" for piece in pieces], add_special_tokens=False)
        return [
            encoding.ids if first or other.ids[: len(newline)] != newline else other.ids[len(newline) :]
            for encoding, other, first in zip(plain, behind, is_first, strict=True)
        ]


_MAX_WORDS: Final = 1 << 17  # maximum number of cached words: about 30 MB
_MAX_WORD_LENGTH: Final = 64
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regular expression of `ByteLevel` with `use_regex`: GPT-2's, from the documentation of tokenizers."""
_ASCII: Final = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
"""ASCII characters of Unicode categories."""
_ODD_BLANKS: Final = re.compile("[\x1c-\x1f]")
"""Characters that only some regular expression engines treat as blanks."""


@dataclass(frozen=True)
class _Pattern:
    """A regular expression that finds words; the text between two matches is a word too.

    `for_ascii` is an equivalent pattern for Python's `re`, which is twice as fast; None if there is none.
    """

    pattern: regex.Pattern[str]
    for_ascii: re.Pattern[str] | None

    @classmethod
    def of(cls, pattern: str) -> _Pattern:
        compiled = regex.compile(f"({pattern})")
        if compiled.groups > 1:
            raise regex.error(f"groups in {pattern}")
        depth, parts = 0, list[str]()
        for part in re.split(r"(\\p\{\w+\}|\\.|\[|\])", pattern):
            depth += (part == "[") - (part == "]")
            characters = _ASCII.get(part[3:-1]) if part.startswith(r"\p{") else None
            parts.append(part if characters is None else characters if depth else f"[{characters}]")
        try:
            ascii_only = re.compile("".join(parts), re.ASCII)
        except re.error:  # of \p, which only `regex` knows
            return cls(compiled, None)
        return cls(compiled, None if ascii_only.groups else ascii_only)

    def split(self, text: str, *, is_ascii: bool) -> list[str]:
        if is_ascii and self.for_ascii:
            words: list[str] = self.for_ascii.findall(text)
            if sum(map(len, words)) == len(text):
                return words
        return [word for word in self.pattern.split(text) if word]


@dataclass
class WordCache:
    """Tokenizes texts as `backend.encode(text, add_special_tokens=False)` does, three times as fast.

    A tokenizer spends most of its time splitting words and computing offsets. Words repeat, so this class splits them
    with one regular expression and looks up their tokens. A tokenizer with another structure is called directly.
    """

    backend: Tokenizer  # without truncation and padding
    added: regex.Pattern[str] | None  # finds added tokens, which are split off first
    patterns: tuple[_Pattern, ...] | None  # applied in order; None if the tokenizer's settings don't determine them
    needs_nfc: bool  # whether the tokenizer normalizes texts to Unicode's NFC first
    _words: dict[str, list[int]] = field(default_factory=dict)
    _uncacheable: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, backend: Tokenizer) -> WordCache:
        normalizer, splitter = (
            None if part is None else json.loads(part.__getstate__())  # as tokenizer.json has it
            for part in (backend.normalizer, backend.pre_tokenizer)
        )
        tokens = list(backend.get_added_tokens_decoder().values())
        is_known = normalizer in (None, {"type": "NFC"}) and not any(
            token.lstrip or token.rstrip or token.single_word or (token.normalized and normalizer) for token in tokens
        )
        contents = sorted((token.content for token in tokens), key=len, reverse=True)
        added = regex.compile(f"({'|'.join(map(regex.escape, contents))})") if contents else None
        return cls(backend, added, _patterns(splitter) if is_known else None, normalizer is not None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
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
        is_ascii = text.isascii() and not _ODD_BLANKS.search(text)
        if not is_ascii:
            new = set(text) - self._known
            if any(unicodedata.category(character) == "Cn" for character in new):
                return None  # not in Python's version of Unicode, so libraries may disagree on it
            self._known |= new
            if self.needs_nfc and not unicodedata.is_normalized("NFC", text):
                return None
        words: list[str] = []
        for number, part in enumerate(self.added.split(text) if self.added else [text]):
            pieces = [part] if part else []
            if number % 2 == 0:  # not an added token
                for pattern in self.patterns:
                    pieces = [word for piece in pieces for word in pattern.split(piece, is_ascii=is_ascii)]
            words += pieces
        return words

    def _add_words(self, words: set[str]) -> None:
        """Cache the tokens of words, except long words and words that the tokenizer splits further."""
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


def _patterns(settings: dict[str, Any] | None) -> tuple[_Pattern, ...] | None:
    """Return the regular expressions of a pre-tokenizer; None if it has a part that is not supported here."""
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
