"""Small JSON files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from ftkit.errors import FtkitError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

ValueT = TypeVar("ValueT")
_LARGEST = 2**24
"""Bytes."""


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` under a temporary name, then give the file its own."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object back; None if there is no such file, or nothing sensible in it."""
    try:
        values = from_json(read_small(path))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def read_typed(path: Path, kind: TypeAdapter[ValueT]) -> ValueT | None:
    """Read a value back; None if there is no such file.

    Raises:
        DamagedFileError: the file can't be read, or holds something else.
    """
    try:
        return kind.validate_json(read_small(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise DamagedFileError(path, f"{key}: {first['msg']}" if key else first["msg"]) from error


class DamagedFileError(FtkitError):
    """A file of a run's folder can't be read."""

    exit_code = NotFoundError.exit_code

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path.name} can't be read: {reason}",
            meaning=f"{path} was changed by hand, was copied in part, or another version of ftkit wrote it",
            fix="use the ftkit that submitted the run, or submit the run anew",
        )


def read_small(path: Path) -> bytes:
    """Read a small file.

    Raises:
        OSError: also for what would never end (a pipe, a device), and for what is not small.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is no file")
    if about.st_size > _LARGEST:
        raise OSError(errno.EFBIG, f"it has {about.st_size:,} bytes")
    return path.read_bytes()
