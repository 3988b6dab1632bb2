"""Import transformers without packages that ftkit does not use, and keep the bytecode of what it imports."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

from ftkit.errors import PrerequisiteError

UNUSED = ("librosa", "scipy", "sklearn", "soundfile", "torchaudio")
"""Packages that transformers imports if they are installed, for models and a generation mode that ftkit does not
use."""


@cache
def import_transformers() -> ModuleType:
    """Import transformers as if `UNUSED` packages were not installed, nor torchvision if it is broken.

    Versions built for another torch or NumPy fail to import. vLLM needs torchvision, so a working one stays visible.
    Warnings of torchao and bitsandbytes, which transformers and peft import if installed, are suppressed: they are
    about kernels for other devices.
    """
    if sys.flags.optimize > 1:
        raise PrerequisiteError(
            "Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), which transformers needs",
            fix="unset PYTHONOPTIMIZE",
        )
    keep_bytecode()
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends"):
        logging.getLogger(name).setLevel(logging.ERROR)
    hidden = (*UNUSED, *(("torchvision",) if is_broken("torchvision") else ()))
    with without_packages(*hidden):
        import transformers.utils.import_utils  # noqa: PLC0415 - seconds of imports

        for name in hidden:
            getattr(transformers.utils.import_utils, f"is_{name}_available", bool)()  # it remembers the result
    return cast("ModuleType", transformers)


def keep_bytecode() -> Path | None:
    """Have this process and its children keep bytecode in `FTKIT_CACHE_DIR`, if it is set and torch has none.

    uv installs packages without bytecode. If they are read-only, or gone after the job, as in an image, each process
    compiles all its imports: 7 of a rank's 24 s until the end of step 1 on an H200. Returns the folder, if one is used.
    """
    cache, spec = os.environ.get("FTKIT_CACHE_DIR"), find_spec("torch")
    if not cache or spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return None
    if Path(cache_from_source(spec.origin)).exists():
        return None
    # Python compares only time and size of a source; other versions at the same path in another image may share both.
    versions = sorted(path.name for path in Path(spec.origin).parents[1].glob("*.dist-info"))
    folder = Path(cache) / "bytecode" / hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return folder


def is_broken(package: str) -> bool:
    if find_spec(package) is None:
        return False
    try:
        import_module(package)
    except Exception:  # noqa: BLE001 - packages for other versions of torch fail in many ways
        return True
    return False


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Run the block as if packages were not installed.

    A library that tests for a package in the block may remember that it is missing; an import of the package itself
    works again after the block.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    imported = {name: modules[name] for name in names if name in modules}
    modules.update(dict.fromkeys(names))  # None in sys.modules: there is no such module
    try:
        yield
    finally:
        for name in names:
            del modules[name]
        modules.update(imported)
