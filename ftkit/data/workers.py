"""Encode rows in worker processes; batches are returned in order."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from ftkit.config.data import PreferencesFormat, label_of
from ftkit.config.recipe import RecipePlan, shares_prompts
from ftkit.data.encoding import RowEncoder
from ftkit.data.limits import begin_fork, explain_death
from ftkit.data.packing import REJECTED, Document, DocumentBatch, share_prompts
from ftkit.data.preferences import portable, rejected_of
from ftkit.data.prepared_data import SourceStats
from ftkit.data.row_formats import unused_columns
from ftkit.data.rows import Row, check_skipped
from ftkit.data.selection import SelectedRow, Split, split_of
from ftkit.errors import DataError

_BATCH_ROWS = 64
_BATCH_PICTURES = 4  # rows of a batch if they may have pictures, of megabytes each
_BATCH_BYTES = 1 << 18
_BATCHES_BEFORE_WORKERS = 4  # with fewer batches, starting workers takes longer than the work
_BATCHES_OF_WORKER = 4  # batches in flight per worker, which bounds the rows in memory


class Pair(NamedTuple):
    """A pair, or a completion with a label: its digest, and that with its sides swapped, or with the other label."""

    where: str
    digest: bytes
    swapped: bytes
    split: Split
    documents: range  # in the batch of the split; none if it is longer than a pack


@dataclass
class EncodedBatch:
    """The result of a batch of rows.

    Documents are counted before any is truncated or dropped. Counters are by source. `unused` are columns that the
    format does not use; `validation_rows` are JSON Lines, and `validation_sources` their sources, one per line.
    `too_long` counts those longer than a pack by what happens with them, `num_too_long` by source.
    `refused` are errors of rows with a document longer than a pack, where `data.too_long` resolves to `error`.
    `num_dropped` counts pairs with equal sides, and `contradictions`, that `data.contradictions` drops.
    """

    train: DocumentBatch = field(init=False)
    validation: DocumentBatch = field(init=False)
    num_rows: Counter[int] = field(default_factory=Counter)
    num_train_rows: Counter[int] = field(default_factory=Counter)
    num_documents: int = 0
    num_too_long: Counter[int] = field(default_factory=Counter)
    too_long: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    unused: set[str] = field(default_factory=set)
    validation_rows: str = ""
    validation_sources: str = ""
    bad: list[DataError] = field(default_factory=list)
    refused: list[DataError] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    contradictions: list[DataError] = field(default_factory=list)
    num_dropped: int = 0
    row_digests: bytes = b""  # 8 bytes for each row of the training split that has documents

    def drop(self, pairs: Sequence[Pair]) -> None:
        self.num_dropped += len(pairs)
        gone = {pair for pair in pairs if pair.documents}
        kept = {pair.where for pair in self.pairs if pair.documents and pair not in gone}  # rows can have several pairs
        lost = {pair.where: pair.documents[0] for pair in gone if pair.split == "train" and pair.where not in kept}
        self.num_train_rows.subtract((self.train.sources[list(lost.values())] & ~REJECTED).tolist())
        for split, batch in (("train", self.train), ("validation", self.validation)):
            dropped = {place for pair in pairs if pair.split == split for place in pair.documents}
            setattr(self, split, batch.take([place for place in range(len(batch.lengths)) if place not in dropped]))


class Totals:
    def __init__(self, encoder: BatchEncoder) -> None:
        self.sources = [SourceStats(name) for name in encoder.recipe.data.source_names]
        self.too_long: Counter[str] = Counter({each.too_long: 0 for each in encoder.encoders.values()})
        """Number of documents longer than a pack, by what happens with them."""
        self.num_documents = self.num_bad = self.longest = self.num_rejected = self.num_dropped = 0
        self.unused: set[str] = set()
        self._encoder = encoder

    def add(self, batch: EncodedBatch) -> None:
        check_skipped(batch.bad, self._encoder.recipe.data.skip_bad - self.num_bad)
        for error in batch.contradictions:
            raise error
        self.num_bad += len(batch.bad)
        self.num_documents += batch.num_documents
        self.num_rejected += batch.train.num_rejected
        self.num_dropped += batch.num_dropped
        self.unused |= batch.unused
        self.longest = max(self.longest, batch.longest)
        self.too_long.update(batch.too_long)
        for number, num_rows in batch.num_rows.items():
            stats, (tokens, targets) = self.sources[number], batch.train.count_tokens(number)
            self.sources[number] = replace(
                stats,
                num_rows=stats.num_rows + num_rows,
                num_train_rows=stats.num_train_rows + batch.num_train_rows[number],
                num_documents=stats.num_documents + int((batch.train.sources & ~REJECTED == number).sum()),
                num_tokens=stats.num_tokens + tokens,
                num_targets=stats.num_targets + targets,
                num_too_long=stats.num_too_long + batch.num_too_long[number],
            )


class SplitDigests:
    """The first 8 bytes of the digest of each document, or pair, of both splits, and of each row: memory that grows."""

    def __init__(self) -> None:
        self._found = {"train": array("Q"), "validation": array("Q")}
        self._rows = array("Q")

    def add(self, batch: EncodedBatch, documents_per_sample: int) -> None:
        self._rows.frombytes(batch.row_digests)
        for split, found in self._found.items():
            of_pairs = (pair.digest for pair in batch.pairs if pair.split == split)
            documents = batch.train if split == "train" else batch.validation
            each = of_pairs if documents_per_sample > 1 else documents.digests
            found.frombytes(b"".join(digest[: found.itemsize] for digest in each))

    @property
    def num_in_both(self) -> int:
        """Number of documents or pairs of the validation split that are also trained on."""
        train, validation = (np.frombuffer(each, np.uint64) for each in self._found.values())
        return int(np.isin(validation, train).sum())

    @property
    def num_duplicates(self) -> int:
        return len(self._rows) - len(np.unique(self._rows))


_SHARED_MINIMUM = 0.2
"""Fraction of tokens from which on it pays to compute prompts of pairs once: attention by block masks is slower."""


def share_saved(recipe: RecipePlan, rows: Iterable[Sequence[Document]]) -> float | None:
    """Return the fraction of the tokens of rows that prompts computed once save; None if they are not."""
    allowed = shares_prompts(recipe, recipe.model.architecture)
    if allowed is False:
        return None
    pairs = list(chain.from_iterable(rows))
    saved = sum(each.start for each in share_prompts(pairs)) / max(1, sum(len(each.tokens) for each in pairs))
    return saved if allowed or saved >= _SHARED_MINIMUM else None


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes batches of rows as documents. Each source may have its own format, and so its own encoder."""

    recipe: RecipePlan
    encoders: Mapping[int, RowEncoder]
    shares_prompts: bool = False

    @property
    def template(self) -> str:
        """What errors call the chat template; empty if there is none."""
        return next((each.renderer.name for each in self.encoders.values() if each.renderer), "")

    def shared(self, documents: Sequence[Document]) -> Sequence[Document]:
        """Return a row's documents as they are packed."""
        return share_prompts(documents) if self.shares_prompts else documents

    def encode(self, batch: Sequence[SelectedRow]) -> EncodedBatch:
        documents: dict[Split, list[DocumentBatch]] = {"train": [], "validation": []}
        recipe = self.recipe
        data, length, num = recipe.data, recipe.training.sequence_length, recipe.training.documents_per_sample
        done, num_fitting = EncodedBatch(), Counter[str]()
        for (source, split, _), row, result in self.results(batch):
            if isinstance(result, DataError):
                done.bad.append(result)
                continue
            done.num_rows[source] += 1
            encoder, form, fitting = self.encoders[source], self.encoders[source].format, list[Document]()
            if isinstance(form, PreferencesFormat):
                done.num_dropped += len(rejected_of(row.columns, form)) - len(result) // 2
            done.unused.update(unused_columns(row.columns, data, form))
            split = split or (split_of(row.columns, data.validation) if data.validation else "train")  # noqa: PLW2901
            if split == "validation":
                columns = portable(row.columns, row.folder) if data.pictures else row.columns
                done.validation_rows += json.dumps(columns, ensure_ascii=False, default=str) + "\n"
                done.validation_sources += f"{source}\n"
            shared = self.shared(result)
            sizes = [len(document.tokens) for document in shared]
            # Of samples: a document, or both sides of a pair, which share a pack.
            longest = max((sum(sizes[first : first + num]) for first in range(0, len(sizes), num)), default=0)
            done.longest = max(done.longest, longest)
            done.num_documents += len(result)
            is_preference = isinstance(form, PreferencesFormat) or bool(label_of(form))
            if longest > length and encoder.too_long == "error":
                truncated = "" if is_preference else "data.too_long=truncate, or "
                shorter = "data.too_long=split" if form.kind == "text" else f"{truncated}data.too_long=drop"
                what = f"{row.where}: {longest:,} tokens, longer than a pack of {length:,}"
                done.refused.append(DataError(what, fix=f"raise training.sequence_length, or set {shorter}"))
            per_pair = 2 if isinstance(form, PreferencesFormat) else 1
            for pair in (slice(first, first + per_pair) for first in range(0, len(result), per_pair)):
                begin = num_fitting[split] + len(fitting)
                for each in range(pair.start, pair.stop, num):
                    outcome, parts = encoder.fit(shared[each : each + num], length)
                    fitting += parts
                    done.num_too_long[source] += bool(outcome)
                    done.too_long.update([outcome] if outcome else [])
                if is_preference:
                    places = range(begin, num_fitting[split] + len(fitting))
                    own, other = (_digest(result[pair], is_swapped=flag) for flag in (False, True))
                    done.pairs.append(Pair(row.where, own, other, split, places))
            num_fitting[split] += len(fitting)
            if fitting and split == "train":
                done.num_train_rows[source] += 1
                done.row_digests += _digest(result, is_swapped=False)[:8]
            documents[split].append(DocumentBatch.of(fitting, source))
        empty = [DocumentBatch.of([])]
        done.train, done.validation = (DocumentBatch.join(each or empty) for each in documents.values())
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


