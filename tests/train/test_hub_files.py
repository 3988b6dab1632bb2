"""Data at `hf://` addresses: a fake Hugging Face Hub, accessed through `HfFileSystem`."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
from object_storage import hub_server

from ftkit.data.source_files import find_files, read_file, stamp
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.train

ROWS = [{"prompt": f"{number} + 1", "completion": str(number + 1)} for number in range(600)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()
FILES = {"README.md": b"#", "data/a.jsonl": LINES, "data/b.jsonl.gz": gzip.compress(LINES), "data/c.json": ARRAY}
PLACE = "hf://datasets/org/chats"


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hub_server(FILES, monkeypatch):
        yield


def test_a_data_set_yields_the_rows_of_its_data_files() -> None:
    files = [f"{PLACE}/data/a.jsonl", f"{PLACE}/data/b.jsonl.gz"]
    assert find_files(f"{PLACE}/data/*.jsonl*", "k") == files
    files.append(f"{PLACE}/data/c.json")
    for place in (PLACE, f"{PLACE}/data"):
        assert find_files(place, "k") == files
    rows = [row.columns for file in files for raw in read_file(file) if (row := raw.parse())]
    assert rows == ROWS * 3
    assert stamp(PLACE, "k").startswith(f"{files[0]} ['{len(LINES)}', ")


def test_missing_and_private_data_sets_are_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (f"{PLACE}/none.jsonl", "hf://datasets/org/none"):
        with pytest.raises(NotFoundError, match=f"there is nothing at {place}"):
            find_files(place, "data.source")
    monkeypatch.setenv("HF_TOKEN", "bad")
    with hub_server(FILES, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "bad")
        with pytest.raises(NotFoundError, match=r"'hf auth login', .*HF_TOKEN"):
            find_files(PLACE, "data.source")
