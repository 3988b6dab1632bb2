"""Encode rows in worker processes; batches are returned in order."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from ftkit.config.recipe import RecipePlan
from ftkit.data.encoding import RowEncoder, shorten
from ftkit.data.formats import unused_columns
from ftkit.data.limits import begin_fork, find_refusal
from ftkit.data.rows import Row
from ftkit.data.sources import split_of
from ftkit.data.store import DocumentBatch
from ftkit.errors import DataError, MemoryExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ftkit.data.encoding import Document
    from ftkit.data.sources import SourceRow, Split

_BATCH_ROWS = 64
_BATCH_BYTES = 1 << 18
_BATCHES_BEFORE_WORKERS = 4
"""With fewer batches, starting workers takes longer than the work."""
_BATCHES_OF_WORKER = 4
"""Batches in flight per worker, which bounds the rows in memory."""


@dataclass(frozen=True)
class EncodedRows:
    """The result of a batch of rows.

    Attributes:
        num_rows: rows that could be used, by source.
        num_documents: documents before any is truncated or dropped.
        num_too_long: documents that are longer than a pack, by source.
        longest: tokens of the longest document.
        unused: columns that the format does not use.
        validation_rows: the rows of the validation split as JSON Lines.
        validation_sources: source numbers of these rows, one per line.
        bad: errors of bad rows, in order.
        refused: errors of rows with a document longer than a pack, in order, if `data.too_long` is `error`.
    """

    train: DocumentBatch
    validation: DocumentBatch
    num_rows: Counter[int] = field(default_factory=Counter)
    num_documents: int = 0
    num_too_long: Counter[int] = field(default_factory=Counter)
    longest: int = 0
    unused: frozenset[str] = frozenset()
    validation_rows: str = ""
    validation_sources: str = ""
    bad: list[DataError] = field(default_factory=list)
    refused: list[DataError] = field(default_factory=list)


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes batches of rows as documents.

    Attributes:
        encoders: encoder of each source; each source may have its own format.
        end_of_turn: the token that ends an assistant turn.
    """

    recipe: RecipePlan
    encoders: Mapping[int, RowEncoder]
    end_of_turn: int | None

    @property
    def template(self) -> str:
        """What errors call the chat template; empty if there is none."""
        return next((each.renderer.name for each in self.encoders.values() if each.renderer), "")

    def encode(self, batch: Sequence[SourceRow]) -> EncodedRows:
        """Return the documents of rows, in their order."""
        documents: dict[Split, list[DocumentBatch]] = {"train": [], "validation": []}
        length, refuses = self.recipe.training.sequence_length, self.recipe.data.too_long == "error"
        num_rows, num_too_long, sizes = Counter[int](), Counter[int](), []
        unused, lines, sources, bad, refused = set[str](), [], [], [], []
        for (source, split, _), row, result in self.results(batch):
            if isinstance(result, DataError):
                bad.append(result)
                continue
            num_rows[source] += 1
            unused.update(unused_columns(row.columns, self.encoders[source].format))
            split_name = split or self._split_of(row)
            if split_name == "validation":
                lines.append(json.dumps(row.columns, ensure_ascii=False, default=str) + "\n")
                sources.append(f"{source}\n")
            lengths = [len(document.tokens) for document in result]
            sizes += lengths
            num_too_long[source] += sum(each > length for each in lengths)
            if refuses and max(lengths, default=0) > length:
                refused.append(_too_long(row, max(lengths), length))
            documents[split_name].append(DocumentBatch.of(self._shortened(result), source))
        train, validation = (
            DocumentBatch.join(documents[split] or [DocumentBatch.of([])]) for split in ("train", "validation")
        )
        return EncodedRows(
            train,
            validation,
            num_rows,
            num_documents=len(sizes),
            num_too_long=num_too_long,
            longest=max(sizes, default=0),
            unused=frozenset(unused),
            validation_rows="".join(lines),
            validation_sources="".join(sources),
            bad=bad,
            refused=refused,
        )

    def results(self, batch: Sequence[SourceRow]) -> Iterator[tuple[SourceRow, Row, list[Document] | DataError]]:
        """Yield each non-blank row with its documents or its error."""
        rows: list[tuple[SourceRow, Row, DataError | None]] = []
        for taken in batch:
            row = Row({}, "")
            error: DataError | None = None
            try:
                parsed = taken.row.parse()
                if parsed is None:
                    continue
                row = parsed
            except DataError as caught:
                error = caught
            rows.append((taken, row, error))
        good: dict[int, list[Row]] = {}
        for taken, row, error in rows:
            if error is None:
                good.setdefault(taken.source, []).append(row)
        encoded = {source: iter(self.encoders[source].encode(each)) for source, each in good.items()}
        for taken, row, error in rows:
            yield taken, row, error or next(encoded[taken.source])

    def _shortened(self, documents: Sequence[Document]) -> list[Document]:
        length, too_long = self.recipe.training.sequence_length, self.recipe.data.too_long
        return [fit for document in documents for fit in shorten(document, length, too_long, self.end_of_turn)]

    def _split_of(self, row: Row) -> Split:
        validation = self.recipe.data.validation
        return split_of(row.columns, validation) if validation else "train"


def _too_long(row: Row, num_tokens: int, length: int) -> DataError:
    return DataError(
        f"{row.where}: {num_tokens:,} tokens, longer than a pack of {length:,}",
        fix="raise training.sequence_length, or set data.too_long to drop, truncate, or (text only) split",
    )


def encode_rows(encoder: BatchEncoder, rows: Iterable[SourceRow], num_workers: int) -> Iterator[EncodedRows]:
    """Yield the results of batches in an order that does not depend on the number of workers.

    Raises:
        DataError: the chat template reached a limit.
        MemoryExhaustedError: a worker was killed.
    """
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
        refusals = [find_refusal(encoder.template, process.exitcode) for process in processes]
        raise next(filter(None, refusals), None) or MemoryExhaustedError(
            "a worker process of the preparation was killed",
            meaning="usually the machine or the job is out of memory",
            fix="give the job more memory, or use fewer workers: ftkit data prepare --workers 1",
        ) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


def skip_bad(errors: Sequence[DataError], allowed: int) -> Sequence[DataError]:
    """Return the errors of rows to skip.

    Raises:
        DataError: the error of the first row beyond those allowed.
    """
    if len(errors) > allowed:
        first = errors[allowed]
        fix = f"{first.fix}; or skip bad rows: data.skip_bad=N ('ftkit data check' lists them)"
        raise DataError(first.what, meaning=first.meaning, fix=fix) from first
    return errors


def _batches(rows: Iterable[SourceRow]) -> Iterator[list[SourceRow]]:
    batch: list[SourceRow] = []
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
    """Store the encoder."""
    global _encoder  # noqa: PLW0603 - the executor passes nothing else on to its tasks
    _encoder = encoder
    begin_fork(parent)


def _encode_in_worker(batch: list[SourceRow]) -> EncodedRows:
    if _encoder is None:
        raise RuntimeError("the worker was not initialized")
    return _encoder.encode(batch)
