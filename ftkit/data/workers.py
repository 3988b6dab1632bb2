"""Encode rows in worker processes; batches are returned in order."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, islice
from typing import TYPE_CHECKING

from ftkit.config.recipe import RecipePlan
from ftkit.data.encoding import RowEncoder
from ftkit.data.limits import begin_fork, explain_death
from ftkit.data.packing import REJECTED, Document, DocumentBatch, shorten
from ftkit.data.prepared_data import SourceStats
from ftkit.data.row_formats import unused_columns
from ftkit.data.rows import Row
from ftkit.data.selection import SelectedRow, Split, split_of
from ftkit.errors import DataError

if TYPE_CHECKING:
    from ftkit.config.data import TooLong

_BATCH_ROWS = 64
_BATCH_BYTES = 1 << 18
_BATCHES_BEFORE_WORKERS = 4
"""With fewer batches, starting workers takes longer than the work."""
_BATCHES_OF_WORKER = 4
"""Batches in flight per worker, which bounds the rows in memory."""


@dataclass
class EncodedBatch:
    """The result of a batch of rows.

    Documents are counted before any is truncated or dropped. Counters are by source. `unused` are columns that the
    format does not use; `validation_rows` are JSON Lines, and `validation_sources` their sources, one per line.
    `refused` are errors of rows with a document longer than a pack, where `data.too_long` resolves to `error`.
    `pairs` are the place of each pair, its digest, and that of the pair with its sides swapped.
    """

    train: DocumentBatch = field(init=False)
    validation: DocumentBatch = field(init=False)
    num_rows: Counter[int] = field(default_factory=Counter)
    num_documents: int = 0
    num_too_long: Counter[int] = field(default_factory=Counter)
    longest: int = 0
    unused: set[str] = field(default_factory=set)
    validation_rows: str = ""
    validation_sources: str = ""
    bad: list[DataError] = field(default_factory=list)
    refused: list[DataError] = field(default_factory=list)
    pairs: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    contradictions: list[DataError] = field(default_factory=list)


class Totals:
    def __init__(self, encoder: BatchEncoder) -> None:
        self.sources = [SourceStats(source.name) for source in encoder.recipe.data.sources]
        self.too_long: Counter[str] = Counter({encoder.too_long(source): 0 for source in encoder.encoders})
        """Number of documents longer than a pack, by what happens with them."""
        self.num_documents = self.num_bad = self.longest = 0
        self.unused: set[str] = set()
        self._encoder = encoder

    def add(self, batch: EncodedBatch) -> None:
        check_skipped(batch.bad, self._encoder.recipe.data.skip_bad - self.num_bad)
        for error in batch.contradictions:
            raise error
        self.num_bad += len(batch.bad)
        self.num_documents += batch.num_documents
        self.unused |= batch.unused
        self.longest = max(self.longest, batch.longest)
        self.too_long.update(self._encoder.outcomes(batch))
        for number, num_rows in batch.num_rows.items():
            stats, (tokens, targets) = self.sources[number], batch.train.count_tokens(number)
            self.sources[number] = replace(
                stats,
                num_rows=stats.num_rows + num_rows,
                num_documents=stats.num_documents + int((batch.train.sources & ~REJECTED == number).sum()),
                num_tokens=stats.num_tokens + tokens,
                num_targets=stats.num_targets + targets,
                num_too_long=stats.num_too_long + batch.num_too_long[number],
            )


def check_skipped(errors: Sequence[DataError], allowed: int) -> None:
    """Raise the error of the first bad row beyond those allowed."""
    if len(errors) > allowed:
        first = errors[allowed]
        fix = f"{first.fix}; or skip bad rows: data.skip_bad=N ('ftkit data check' lists them)"
        raise DataError(first.what, meaning=first.meaning, fix=fix) from first


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes batches of rows as documents. Each source may have its own format, and so its own encoder."""

    recipe: RecipePlan
    encoders: Mapping[int, RowEncoder]
    end_of_turn: int | None

    @property
    def template(self) -> str:
        """What errors call the chat template; empty if there is none."""
        return next((each.renderer.name for each in self.encoders.values() if each.renderer), "")

    def too_long(self, source: int) -> TooLong:
        """Return what happens with documents of a source that are longer than a pack."""
        return self.recipe.data.resolve_too_long(self.encoders[source].format)

    def outcomes(self, batch: EncodedBatch) -> Counter[str]:
        """Return the number of a batch's documents longer than a pack, by what happens with them."""
        counts: Counter[str] = Counter()
        for source, number in batch.num_too_long.items():
            counts[self.too_long(source)] += number
        return counts

    def encode(self, batch: Sequence[SelectedRow]) -> EncodedBatch:
        """Return the documents of rows, in their order."""
        documents: dict[Split, list[DocumentBatch]] = {"train": [], "validation": []}
        recipe = self.recipe
        data, length, num = recipe.data, recipe.training.sequence_length, recipe.training.documents_per_sample
        done = EncodedBatch()
        for (source, split, _), row, result in self.results(batch):
            if isinstance(result, DataError):
                done.bad.append(result)
                continue
            done.num_rows[source] += 1
            done.unused.update(unused_columns(row.columns, self.encoders[source].format))
            split = split or (split_of(row.columns, data.validation) if data.validation else "train")  # noqa: PLW2901
            if split == "validation":
                done.validation_rows += json.dumps(row.columns, ensure_ascii=False, default=str) + "\n"
                done.validation_sources += f"{source}\n"
            sizes = [len(document.tokens) for document in result]
            # Of samples: a document, or both sides of a pair, which share a pack.
            lengths = [sum(sizes[first : first + num]) for first in range(0, len(sizes), num)]
            longest = max(lengths, default=0)
            done.longest = max(done.longest, longest)
            done.num_documents += len(result)
            done.num_too_long[source] += sum(each > length for each in lengths)
            too_long = self.too_long(source)
            if longest > length and too_long == "error":
                is_text = self.encoders[source].format.kind == "text"
                shorter = "data.too_long=split" if is_text else "data.too_long=truncate, or data.too_long=drop"
                what = f"{row.where}: {longest:,} tokens, longer than a pack of {length:,}"
                done.refused.append(DataError(what, fix=f"raise training.sequence_length, or set {shorter}"))
            fitting = [fit for each in result for fit in shorten(each, length, too_long, self.end_of_turn)]
            if num > 1:  # a pair fits as a whole, or not at all
                fitting = [each for place, each in enumerate(result) if lengths[place // num] <= length]
                for chosen, rejected in zip(result[::2], result[1::2], strict=True):
                    sides = [sha256(each.tokens.tobytes()).digest() for each in (chosen, rejected)]
                    both = [sha256(b"".join(pair)).digest()[:16] for pair in (sides, sides[::-1])]
                    done.pairs.append((row.where, both[0], both[1]))
            documents[split].append(DocumentBatch.of(fitting, source))
        empty = [DocumentBatch.of([])]
        done.train = DocumentBatch.join(documents["train"] or empty)
        done.validation = DocumentBatch.join(documents["validation"] or empty)
        return done

    def results(self, batch: Sequence[SelectedRow]) -> Iterator[tuple[SelectedRow, Row, list[Document] | DataError]]:
        """Yield each non-blank row with its documents or its error."""
        rows: list[tuple[SelectedRow, Row | DataError]] = []
        good: dict[int, list[Row]] = {}
        for taken in batch:
            try:
                row = taken.row.parse()
            except DataError as error:
                rows.append((taken, error))
                continue
            if row is not None:
                rows.append((taken, row))
                good.setdefault(taken.source, []).append(row)
        encoded = {source: iter(self.encoders[source].encode(each)) for source, each in good.items()}
        for taken, parsed in rows:
            if isinstance(parsed, DataError):
                yield taken, Row({}, ""), parsed
            else:
                yield taken, parsed, next(encoded[taken.source])


def encode_rows(encoder: BatchEncoder, rows: Iterable[SelectedRow], num_workers: int) -> Iterator[EncodedBatch]:
    """Yield the results of batches in an order that does not depend on the number of workers."""
    seen: set[bytes] = set()  # the digests of all pairs so far: 16 bytes for each
    for encoded in _encode_rows(encoder, rows, num_workers):
        for where, digest, swapped in encoded.pairs:
            if swapped in seen:
                what = f"{where}: an earlier row prefers what this one rejects, and rejects what it prefers"
                encoded.contradictions.append(DataError(what, fix="remove one of both rows"))
            seen.add(digest)
        yield encoded


def _encode_rows(encoder: BatchEncoder, rows: Iterable[SelectedRow], num_workers: int) -> Iterator[EncodedBatch]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    batches = _batches(rows)
    first = list(islice(batches, _BATCHES_BEFORE_WORKERS))
    is_one = num_workers == 1 and not encoder.template  # one worker renders at less cost than a fork for each batch
    if is_one or len(first) < _BATCHES_BEFORE_WORKERS:
        yield from map(encoder.encode, chain(first, batches))
        return
    # A forked worker has the tokenizer immediately; a spawned one would import transformers for seconds.
    workers = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("fork"), initializer=_begin_worker, initargs=(encoder, os.getpid())
    )
    try:
        pending = deque(workers.submit(_encode_in_worker, batch) for batch in first)
        processes = multiprocessing.active_children()
        for batch in batches:
            pending.append(workers.submit(_encode_in_worker, batch))
            if len(pending) >= _BATCHES_OF_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        workers.shutdown(wait=True)  # it waits for the processes, so that their exit codes are known
        raise explain_death(encoder.template, *(process.exitcode for process in processes)) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


def _batches(rows: Iterable[SelectedRow]) -> Iterator[list[SelectedRow]]:
    batch: list[SelectedRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.row.content) if isinstance(row.row.content, bytes) else _BATCH_BYTES // _BATCH_ROWS
        if size >= _BATCH_BYTES or len(batch) == _BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: BatchEncoder | None = None
"""State of a worker process."""


def _begin_worker(encoder: BatchEncoder, parent: int) -> None:
    global _encoder  # noqa: PLW0603 - the executor passes nothing else on to its tasks
    _encoder = encoder
    begin_fork(parent)


def _encode_in_worker(batch: list[SelectedRow]) -> EncodedBatch:
    if _encoder is None:
        raise RuntimeError("the worker was not initialized")
    return _encoder.encode(batch)
