"""Private names of flash-attn-4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flash-attn-4's forward and backward; its public function is opaque to compilers and to checkpointing.

    `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`, flash-attn-4 4.0.0b. If they go:
    `choose_kernel` finds that the kernel doesn't run, and falls back to flex attention.

    Raises:
        ImportError: the package is missing, or has no such functions.
    """
    from flash_attn.cute import interface  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    return interface._flash_attn_fwd, interface._flash_attn_bwd  # noqa: SLF001