def _digest(pair: Sequence[Document], *, is_swapped: bool) -> bytes:
    sides = (
        bytes([each.is_rejected ^ is_swapped]) + sha256(each.tokens.tobytes() + each.pictures).digest() for each in pair
    )
    return sha256(b"".join(sorted(sides))).digest()[:16]


def encode_rows(encoder: BatchEncoder, rows: Iterable[SelectedRow], num_workers: int) -> Iterator[EncodedBatch]:
    """Yield the results of batches in an order that does not depend on the number of workers."""
    seen: set[bytes] = set()  # the digests of all pairs so far: 16 bytes for each
    for encoded in _encode_rows(encoder, rows, num_workers):
        contradictions = []
        for pair in encoded.pairs:
            if pair.swapped in seen:
                contradictions.append(pair)
            else:
                seen.add(pair.digest)
        if contradictions and encoder.recipe.data.contradictions == "drop":
            encoded.drop(contradictions)
        else:
            for pair in contradictions:
                what = f"{pair.where}: an earlier row prefers what this one rejects, or rejects what it prefers"
                fix = "remove one of both rows, or the later one: data.contradictions=drop"
                encoded.contradictions.append(DataError(what, fix=fix))
        yield encoded


def _encode_rows(encoder: BatchEncoder, rows: Iterable[SelectedRow], num_workers: int) -> Iterator[EncodedBatch]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    batches = _batches(rows, _BATCH_PICTURES if encoder.recipe.data.pictures else _BATCH_ROWS)
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


def _batches(rows: Iterable[SelectedRow], most: int) -> Iterator[list[SelectedRow]]:
    batch: list[SelectedRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.row.size
        if size >= _BATCH_BYTES or len(batch) == most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: BatchEncoder | None = None  # state of a worker process


def _begin_worker(encoder: BatchEncoder, parent: int) -> None:
    global _encoder  # noqa: PLW0603 - the executor passes nothing else on to its tasks
    _encoder = encoder
    begin_fork(parent)
    if torch := sys.modules.get("torch"):  # processors may use it, and a fork has none of the parent's threads
        torch.set_num_threads(1)


def _encode_in_worker(batch: list[SelectedRow]) -> EncodedBatch:
    if _encoder is None:
        raise RuntimeError("the worker was not initialized")
    return _encoder.encode(batch)
