"""Load pretrained weights from safetensors files directly into each rank's shard.

A rank reads only the rows of its shard of each tensor, so it never has the whole model.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from ftkit.data.staging import STAGED
from ftkit.errors import NotFoundError, TrainingError
from ftkit.hub.readiness import download_weights
from ftkit.models.folder import check_folder
from ftkit.models.weight_files import WEIGHTS_FILE, WEIGHTS_INDEX, read_index, text_name
from ftkit.paths import is_path
from ftkit.train.model.expert_adapters import GroupedExperts
from ftkit.train.model.hf_model import find_decoder_layers, text_part_of
from ftkit.train.model.linears import QuantizedLinear, WeightLayout, is_transposed
from ftkit.train.model.local_shard import LocalShard, local_shard, rows_per_read
from ftkit.train.model.lora import DORA_MAGNITUDE, init_adapters, is_adapter, load_adapters
from ftkit.train.model.weight_conversion import LazyTensors, MappedTensor, TensorSource, map_tensors
from ftkit.train.private_apis.transformers import ignored_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.config.recipe import RecipePlan
    from ftkit.models.architecture import ArchitectureSpec, ModelSpec
    from ftkit.train.world import World

log = logging.getLogger(__name__)


def fetch_weights(model: ModelSpec, world: World, *, is_teacher: bool = False) -> Path:
    """Return the folder with the model's files, on the node's local disk if staged; a teacher's are never staged.

    Download missing files once per node; the other ranks wait.
    """
    if (staged := os.environ.get(STAGED)) and not is_teacher:
        return Path(staged)
    if is_path(model.weights):
        check_folder(Path(model.weights))  # no node has checked it yet if the data was prepared earlier
        return Path(model.weights)
    home = Path("~/.cache/huggingface")  # unless HF_HOME is set, as the job script does
    if world.local_rank == 0:
        download_weights(model, os.environ, home)
    world.barrier()
    folder = download_weights(model, os.environ, home, local_files_only=True)
    check_folder(folder)
    return folder


def materialize(model: nn.Module, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate a sharded model's parameters, which unties tied ones; move buffers to `device` with their values."""
    buffers = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    model.to_empty(device=parameter_device)
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, buffer)


@dataclass(frozen=True)
class LoadTarget:
    """This rank's shard of a parameter that is loaded from the files, possibly quantized."""

    shard: LocalShard  # if quantized, of the flat form, or of stacked experts' flat forms
    layout: WeightLayout | None = None  # of the quantized form, if any
    magnitude: LocalShard | None = None  # DoRA's, initialized with the norms of the pretrained weights of each output
    is_transposed: bool = False  # whether the files have a matrix as [inputs, outputs]

    @property
    def expected_shape(self) -> list[int]:
        """The shape of the tensor in the files."""
        if self.layout is None:
            return [*self.shard.shape]
        shape = [self.layout.num_outputs, self.layout.num_inputs]
        return [*self.shard.shape[:-1], *(shape[::-1] if self.is_transposed else shape)]

    def load(self, source: TensorSource, name: str) -> None:
        """Read this rank's rows (or experts) of a tensor, or the whole matrix if each shard depends on all of it."""
        shape, device = list(source.get_shape()), self.shard.values.device
        if shape != self.expected_shape:
            raise TrainingError(
                f"'{name}' has shape {shape} in the files and {self.expected_shape} in the model",
                fix="check model.architecture against the weights' config.json, and copy or download both again",
            )
        layout, magnitude = self.layout, self.magnitude

        def read(first: int = 0, last: int | None = None) -> torch.Tensor:
            return source[first:last].to(device)

        def by_output(stored: torch.Tensor) -> torch.Tensor:
            return stored.mT if self.is_transposed else stored

        if layout is None:
            self.shard.copy_rows(lambda first, last: source[first:last])
            if magnitude is not None and self.is_transposed:
                magnitude.copy_from(_row_norms(read().T))
            elif magnitude is not None:
                magnitude.copy_rows(lambda first, last: _row_norms(read(first, last)))
        elif len(self.shard.shape) > 1:
            num_experts = rows_per_read(self.expected_shape)
            self.shard.copy_rows(lambda first, last: layout.quantize(by_output(read(first, last))), num_experts)
        else:
            flat = layout.quantize(by_output(read()))
            self.shard.copy_from(flat)
            if magnitude is not None:
                magnitude.copy_from(_row_norms(layout.dequantize(flat)))


def _row_norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.norm(rows.float(), dim=1)
    return norms


