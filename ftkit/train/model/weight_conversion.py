"""Map the tensors of checkpoint files to a model's parameters: by name, by another name, or in pieces.

transformers 5 holds experts in one tensor, and files on the hub hold them one by one. Its
`transformers.conversion_mapping` says which become which; ftkit reads the pieces itself, since each rank needs only
its own rows. A text model that is part of a multimodal one, as Gemma 3's is from 4B on, has other names there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from ftkit.errors import TrainingError
from ftkit.train.private_apis import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from transformers import PreTrainedModel

Pieces = list[tuple[str, ...]]
"""Names of tensors in the files: for each row of the model's tensor those that are concatenated to it."""

_WRAPPED = "model.language_model."
"""Prefix of the text model in a multimodal model's class."""

_TEXT_PREFIXES = {
    "language_model.model.": "model.",  # as files on the hub have them
    "language_model.lm_head.": "lm_head.",
    _WRAPPED: "model.",  # as the class has them, and some versions of transformers save them
}


def text_name(stored: str) -> str:
    """Return the text model's name of a tensor in the files; one that is not of the text model keeps its name."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def wrapped_name(name: str) -> str:
    """Return the multimodal class's name of a tensor of the text model."""
    return _WRAPPED + name.removeprefix("model.") if name.startswith("model.") else name


def wrapped_targets(projections: Iterable[str]) -> str:
    """Return peft's pattern for a multimodal class's adapted modules: its vision tower may have layers so called."""
    return rf"{re.escape(_WRAPPED)}.*\.({'|'.join(map(re.escape, projections))})"


def map_tensors(model: PreTrainedModel, stored: Iterable[str], known: Collection[str]) -> dict[str, str | Pieces]:
    """Return under which name, or in which pieces, the files hold each of the model's tensors that they hold.

    Args:
        model: the model; only its class and configuration matter.
        stored: names of the files' tensors.
        known: names of the model's tensors.

    Raises:
        TrainingError: pieces of a tensor are missing, or ftkit doesn't know this conversion.
    """
    found: dict[str, str | Pieces] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    conversions = _Conversions.of(model)
    for one in sorted(stored, key=_natural):
        name, pattern = text_name(one), None
        if name not in known:
            name, pattern = conversions.rename(name)
        if name in known and pattern is None:
            found[name] = one
        elif name in known:
            pieces[name][cast("str", pattern)].append(one)
    for name, by_pattern in pieces.items():
        found[name] = conversions.join(name, by_pattern)
    return found


def split_as_stored(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a model's whole weights as files on the hub hold them."""
    if not _Conversions.of(model).converters:
        return weights
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - transformers 5

    split: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(weights))
    return {name: tensor.clone() for name, tensor in split.items()}  # files need tensors that share no memory


@dataclass(frozen=True)
class JoinedPieces:
    """A tensor in pieces, with the interface of a slice of a file: a range of rows reads only their pieces."""

    pieces: Pieces
    read: Callable[[str], Any]

    def get_shape(self) -> list[int]:
        """Return the shape of the joined tensor."""
        shapes = [self.read(name).get_shape() for name in self.pieces[0]]
        return [len(self.pieces), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Return some rows: one expert each."""
        return torch.stack([torch.cat([self.read(name)[:] for name in names]) for names in self.pieces[rows]])


@dataclass(frozen=True)
class _Conversions:
    """How transformers converts the files' tensors as it loads a class of model."""

    renamings: list[Any]
    converters: list[Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Conversions:
        if not CONVERTS_WEIGHTS:
            return cls([], [])
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - transformers 5
        from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415

        known = get_model_conversion_mapping(model, add_legacy=False)
        return cls(*([one for one in known if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)))

    def rename(self, stored: str) -> tuple[str, str | None]:
        """Return the name of the tensor that a stored one becomes (a part of), and the pattern of that part."""
        if not self.renamings and not self.converters:
            return stored, None
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415 - transformers 5

        renamed: tuple[str, str | None] = rename_source_key(stored, self.renamings, self.converters)
        return renamed

    def join(self, name: str, by_pattern: dict[str, list[str]]) -> Pieces:
        """Return the pieces of a tensor, row by row."""
        (converter,) = (one for one in self.converters if not by_pattern.keys().isdisjoint(one.source_patterns))
        operations = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
        if operations not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise TrainingError(
                f"'{name}' is stored in another form than the model's: {', '.join(each for each, _ in operations)}",
                meaning=f"transformers {transformers.__version__} converts it while loading; ftkit can't",
                fix="load and save the model with transformers, or choose another one",
            )
        parts = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
        if len({len(part) for part in parts}) > 1:
            raise TrainingError(
                f"pieces of '{name}' are missing: {' and '.join(str(len(part)) for part in parts)} are there",
                meaning="the files are incomplete",
                fix="download them again",
            )
        return list(zip(*parts, strict=True))


def _natural(name: str) -> list[str | int]:
    """Order numbers in names as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
