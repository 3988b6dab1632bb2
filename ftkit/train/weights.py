"""Pretrained weights: from safetensors files straight into each rank's shard.

No rank ever holds a whole model: of each tensor it reads the rows that are its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from ftkit.errors import NotFoundError, TrainingError
from ftkit.specs.load import is_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.specs.model import ModelSpec
    from ftkit.train.world import World

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def fetch_weights(model: ModelSpec, world: World) -> Path:
    """Return the folder with the model's files; downloads once on each node, the others wait.

    Raises:
        NotFoundError: there is no such folder or hub model, or this token may not read it.
    """
    if is_path(model.weights):
        folder = Path(model.weights)
        if not (folder / "config.json").is_file():
            raise NotFoundError(f"there is no config.json in {folder}", fix="give a folder in Hugging Face's layout")
        return folder
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja"]
    if world.local_rank == 0:
        _download(model, patterns)
    world.barrier()
    return Path(
        snapshot_download(model.weights, revision=model.revision, allow_patterns=patterns, local_files_only=True)
    )


def _download(model: ModelSpec, patterns: list[str]) -> None:
    try:
        snapshot_download(model.weights, revision=model.revision, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise NotFoundError(
            f"can't download '{model.weights}': {str(error).splitlines()[0]}",
            meaning="the name is wrong, the model is gated and HF_TOKEN may not read it, or the hub is out of reach",
            fix="accept the model's licence on the hub and set HF_TOKEN; or give model.weights a local folder",
        ) from error


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give memory to a sharded model's empty parameters; its buffers stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    cast("PreTrainedModel", model).tie_weights()  # to_empty gives each name a tensor of its own


def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill a sharded model's parameters.

    Raises:
        TrainingError: a parameter is missing from the files, or is there in another shape.
    """
    wanted = dict(model.named_parameters())  # a tied parameter comes once, under its first name
    for path, names in _files(folder).items():
        with safe_open(path, framework="pt") as file:
            for name in sorted(names & wanted.keys()):
                _fill(wanted.pop(name), file.get_slice(name), name)
    if wanted:
        raise TrainingError(
            f"{len(wanted)} of the model's parameters are not in {folder}: {', '.join(sorted(wanted)[:3])} …",
            meaning="the files are incomplete, or of another model",
            fix="download them again; check model.weights and model.architecture",
        )


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return which tensors are in which file."""
    if (folder / _INDEX).is_file():
        places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
        return {folder / file: {name for name, place in places.items() if place == file} for file in files}
    if not (folder / _SINGLE).is_file():
        raise NotFoundError(f"there are no safetensors files in {folder}", fix="convert the weights to safetensors")
    with safe_open(folder / _SINGLE, framework="pt") as file:
        return {folder / _SINGLE: set(file.keys())}


@torch.no_grad()
def _fill(parameter: nn.Parameter, source: object, name: str) -> None:
    shape = list(source.get_shape())  # type: ignore[attr-defined] # safetensors ships no types for slices
    if shape != list(parameter.shape):
        raise TrainingError(
            f"'{name}' has shape {shape} in the files and {list(parameter.shape)} in the model",
            fix="check model.architecture against the weights' config.json",
        )
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[:])  # type: ignore[index]
        return
    begin, end = _own_rows(parameter)
    parameter.to_local().copy_(source[begin:end])  # type: ignore[index]


def _own_rows(parameter: DTensor) -> tuple[int, int]:
    """Return which rows this rank holds: `torch.chunk`'s division, as FSDP2 shards."""
    ranks, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    rows = parameter.shape[0]
    share = -(-rows // ranks)
    return min(rank * share, rows), min((rank + 1) * share, rows)
