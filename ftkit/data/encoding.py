"""Encode rows as token ids and labels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftkit.config.data import DataSpec, Format, TextFormat
from ftkit.data.conversations import PlainText
from ftkit.data.formats import check_split, read_example
from ftkit.data.limits import TemplateLimitError, run_in_fork
from ftkit.data.rendering import ChatRenderer, Rendering
from ftkit.data.rows import errors_at
from ftkit.data.typed_tokens import special_tokens_of, token_pattern
from ftkit.data.word_cache import WordCache
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ftkit.data.rows import Row

MAX_CHARACTERS = 8 << 20
"""Maximum length of a rendering: about two million tokens, longer than any context. `tokenizers` takes 100 bytes for
each."""
IGNORED = -100
"""The label of a token that does not count in the loss: PyTorch's default `ignore_index`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized rendering.

    `tokens` and `labels` have the same length; `labels[i]` is the token that the model should predict
    after `tokens[i]`, or `IGNORED`. The last token has no label, since the next token belongs to another document.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    is_text: bool = False

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


def find_end_tokens(tokenizer: Any, end_tokens: Collection[int] = ()) -> list[int]:
    """Return the special tokens that end assistant turns, first that of answers; turns with calls may have another.

    One of them is the last label of each trained turn, so they end completions of the trained model, in evaluation and
    wherever the model is used. They are not always the tokenizer's `eos_token`, which ends a text in base models.

    Args:
        tokenizer: the tokenizer.
        end_tokens: the end tokens of the model's configuration.

    Returns:
        empty: the template ends a turn with ordinary text, or there is no template.
    """
    if tokenizer.chat_template is None:
        return []
    found = ChatRenderer.of(tokenizer, {}, end_tokens).end_tokens
    return [tokenizer.convert_tokens_to_ids(token) for token in found]


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows as documents. Can be pickled and sent to worker processes.

    Attributes:
        tokenizer: a fast tokenizer.
        data: the recipe's data section.
        format: the format of the rows, resolved.
        renderer: the chat template; None where the rows are plain text.
        vocab_size: rows of the model's embedding table.
        adds_space: whether the tokenizer adds a space before a text, as older SentencePiece tokenizers do.
        words: cache of the tokens of words.
        begin: the token that begins a document of plain text, if the tokenizer adds one.
        special_tokens: special tokens that stay text if plain text contains them.
    """

    tokenizer: Any
    data: DataSpec
    format: Format
    renderer: ChatRenderer | None
    vocab_size: int
    adds_space: bool
    words: WordCache
    begin: str
    special_tokens: tuple[str, ...]

    @classmethod
    def of(
        cls, tokenizer: Any, data: DataSpec, form: Format, vocab_size: int, end_tokens: Collection[int] = ()
    ) -> RowEncoder:
        """Make an encoder for rows of a format.

        Raises:
            DataError: the chat template writes no special token after an assistant turn.
        """
        renderer = None if form.kind == "text" else ChatRenderer.of(tokenizer, data.template_options, end_tokens)
        if renderer is not None and data.train_on != "all" and not renderer.end_tokens:
            raise DataError(
                "the chat template writes no special token after an assistant turn",
                meaning="the model would never learn to end a completion, and would generate up to the token limit",
                fix="set data.chat_template to a template whose tokens the tokenizer has",
            )
        check_split(data, form)
        tokenizer.backend_tokenizer.no_truncation()  # some tokenizer.json files set them
        tokenizer.backend_tokenizer.no_padding()
        encode = tokenizer.backend_tokenizer.encode
        joined, *parts = (encode(text, add_special_tokens=False).ids for text in ("a\nHello", "a\n", "Hello"))
        adds_space = joined != [*parts[0], *parts[1]]
        has_begin = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        is_parsed = isinstance(form, TextFormat) and form.parse_special_tokens
        return cls(
            tokenizer, data, form, renderer, vocab_size, adds_space, WordCache.of(tokenizer.backend_tokenizer),
            begin=tokenizer.bos_token if has_begin else "",
            special_tokens=() if is_parsed else special_tokens_of(tokenizer),
        )  # fmt: skip

    def renderings(self, row: Row) -> list[Rendering]:
        """Return the texts of a row, with the trained spans of each.

        Raises:
            DataError: the row can't be used with this recipe; the message has its file and line.
        """
        with errors_at(row):
            example = read_example(row.columns, self.data, self.format)
            if isinstance(example, PlainText):
                found = [self._plain(example.text)]
            elif self.renderer is None:
                raise TypeError("conversations need a chat template")
            else:
                found = self.renderer.renderings(example, self.data)
            longest = max(len(rendering.text) for rendering in found)
            if longest > MAX_CHARACTERS:
                raise DataError(
                    f"a text of {longest:,} characters",
                    meaning=f"ftkit tokenizes up to {MAX_CHARACTERS:,} at a time, more than any model's context",
                    fix="split it into several rows, or skip it: data.skip_bad",
                )
            return found

    def encode(self, rows: Sequence[Row]) -> list[list[Document] | DataError]:
        """Encode rows in a batch, which is faster than one by one.

        Returns:
            for each row its documents (several if the template rewrites earlier turns), or its error.

        Raises:
            TemplateLimitError: the chat template reached a limit.
        """
        found = run_in_fork(self.renderer, self._render, rows) if self.renderer else self._render(rows)
        documents = iter(self._tokenize([each for part in found if isinstance(part, list) for each in part]))
        result: list[list[Document] | DataError] = []
        for row, part in zip(rows, found, strict=True):
            if isinstance(part, DataError):
                result.append(part)
                continue
            own = [next(documents) for _ in part]
            try:
                with errors_at(row):
                    self._check(own)
                result.append(own)
            except DataError as error:
                result.append(error)
        return result

    def _render(self, rows: Sequence[Row]) -> list[list[Rendering] | DataError]:
        found: list[list[Rendering] | DataError] = []
        for row in rows:
            try:
                found.append(self.renderings(row))
            except TemplateLimitError:
                raise
            except DataError as error:
                found.append(error)
        return found

    def _plain(self, text: str) -> Rendering:
        """Return a text between the begin and end tokens of a document; special tokens in the text stay text."""
        if not text.strip():
            raise DataError("the text is blank", fix="remove this example")
        pattern = token_pattern(self.special_tokens)
        cuts = tuple(len(self.begin) + found.start() + 1 for found in pattern.finditer(text))
        document = f"{self.begin}{text}{self.tokenizer.eos_token}"
        return Rendering(document, ((0, len(document)),), cuts)

    def _tokenize(self, renderings: Iterable[Rendering]) -> list[Document]:
        """Tokenize texts in pieces cut at the ends of trained turns, so that a prompt has the tokens of inference."""
        pieces: list[str] = []
        trained: list[list[bool]] = []
        for rendering in renderings:
            text, spans = rendering.text, rendering.spans
            bounds = sorted({0, len(text), *rendering.cuts, *(place for span in spans for place in span)})
            parts = [(begin, end) for begin, end in pairwise(bounds)]
            pieces += [text[begin:end] for begin, end in parts]
            trained.append([any(first <= begin and end <= last for first, last in spans) for begin, end in parts])
        is_first = [number == 0 for flags in trained for number in range(len(flags))]
        ids = iter(self._tokenize_pieces(pieces, is_first))
        return [self._document([(next(ids), flag) for flag in flags]) for flags in trained]

    def _document(self, parts: Sequence[tuple[list[int], bool]]) -> Document:
        tokens = np.array([token for ids, _ in parts for token in ids], dtype=np.int32)
        counts = np.repeat([flag for _, flag in parts], [len(ids) for ids, _ in parts])
        labels = np.full(len(tokens), IGNORED, dtype=np.int32)
        labels[:-1] = np.where(counts[1:], tokens[1:], IGNORED)
        return Document(tokens, labels, is_text=self.renderer is None)

    def _tokenize_pieces(self, pieces: list[str], is_first: list[bool]) -> list[list[int]]:
        encode_batch = self.tokenizer.backend_tokenizer.encode_batch_fast
        if not self.adds_space:
            return self.words.encode(pieces)
        plain = encode_batch(pieces, add_special_tokens=False)
        # No space is added after a line break, whose own tokens are then removed.
        newline: list[int] = encode_batch(["\n"], add_special_tokens=False)[0].ids
        behind = encode_batch([f"\n{piece}" for piece in pieces], add_special_tokens=False)
        return [
            encoding.ids if first or other.ids[: len(newline)] != newline else other.ids[len(newline) :]
            for encoding, other, first in zip(plain, behind, is_first, strict=True)
        ]

    def _check(self, documents: Sequence[Document]) -> None:
        """Check that tokens have a row in the model's embedding table, and that there is something to train on."""
        for document in documents:
            check_tokens(self.tokenizer, document.tokens, self.vocab_size)
            if document.num_targets == 0:
                raise DataError("there is nothing to train on", fix="correct data.format, or skip these examples")


