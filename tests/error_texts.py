"""Compare the texts of errors with a golden file; `FTKIT_UPDATE_GOLDEN=1` rewrites it: read the diff."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from ftkit.errors import FtkitError

GOLDEN = Path(__file__).parent / "golden" / "errors"


def check_error_texts(
    room: str, failures: Iterable[tuple[str, Callable[[], object]]], shown: Mapping[str, str]
) -> None:
    """Raise each error, and compare the texts with the room's file; `shown` replaces what differs between machines."""
    texts = []
    for name, fail in failures:
        with pytest.raises(FtkitError) as caught:
            fail()
        text = str(caught.value)
        for here, everywhere in shown.items():
            text = text.replace(here, everywhere)
        texts.append(f"## {name}\n{type(caught.value).__name__}: {text}\n")
    golden = GOLDEN / f"{room}.txt"
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        golden.write_text("\n".join(texts), encoding="utf-8")
    assert "\n".join(texts) == golden.read_text(encoding="utf-8")
