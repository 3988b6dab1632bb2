"""Compare the texts of errors with a golden file; `FTKIT_UPDATE_GOLDEN=1` rewrites it: read the diff."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ftkit.errors import FtkitError

GOLDEN = Path(__file__).parent / "golden" / "errors"


def check_error_texts(room: str, failures: Iterable[tuple[str, Callable[[], object]]], folder: Path) -> None:
    """Raise each error, and compare their texts with the room's file; `folder` is written as /project."""
    texts = []
    for name, fail in failures:
        with pytest.raises(FtkitError) as caught:
            fail()
        text = str(caught.value).replace(str(folder), "/project")
        texts.append(f"## {name}\n{type(caught.value).__name__}: {text}\n")
    golden = GOLDEN / f"{room}.txt"
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        golden.write_text("\n".join(texts), encoding="utf-8")
    assert "\n".join(texts) == golden.read_text(encoding="utf-8")
