"""What commands print about mistakes: tests/golden/errors/cli.txt. `FTKIT_UPDATE_GOLDEN=1` rewrites it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Result, RunMaker

GOLDEN = Path(__file__).parents[2] / "golden" / "errors" / "cli.txt"
MISTAKES = (
    ("statsu",),
    ("gc",),
    ("status", "nothing"),
    ("status",),
    ("run", "demo", "other", "--dry-run"),
    ("run", "demo", "--name", "a/b"),
    ("logs", "last", "--rank", "9"),
    ("runs", "nothing"),
    ("compare", "last", "last"),
    ("rm",),
    ("push", "olmo3:25.02"),
    ("push", "olmo3:25.02", "--sign"),
    ("import", "olmo3"),
    ("data", "show", "--packs", "x", "last"),
    ("doctor", "--nodes", "0"),
    ("generate", "last"),
)


def test_error_texts(ftkit: Callable[..., Result], make_run: RunMaker, tmp_path: Path) -> None:
    make_run()
    texts = []
    for words in MISTAKES:
        result = ftkit(*words)
        assert (result.out, "Traceback" in result.err) == ("", False)
        texts.append(f"$ ftkit {' '.join(words)} # {result.code}\n{result.err}")
    found = "\n".join(texts).replace(str(tmp_path), "/here")
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")
