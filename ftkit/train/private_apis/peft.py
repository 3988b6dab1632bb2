"""An undocumented name of peft."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
