"""Read examples from where the recipe says, shuffle them, and hold some out."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.data import malware_analysis, text_to_sql
from ftkit.errors import DataError
from ftkit.specs.data import FilesSource, GeneratedSource, HubSource

if TYPE_CHECKING:
    from ftkit.specs.data import Source

Example = dict[str, Any]


@dataclass(frozen=True)
class Examples:
    """The two parts of the data; no example is in both."""

    train: list[Example]
    heldout: list[Example]


def read_examples(source: Source) -> Examples:
    """Read the examples of a source, in the same order each time.

    Raises:
        DataError: a file is missing or malformed, the hub refuses, or there are too few examples.
    """
    match source:
        case GeneratedSource():
            return _generate(source)
        case FilesSource(heldout=str(heldout)):
            train = _take(_read_lines(Path(source.train)), source.num_train, source.seed)
            return Examples(train, _read_lines(Path(heldout)))
        case FilesSource():
            return _split(_read_lines(Path(source.train)), source)
        case HubSource():
            return _split(_read_hub(source), source)


def _generate(source: GeneratedSource) -> Examples:
    task: text_to_sql.TextToSql | malware_analysis.MalwareAnalysis
    match source.generator:
        case "text-to-sql":
            task = text_to_sql.generate(source.seed, source.num_train, source.num_heldout)
        case "malware-analysis":
            sizes = source.binary_sizes.smallest, source.binary_sizes.largest
            task = malware_analysis.generate(source.seed, source.num_train, source.num_heldout, sizes)
    return Examples([asdict(example) for example in task.train], [asdict(example) for example in task.heldout])


def _split(examples: list[Example], source: FilesSource | HubSource) -> Examples:
    """Shuffle; the first `num_heldout` are held out, the next `num_train` (or all others) are trained on."""
    wanted = source.num_heldout + (source.num_train or 1)
    if len(examples) < wanted:
        raise DataError(
            f"the data has {len(examples):,} examples, the recipe asks for {wanted:,} (num_train + num_heldout)",
            fix="lower data.source.num_train or data.source.num_heldout",
        )
    shuffled = _take(examples, None, source.seed)
    end = None if source.num_train is None else wanted
    return Examples(shuffled[source.num_heldout : end], shuffled[: source.num_heldout])


def _take(examples: list[Example], num: int | None, seed: int) -> list[Example]:
    shuffled = list(examples)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:num]


def _read_lines(path: Path) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path}: {error}", fix="check data.source in the recipe") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}", fix="each line is one JSON object") from error
        if not isinstance(example, dict):
            raise DataError(f"{path}:{number}: not a JSON object", fix="each line is one JSON object")
        examples.append(example)
    return examples


def _read_hub(source: HubSource) -> list[Example]:
    import datasets  # noqa: PLC0415 - a second of imports that only this source needs

    try:
        loaded = datasets.load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises whatever its many back-ends raise
        raise DataError(
            f"can't load the data set '{source.dataset}': {error}",
            meaning="it does not exist, is gated, or this machine can't reach the hub",
            fix="check the name; set HF_TOKEN for a gated one; on a node without network, prepare where there is one",
        ) from error
    return [dict(row) for row in loaded]
