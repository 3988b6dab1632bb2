"""Read examples from where the recipe says, shuffle them, and hold some out."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.data import FilesSource, GeneratedSource, HubSource
from ftkit.data.rows import Row, read_first_rows, read_json_lines
from ftkit.data.tasks import malware_analysis, text_to_sql
from ftkit.errors import DataError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.config.data import Source

FIRST_BYTES = 1 << 20
"""How much of a file is looked at before a job is submitted."""


@dataclass(frozen=True)
class Splits:
    """The two parts of the data; no example is in both."""

    train: list[Row]
    validation: list[Row]


def read_splits(source: Source) -> Splits:
    """Read the examples of a source, in the same order each time.

    Raises:
        DataError: a file is missing or malformed, the hub refuses, or there are too few examples.
    """
    match source:
        case GeneratedSource():
            return _generate(source)
        case FilesSource(heldout=str(heldout)):
            train, rows = _split(read_json_lines(Path(source.train)), source).train, read_json_lines(Path(heldout))
            if not rows:
                raise DataError(f"{heldout} has no examples", fix="correct data.source.heldout, or leave it out")
            return Splits(train, rows)
        case FilesSource():
            return _split(read_json_lines(Path(source.train)), source)
        case HubSource():
            return _split(_read_hub(source), source)


def peek_rows(source: Source) -> list[Row]:
    """Read what can be had at once: the first rows of local files, one generated example, nothing of the hub.

    Raises:
        DataError: a file is missing, one of these rows is malformed, or small files have too few examples.
    """
    match source:
        case GeneratedSource():
            return _generate(source.model_copy(update={"num_train": 1, "num_heldout": 0})).train
        case FilesSource():
            paths = [Path(path) for path in (source.train, source.heldout) if path is not None]
            rows = [row for path in paths for row in read_first_rows(path, FIRST_BYTES)]
            if all(path.stat().st_size <= FIRST_BYTES for path in paths):
                read_splits(source)
            return rows
        case HubSource():
            return []


def _generate(source: GeneratedSource) -> Splits:
    task: text_to_sql.TextToSql | malware_analysis.MalwareAnalysis
    match source.generator:
        case "text-to-sql":
            task = text_to_sql.generate(source.seed, source.num_train, source.num_heldout)
        case "malware-analysis":
            sizes = source.binary_sizes.smallest, source.binary_sizes.largest
            task = malware_analysis.generate(source.seed, source.num_train, source.num_heldout, sizes)
    return Splits(_numbered(task.train, "generated example"), _numbered(task.heldout, "generated validation example"))


def _numbered(examples: Sequence[text_to_sql.Example | malware_analysis.Example], what: str) -> list[Row]:
    return [Row(asdict(example), f"{what} {number}") for number, example in enumerate(examples, start=1)]


def _split(rows: list[Row], source: FilesSource | HubSource) -> Splits:
    """Shuffle; the first `num_heldout` are held out, the next `num_train` (or all others) are trained on."""
    wanted = source.num_heldout + (source.num_train or 1)
    if len(rows) < wanted:
        raise DataError(
            f"the data has {len(rows):,} examples, the recipe asks for {wanted:,} (num_train + num_heldout)",
            fix="lower data.source.num_train or data.source.num_heldout",
        )
    shuffled = list(rows)
    random.Random(source.seed).shuffle(shuffled)
    end = None if source.num_train is None else wanted
    return Splits(shuffled[source.num_heldout : end], shuffled[: source.num_heldout])


def _read_hub(source: HubSource) -> list[Row]:
    import datasets  # noqa: PLC0415 - a second of imports that only this source needs

    name = f"data set '{source.dataset}', split {source.split}, row"
    try:
        loaded = datasets.load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision)
        return [Row(dict(columns), f"{name} {number}") for number, columns in enumerate(loaded)]
    except Exception as error:  # the library raises whatever its many back-ends raise
        raise DataError(
            f"can't load the data set '{source.dataset}': {one_line(error)}",
            meaning="it does not exist, is gated, or this machine can't reach the hub",
            fix="check the name; set HF_TOKEN for a gated one; on a node without network, prepare where there is one",
        ) from error
