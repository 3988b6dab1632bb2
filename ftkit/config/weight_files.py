"""Compare the tensors in weight files with config.json: their shapes, and the number of decoder layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftkit.config.model import ArchitecturePlan
from ftkit.errors import NotFoundError, plural
from ftkit.families import family_of
from ftkit.model_folder import CONFIG_FILE, UNREADABLE, read_stored_shapes, text_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ftkit.config.model import ArchitectureFields

_LAYER = re.compile(r"((model|transformer|gpt_neox|backbone)\.)?(layers|h|blocks)\.(\d+)\.")
"""Prefix of the tensors of a decoder layer."""
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_PREDICTING = re.compile("nextn|mtp")
"""Keys of config.json that count layers which predict further tokens. They follow the decoder layers, untrained."""
_SHOWN = 3


def check_tensors(shape: ArchitectureFields, config: Mapping[str, Any], folder: Path) -> str | None:
    """Compare the files' tensors with the model that is built from config.json.

    Args:
        shape: the shape in the weights' files, with parameters counted; nothing is compared without the counts.
        config: raw configuration.
        folder: a folder whose weight files are complete.

    Returns:
        A warning if the files have more decoder layers.

    Raises:
        NotFoundError: the files have fewer layers, or tensors of another shape. Only families with a formula are
            compared, whose tensors have the same names in files and class.
    """
    if not isinstance(shape, ArchitecturePlan) or shape.counts is None:
        return None
    try:
        stored = {text_name(name): sizes for name, sizes in read_stored_shapes(folder).items()}
    except UNREADABLE:
        return None  # damaged files in the hub's cache are refused by the run
    layers = {int(found[4]) for name in stored if (found := _LAYER.match(name))}
    num, of_config = 1 + max(layers, default=-1), shape.num_hidden_layers
    if family_of(shape.family).has_formula:
        wrong = [*_wrong_layers(num, of_config), *_wrong_shapes(shape, stored)]
        if wrong:
            shown = wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
            raise NotFoundError(
                f"model.weights: {folder / CONFIG_FILE} contradicts the weight files: {'; '.join(shown)}",
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


def _wrong_shapes(shape: ArchitecturePlan, stored: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the tensors that differ: tables, and linear layers except those of routed experts."""
    linears: dict[str, list[tuple[int, ...]]] = {}
    for linear in shape.counts.linears if shape.counts else ():
        linears.setdefault(f"{linear.name}.weight", []).append((linear.outputs, linear.inputs))
    for name, sizes in stored.items():
        layer = _LAYER.match(name)
        expected: list[tuple[int, ...]] | None = None
        if name.removeprefix("model.") in _TABLES:
            expected = [(shape.vocab_size, shape.hidden_size)]
        elif layer and int(layer[4]) < shape.num_hidden_layers and ".experts." not in name:
            expected = linears.get(".".join(name.split(".")[-2:]))
        if expected and sizes not in expected:
            wanted = " or ".join(str([*each]) for each in expected)
            yield f"'{name}' has shape {[*sizes]} in the files, and {wanted} by {CONFIG_FILE}"
