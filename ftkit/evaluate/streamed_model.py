"""Load a model that is larger than memory: each module reads its weights from the files, runs, and frees them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig

from ftkit.errors import PrerequisiteError
from ftkit.train.model.build import auto_class_of, load_pretrained
from ftkit.train.model.weight_conversion import converts_layout
from ftkit.train.private_apis.libraries import free_offloaded, import_peft, load_offloaded

if TYPE_CHECKING:
    from collections.abc import Iterator


_BYTES_PER_VALUE = 6
"""A tensor while it is loaded: in bf16 as in the file, and in fp32."""
_PROCESS_BYTES = 2**29
"""Memory of a process that has imported torch and transformers, and of activations."""


def peak_bytes(largest: int) -> int:
    """Return the memory of a process that runs a `streamed_model` whose largest tensor has `largest` values."""
    return _BYTES_PER_VALUE * largest + _PROCESS_BYTES


def check_memory(needed: int, free: int) -> None:
    """Check that an export can be verified: logits are computed with a part of the weights at a time in memory.

    Args:
        needed: bytes that this takes.
        free: bytes that processes may allocate; 0 if unknown.

    Raises:
        PrerequisiteError: there is too little.
    """
    if 0 < free < needed:
        raise PrerequisiteError(
            f"verifying this export takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free",
            meaning="logits are computed in fp32, with one decoder layer or module at a time in memory",
            fix="use a machine with more memory; ftkit export can leave the check out: --no-verify",
        )


@contextmanager
def streamed_model(folder: Path, adapters: Path | None, num_bytes: int) -> Iterator[Any]:
    """Load a model in fp32 with transformers, and adapters with peft; the model's weights stay in the files.

    accelerate loads those of one module at a time. Tensors that transformers converts, such as stacked experts, are
    written to the disk first.

    Args:
        folder: a model in Hugging Face's layout.
        adapters: a folder in peft's layout; the adapters stay in memory.
        num_bytes: of the weights in fp32.

    Raises:
        PrerequisiteError: the disk has no room for converted tensors.
    """
    place = (adapters or folder).parent
    with tempfile.TemporaryDirectory(prefix=".ftkit-", dir=place if os.access(place, os.W_OK) else None) as scratch:
        _check_disk(folder, Path(scratch), num_bytes)
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns that weights are on the disk
        model = load_pretrained(folder, torch.float32, device_map={"": "disk"}, offload_folder=scratch)
        yield model if adapters is None else _add_adapters(model, adapters)


def _check_disk(folder: Path, scratch: Path, num_bytes: int) -> None:
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = auto_class_of(config).from_config(config)
    free = shutil.disk_usage(scratch).free
    if converts_layout(model) and free < num_bytes:
        raise PrerequisiteError(
            f"verifying this export takes {num_bytes / 2**30:.0f} GiB on the disk of {scratch.parent}, and "
            f"{free / 2**30:.0f} GiB are free",
            meaning="it is larger than memory, and transformers stacks the experts of such a model in new files",
            fix="free disk space, or verify it on a machine with more memory; ftkit export has --no-verify",
        )


def _add_adapters(model: Any, folder: Path) -> Any:
    # peft moves adapters to the meta device if their layer is there, and then computes nonsense. So weights become
    # zeros until accelerate loads them: tensors of which memory has a single value.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    del model.hf_device_map  # with it, peft would dispatch the model again, and fail
    adapted = import_peft().PeftModel.from_pretrained(model, str(folder))
    for module in adapted.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            # DoRA computes with the base layer's weight after that layer has run.
            magnitude.register_forward_pre_hook(_load_base_layer, with_kwargs=True)
            magnitude.register_forward_hook(_free_base_layer, with_kwargs=True)
    return adapted


def _load_base_layer(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
    load_offloaded(kwargs["base_layer"])


def _free_base_layer(_module: nn.Module, _args: object, kwargs: dict[str, Any], _output: object) -> None:
    free_offloaded(kwargs["base_layer"])
