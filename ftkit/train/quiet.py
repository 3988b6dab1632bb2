"""Quiet the libraries that others import; without importing any of them."""

from __future__ import annotations

import logging


def silence_torchao() -> None:
    """Drop torchao's warnings of kernels for other GPUs: transformers and peft import it where it is installed."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
