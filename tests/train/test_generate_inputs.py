from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import DataError
from ftkit.evaluate.generate import read_inputs

if TYPE_CHECKING:
    from pathlib import Path


def test_prompts_are_read_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "63"  # as in /dev/fd
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"prompt": "a"}\n{"prompt": "b"}\n'))
    writer.start()
    rows = read_inputs(str(pipe))
    writer.join()
    assert [row.columns for row in rows] == [{"prompt": "a"}, {"prompt": "b"}]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="has no rows"):
        read_inputs(str(empty))
    assert [row.columns for row in read_inputs("63")] == [{"prompt": "63"}]
