"""Import the trainer's libraries in less time."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from contextlib import contextmanager
from importlib.util import cache_from_source, find_spec
from pathlib import Path
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


def keep_bytecode(cache: Path) -> Path | None:
    """Have this process and its children keep bytecode in a folder of `cache` if torch was installed without.

    uv installs packages so. Where they are read-only, or gone after the job, as in an image, each process compiles all
    that it imports: 7 of a rank's 24 s until the end of step 1 on an H200.

    Returns:
        The folder; None if torch has bytecode, or the user's environment has a folder for it.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return None
    if Path(cache_from_source(spec.origin)).exists():
        return None
    # Python compares times and sizes of sources, which images with other versions at the same path may share.
    versions = sorted(path.name for path in Path(spec.origin).parents[1].glob("*.dist-info"))
    folder = cache / "bytecode" / hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return folder
