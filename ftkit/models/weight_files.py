"""A model's weight files: the tensors in them, from the headers of safetensors, and whether config.json fits them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from pathlib import Path
from typing import Any

from ftkit.errors import NotFoundError, first_few, plural
from ftkit.files import MAX_JSON_BYTES, load_json, open_regular, read_small
from ftkit.models.architecture import ArchitectureFields, ArchitecturePlan, Linear
from ftkit.models.families import family_of

CONFIG_FILE = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
LENGTH_BYTES = 8  # bytes of the little-endian length before the header of a safetensors file
_MAX_HEADER_BYTES = 100_000_000  # limit of the format
_MAX_NAME = 255  # longest name of a file, in bytes
WRAPPED = "model.language_model."  # prefix of the text model in most multimodal models' classes

_TEXT_PREFIXES = {
    "language_model.model.": "model.",  # in files on the hub
    "language_model.lm_head.": "lm_head.",
    WRAPPED: "model.",  # in the class, and in files of some versions of transformers
    "model.text_model.": "model.",  # in Idefics 2 and 3, and SmolVLM
}


def text_name(stored: str) -> str:
    """Return the text model's name of a tensor in the files; other tensors keep their name."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def readable_tensors(file: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file of safetensors; none if the file is missing or damaged."""
    with suppress(*UNREADABLE):
        return stored_tensors(file)
    return {}


def weight_files(folder: Path) -> list[str]:
    """Return the files with a model's weights. As in transformers, an index beside a single file has no effect."""
    if (folder / WEIGHTS_FILE).is_file() or not (folder / WEIGHTS_INDEX).is_file():
        return [WEIGHTS_FILE]
    return sorted(set(read_index(folder).values()))


def read_index(folder: Path) -> dict[str, str]:
    """Return each tensor's file, from the index; one of `UNREADABLE` if damaged, NotFoundError for a file elsewhere."""
    places: dict[str, str] = load_json(read_small(folder / WEIGHTS_INDEX, MAX_JSON_BYTES))["weight_map"]
    for file in set(places.values()):
        parts = Path(file).parts
        if Path(file).is_absolute() or ".." in parts or "\0" in file or any(len(part) > _MAX_NAME for part in parts):
            raise NotFoundError(
                f"model.weights: {folder / WEIGHTS_INDEX} lists {file[:80]!r}, which is no file of this folder",
                meaning="the index was damaged or edited; ftkit reads only files within a model's folder",
                fix="copy or download the model again",
            )
    return places


def is_complete(path: Path) -> bool:
    """Return whether a safetensors file is as long as its header says: the header's length, the header, the tensors."""
    try:
        end = max((tensor.end for tensor in stored_tensors(path).values()), default=None)
        if end is None:
            with open_regular(path) as file:
                end = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        return path.stat().st_size == end
    except UNREADABLE:
        return False


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that damaged safetensors files, and damaged indexes, raise."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is in a file of safetensors: bytes `begin` to `end`."""

    path: Path
    kind: tuple[str, tuple[int, ...]]
    begin: int
    end: int

    def equals(self, other: StoredTensor) -> bool:
        return self.kind == other.kind and all(map(eq, self._chunks(), other._chunks()))

    def _chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            for done in range(self.begin, self.end, 2**24):
                yield file.read(min(2**24, self.end - done))


