"""Undocumented names of bitsandbytes."""

from __future__ import annotations

from functools import cache
from typing import Any

from ftkit.errors import PrerequisiteError


@cache
def import_bitsandbytes(needed_by: str) -> Any:
    """Return bitsandbytes' functions: quantization to NF4, its tables, and the update of 8-bit optimizer states.

    `bitsandbytes.functional`, whose functions are undocumented, 0.46 to 0.50; importing it also defines the operators
    `torch.ops.bitsandbytes`. If one goes: `tests/train/test_nf4.py` and `test_adamw8bit.py` have the formulas.

    Raises:
        PrerequisiteError: it is not installed.
    """
    try:
        from bitsandbytes import functional  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PrerequisiteError(
            f"{needed_by} needs bitsandbytes, which is not installed", fix="pip install 'ftkit[qlora]'"
        ) from error
    return functional