def check_tokens(tokenizer: Any, tokens: NDArray[np.integer[Any]], vocab_size: int) -> None:
    """Check that tokens have a row in the model's embedding table.

    Raises:
        DataError: a token has no row.
    """
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"token {largest:,} ({tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the model's vocabulary of "
            f"{vocab_size:,}",
            meaning="the tokenizer belongs to another model, or has added tokens that the weights lack",
            fix="use the model's tokenizer: model.tokenizer.source=model; or correct model.architecture.vocab_size",
        )


def shorten(document: Document, length: int, too_long: str, end_of_turn: int | None) -> list[Document]:
    """Apply `data.too_long` to a document; one that fits is returned unchanged.

    Args:
        document: the document.
        length: maximum tokens.
        too_long: `drop`; `truncate`, after the last trained turn that fits, or a text anywhere; `split`, text only.
        end_of_turn: the token that ends an assistant turn, for documents that are trained on all tokens.

    Returns:
        an empty list if the document is dropped, or if its first trained turn does not end within `length`.
    """
    if len(document.tokens) <= length:
        return [document]
    if too_long == "drop":
        return []
    if document.is_text:
        starts = range(0, len(document.tokens) - 1, length) if too_long == "split" else (0,)
        return [_part(document, start, min(start + length, len(document.tokens))) for start in starts]
    counts = np.append(False, document.labels != IGNORED)
    last_of_turn = counts[:-1] & (~counts[1:] | (document.tokens == end_of_turn))
    ends = np.flatnonzero(last_of_turn[:length]) + 1
    return [_part(document, 0, int(ends[-1]))] if len(ends) else []


def _part(document: Document, start: int, end: int) -> Document:
    labels = document.labels[start:end].copy()
    labels[-1] = IGNORED
    return Document(document.tokens[start:end], labels, document.is_text)