def tensors_of_model(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a model's weight files, from their headers; damaged files raise any error."""
    return {name: tensor for file in weight_files(folder) for name, tensor in stored_tensors(folder / file).items()}


def stored_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file of safetensors, from its header, which is read again only if the file changed."""
    seen = path.stat()
    return _read_header(path, (seen.st_ino, seen.st_size, seen.st_mtime_ns))


@lru_cache(maxsize=256)  # files of the largest models
def _read_header(path: Path, _: tuple[int, int, int]) -> Mapping[str, StoredTensor]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = load_json(file.read(min(length, _MAX_HEADER_BYTES)))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path,
            (entry["dtype"], tuple(entry["shape"])),
            *(LENGTH_BYTES + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }


# --- Compared with config.json ----------------------------------------------------------------------

_LAYER = re.compile(r"((model|transformer|gpt_neox|backbone)\.)?(layers|h|blocks)\.(?P<number>\d+)\.")
"""Prefix of the tensors of a decoder layer."""
_PREDICTING = re.compile("nextn|mtp")
"""Keys of config.json that count layers which predict further tokens. They follow the decoder layers, untrained."""
_SHOWN = 3


def check_tensors(shape: ArchitectureFields, config: Mapping[str, Any], folder: Path) -> str | None:
    """Compare complete weight files with the model that is built from config.json, if its parameters are counted.

    Return a warning if the files have more decoder layers; for families without a formula, whose files may have other
    tensors than their class, also if they have fewer layers or tensors of other shapes. Raises NotFoundError: the files
    of a family with a formula have fewer layers, or tensors of other shapes.
    """
    if not isinstance(shape, ArchitecturePlan) or shape.counts is None:
        return None
    try:
        stored = {text_name(name): tensor.kind[1] for name, tensor in tensors_of_model(folder).items()}
    except UNREADABLE:
        return None  # damaged files in the hub's cache are refused by the run
    num = 1 + max((int(found["number"]) for name in stored if (found := _LAYER.match(name))), default=-1)
    of_config = shape.num_hidden_layers
    wrong = [*_wrong_shapes(shape, shape.counts.linears, stored)] if shape.counts.is_exact else []
    if num >= of_config and family_of(shape.family).has_formula:
        wrong += _missing(shape, shape.counts.linears, stored)
    if 0 < num < of_config:
        found_layers = f"the files have {plural(num, 'decoder layer')}"
        wrong.insert(0, f"{found_layers}, {CONFIG_FILE} says {of_config} (num_hidden_layers)")
    if wrong:
        what = f"{folder / CONFIG_FILE} contradicts the weight files: {first_few(wrong, _SHOWN, '; ')}"
        if not family_of(shape.family).has_formula:
            return f"{what}: the trainer will refuse them if {CONFIG_FILE} is not that of these files"
        raise NotFoundError(
            f"model.weights: {what}",
            meaning=f"{CONFIG_FILE} was edited, or it belongs to another model than the files",
            fix="copy or download the folder again",
        )
    num_predicting = sum(value for key, value in config.items() if _PREDICTING.search(key) and type(value) is int)
    if num <= of_config + num_predicting:
        return None
    return (
        f"the weight files in {folder} have {num} decoder layers, its {CONFIG_FILE} says {of_config} "
        f"(num_hidden_layers): the run trains and exports only the first {of_config}; if that is not intended, copy or "
        f"download {CONFIG_FILE} again"
    )


def _missing(shape: ArchitecturePlan, linears: tuple[Linear, ...], stored: Iterable[str]) -> Iterator[str]:
    """Yield the kinds of linear layers of which the files have only a part."""
    names = (name.removesuffix(".weight").rpartition(".")[2] for name in stored if _is_compared(name, shape))
    found, expected = Counter(names), Counter[str]()
    for each in linears:
        expected[each.name] += each.count
    for name, num in expected.items():
        if 0 < found[name] < num:
            yield f"the files have {found[name]} of {num} '{name}'"


def _is_compared(name: str, shape: ArchitecturePlan) -> bool:
    """Return whether a tensor is a matrix of a decoder layer, but not of routed experts."""
    layer = _LAYER.match(name)
    is_used = layer is not None and int(layer["number"]) < shape.num_hidden_layers
    return is_used and ".experts." not in name and name.endswith(".weight")


def _wrong_shapes(
    shape: ArchitecturePlan, linears: tuple[Linear, ...], stored: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield the tensors that differ: tables, and linear layers except those of routed experts."""
    tables = ("embed_tokens", "lm_head")
    sizes = {name: [(shape.vocab_size, shape.hidden_size)] for name in tables}
    for each in linears:
        sizes.setdefault(each.name, []).append((each.outputs, each.inputs))
    if not family_of(shape.family).has_formula:  # GPT-2 has [inputs, outputs], Moshi a row more
        sizes = {name: [*own, *((b, a) for a, b in own), *((a + 1, b) for a, b in own)] for name, own in sizes.items()}
    for name, size in stored.items():
        module, _, kind = name.removeprefix("model.").rpartition(".")
        is_compared = (module in tables and kind == "weight") or _is_compared(name, shape)
        expected = sizes.get(module.rpartition(".")[2], []) if is_compared else []
        if expected and len(size) == len(expected[0]) and size not in expected:
            yield f"'{name}' has shape {[*size]} in the files, and {[*expected[0]]} by {CONFIG_FILE}"
