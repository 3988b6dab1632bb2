"""Select rows from a recipe's sources, split them, and order them. Rows are processed as a stream."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import merge
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ftkit.config.data_sources import FilesSource, GeneratedSource, HubSource, MixtureSource, ValidationSpec
from ftkit.data.readers import without_nulls
from ftkit.data.rows import Columns, RawRow, Row
from ftkit.data.source_files import count_rows, find_files, read_file
from ftkit.data.tasks import generate_rows
from ftkit.errors import DataError, one_line, plural
from ftkit.paths import is_address

if TYPE_CHECKING:
    from datasets import Dataset

    from ftkit.config.data import DataSpec

Split = Literal["train", "validation"]

FIRST_BYTES = 1 << 20
FIRST_ROWS = 200
"""Maximum bytes and rows per file that are checked before a job is submitted."""
_DETECTION_BYTES = 64 << 20  # maximum bytes of the rows from which a format is detected


class SelectedRow(NamedTuple):
    """A selected row: the source's index in `data.source`, and its split; None if the row's content decides."""

    source: int
    split: Split | None
    row: RawRow


def read_rows(data: DataSpec) -> Iterator[SelectedRow]:
    """Yield the rows to train and to validate on, in an order that depends on the recipe and the data alone."""
    if isinstance(data.source, GeneratedSource):
        return _generate(data, data.source)
    _check_overlap(data)
    sources = _open_sources(data)
    if len(sources) == 1:
        rows = sources[0].taken()
    else:
        rows = (row for *_, row in merge(*(source.taken_evenly() for source in sources)))
    validation = [
        (each.number, each.source.heldout, f"{each.key}.heldout")
        for each in sources
        if isinstance(each.source, FilesSource) and each.source.heldout
    ]
    if data.validation is not None:
        rows = _split(rows, sources, data.validation)
        if data.validation.file is not None:
            validation.append((0, data.validation.file, "data.validation.file"))
    more = (SelectedRow(each, "validation", row) for each, place, key in validation for row in _read_files(place, key))
    return chain(rows, more)


def first_rows(data: DataSpec, source: int, num_rows: int) -> list[Row]:
    """Read the first rows of a source. Rows that can't be parsed are skipped, unless none can be parsed.

    Raises as `read_rows` does.
    """
    if isinstance(data.source, GeneratedSource):
        raw = [row for *_, row in _generate(data, data.source.model_copy(update={"num_train": 1, "num_heldout": 0}))]
    else:
        raw = list(_limited(_open_sources(data, count=False)[source].read(), num_rows, _DETECTION_BYTES))
    return _parsed(raw, max_bad=len(raw) - 1)


def peek_rows(data: DataSpec) -> list[Row]:
    """Read data that is available immediately: the first rows of files, but no rows of the hub or a generator."""
    if isinstance(data.source, GeneratedSource):
        return []  # preparation runs the task
    _check_overlap(data)
    files = [(file, key) for key, place in data.files for file in find_files(place, key)[:2]]
    seen = [raw for file, key in files for raw in _limited(read_file(file, key), FIRST_ROWS, FIRST_BYTES)]
    rows = _parsed(seen, max_bad=data.skip_bad)
    are_local = not any(isinstance(source, HubSource) for source in data.sources) and all(
        not is_address(place) for _, place in data.files
    )
    if are_local and sum(Path(f).stat().st_size for key, p in data.files for f in find_files(p, key)) <= FIRST_BYTES:
        for _ in read_rows(data):  # counts them
            pass
    return rows


def _limited(rows: Iterable[RawRow], num_rows: int, num_bytes: int) -> Iterator[RawRow]:
    for row in islice(rows, num_rows):
        yield row
        num_bytes -= row.size
        if num_bytes < 0:
            return


def _parsed(raw: Iterable[RawRow], max_bad: int) -> list[Row]:
    """Parse rows. Skip up to `max_bad` bad rows; if there are more, raise the error of the first."""
    rows, bad = [], []
    for each in raw:
        try:
            row = each.parse()
        except DataError as error:
            bad.append(error)
            if len(bad) > max_bad:
                raise bad[0] from None
            continue
        rows += [row] if row else []
    return rows


def split_of(columns: Columns, validation: ValidationSpec) -> Split:
    """Return the split of a row by its content, independent of the order of its columns and the format of its file."""
    text = json.dumps(columns, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.blake2b(f"{validation.seed}\n{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") < (validation.fraction or 0.0) * 2**64 else "train"


@cache
def load_from_hub(source: HubSource) -> Dataset:
    """Load a dataset with all its rows. Raises DataError, whatever the library raises."""
    import datasets  # noqa: PLC0415 - takes a second to import, only for this source

    try:
        loaded = datasets.load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # the library passes on any error of its back ends
        raise DataError(
            f"can't load the dataset '{source.dataset}': {one_line(error)}",
            meaning="it does not exist, is gated, or this machine can't reach the hub",
            fix="check the name; set HF_TOKEN for a gated one; on a node without network, prepare the data elsewhere",
        ) from error
    _keep_encoded(loaded.info.features)
    return loaded


def _keep_encoded(feature: Any) -> None:
    """Disable decoding of pictures and sounds, which stay bytes or a path. ftkit decodes pictures within limits."""
    if hasattr(feature, "decode"):
        feature.decode = False
    inner = feature if isinstance(feature, dict | list) else getattr(feature, "feature", None) or ()
    for each in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else [inner]:
        _keep_encoded(each)


def _read_files(place: str, key: str) -> Iterator[RawRow]:
    num_rows = 0
    for file in find_files(place, key):
        for row in read_file(file, key):
            num_rows += 1
            yield row
    if not num_rows:
        raise DataError(f"{place} has no rows", fix=f"correct {key}")


@dataclass(frozen=True)
class _OpenSource:
    """A source, and the number of training rows to take from it; if `num_train` is None, all rows not in validation."""

    number: int
    key: str
    source: FilesSource | HubSource
    num_train: int | None

    def read(self) -> Iterator[RawRow]:
        if isinstance(self.source, FilesSource):
            return _read_files(self.source.train, f"{self.key}.train")
        name = f"dataset '{self.source.dataset}', split {self.source.split}"
        rows = enumerate(load_from_hub(self.source))
        return (RawRow(name, ", row ", number, without_nulls(columns)) for number, columns in rows)

    @cached_property
    def num_rows(self) -> int:
        if isinstance(self.source, HubSource):
            return len(load_from_hub(self.source))
        key = f"{self.key}.train"
        return sum(count_rows(file, key) for file in find_files(self.source.train, key))

    @property
    def num_taken(self) -> int:
        return self.num_rows if self.num_train is None else self.num_train + self.source.num_heldout

    def taken(self) -> Iterator[SelectedRow]:
        rows = (SelectedRow(self.number, "train", row) for row in self.read())
        num_validation = self.source.num_heldout
        if self.num_train is None and not num_validation:
            yield from rows
            return
        wanted = num_validation + (self.num_train or 1)
        if self.num_rows < wanted:
            raise DataError(
                f"the data has {plural(self.num_rows, 'example')}, the recipe asks for {wanted:,} "
                "(num_train + num_heldout)",
                fix=f"lower {self.key}.num_train or {self.key}.num_heldout",
                name="too-few-rows",
            )
        yield from _sample(rows, self.num_rows, self.num_taken - num_validation, num_validation, self.source.seed)

    def taken_evenly(self) -> Iterator[tuple[float, int, SelectedRow]]:
        """Yield the selected rows, each with its relative position between 0 and 1."""
        for index, row in enumerate(self.taken()):
            yield (index + 0.5) / self.num_taken, self.number, row


def _open_sources(data: DataSpec, *, count: bool = True) -> list[_OpenSource]:
    sources, weights = [], []
    for number, source in enumerate(data.sources):
        key = f"data.source[{number}]" if isinstance(data.source, MixtureSource) else "data.source"
        if isinstance(source, GeneratedSource):
            raise TypeError("generated examples can't be mixed with other sources")
        sources.append(_OpenSource(number, key, source, source.num_train))
        weights += [source.weight] if source.weight else []
    if not weights or not count:
        return sources
    # The source with the fewest rows for its weight limits the total.
    available = [each.num_rows - each.source.num_heldout for each in sources]
    scale = min(num / weight for num, weight in zip(available, weights, strict=True))
    chosen = [min(num, round(scale * weight)) for num, weight in zip(available, weights, strict=True)]
    for source_key in (each.key for each, num in zip(sources, chosen, strict=True) if num < 1):
        sizes = ", ".join(f"{num:,}" for num in available)
        raise DataError(
            f"{source_key}: its weight selects no row",
            meaning=f"the weights differ too much for data of these sizes: {sizes}",
            fix="raise its weight, or give num_train instead of weights",
        )
    return [replace(each, num_train=num) for each, num in zip(sources, chosen, strict=True)]


def _split(
    rows: Iterator[SelectedRow], sources: list[_OpenSource], validation: ValidationSpec
) -> Iterator[SelectedRow]:
    if validation.count is not None:
        num_rows = sum(source.num_taken for source in sources)
        if num_rows <= validation.count:
            raise DataError(
                f"the data has {plural(num_rows, 'example')}, data.validation.count is {validation.count:,}: nothing "
                "is left to train on",
                fix="lower data.validation.count",
                name="too-few-rows",
            )
        return _sample(rows, num_rows, num_rows - validation.count, validation.count, validation.seed)
    if validation.fraction is None:
        return rows
    if validation.by == "hash":
        return (row._replace(split=None) for row in rows)
    draw, fraction = random.Random(validation.seed), validation.fraction
    return (row._replace(split="validation") if draw.random() < fraction else row for row in rows)


def _sample(
    rows: Iterator[SelectedRow], num_rows: int, num_train: int, num_validation: int, seed: int
) -> Iterator[SelectedRow]:
    """Sample rows of both splits in one pass with constant memory.

    Algorithm S of Knuth's "The Art of Computer Programming", volume 2, section 3.4.2.
    """
    draw = random.Random(seed)
    for left, row in zip(range(num_rows, 0, -1), rows, strict=False):
        place = draw.random() * left
        if place < num_validation:
            num_validation -= 1
            yield row._replace(split="validation")
        elif place < num_validation + num_train:
            num_train -= 1
            yield row


def _check_overlap(data: DataSpec) -> None:
    """Refuse files that are read both for training and for validation."""
    places = [(key, place, key.endswith(".train")) for key, place in data.files]
    if all(is_train for *_, is_train in places):
        return
    read = [(file, key, is_train) for key, place, is_train in places for file in find_files(place, key)]
    trained = {_resolved(file): key for file, key, is_train in read if is_train}
    for file, key, is_train in read:
        if not is_train and _resolved(file) in trained:
            raise DataError(
                f"{key}: {file} is also trained on, by {trained[_resolved(file)]}",
                meaning="the loss on the validation split would be that of training data",
                fix="select other files; or draw the split from the data: data.validation.fraction, without a file",
                name="validation-is-trained",
            )


def _resolved(file: str) -> str:
    return file if is_address(file) else str(Path(file).resolve())


def _generate(data: DataSpec, source: GeneratedSource) -> Iterator[SelectedRow]:
    train, validation = generate_rows(data, source)
    for number, columns in enumerate(train, start=1):
        yield SelectedRow(0, "train", RawRow("generated example", " ", number, columns))
    for number, columns in enumerate(validation, start=1):
        yield SelectedRow(0, "validation", RawRow("generated validation example", " ", number, columns))