def load_targets(model: nn.Module) -> dict[str, LoadTarget]:
    """Return the target of each tensor in the files. Adapters are in no file, and add a level to the base's names."""
    # A tied parameter is listed once, under its first name.
    shards = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    found: dict[str, LoadTarget] = {}
    for name, shard in shards.items():
        if is_adapter(name):
            continue
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        layout, is_turned = None, own_name == "weight" and is_transposed(module)
        if isinstance(module, QuantizedLinear) and own_name == "quantized":
            layout, is_turned = module.layout, module.is_transposed
        elif isinstance(module, GroupedExperts) and own_name in module.layouts:
            layout, is_turned = module.layouts[own_name], module.is_transposed
        is_matrix = own_name in ("quantized", "weight")
        magnitude = shards.get(owner.removesuffix("base_layer") + DORA_MAGNITUDE) if is_matrix else None
        stored = name.replace(".base_layer.", ".").replace(".quantized", ".weight")
        found[stored] = LoadTarget(shard, layout, magnitude, is_turned)
    return found


def load_weights(model: PreTrainedModel, folder: Path, stored_vocab_size: int | None = None) -> None:
    """Load a sharded model's parameters, except adapters, and the buffers in the files.

    From a multimodal model's files, read only the text model, unless the model is built as a whole. If the files have
    only `stored_vocab_size` rows of the embedding, initialize the others with the mean.
    """
    targets, buffers = load_targets(model), dict(model.named_buffers())
    places = _places(folder)
    with _OpenFiles(places) as files:
        mapped = _map_by_first_name(model, places, targets.keys() | buffers.keys(), files.read)
        if missing := sorted(targets.keys() - mapped.keys()):
            raise TrainingError(
                f"{len(missing)} of the model's parameters are not in {folder}: {', '.join(missing[:3])} …",
                meaning="the files are incomplete, or belong to another model",
                fix="download them again; check model.weights and model.architecture",
            )
        used = {stored for one in mapped.values() for stored in one.joined}  # by all ranks
        grow = _growth(model, stored_vocab_size)
        for name in sorted(mapped, key=lambda name: (places[mapped[name].first], mapped[name].first)):
            one = mapped.pop(name)  # frees the sources of a conversion with its last result
            if name in targets:
                targets[name].load(grow(name, one.source), one.first)
            else:
                buffers[name].copy_(one.source[...])
        used |= files.used
    in_layers = set(_in_layers(model, places.keys() - used))
    if others := sorted(places.keys() - used - in_layers):
        log.info(
            "the files have %d more tensors, such as of a vision tower or of layers that predict further tokens; "
            "they are neither trained nor exported: %s …", len(others), ", ".join(others[:3]),
        )  # fmt: skip
    if in_layers:
        first = ", ".join(sorted(in_layers)[:3])
        name = type(model).__name__
        log.warning("the files have %d tensors that %s does not use, or train: %s …", len(in_layers), name, first)


def _in_layers(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """Return the files' tensors in decoder layers that the class does not ignore."""
    layers = find_decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers) + "."
    ignored = [*ignored_tensors(model), r"rotary_emb\.inv_freq"]
    return [
        name
        for name in stored
        if any(
            own.startswith(prefix) and not any(re.search(pattern, own) for pattern in ignored)
            for own in (name, text_name(name))
        )
    ]


def open_pretrained(model: PreTrainedModel, folder: Path, stored_vocab_size: int | None = None) -> LazyTensors:
    """Return the tensors of a folder of pretrained weights by a model's names; each is read on access.

    Tensors have the files' dtypes. MXFP4 is dequantized, rows for added tokens are appended, and tensors that the model
    lacks are left out. Only the model's names and class matter: it has no adapters, and may be on the meta device.
    """
    places = _places(folder)
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    mapped = _map_by_first_name(model, places, known, _OpenFiles(places).read)
    grow = _growth(model, stored_vocab_size)

    def read(name: str) -> torch.Tensor:
        source = grow(name, mapped[name].source)
        return source[:] if len(source.get_shape()) else source[...]

    return LazyTensors(mapped, read)


