"""Silence warnings of indirectly imported libraries, without importing them."""

from __future__ import annotations

import logging


def silence_torchao() -> None:
    """Drop torchao's warnings about kernels for other GPUs: transformers and peft import it if it is installed."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
