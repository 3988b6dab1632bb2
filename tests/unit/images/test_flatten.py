"""Layers laid over each other, without unpacking them."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from ftkit.images.flatten import flatten

if TYPE_CHECKING:
    from pathlib import Path

Entry = tuple[str, str | None, str]


def make_layer(path: Path, entries: list[Entry], *, zipped: bool) -> Path:
    """Write a layer of (path, content or link target, kind)."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, value, kind in entries:
            entry = tarfile.TarInfo(name)
            if kind == "link":
                entry.type, entry.linkname = tarfile.LNKTYPE, str(value)
                tar.addfile(entry)
            elif kind == "folder":
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            else:
                data = str(value).encode()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(output.getvalue()) if zipped else output.getvalue())
    return path


def whole(tmp_path: Path, *layers: list[Entry], zipped: bool = True) -> dict[str, str]:
    paths = [make_layer(tmp_path / str(number), layer, zipped=zipped) for number, layer in enumerate(layers)]
    found = {}
    for member, content in flatten(paths):
        assert member.path.decode() not in found, "a path came twice"
        found[member.path.decode()] = member.target.decode() or b"".join(content).decode()
    return found


@pytest.mark.parametrize("zipped", [True, False])
def test_the_upper_layer_wins(tmp_path: Path, *, zipped: bool) -> None:
    below, above = [("a", "old", "file"), ("b", "kept", "file")], [("a", "new", "file")]
    assert whole(tmp_path, below, above, zipped=zipped) == {"a": "new", "b": "kept"}


def test_a_deleted_file_is_gone_and_may_come_back(tmp_path: Path) -> None:
    layers = [[("d/a", "1", "file"), ("d/b", "2", "file")], [("d/.wh.a", "", "file")], [("d/a", "3", "file")]]
    assert whole(tmp_path, *layers[:2]) == {"d/b": "2"}
    assert whole(tmp_path, *layers) == {"d/a": "3", "d/b": "2"}


def test_a_deleted_folder_takes_its_files_along(tmp_path: Path) -> None:
    assert whole(tmp_path, [("d", None, "folder"), ("d/e/a", "1", "file")], [(".wh.d", "", "file")]) == {}


def test_an_emptied_folder_keeps_what_its_own_layer_has(tmp_path: Path) -> None:
    above: list[Entry] = [
        ("d", None, "folder"),
        ("d/.wh..wh..opq", "", "file"),
        ("d/new", "2", "file"),
    ]
    assert whole(tmp_path, [("d/old", "1", "file")], above) == {"d": "", "d/new": "2"}


def test_a_file_in_place_of_a_folder_hides_what_was_in_it(tmp_path: Path) -> None:
    assert whole(tmp_path, [("d/a", "1", "file")], [("d", "now a file", "file")]) == {"d": "now a file"}


def test_a_hard_link_outlives_the_name_that_it_was_made_from(tmp_path: Path) -> None:
    below: list[Entry] = [("a", "content", "file"), ("link", "a", "link")]
    assert whole(tmp_path, below, [("a", "changed", "file")]) == {"a": "changed", "link": "content"}


def test_a_hard_link_stays_one_otherwise(tmp_path: Path) -> None:
    assert whole(tmp_path, [("a", "content", "file"), ("link", "a", "link")]) == {"a": "content", "link": "a"}
