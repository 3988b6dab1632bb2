"""Inspect training data: samples as the model will see them, statistics, and all bad rows."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, pairwise, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from ftkit.config.data import describe_format
from ftkit.config.recipe import RecipePlan
from ftkit.data.conversations import Conversation
from ftkit.data.labels import REPEATED_MARKER
from ftkit.data.limits import run_in_fork
from ftkit.data.packing import IGNORED, REJECTED, TRAINED, Document, Packer, document_begins
from ftkit.data.pictures import open_picture, thumbnail
from ftkit.data.preferences import conversations_of
from ftkit.data.prepared_data import PreparedData, SourceStats
from ftkit.data.row_formats import read_example
from ftkit.data.rows import check_skipped
from ftkit.data.selection import read_rows
from ftkit.data.workers import BatchEncoder, EncodedBatch, SplitDigests, Totals, encode_rows
from ftkit.errors import DataError, one_line, plural
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftkit.data.encoding import RowEncoder
    from ftkit.data.rows import Row

_REPORT_SECONDS = 10.0
_TAG_OR_LINE = re.compile(r"</?\w+>|\n")
_SIDES = (("", ""), ("desirable", "undesirable"), ("chosen", "rejected"))
"""Names of the two sides, indexed by the number of completions per sample."""


@dataclass(frozen=True)
class Segment:
    """A span of a text: its turn, the turn's role, and whether it is trained."""

    turn: int
    role: str
    text: str
    is_trained: bool


@dataclass(frozen=True)
class ShownPicture:
    """A picture of a row: its size in pixels and in tokens, its tokens, and a small copy of it as a `data:` URI."""

    width: int
    height: int
    num_tokens: int
    expansion: str
    thumbnail: str


@dataclass(frozen=True)
class Sample:
    """A document as it will be trained: rendering `number` of the row at `where`.

    `fate` is the effect of `data.too_long` on it; empty if it fits. `trained` tells for each token in `ids` whether it
    counts in the loss. `side` is a name in `_SIDES` or empty. `pictures` are those of the row.
    """

    where: str
    number: int
    num_renderings: int
    num_tokens: int
    num_trained: int
    segments: tuple[Segment, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    fate: str = ""
    side: str = ""
    pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True)
class Piece:
    """The text of a token, or of several tokens that encode one character or repeat one marker, such as a picture's."""

    text: str
    ids: tuple[int, ...]
    is_trained: bool


