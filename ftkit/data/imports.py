"""Import transformers where other packages are installed that it imports and ftkit does not use."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


UNUSED = ("librosa", "scipy", "sklearn", "soundfile", "torchaudio")
"""Packages that transformers imports wherever they are installed, for models and a way of generation that ftkit does
not use."""
_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends")


@cache
def import_transformers() -> Any:
    """Import transformers as if `UNUSED` packages were not installed, nor torchvision if it is broken.

    Versions that were built for another torch or NumPy fail. vLLM needs torchvision, where it works. Warnings of
    torchao and bitsandbytes, which transformers and peft import if installed, are about kernels for other devices:
    they are dropped.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    hidden = (*UNUSED, *(("torchvision",) if is_broken("torchvision") else ()))
    with without_packages(*hidden):
        import transformers  # noqa: PLC0415 - seconds of imports
        from transformers.utils import import_utils  # noqa: PLC0415

        for name in hidden:
            getattr(import_utils, f"is_{name}_available", bool)()  # it remembers the result
    return transformers


def is_broken(package: str) -> bool:
    """Return whether a package is installed, and its import fails."""
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
    modules: dict[str, Any] = sys.modules
    imported = {name: modules[name] for name in names if name in modules}
    modules.update(dict.fromkeys(names))  # None in sys.modules: there is no such module
    try:
        yield
    finally:
        for name in names:
            del modules[name]
        modules.update(imported)
