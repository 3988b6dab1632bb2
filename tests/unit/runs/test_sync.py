"""Copies of a run to a folder, by more than one process at a time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS

from ftkit.files import file_lock, write_json
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.runs.storage import store as store_module
from ftkit.runs.storage.store import Store
from ftkit.runs.storage.sync import RunCopy

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from conftest import RunMaker

    from ftkit.runs.job import SubmittedRun

pytest.importorskip("fsspec", reason="needs the extra train")


@pytest.fixture
def run(make_run: RunMaker) -> SubmittedRun:
    made = make_run()
    folder = made.layout.checkpoint(5)
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(b"tensor")
    write_json(
        folder / MARKER, Marker(FORMAT_VERSION, TrainState(5, "x"), 2, {"shard": SavedFile.of(folder / "shard")})
    )
    return made


def test_two_processes_copy_one_file_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where the file system has no locks."""
    (tmp_path / "file").write_bytes(b"content")
    copy, is_first = store_module._copy, [True]

    def copy_during_another(source: Path, target: Path, progress: Any) -> None:
        copy(source, target, progress)
        if is_first.pop() if is_first else False:
            Store(str(tmp_path / "copies")).put(source, "file")

    monkeypatch.setattr(store_module, "_copy", copy_during_another)
    Store(str(tmp_path / "copies")).put(tmp_path / "file", "file")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["file"]
    assert (tmp_path / "copies" / "file").read_bytes() == b"content"


def test_a_partial_file_of_a_killed_copy_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / ".file.00000000.partial").write_bytes(b"con")
    Store(str(tmp_path / "copies")).put(tmp_path / "file", "file")
    assert len(list((tmp_path / "copies").iterdir())) == 2, "its copy may still be alive"
    monkeypatch.setattr(store_module, "_LEFTOVER_SECONDS", -1.0)
    Store(str(tmp_path / "copies")).put(tmp_path / "file", "file")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["file"]


def test_a_local_file_that_is_gone_is_not_blamed_on_the_store(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "shard").touch()
    store, gone = Store(str(tmp_path / "copies")), tmp_path / "deleted by the trainer"
    with pytest.raises(FileNotFoundError):
        store.put(gone, "shard")
    with pytest.raises(FileNotFoundError):
        store.holds("shard", gone)


def test_a_second_copy_of_a_run_waits_for_the_first_and_says_so(run: SubmittedRun, tmp_path: Path) -> None:
    messages: list[str] = []
    is_waiting = threading.Event()

    def report(text: str) -> None:
        messages.append(text)
        is_waiting.set()

    copy = RunCopy(run.layout, str(tmp_path / "copies"), report)
    copying = threading.Thread(target=copy.update)
    with file_lock(copy.lock):
        copying.start()
        assert is_waiting.wait(PATIENCE_SECONDS)
        assert "copies it to" in messages[0]
        assert not (tmp_path / "copies").exists()
    copying.join(PATIENCE_SECONDS)
    assert (tmp_path / "copies" / run.id / "checkpoints" / "step-000005" / MARKER).is_file()
    messages.clear()
    assert RunCopy(run.layout, str(tmp_path / "copies"), report).update().done == ("checkpoints/step-000005",)
    assert messages == []


def test_a_run_is_copied_where_locks_are_not_supported(
    run: SubmittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    status = RunCopy(run.layout, str(tmp_path / "copies"), lambda _: None).update()
    assert (status.error, status.done) == (None, ("checkpoints/step-000005",))


def test_a_pipe_in_a_run_folder_ends_the_copy(run: SubmittedRun, tmp_path: Path) -> None:
    run.layout.script.unlink(missing_ok=True)
    os.mkfifo(run.layout.script)
    assert "not a regular file" in str(RunCopy(run.layout, str(tmp_path / "copy"), print).update().error)
