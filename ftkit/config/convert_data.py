"""Convert the datasets of another tool's configuration to a source and a format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ftkit.config.convert_rows import DATASET, Row
from ftkit.config.data_sources import expand_source
from ftkit.config.foreign_files import Code
from ftkit.config.other_tools import read_values

_LOADERS: Final = ("json", "csv", "parquet", "arrow", "text")
"""Names of `load_dataset` for files."""
_OF_SOURCE: Final = ("path", "subset", "split", "revision", "files", "num")
_DETECTED: Final = "the format is detected from the first rows, one for all sources (data.format)"


@dataclass
class Datasets:
    """All datasets as one source, their format if it is known and the same, and the rows that these are from."""

    source: Any = None
    form: Any = None
    train_on: str = ""
    note: str = ""
    rows: list[Row] = field(default_factory=list)
    form_rows: list[Row] = field(default_factory=list)


def read_datasets(facts: Mapping[str, list[Row]]) -> Datasets:
    """Convert the rows of datasets, by fact."""
    found = Datasets()
    entries: dict[int, dict[str, Any]] = {}
    for fact, rows in facts.items():
        name = fact.removeprefix(DATASET)
        for row in rows:
            row.note = row.note if isinstance(row.value, Code) else "another key sets this"
            if not isinstance(row.value, Code) and name not in entries.setdefault(row.index, {}):
                entries[row.index][name] = row.value
                row.note = "" if name in _OF_SOURCE else _DETECTED
                (found.rows if name in _OF_SOURCE else found.form_rows).append(row)
    number = next((entry.pop("num") for entry in entries.values() if "num" in entry), None)
    sources: list[Any] = []
    forms: list[Any] = []
    notes = ["examples are sampled, not the first ones"] * (number is not None)
    for entry in (entries[index] for index in sorted(entries) if entries[index]):
        kind = str(entry.get("type", "")).partition(":")[0]
        known = read_values()["datasets"]
        meaning = known.get(kind) or known.get(kind.rpartition(".")[2]) or known.get(kind.partition(".")[0], {})
        sources += _sources({"path": meaning.get("path"), **entry}, number)
        forms.append(_format(entry, meaning.get("format")))
        found.train_on = found.train_on or meaning.get("train_on", "")
        notes += [meaning["note"]] if "note" in meaning else []
    if sources:
        found.source = sources[0] if len(sources) == 1 else sources
        found.note = "; ".join(dict.fromkeys(notes))
    if forms and all(form == forms[0] for form in forms):
        found.form = forms[0]
    return found


def _sources(entry: Mapping[str, Any], number: object) -> Iterator[Any]:
    path, files = entry.get("path"), entry.get("files") or []
    listed = list(files.values()) if isinstance(files, dict) else files if isinstance(files, list) else [files]
    if not isinstance(path, str):
        return
    places = [path]
    if path in _LOADERS:
        places = listed
    elif listed:
        places = [f"{path}/{file}" if path[0] in "/.~" else f"hf://datasets/{path}/{file}" for file in listed]
    extra = {} if number is None else {"num_train": number}
    for place in map(str, places):
        source = expand_source(place)
        if isinstance(source, dict) and source["kind"] == "hub":
            keys = [key for key in ("subset", "split", "revision") if entry.get(key) not in {None, "", "train"}]
            extra |= {key: entry[key] for key in keys}
        yield {**source, **extra} if isinstance(source, dict) and extra else place


def _format(entry: Mapping[str, Any], form: Any) -> Any:
    """Return a format; None if ftkit has none for these columns, or detects it."""
    columns = [entry[key] for key in ("context", "prompt", "completion") if entry.get(key)]
    if columns == ["instruction", "output"]:
        return "alpaca"
    if len(columns) > 1 and all(re.fullmatch(r"[^.\[\]{}\"!:]+", str(each)) for each in columns):
        prompt = "\n".join(f"{{{each}}}" for each in columns[:-1])
        return {"kind": "prompt-completion", "prompt": prompt, "completion": f"{{{columns[-1]}}}"}
    if form == "text" and entry.get("text"):
        return {"kind": "text", "column": entry["text"]}
    if not entry.get("column") and form not in ("messages", "sharegpt"):
        return form
    if not {entry.get("role", "role"), entry.get("content", "content")} <= {"role", "content", "from", "value"}:
        return None  # turns have no other keys
    style = "sharegpt" if "sharegpt" in (form, entry.get("style")) or entry.get("role") == "from" else "openai"
    column = entry.get("column") or ("conversations" if form == "sharegpt" else "messages")
    return {"kind": "messages", "column": column, "style": style}
