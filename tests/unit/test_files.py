from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.image_reference import Digest
from ftkit.files import (
    DamagedFileError,
    InvalidJsonError,
    atomic_file,
    atomic_folder,
    output_file,
    parse_json,
    publish,
    read_json,
    read_json_if_valid,
    to_json,
    write_file,
    write_json,
)

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Inner:
    size: int
    sha256: Digest


@dataclass(frozen=True)
class Record:
    name: str
    files: dict[str, Inner] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    note: str | None = None


DIGEST = Digest("sha256:" + "a" * 64)


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@given(
    st.builds(
        Record,
        name=st.text(),
        files=st.dictionaries(st.text(), st.builds(Inner, st.integers(), st.just(DIGEST))),
        values=st.lists(st.floats(allow_nan=False)).map(tuple),
        note=st.none() | st.text(),
    )
)
def test_a_dataclass_round_trips_through_json(record: Record) -> None:
    assert parse_json(to_json(record), Record) == record


def test_json_supports_nan_and_file_names_that_are_not_utf8() -> None:
    assert isnan(parse_json(to_json(Record("x", values=(float("nan"),))), Record).values[0])
    assert "udcff" in to_json({"command": [os.fsdecode(b"\xff")]})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "EOF"),
        ("[1]", "should be an object"),
        ('{"name": 7}', "^name: Input should be a valid string$"),
        ('{"name": "x", "files": {"a": {"size": 1, "sha256": "b"}}}', "files.a.sha256: .*64 hexadecimal"),
        ('{"name": 7, "files": 7, "values": 7, "note": 7}', "; and 1 more$"),
    ],
)
def test_invalid_json_is_rejected_with_the_wrong_keys(text: str, reason: str) -> None:
    with pytest.raises(InvalidJsonError, match=reason):
        parse_json(text, Record)


def test_a_missing_file_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path, Record) is None
    assert read_json(path / "below", Record) is None
    path.write_text("{")
    assert read_json_if_valid(path, Record) is None
    with pytest.raises(DamagedFileError, match=r"x\.json .*: Invalid JSON"):
        read_json(path, Record)
    write_json(path, Record("x"))
    assert read_json(path / "below", Record) is None
    assert read_json(path, Record) == Record("x")
    assert read_json(path, dict[str, Any]) == {"name": "x", "files": {}, "values": [], "note": None}


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo])
def test_special_files_are_never_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "x.json")
    with pytest.raises(DamagedFileError, match=r"x\.json .*: it is not"):
        read_json(tmp_path / "x.json", Record)


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    monkeypatch.setattr("ftkit.files.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_keeps_the_suffix_that_libraries_use(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "trace.json.gz") as temporary:
        assert temporary.name.endswith("trace.json.gz")
        temporary.touch()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_folder_appears_complete_and_replaces_a_previous_one(tmp_path: Path) -> None:
    final = tmp_path / "parent" / "export"
    for text in ("old", "new"):
        with atomic_folder(final) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(text)
            (folder / "link").symlink_to("nowhere")
    assert (final / "inner" / "file").read_text() == "new"
    assert list(final.parent.iterdir()) == [final]


def test_a_failed_folder_write_keeps_only_the_previous_one(tmp_path: Path) -> None:
    final, temporary = tmp_path / "export", tmp_path / ".export.partial"
    final.mkdir()
    temporary.mkdir()
    (temporary / "left by a killed job").touch()

    def build() -> None:
        with atomic_folder(final, temporary) as folder:
            assert list(folder.iterdir()) == []
            fail()

    with pytest.raises(OSError, match="No space left"):
        build()
    assert list(tmp_path.iterdir()) == [final]


def test_a_folder_that_cannot_be_renamed_keeps_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, final = tmp_path / "new", tmp_path / "final"
    folder.mkdir()
    final.mkdir()
    (final / "file").touch()
    rename = type(folder).rename
    monkeypatch.setattr(type(folder), "rename", lambda path, to: fail() if path == folder else rename(path, to))
    with pytest.raises(OSError, match="No space left"):
        publish(folder, final)
    assert (final / "file").exists()


@pytest.mark.parametrize(("number", "is_error"), [(22, False), (95, False), (5, True)])
def test_a_file_system_without_fsync_is_not_an_error(
    number: int, is_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ftkit.files.os.fsync", refuse)
    if is_error:
        with pytest.raises(OSError, match="Input/output"):
            write_file(tmp_path / "x", b"x")
    else:
        write_file(tmp_path / "x", b"x")
    assert (tmp_path / "x").exists() != is_error


def test_everything_in_a_folder_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, final, synced = tmp_path / "temporary", tmp_path / "final", list[str]()
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").touch()

    def note(path: Path) -> None:
        synced.append(path.name)
        assert final.exists() == (path == tmp_path)

    monkeypatch.setattr("ftkit.files.sync", note)
    publish(folder, final)
    assert sorted(synced) == sorted(["inner", "file", "temporary", tmp_path.name])


def test_an_output_file_keeps_a_pipe_and_writes_through_a_link(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    with output_file(pipe) as temporary:
        temporary.write_bytes(b"content")
    reader.join()
    assert received == [b"content"]
    assert pipe.is_fifo()

    link.symlink_to(file)  # its target is not there yet
    for content in (b"first", b"second"):
        with output_file(link) as temporary:
            temporary.write_bytes(content)
        assert link.is_symlink()
        assert file.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]
