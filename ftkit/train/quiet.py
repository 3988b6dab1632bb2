"""Silence warnings of indirectly imported libraries, without importing them."""

from __future__ import annotations

import logging


def silence_torchao() -> None:
    """Drop warnings about kernels for other devices: transformers and peft import both libraries if installed."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends"):
        logging.getLogger(name).setLevel(logging.ERROR)
