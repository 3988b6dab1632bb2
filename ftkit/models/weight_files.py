"""Compare the tensors in weight files with config.json: their shapes, and the number of decoder layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftkit.errors import NotFoundError, plural
from ftkit.models.families import family_of
from ftkit.models.folder import CONFIG_FILE, UNREADABLE, read_stored_shapes, text_name
from ftkit.models.spec import ArchitecturePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ftkit.models.spec import ArchitectureFields, ModelCounts

_LAYER = re.compile(r"((model|transformer|gpt_neox|backbone)\.)?(layers|h|blocks)\.(\d+)\.")
"""Prefix of the tensors of a decoder layer."""
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_PREDICTING = re.compile("nextn|mtp")
"""Keys of config.json that count layers which predict further tokens. They follow the decoder layers, untrained."""
_SHOWN = 3
_NDIM = 2
"""Dimensions of matrices; experts are stacked in three."""


def check_tensors(shape: ArchitectureFields, config: Mapping[str, Any], folder: Path) -> str | None:
    """Compare the files' tensors with the model that is built from config.json.

    Args:
        shape: the shape in the weights' files, with parameters counted exactly; nothing is compared otherwise.
        config: raw configuration.
        folder: a folder whose weight files are complete.

    Returns:
        A warning if the files have more decoder layers; for families without a formula, whose files may have other
        tensors than their class, also if they have fewer layers or tensors of other shapes.

    Raises:
        NotFoundError: the files of a family with a formula have fewer layers, or tensors of other shapes.
    """
    if not isinstance(shape, ArchitecturePlan) or shape.counts is None:
        return None
    try:
        stored = {text_name(name): sizes for name, sizes in read_stored_shapes(folder).items()}
    except UNREADABLE:
        return None  # damaged files in the hub's cache are refused by the run
    layers = {int(found[4]) for name in stored if (found := _LAYER.match(name))}
    num, of_config = 1 + max(layers, default=-1), shape.num_hidden_layers
    if wrong := [*_wrong_layers(num, of_config), *_wrong_shapes(shape, shape.counts, stored)]:
        shown = wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
        what = f"{folder / CONFIG_FILE} contradicts the weight files: {'; '.join(shown)}"
        if not family_of(shape.family).has_formula:
            return f"{what}: the trainer will refuse them if {CONFIG_FILE} is not that of these files"
        raise NotFoundError(
            f"model.weights: {what}",
            meaning=f"{CONFIG_FILE} was edited, or it belongs to another model than the files",
            fix="copy or download the folder again",
        )
    if num <= of_config + _num_predicting(config):
        return None
    return (
        f"the weight files in {folder} have {num} decoder layers, its {CONFIG_FILE} says {of_config} "
        f"(num_hidden_layers): the run trains and exports only the first {of_config}; if that is not intended, copy or "
        f"download {CONFIG_FILE} again"
    )


def _num_predicting(config: Mapping[str, Any]) -> int:
    counts = (value for key, value in config.items() if _PREDICTING.search(key))
    return sum(value for value in counts if type(value) is int)


def _wrong_layers(num: int, of_config: int) -> Iterator[str]:
    if 0 < num < of_config:
        yield f"the files have {plural(num, 'decoder layer')}, {CONFIG_FILE} says {of_config} (num_hidden_layers)"


def _wrong_shapes(shape: ArchitecturePlan, counts: ModelCounts, stored: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the tensors that differ: tables, and linear layers except those of routed experts."""
    if not counts.is_exact:
        return
    has_formula, tables = family_of(shape.family).has_formula, [(shape.vocab_size, shape.hidden_size)]
    linears: dict[str, list[tuple[int, int]]] = {}
    for each in counts.linears:
        linears.setdefault(f"{each.name}.weight", []).append((each.outputs, each.inputs))
        if not has_formula:  # GPT-2 has [inputs, outputs]
            linears[f"{each.name}.weight"].append((each.inputs, each.outputs))
    if not has_formula:  # Moshi has a row more
        tables.append((shape.vocab_size + 1, shape.hidden_size))
    for name, sizes in stored.items():
        layer = _LAYER.match(name)
        expected: list[tuple[int, int]] = []
        if name.removeprefix("model.") in _TABLES:
            expected = tables
        elif layer and int(layer[4]) < shape.num_hidden_layers and ".experts." not in name:
            expected = linears.get(".".join(name.split(".")[-2:]), [])
        if len(sizes) == _NDIM and expected and sizes not in expected:
            yield f"'{name}' has shape {[*sizes]} in the files, and {[*expected[0]]} by {CONFIG_FILE}"
