"""Where in the files each tensor of a model is: under its own name, under another, or in pieces.

transformers 5 has experts in one tensor, and files on the hub have them one by one. It knows what becomes of which
(`transformers.conversion_mapping`), and is asked; the pieces are read here, since each rank wants its own rows alone.
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
from ftkit.train.library_versions import CONVERTS_WEIGHTS
from ftkit.train.model.stored_names import text_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from transformers import PreTrainedModel

Pieces = list[tuple[str, ...]]
"""Names of tensors in the files: for each row of the model's tensor those that are joined to it, along their rows."""


def arrange(model: PreTrainedModel, stored: Iterable[str], known: Collection[str]) -> dict[str, str | Pieces]:
    """Return under which name, or in which pieces, the files hold each tensor of the model that they hold.

    Args:
        model: the model, of which only the kind matters.
        stored: names of the files' tensors.
        known: names of the model's tensors.

    Raises:
        TrainingError: the pieces of a tensor are incomplete, or of a kind that can't be put together here.
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
    """Return whole weights of a model in the pieces that files on the hub have."""
    if not _Conversions.of(model).converters:
        return weights
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - transformers 5

    split: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(weights))
    return {name: tensor.clone() for name, tensor in split.items()}  # files want tensors that share no memory


@dataclass(frozen=True)
class JoinedPieces:
    """A tensor in pieces, read as one that is in a file: a range of its rows reads their pieces alone."""

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
    """What transformers does to the files' tensors as it loads a kind of model."""

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
        """Return the name of the tensor that a stored one becomes (a part of), and as which part."""
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
                f"'{name}' is stored otherwise than the model has it: {', '.join(kind for kind, _ in operations)}",
                meaning=f"transformers {transformers.__version__} converts it as it loads it, which ftkit can't",
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
