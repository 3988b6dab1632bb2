"""Undocumented names of peft."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ftkit.data.imports import is_broken, without_packages

if TYPE_CHECKING:
    from torch import nn


def compute_in_input_dtype(model: nn.Module) -> None:
    """Make peft's layers compute in the dtype of their inputs, under autocast, instead of that of the adapters.

    `BaseTunerLayer.cast_input_dtype_enabled`, peft 0.14 to 0.21. If it goes: `peft.helpers.disable_input_dtype_casting`
    around each forward.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - takes seconds, and only adapters need it

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


@cache
def import_peft() -> Any:
    """Import peft, also where packages with layers that it adapts are broken or too old for it.

    It imports them whatever it adapts, and fails if torchao is older than 0.16, as in many images of NVIDIA, or if
    Transformer Engine finds no GPU driver. Called in `faster_imports`, it imports none.
    `peft.import_utils.is_torchao_available` and others, which remember their results, peft 0.14 to 0.21. If they go:
    leave them out.
    """
    broken = ("bitsandbytes",) if is_broken("bitsandbytes") else ()
    with without_packages("transformer_engine", *broken):
        import peft  # noqa: PLC0415 - takes seconds, and only adapters need it
        from peft import import_utils  # noqa: PLC0415

        import_utils.is_bnb_available()
    for name in ("torchao", "gptqmodel", "auto_gptq"):
        is_available = getattr(import_utils, f"is_{name}_available", None)
        if is_available is None:
            continue
        try:
            is_available()
        except ImportError:
            with without_packages(name):
                is_available()
    return peft
