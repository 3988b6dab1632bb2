"""Choose the devices that run a model: the CPU, one GPU, or several GPUs with some of the layers each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ftkit.errors import PrerequisiteError
from ftkit.train.model.build import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

_MAX_WEIGHTS_FRACTION = 0.8
"""Maximum fraction of a GPU's free memory for weights; the rest is for activations, and for the KV cache."""


def available_devices() -> tuple[torch.device, ...]:
    """Return all GPUs; with several processes, this rank's GPU; without GPUs, the CPU."""
    if not torch.cuda.is_available():
        return (torch.device("cpu"),)
    if local_rank := os.environ.get("LOCAL_RANK"):
        return (torch.device("cuda", int(local_rank)),)
    return tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))


def place(model: PreTrainedModel, devices: Sequence[torch.device]) -> None:
    """Move a model to the first device; if it does not fit there, spread its layers over all of them.

    The layers run one after another, each on the device that has it, so more GPUs add memory but no speed. Any model of
    transformers can be split this way, even with adapters or in 4 bits.

    Raises:
        PrerequisiteError: it does not fit on all of them together.
    """
    memory = {} if devices[0].type == "cpu" else {each.index: _weight_capacity(each) for each in devices}
    num_bytes = weight_bytes(model)
    if not memory or num_bytes <= memory[devices[0].index]:
        model.to(devices[0])
        return
    split = split_layers(model, memory)
    if split is None:
        gib, room = num_bytes / 2**30, sum(memory.values()) / 2**30
        raise PrerequisiteError(
            f"the model's weights take {gib:.1f} GiB; {len(devices)} GPUs here have room for {room:.1f} GiB",
            meaning="the model is too large for them, other programs use them, or --gpus gives each process one GPU",
            fix="leave --gpus out, use a node with more GPUs, or serve the model: ftkit serve",
        )
    from accelerate import dispatch_model  # noqa: PLC0415 - takes a second, and only large models need it

    dispatch_model(model, split)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters, tied ones once, and of buffers."""
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def split_layers(model: PreTrainedModel, memory: Mapping[int, int]) -> dict[str, int] | None:
    """Return the GPU of each module, balanced, with no decoder layer divided; None if the model does not fit.

    Args:
        model: a model on any device, even the meta device.
        memory: bytes for weights, by the GPU's index.
    """
    from accelerate import infer_auto_device_map  # noqa: PLC0415 - see above
    from accelerate.utils import get_balanced_memory  # noqa: PLC0415

    layer_classes = sorted({type(layer).__name__ for layer in find_decoder_layers(model)})
    model.tie_weights()  # accelerate keeps tied parameters on one device, and warns if they are not tied
    for limits in (get_balanced_memory(model, dict(memory), no_split_module_classes=layer_classes), dict(memory)):
        split: dict[str, int] = infer_auto_device_map(model, limits, no_split_module_classes=layer_classes)
        if set(split.values()) <= memory.keys():  # else parts of it are left to the CPU or the disk
            return split
    return None


def _weight_capacity(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(_MAX_WEIGHTS_FRACTION * free)
