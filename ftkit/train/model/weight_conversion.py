"""Map the tensors of checkpoint files to a model's parameters: by name, by renaming, or from pieces.

transformers 5 stacks experts in one tensor; files on the hub store them separately. The mapping is in
`transformers.conversion_mapping`, but ftkit reads the pieces directly, because each rank needs only its own rows. The
text model of a multimodal one, as in Gemma 3 from 4B on, has other names in the files.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ftkit.errors import TrainingError
from ftkit.models.weight_files import text_name
from ftkit.train.private_apis.transformers import WeightConversions, revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"
"""Suffixes of a tensor that is stored in MXFP4, such as gpt-oss's experts."""
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 codes (OCP Microscaling Formats specification 1.0, section 5.3.3)."""
_MXFP4_BIAS = 127  # bias of the scales, which are exponents of two: E8M0, section 5.4.1
_FP8_SCALES = "_scale_inv"  # suffix of the scales of a matrix in FP8, as in DeepSeek-V3 and Qwen3-FP8
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_JOINED_BY_ROWS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
"""Conversions that work row by row, so that each rank reads only its rows; transformers does the others."""


class TensorSource(Protocol):
    """A tensor that is read in ranges of rows, like a slice of a safetensors file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class MappedTensor:
    first: str  # one of the stored tensors that it is read from; determines the file
    source: TensorSource  # a rank may read only some of the stored tensors
    joined: frozenset[str] = frozenset()  # all stored tensors that are joined to it, with their scales


def name_for_peft(model: PreTrainedModel, name: str) -> str:
    """Return the name under which peft finds an adapter when it loads it.

    peft renames adapters as transformers renames the tensors of files, which changes some of the model's names again:
    Laguna's `shared_experts` matches the pattern of `shared_expert.`, from which it was renamed.
    """
    conversions, (layer, mark, adapter) = WeightConversions.of(model), name.partition(".lora_")
    weight = f"{layer}.weight"
    if conversions.rename(weight)[0] == weight:
        return name
    stored, *others = revert_weight_conversion(model, {weight: torch.empty(0, device="meta")})
    is_found = not others and conversions.rename(stored)[0] == weight
    return f"{stored.removesuffix('.weight')}{mark}{adapter}" if is_found else name


def map_tensors(
    model: PreTrainedModel, stored: Iterable[str], known: Collection[str], read: Callable[[str], TensorSource]
) -> dict[str, MappedTensor]:
    """Return the sources of the model's tensors that are in the files, by the model's names.

    Only the model's class and configuration matter. `read` opens a tensor of the files without reading it.
    """
    stored = set(stored)
    names, read = dequantized(stored, read)
    found: dict[str, MappedTensor] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    conversions = WeightConversions.of(model)
    for one in sorted(names, key=_natural_sort_key):
        name, pattern = one if one in known else text_name(one), None
        if name not in known and name.removesuffix(_MXFP4_BLOCKS) in known:
            scales = one.removesuffix(_MXFP4_BLOCKS) + _MXFP4_SCALES
            found[name.removesuffix(_MXFP4_BLOCKS)] = MappedTensor(one, Mxfp4Tensor(read(one), read(scales)))
            continue
        if name not in known:  # a multimodal model's class renames what its files have
            name, pattern = next(
                (found for found in map(conversions.rename, (one, name)) if found[0] in known), conversions.rename(name)
            )
        if name not in known and (full := f"{model.base_model_prefix}.{name}") in known:
            name = full  # files of the model without its output projection, as of GPT-2 and BLOOM on the hub
        if name in known and pattern is None:
            found[name] = MappedTensor(one, read(one))
        elif pattern is not None:
            pieces[name][pattern].append(one)
    for name, by_pattern in pieces.items():
        first, joined = next(iter(by_pattern.values()))[0], {*chain.from_iterable(by_pattern.values())}
        joined |= {one + _FP8_SCALES for one in joined} & stored
        for target, source in _join(conversions.converters, name, by_pattern, model, read).items():
            if target in known:
                found[target] = MappedTensor(first, source, frozenset(joined))
    return found


def converts_layout(model: PreTrainedModel) -> bool:
    """Return whether files on the hub have a different layout than the model."""
    return bool(WeightConversions.of(model).converters)