def pieces_by_turn(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the role and the pieces of each turn; a token that spans two turns belongs to the first."""
    pieces = deque(_pieces(sample, tokenizer))
    begin = end = 0
    for _, turn in groupby(sample.segments, key=lambda segment: segment.turn):
        segments = list(turn)
        end += sum(len(segment.text) for segment in segments)
        taken = []
        while pieces and (begin < end or segments[-1] is sample.segments[-1]):
            taken.append(pieces.popleft())
            begin += len(taken[-1].text)
        yield segments[0].role, list(_without_repeats(taken))


def _without_repeats(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for _, run in groupby(pieces, key=lambda piece: piece.ids):
        same = list(run)
        is_repeated = REPEATED_MARKER.fullmatch(same[0].text * len(same))
        yield from [replace(same[0], text=f"{same[0].text} × {len(same)}")] if is_repeated else same


def _pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Yield the text of each token, decoded with its predecessor: SentencePiece drops the first space of a text."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    begin = 0
    for end in range(1, len(sample.ids) + 1):
        before = sample.ids[max(0, begin - 1) : begin]
        text = decode(sample.ids[max(0, begin - 1) : end])[len(decode(before)) :]
        if not text.endswith("\ufffd") or end == len(sample.ids):  # otherwise the character continues in the next token
            yield Piece(text, sample.ids[begin:end], all(sample.trained[begin:end]))
            begin = end


def samples_of_packs(data: PreparedData, packs: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
    """Yield the documents of training packs in their order."""
    store = data.read_train()
    for pack in packs:
        if not 0 <= pack < len(store):
            raise DataError(f"there is no pack {pack}: the data has packs 0 to {len(store) - 1}")
        tokens, labels, positions, sources = store.read([pack])[0]
        is_trained = np.append(False, labels[:-1] != IGNORED)
        bounds = list(pairwise([*np.flatnonzero(document_begins(positions)).tolist(), len(positions)]))
        if len(bounds) > 1 and not is_trained[bounds[-1][0] :].any():
            bounds.pop()  # padding
        for number, (begin, end) in enumerate(bounds, 1):
            pairs = zip(is_trained[begin:end].tolist(), tokens[begin:end].tolist(), strict=True)
            segments = tuple(
                Segment(0, "", str(tokenizer.decode([token for _, token in part])), trained)
                for trained, part in groupby(pairs, itemgetter(0))
            )
            yield Sample(
                f"pack {pack}", number, len(bounds), end - begin, int(is_trained[begin:end].sum()), segments,
                tuple(tokens[begin:end].tolist()), tuple(is_trained[begin:end].tolist()),
                side="rejected" if sources[begin] >= REJECTED else "",
            )  # fmt: skip


@dataclass(frozen=True)
class LengthBin:
    """Number of documents with `start` to `end` tokens."""

    start: int
    end: int
    count: int


@dataclass(frozen=True)
class DataStats:
    """Token statistics of a recipe's training data.

    Renderings are documents before any is dropped, truncated or split. A row has several if the template rewrites
    turns. The other documents are counted after that. Duplicates are rows.
    """

    formats: tuple[str, ...]
    sources: tuple[SourceStats, ...]
    num_bad: int
    num_dropped: int  # pairs that `data.contradictions` drops
    num_renderings: int
    num_documents: int
    num_validation: int
    num_in_both: int  # documents or pairs in both the validation and the training split
    num_tokens: int
    num_trained: int
    num_too_long: int
    too_long: str
    num_duplicates: int
    longest: int
    longest_rendering: int
    mean: float
    median: float
    num_packs: int
    fill_ratio: float
    histogram: tuple[LengthBin, ...]
    sides: tuple[float, ...] = ()
    """Mean number of trained tokens of chosen and of rejected completions: training favors the longer ones."""


@dataclass(frozen=True)
class DataInspector:
    """Reads a recipe's data, and encodes it as preparation would."""

    recipe: RecipePlan
    encoder: BatchEncoder
    report: Callable[[str], None]  # called every ten seconds with the number of rows read
    digests: SplitDigests = field(default_factory=SplitDigests)
    """Of the documents of all rows, once `check` or `stats` has read them."""

    def samples(self, num_rows: int) -> Iterator[Sample]:
        """Yield the documents of the first `num_rows` rows that can be used."""
        rows = (row for row in read_rows(self.recipe.data) if row.split != "validation")
        num_bad = 0
        while num_rows and (batch := list(islice(rows, num_rows))):
            for taken, row, documents in self.encoder.results(batch):
                if isinstance(documents, DataError):
                    check_skipped([documents], self.recipe.data.skip_bad - num_bad)
                    num_bad += 1
                    self.report(f"skipped: {one_line(documents)}")
                    continue
                num_rows -= 1
                encoder, num = self.encoder.encoders[taken.source], self.recipe.training.documents_per_sample
                shared = self.encoder.shared(documents)
                pictures = tuple(self._pictures(encoder, row))
                for number, document in enumerate(documents, start=1):
                    first = (number - 1) // num * num
                    yield Sample(
                        row.where, number, len(documents), len(document.tokens), document.num_targets,
                        tuple(self._segments(encoder, row, document, number - 1, pictures)),
                        tuple(document.tokens.tolist()), (False, *(document.labels[:-1] != IGNORED).tolist()),
                        self._fate(encoder, shared[first : first + num]),
                        _SIDES[self.recipe.training.completions_per_sample][document.is_rejected],
                        pictures,
                    )  # fmt: skip

    def lengths(self, most_encoded: int, most_counted: int) -> tuple[list[int], int, int]:
        """Return the token lengths of the first rows' documents, and the numbers of encoded and of counted rows.

        Bad rows are skipped; DataError if all are.
        """
        rows = iter(read_rows(self.recipe.data))
        results = [documents for *_, documents in self.encoder.results(list(islice(rows, most_encoded)))]
        good = [documents for documents in results if not isinstance(documents, DataError)]
        if results and not good:
            raise next(each for each in results if isinstance(each, DataError))
        counted = len(results) + sum(1 for _ in islice(rows, most_counted - len(results)))
        return [len(document.tokens) for documents in good for document in documents], len(good), counted

    def check(self) -> Iterator[EncodedBatch]:
        """Encode all rows; yield each batch, with the errors of rows that can't be used."""
        num_rows, due = 0, time.monotonic() + _REPORT_SECONDS
        for encoded in encode_rows(self.encoder, read_rows(self.recipe.data), num_usable_cpus()):
            num_rows += encoded.num_rows.total() + len(encoded.bad)
            self.digests.add(encoded, self.recipe.training.documents_per_sample)
            if time.monotonic() >= due:
                self.report(f"{plural(num_rows, 'row')} so far")
                due = time.monotonic() + _REPORT_SECONDS
            yield encoded

    def _fate(self, encoder: RowEncoder, sample: Sequence[Document]) -> str:
        length = self.recipe.training.sequence_length
        fate, parts = encoder.fit(sample, length)
        if not fate:
            return ""
        kept = " and ".join(f"{len(part.tokens):,}" for part in parts)
        num_trained = sum(part.num_targets for part in parts)
        done = f"{fate}, {kept} tokens are kept, {num_trained:,} of them trained"
        outcome = {"error": "an error", "drop": "dropped"}.get(fate, done)
        what = "" if len(sample) == 1 else "both sides are "
        return f"{what}longer than sequence_length {length:,}: {outcome}"

    def _pictures(self, encoder: RowEncoder, row: Row) -> Iterator[ShownPicture]:
        sides = conversations_of(read_example(row.columns, self.recipe.data, encoder.format))
        sources = [source for side in sides[:1] for message in side.messages for source in message.pictures]
        opened = [open_picture(source, row.folder) for source in sources]
        if not opened or encoder.pictures is None:
            return
        for picture, expansion in zip(opened, encoder.pictures.process(opened)[0], strict=True):
            num_tokens = len(encoder.tokenizer(expansion, add_special_tokens=False)["input_ids"])
            yield ShownPicture(*picture.size, num_tokens, expansion, thumbnail(picture))

    def _segments(
        self, encoder: RowEncoder, row: Row, document: Document, place: int, pictures: Sequence[ShownPicture]
    ) -> Iterator[Segment]:
        """Divide a document's text into spans by turn and by whether its tokens have labels."""
        trained = [False, *(document.labels[:-1] != IGNORED).tolist()]
        runs: list[tuple[str, bool]] = []
        ids: list[int] = []
        before = ""
        for flag, group in groupby(zip(trained, document.tokens.tolist(), strict=True), itemgetter(0)):
            ids += [token for _, token in group]
            # Decoded from the start: SentencePiece drops the first space of a text.
            text = str(encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            runs.append((text[len(before) :], flag))
            before = text
        turns = self._turns(encoder, row, "".join(text for text, _ in runs), place, pictures)
        ends = [end for end, _ in turns]
        position = 0
        for text, flag in runs:
            stop = position + len(text)
            while position < stop:
                turn = min(bisect_left(ends, position + 1), len(turns) - 1)
                end = stop if turn == len(turns) - 1 else min(stop, ends[turn])
                yield Segment(turn, turns[turn][1], text[position - stop + len(text) : end - stop + len(text)], flag)
                position = end

    def _turns(
        self, encoder: RowEncoder, row: Row, text: str, place: int, pictures: Sequence[ShownPicture]
    ) -> list[tuple[int, str]]:
        """Return the end of each turn in a document's text, and its role; the last turn ends at the end of the text."""
        sides = conversations_of(read_example(row.columns, self.recipe.data, encoder.format))
        if not sides or encoder.renderer is None:
            return [(len(text), "text")]
        own = sides[place::2] or sides  # of a pair; earlier ones may be dropped. Otherwise, of one conversation
        example = next((side for side in own if side.messages[-1].content.strip() in text), own[0])
        turns: list[tuple[int, str]] = []
        position = 0
        messages = example.messages
        parts = [Conversation(messages[:number], example.tools) for number in range(1, len(messages) + 1)]
        renderer = encoder.renderer
        renderings = run_in_fork(renderer, lambda: [renderer.try_render(part) for part in parts])
        for number, (message, rendered) in enumerate(zip(messages, renderings, strict=True), start=1):
            if rendered is None:
                continue
            ids = encoder.tokenizer(rendered, add_special_tokens=False)["input_ids"]  # some tokenizers normalize text
            shown = str(encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False)).rstrip()
            if pictures:
                pieces = shown.split(renderer.picture_token)
                expansions = [each.expansion for each in pictures][: len(pieces) - 1]
                shown = "".join(chain.from_iterable(zip_longest(pieces, expansions, fillvalue="")))
            if not text.startswith(shown):  # the template rewrote the turn
                after = messages[number].content.strip() if number < len(messages) else ""
                limit = text.find(after, position) if after else -1
                # Its content, or else the last part of it, before the next turn's content if it is there.
                written = (message.content, *reversed(_TAG_OR_LINE.split(message.content)))
                spans = ((text.find(part.strip(), position), len(part.strip())) for part in written if part.strip())
                if not (found := [each for each in spans if each[0] >= 0]):
                    continue
                start, size = min(found, key=lambda each: each[0] > limit >= 0)
                stop = start + size
                following = text.find(after, stop) if after else -1
                end = stop + len(text[stop:].partition("\n")[0])
                shown = text[:following].rstrip() if 0 <= following < end else text[:end]
            if len(shown) > position:
                position = len(shown) + (text[len(shown) : len(shown) + 1] == "\n")
                turns.append((position, message.role))
            if position >= len(text):
                break
        return turns or [(len(text), "text")]

    def stats(self) -> DataStats:
        """Encode all rows, and count those of the training split."""
        length = self.recipe.training.sequence_length
        totals = Totals(self.encoder)
        lengths: Counter[int] = Counter()
        per_sample = self.recipe.training.documents_per_sample
        packer, trained = Packer(length, documents_per_sample=per_sample), np.zeros(2)
        num_validation = num_packs = 0
        for encoded in self.check():
            totals.add(encoded)
            num_validation += len(encoded.validation.lengths)
            lengths.update((encoded.train.lengths + encoded.train.starts).tolist())
            if per_sample > 1 and len(encoded.train.lengths):
                starts = np.cumsum(encoded.train.lengths) - encoded.train.lengths
                targets = np.add.reduceat(encoded.train.tokens >= TRAINED, starts, dtype=np.int64)
                trained += targets.reshape(-1, 2).sum(axis=0)
            num_packs += sum(len(sizes) for _, sizes in packer.add(encoded.train))
        num_packs += sum(len(sizes) for _, sizes in packer.finish())
        num_tokens = sum(source.num_tokens for source in totals.sources)
        num_documents = lengths.total()
        return DataStats(
            formats=tuple(describe_format(encoder.format) for encoder in self.encoder.encoders.values()),
            sources=tuple(totals.sources), num_bad=totals.num_bad, num_dropped=totals.num_dropped,
            num_renderings=totals.num_documents, num_documents=num_documents, num_validation=num_validation,
            num_in_both=self.digests.num_in_both, num_tokens=num_tokens,
            num_trained=sum(source.num_targets for source in totals.sources), num_too_long=totals.too_long.total(),
            too_long=", ".join(dict.fromkeys(each.too_long for each in self.encoder.encoders.values())),
            num_duplicates=self.digests.num_duplicates, longest=max(lengths, default=0),
            longest_rendering=totals.longest,
            mean=sum(length * count for length, count in lengths.items()) / max(1, num_documents),
            median=median_of(lengths), num_packs=num_packs, fill_ratio=num_tokens / max(1, num_packs * length),
            histogram=tuple(_histogram(lengths)),
            sides=tuple((trained * 2 / max(1, num_documents)).tolist()) if per_sample > 1 else (),
        )  # fmt: skip


def median_of(lengths: Counter[int]) -> float:
    return float(np.median(np.repeat([*lengths], [*lengths.values()]))) if lengths else 0.0


def _histogram(lengths: Counter[int]) -> Iterator[LengthBin]:
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        counts[(length - 1).bit_length()] += count
    for power in range(min(counts, default=0), max(counts, default=-1) + 1):
        yield LengthBin((1 << power) // 2 + 1, 1 << power, counts[power])
