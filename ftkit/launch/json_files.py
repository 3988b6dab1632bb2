"""Small JSON files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` under a temporary name, then give the file its own."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object back; None if there is no such file, or nothing sensible in it."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
