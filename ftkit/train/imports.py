"""Import the trainer's libraries in less time."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftkit.data.imports import UNUSED as OF_TRANSFORMERS
from ftkit.data.imports import without_packages

if TYPE_CHECKING:
    from collections.abc import Iterator

UNUSED = (*OF_TRANSFORMERS, "bitsandbytes", "boto3", "torchao", "torchvision", "transformer_engine")
"""Packages that transformers, accelerate and peft import wherever they are installed, for models, layers and services
that ftkit does not use. sklearn imports pandas and pyarrow too, and bitsandbytes torch's Inductor."""


@contextmanager
def faster_imports() -> Iterator[None]:
    """Import in the block as if `UNUSED` packages were not installed, and without collecting garbage.

    Either takes a tenth of the CPU time of the imports, or more.
    """
    with without_packages(*(name for name in UNUSED if name not in sys.modules)):
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()  # what was imported stays: later collections skip it
            gc.enable()