def _map_by_first_name(
    model: PreTrainedModel, stored: Iterable[str], known: Collection[str], read: Callable[[str], TensorSource]
) -> dict[str, MappedTensor]:
    """Map tensors with `map_tensors`; files may have a tied parameter under any of its names."""
    first_names: dict[torch.Tensor, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {name: first for name, each in named if (first := first_names.setdefault(each, name)) != name}
    mapped = map_tensors(model, stored, {*known, *aliases}, read)
    for name in aliases.keys() & mapped.keys():
        mapped.setdefault(aliases[name], mapped.pop(name))
    return mapped


def _growth(model: PreTrainedModel, num_stored: int | None) -> Callable[[str, TensorSource], TensorSource]:
    """Return a function of a parameter's name and source that adds rows for new tokens if it has a row per token."""
    owners = (model.get_input_embeddings(), model.get_output_embeddings())
    ids = {id(parameter) for owner in owners for parameter in owner.parameters(recurse=False)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in ids}

    def grow(name: str, source: TensorSource) -> TensorSource:
        grows = num_stored is not None and name in names and source.get_shape()[0] == num_stored
        return _GrownTensor(source, text_part_of(model.config).vocab_size) if grows else source

    return grow


@dataclass(frozen=True)
class _GrownTensor:
    """A tensor of the files with added rows, each the mean of the stored rows."""

    source: TensorSource
    num_rows: int

    def get_shape(self) -> list[int]:
        return [self.num_rows, *self.source.get_shape()[1:]]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        stored, (first, last, _) = self.source.get_shape()[0], rows.indices(self.num_rows)
        if last <= stored:  # most ranks need no mean, which would read all rows
            return self.source[first:last]
        # The mean in fp64, in chunks that don't depend on the shards.
        shape = self.source.get_shape()
        height = rows_per_read(shape)
        total = torch.zeros(shape[1:], dtype=torch.float64)
        for begin in range(0, stored, height):
            chunk = self.source[begin : min(begin + height, stored)]
            total += chunk.double().sum(dim=0)
        new = (total / stored).to(chunk.dtype).expand(last - max(first, stored), *shape[1:])
        return torch.cat([self.source[first:stored], new]) if first < stored else new


class _OpenFiles(ExitStack):
    """Safetensors files, opened on first use and closed together."""

    def __init__(self, places: dict[str, Path]) -> None:
        super().__init__()
        self._places = places
        self._opened: dict[Path, Any] = {}
        self.used: set[str] = set()

    def read(self, stored: str) -> TensorSource:
        """Return a slice of a tensor; only the requested rows are read."""
        path = self._places[stored]
        self.used.add(stored)
        if path not in self._opened:
            self._opened[path] = self.enter_context(safe_open(path, framework="pt"))
        slices: TensorSource = self._opened[path].get_slice(stored)
        return slices


def begin_weights(
    model: PreTrainedModel, recipe: RecipePlan, folder: Path | None, wrapper: PretrainedConfig | None
) -> None:
    """Give a model, sharded or not, the weights that its run begins with: of `folder`, or random ones; and adapters."""
    source, seed = recipe.model, recipe.training.seed
    if folder is None:
        init_weights(model, source.architecture, seed)
    else:
        load_weights(model, folder, source.vocab_size_of_weights)
    init_adapters(model, seed)
    if source.adapter is not None:
        load_adapters(model, Path(source.adapter), wrapper)


_ADDS_ONE = ("gemma", "gemma2", "gemma3_text")  # families whose RMS norms multiply by 1 + weight


def init_weights(model: nn.Module, shape: ArchitectureSpec, seed: int) -> None:
    """Initialize a sharded model's parameters, except adapters, with the same values for any number of shards.

    Each rank draws the chunks of rows that overlap its shard, so at most one chunk is in memory besides the shards;
    4-bit matrices are drawn completely. Norm weights (vectors) are one (zero for Gemma, which adds one). Biases,
    including those of routers, are zero.
    """
    norm = 0.0 if shape.family in _ADDS_ONE else 1.0
    for name, target in load_targets(model).items():
        constant = 0.0 if name.endswith("bias") else norm
        drawn = _RandomTensor(target, zlib.crc32(f"{seed} {name}".encode()), shape.initializer_range, constant)
        target.load(drawn, name)


@dataclass(frozen=True)
class _RandomTensor:
    """A tensor of random values with the interface of a slice of a file."""

    target: LoadTarget
    seed: int
    deviation: float
    constant: float

    def get_shape(self) -> list[int]:
        return self.target.expected_shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        shape, device = self.get_shape(), self.target.shard.values.device
        if len(shape) == 1:
            return torch.full(shape, self.constant, device=device)[rows]
        first, last, _ = rows.indices(shape[0])
        height = rows_per_read(shape)
        begin, end = first // height * height, min(-(-last // height) * height, shape[0])
        dtype = torch.float32 if self.target.layout is None else self.target.layout.storage
        values = torch.empty((end - begin, *shape[1:]), dtype=dtype, device=device)
        for number, chunk in enumerate(torch.split(values, height), begin // height):
            generator = torch.Generator(device).manual_seed(self.seed + number)
            drawn = chunk if dtype == torch.float32 else torch.empty_like(chunk, dtype=torch.float32)
            chunk.copy_(drawn.normal_(std=self.deviation, generator=generator))
            del drawn  # freed before the next is drawn
        return values[first - begin : last - begin]


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    single = folder / WEIGHTS_FILE
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not (folder / WEIGHTS_INDEX).is_file():
        raise NotFoundError(f"there are no safetensors files in {folder}", fix="convert the weights to safetensors")
    return {name: folder / file for name, file in read_index(folder).items()}
