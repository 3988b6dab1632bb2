"""Convert the data sets of another tool: their places, rows, and columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ftkit.config.convert_rows import DATASET, Conversion, Row
from ftkit.config.data_sources import DATA_FILE, expand_source
from ftkit.config.foreign_files import Code
from ftkit.config.other_tools import read_values

_LOADERS: Final = ("json", "csv", "parquet", "arrow", "text")  # names of `load_dataset` for files
_WEIGHTS: Final = "give each source its share: data.source: [{source: PLACE, weight: SHARE}, …], without num_train"
_OF_SOURCE: Final = ("path", "subset", "split", "revision", "files", "num", "limit")
_SAMPLED: Final = "examples are sampled, not the first ones; lower num_train if there are fewer"
_ONCE: Final = "no row repeats here: the source that limits the total is used completely, once"
DETECTED: Final = "the format of each source is detected from its first rows (data.format sets one for all)"
_FIRST: Final = re.compile(r"\w+\[:(\d+)\]")  # a split, limited to its first rows
_ALL: Final = "of files, all rows are taken; num_train: N in data.source samples N of them"
_PLACES: Final = {"path", "source", "file_name", "path_or_dataset_id", "data_files", "ds_type"}  # or their kinds
_LIMITS: Final = {"split", "num_samples", "num_samples_limit", "limit_dataset_samples"}
_HELDOUT: Final = "data.validation: {file: FILE} takes one file, which is read like the data to train on"


def set_datasets(it: Conversion) -> None:
    """Set all datasets as one source, and the format if it is known and the same for all."""
    entries: dict[int, dict[str, Any]] = {}
    rows: list[Row] = []
    form_rows: list[Row] = []
    splits: dict[int, Row] = {}
    for fact in [fact for fact in it.facts if fact.startswith(DATASET)]:
        name = fact.removeprefix(DATASET)
        for row in it.take(fact):
            if not isinstance(row.value, Code) and name not in entries.setdefault(row.index, {}):
                entries[row.index][name] = row.value
                row.note = "" if name in _OF_SOURCE else DETECTED
                (rows if name in _OF_SOURCE else form_rows).append(row)
                splits |= {row.index: row} if name == "split" else {}
    number = next((entry.pop("num") for entry in entries.values() if "num" in entry), None)
    sources: list[Any] = []
    forms: list[Any] = []
    notes: list[str] = []
    differences: list[str] = []  # of formats
    train_on = ""
    for index, entry in sorted(each for each in entries.items() if each[1]):
        kind = str(entry.get("type", "")).partition(":")[0]
        known = read_values()["datasets"]
        meaning = known.get(kind) or known.get(kind.rpartition(".")[2]) or known.get(kind.partition(".")[0], {})
        whole = {"path": meaning.get("path"), **entry}
        found = list(_sources(whole, number))
        sources += found
        notes += [_SAMPLED] * any("num_train" in each for each in found if isinstance(each, dict))
        if found and str(whole.get("split", "")) not in {"train", ""}:
            rows.remove(splits[index])
            splits[index].note = _ALL
        forms.append(_format(entry, meaning.get("format")))
        train_on = train_on or meaning.get("train_on", "")
        differences += [meaning["note"]] if "note" in meaning and forms[-1] == meaning["format"] else []
    by_share = _set_weights(it, sources)
    notes += [_ONCE] * any(row.value == "interleave_over" for row in by_share)
    is_one_format = bool(forms) and forms[0] is not None and all(form == forms[0] for form in forms)
    if sources:
        rows += by_share
        note = "; ".join(dict.fromkeys(notes if is_one_format else notes + differences))
        it.put("data.source", sources[0] if len(sources) == 1 else sources, *rows, note=note, is_changed=bool(note))
    for row in [row for row in rows if not row.became]:
        row.note = row.note or "data.source is not in the input; this belongs to it"
    if is_one_format:
        note = "; ".join(dict.fromkeys(differences))
        it.put("data.format", forms[0], *form_rows, note=note, is_changed=bool(note))
    if train_on:
        it.put("data.train_on", train_on)


def _set_weights(it: Conversion, sources: list[object]) -> list[Row]:
    """Give the sources their shares where LLaMA-Factory interleaves datasets; return the rows that set them."""
    by_kind, by_share = it.take("mixing", _WEIGHTS), it.take("shares", _WEIGHTS)
    if not any(row.value in {"interleave_under", "interleave_over"} for row in by_kind):
        for row in by_kind:
            row.note = "each source contributes all its rows, as here"
        return []
    found = [float(each) for row in by_share for each in re.findall(r"\d+\.?\d*|\.\d+", str(row.value))]
    shares = found or [1.0] * len(sources)
    is_limited = any(isinstance(source, dict) and "num_train" in source for source in sources)
    if len(shares) != len(sources) or len(sources) == 1 or not all(shares) or is_limited:
        return []
    for number, (source, share) in enumerate(zip(sources, shares, strict=True)):
        sources[number] = {**(source if isinstance(source, dict) else {"source": source}), "weight": share}
    return [*by_kind, *by_share]


def _sources(entry: dict[str, Any], number: object) -> Iterator[Any]:
    """Yield the sources of an entry, and remove what they express, such as its split, from the entry."""
    path, files = entry.get("path"), entry.get("files") or []
    listed = list(files.values()) if isinstance(files, dict) else files if isinstance(files, list) else [files]
    if not isinstance(path, str):
        return
    places = [path]
    if path in _LOADERS:
        places = listed
    elif listed:
        places = [_place_of(str(file), path) for file in listed]
    limits = [each for each in (number, entry.get("limit")) if type(each) is int]
    for place in map(str, places):
        source = expand_source(place)
        extra: dict[str, object] = {}
        if isinstance(source, dict) and source["kind"] == "hub":
            keys = [key for key in ("subset", "split", "revision") if str(entry.get(key, "")) not in {"", "train"}]
            extra = {key: entry.pop(key) for key in keys}
        elif len(places) == 1 and (first := _FIRST.fullmatch(str(entry.get("split")))):
            del entry["split"]
            limits.append(int(first[1]))
        if limits or number is not None:
            extra["num_train"] = min(limits, default=number)
        yield {**source, **extra} if isinstance(source, dict) and extra else place


def _place_of(file: str, path: object) -> str:
    """Return the place of a file of a data set: of a folder, or of a repository on the hub."""
    if not isinstance(path, str) or path in _LOADERS:
        return file
    return f"{path}/{file}" if path[0] in "/.~" else f"hf://datasets/{path}/{file}"


def _format(entry: Mapping[str, Any], form: Any) -> Any:
    """Return a format; None if ftkit detects it, or has none for these columns."""
    columns = [str(entry[key]) for key in ("context", "prompt", "input", "completion") if entry.get(key)]
    if columns == ["instruction", "output"]:
        return "alpaca"
    if len(columns) > 1 and all(re.fullmatch(r"[^.\[\]{}\"!:]+", each) for each in columns):
        if entry.get("input") and all(each.isidentifier() for each in columns):  # empty ones add no line
            prompt = f"{{{{ [{', '.join(columns[:-1])}] | select | join('\\n') }}}}"
            return {"kind": "jinja", "prompt": prompt, "completion": f"{{{{ {columns[-1]} }}}}"}
        prompt = "\n".join(f"{{{each}}}" for each in columns[:-1])
        return {"kind": "prompt-completion", "prompt": prompt, "completion": f"{{{columns[-1]}}}"}
    if form == "text" and entry.get("text"):
        return {"kind": "text", "column": entry["text"]}
    if not entry.get("column") and form not in ("messages", "sharegpt"):
        return form
    usual = ("from", "value") if "sharegpt" in (form, entry.get("style")) else ("role", "content")
    keys = (str(entry.get("role", usual[0])), str(entry.get("content", usual[1])))
    style = {("from", "value"): "sharegpt", ("role", "content"): "openai"}.get(keys)  # ftkit reads these keys only
    column = entry.get("column") or ("conversations" if form == "sharegpt" else "messages")
    return {"kind": "messages", "column": column, "style": style} if style else None


def set_heldout(it: Conversion) -> None:
    """Validate on a file that is read like the first source."""
    rows = it.take("heldout", _HELDOUT)
    sections = [row.key.rpartition(".")[0] for row in it.sources.get("data.source", ()) if row.index == 0]
    given = [(row, str(each)) for row in rows for each in (row.value if isinstance(row.value, list) else [row.value])]
    files = [(row, each) for row, each in given if DATA_FILE.search(each) and not isinstance(row.value, Code)]
    if len(files) > 1:  # of several splits, programs evaluate on that for validation during training
        files = [each for each in files if each[0].key.rpartition(".")[2].startswith(("val", "eval"))]
    if len(files) != 1:
        return
    row, file = files[0]
    if ".data_files" in row.key:
        path = f"{row.key.partition('.data_files')[0]}.path"
        file = _place_of(file, next((each.value for each in it.rows if each.key == path), None))
    both: list[dict[str, object]] = []
    for section in (row.key.rpartition(".")[0], next(filter(None, sections), "")):
        found = {each.key.rpartition(".")[2]: each.value for each in it.rows if each.key.startswith(f"{section}.")}
        if "[" not in str(found.get("split")):
            found.pop("split", None)
        both.append({key: value for key, value in found.items() if key not in _PLACES})
    if both[0] == {key: value for key, value in both[1].items() if key not in _LIMITS}:
        it.put("data.validation", {"file": file}, row)
