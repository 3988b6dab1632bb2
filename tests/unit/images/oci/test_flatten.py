"""Flattening of layers without unpacking them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.config.image_reference import Digest
from ftkit.errors import ImageError
from ftkit.images.oci import tar as tar_module
from ftkit.images.oci.tar import Layer, flatten

if TYPE_CHECKING:
    from pathlib import Path

Entry = tuple[str, str | None, str]


def make_layer(path: Path, entries: list[Entry], *, zipped: bool) -> Layer:
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
    return Layer(path, Digest("sha256:" + hashlib.sha256(output.getvalue()).hexdigest()))


def whole(tmp_path: Path, *layers: list[Entry], zipped: bool = True) -> dict[str, str]:
    blobs = [make_layer(tmp_path / str(number), layer, zipped=zipped) for number, layer in enumerate(layers)]
    found = {}
    for member, content in flatten(blobs):
        assert member.path.decode() not in found, "duplicate path"
        found[member.path.decode()] = member.target.decode() or b"".join(content).decode()
    return found


@pytest.mark.parametrize("zipped", [True, False])
def test_the_upper_layer_takes_precedence(tmp_path: Path, *, zipped: bool) -> None:
    below, above = [("a", "old", "file"), ("b", "kept", "file")], [("a", "new", "file")]
    assert whole(tmp_path, below, above, zipped=zipped) == {"a": "new", "b": "kept"}


def test_a_deleted_file_is_removed_and_can_be_added_again(tmp_path: Path) -> None:
    layers = [[("d/a", "1", "file"), ("d/b", "2", "file")], [("d/.wh.a", "", "file")], [("d/a", "3", "file")]]
    assert whole(tmp_path, *layers[:2]) == {"d/b": "2"}
    assert whole(tmp_path, *layers) == {"d/a": "3", "d/b": "2"}


def test_a_deleted_folder_removes_its_files(tmp_path: Path) -> None:
    assert whole(tmp_path, [("d", None, "folder"), ("d/e/a", "1", "file")], [(".wh.d", "", "file")]) == {}


def test_an_opaque_folder_keeps_files_of_its_own_layer(tmp_path: Path) -> None:
    above: list[Entry] = [
        ("d", None, "folder"),
        ("d/.wh..wh..opq", "", "file"),
        ("d/new", "2", "file"),
    ]
    assert whole(tmp_path, [("d/old", "1", "file")], above) == {"d": "", "d/new": "2"}


def test_a_file_in_place_of_a_folder_hides_the_folders_files(tmp_path: Path) -> None:
    assert whole(tmp_path, [("d/a", "1", "file")], [("d", "now a file", "file")]) == {"d": "now a file"}


def test_a_hard_link_survives_the_deletion_of_its_target(tmp_path: Path) -> None:
    below: list[Entry] = [("a", "content", "file"), ("link", "a", "link")]
    assert whole(tmp_path, below, [("a", "changed", "file")]) == {"a": "changed", "link": "content"}


def test_a_hard_link_to_a_visible_file_stays_a_hard_link(tmp_path: Path) -> None:
    assert whole(tmp_path, [("a", "content", "file"), ("link", "a", "link")]) == {"a": "content", "link": "a"}


def test_a_hard_link_to_a_hidden_hard_link_resolves_to_the_file(tmp_path: Path) -> None:
    below: list[Entry] = [("a", "content", "file"), ("b", "a", "link"), ("c", "b", "link"), ("d", "c", "link")]
    assert whole(tmp_path, below, [(".wh.b", "", "file")]) == {"a": "content", "c": "a", "d": "c"}
    hidden: list[Entry] = [(".wh.a", "", "file"), (".wh.b", "", "file")]
    assert whole(tmp_path, below, hidden) == {"c": "content", "d": "c"}


def test_hard_links_to_one_hidden_file_stay_linked(tmp_path: Path) -> None:
    below: list[Entry] = [("a", "content", "file"), *((f"l{number}", "a", "link") for number in range(5))]
    found = whole(tmp_path, below, [("a", "changed", "file")])
    assert found == {"a": "changed", "l0": "content", "l1": "l0", "l2": "l0", "l3": "l0", "l4": "l0"}


def test_a_layer_is_read_at_most_twice_whatever_the_number_of_hidden_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_opened = 0
    opened = tar_module._opened

    def counting(path: Path) -> object:
        nonlocal num_opened
        num_opened += 1
        return opened(path)

    monkeypatch.setattr(tar_module, "_opened", counting)
    below = [entry for n in range(200) for entry in ((f"a{n}", str(n), "file"), (f"l{n}", f"a{n}", "link"))]
    found = whole(tmp_path, below, [(f".wh.a{n}", "", "file") for n in range(200)])
    assert found == {f"l{n}": str(n) for n in range(200)}
    assert num_opened == 3  # the upper layer once


@pytest.mark.parametrize("entries", [[("a", "a", "link")], [("a", "b", "link"), ("b", "a", "link")]])
def test_a_hard_link_to_itself_is_an_error(tmp_path: Path, entries: list[Entry]) -> None:
    with pytest.raises(ImageError, match=r"b'[ab]' is a"):
        whole(tmp_path, entries)


def test_a_layer_that_does_not_match_the_configuration_is_rejected(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "0", [("a", "content", "file")], zipped=True)
    other = make_layer(tmp_path / "1", [("a", "altered", "file")], zipped=True)
    with pytest.raises(ImageError, match=layer.diff_id):
        list(flatten([replace(layer, blob=other.blob)]))


@pytest.mark.parametrize("keep", [0, 5, 40, -9, -1])
def test_a_truncated_layer_is_an_error(tmp_path: Path, keep: int) -> None:
    layer = make_layer(tmp_path / "0", [("a", "content" * 100, "file")], zipped=True)
    layer.blob.write_bytes(layer.blob.read_bytes()[:keep])
    with pytest.raises(ImageError):
        list(flatten([layer]))


@pytest.mark.parametrize("place", [0, 2, 40, -8, -1])
def test_a_layer_with_a_damaged_byte_is_an_error(tmp_path: Path, place: int) -> None:
    layer = make_layer(tmp_path / "0", [("a", "content" * 100, "file")], zipped=True)
    data = bytearray(layer.blob.read_bytes())
    data[place] ^= 0xFF
    layer.blob.write_bytes(data)
    with pytest.raises(ImageError):
        list(flatten([layer]))