def split_as_stored(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a model's unsharded weights in the layout of files on the hub."""
    return revert_weight_conversion(model, weights) if converts_layout(model) else weights


@dataclass(frozen=True)
class JoinedPieces:
    """A tensor with one row per expert, each concatenated from several tensors of the files."""

    pieces: list[tuple[str, ...]]
    read: Callable[[str], TensorSource]

    def get_shape(self) -> list[int]:
        shapes = [self.read(name).get_shape() for name in self.pieces[0]]
        return [len(self.pieces), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return torch.stack([torch.cat([self.read(name)[:] for name in names]) for names in self.pieces[rows]])


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Experts in MXFP4, dequantized to bf16 [E, G * 32, N] on reading."""

    blocks: TensorSource  # uint8 [E, N, G, 16]: 32 four-bit codes per group
    scales: TensorSource  # uint8 [E, N, G]: exponents

    def get_shape(self) -> list[int]:
        experts, outputs, groups, width = self.blocks.get_shape()
        return [experts, groups * width * 2, outputs]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        blocks, scales = self.blocks[rows], self.scales[rows]
        values = torch.tensor(_MXFP4_VALUES, dtype=torch.bfloat16)
        numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
        exponents = scales.int() - _MXFP4_BIAS
        return torch.ldexp(numbers, exponents[..., None]).flatten(-2).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Fp8Tensor:
    """An FP8 matrix, [N, K], with a scale per block, dequantized to bf16 on reading."""

    values: TensorSource
    scales: TensorSource  # fp32 [ceil(N / B), ceil(K / B)]: factor of the values in a block of B x B

    def get_shape(self) -> list[int]:
        return self.values.get_shape()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        (height, width), counts = self.get_shape(), self.scales.get_shape()
        size = next((size for size in _BLOCK_SIZES if [-(-height // size), -(-width // size)] == [*counts]), None)
        if size is None:
            raise TrainingError(
                f"the scales of a matrix in FP8 are {counts}, which fit no square blocks of {[height, width]}",
                meaning="these weights are quantized in a way that ftkit does not support",
                fix="use the unquantized version of the model",
            )
        first, last, _ = rows.indices(height)
        scales = self.scales[first // size : -(-last // size)].float()
        each_row = torch.arange(first, last) // size - first // size
        spread = scales.repeat_interleave(size, dim=1)[each_row, :width]
        return (self.values[first:last].float() * spread).to(torch.bfloat16)


def dequantized(
    stored: set[str], read: Callable[[str], TensorSource]
) -> tuple[set[str], Callable[[str], TensorSource]]:
    """Return the names of the files' tensors without FP8 scales, and a reader that applies the scales."""
    scales = {name + _FP8_SCALES for name in stored} & stored

    def read_dequantized(name: str) -> TensorSource:
        factor = name + _FP8_SCALES
        return Fp8Tensor(read(name), read(factor)) if factor in scales else read(name)

    return stored - scales, read_dequantized


@dataclass(frozen=True)
class _ConvertedTensor:
    """A tensor that transformers converts."""

    convert: Callable[[], dict[str, torch.Tensor]]  # returns it and others; converts once
    name: str

    def get_shape(self) -> list[int]:
        return list(self.convert()[self.name].shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.convert()[self.name][rows]


def _join(
    converters: Iterable[Any],
    name: str,
    by_pattern: dict[str, list[str]],
    model: PreTrainedModel,
    read: Callable[[str], TensorSource],
) -> dict[str, TensorSource]:
    """Return the model's tensors that one converter makes from stored tensors, by name; `name` is the first of them.

    Tensors that can't be joined by rows are read completely.
    """
    (converter,) = (one for one in converters if not by_pattern.keys().isdisjoint(one.source_patterns))
    parts = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
    if len({len(part) for part in parts}) > 1:
        raise TrainingError(
            f"pieces of '{name}' are missing: the files have {' and '.join(str(len(part)) for part in parts)}",
            meaning="the files are incomplete",
            fix="download them again",
        )
    operations = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    if operations in _JOINED_BY_ROWS:
        return {name: JoinedPieces(list(zip(*parts, strict=True)), read)}

    @cache
    def convert() -> dict[str, torch.Tensor]:
        used = copy.deepcopy(converter)
        for pattern, names in by_pattern.items():
            for stored in names:
                used.add_tensor(name, stored, pattern, read(stored)[:])
        converted = used.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}

    first, *others = converter.target_patterns
    prefix, _, suffix = name.partition(first)
    targets = [name, *(prefix + other + suffix for other in others)]
    return {target: _ConvertedTensor(convert, target) for target in targets}


def _natural_sort_key(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class LazyTensors(Mapping[str, torch.Tensor]):
    """A mapping of tensors by name; `read` computes one at each access.

    Iteration and `in` compute none; `Mapping`'s own `in` would compute the tensor.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
