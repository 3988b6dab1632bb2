"""Copies of a run to a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from ftkit.config.context import Context
from ftkit.files import write_json
from ftkit.launch.resolve import RunArgs
from ftkit.launch.user_script import ScriptArgs, resolve_script
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import PlanError, plan_to_json
from ftkit.runs import storage as store_module
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.runs.manifest import build_manifest
from ftkit.runs.storage import Store
from ftkit.runs.sync import RunCopy, fetch_run

if TYPE_CHECKING:
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


def test_a_local_file_that_is_gone_is_not_blamed_on_the_store(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "shard").touch()
    store, gone = Store(str(tmp_path / "copies")), tmp_path / "deleted by the trainer"
    with pytest.raises(FileNotFoundError):
        store.put(gone, "shard")
    with pytest.raises(FileNotFoundError):
        store.holds("shard", gone)


def test_existing_files_are_not_copied_again(run: SubmittedRun, tmp_path: Path) -> None:
    assert RunCopy(run.layout, str(tmp_path / "copies"), print).update().done == ("checkpoints/step-000005",)
    assert (tmp_path / "copies" / run.id / "checkpoints" / "step-000005" / MARKER).is_file()
    again = RunCopy(run.layout, str(tmp_path / "copies"), pytest.fail).update()
    assert (again.error, again.done) == (None, ("checkpoints/step-000005",))


def test_the_run_of_another_user_is_copied(run: SubmittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.runs.sync.write_json", Mock(side_effect=PermissionError(13, "Permission denied")))
    copied = RunCopy(run.layout, str(tmp_path / "copies"), print).update()
    assert (copied.error, copied.done) == (None, ("checkpoints/step-000005",))


def test_a_pipe_in_a_run_folder_ends_the_copy(run: SubmittedRun, tmp_path: Path) -> None:
    run.layout.script.unlink(missing_ok=True)
    os.mkfifo(run.layout.script)
    assert "regular file" in str(RunCopy(run.layout, str(tmp_path / "copy"), print).update().error)


def test_a_scripts_run_is_not_continued_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()")
    ctx = Context(tmp_path, tmp_path / "user", {"FTKIT_CLUSTER": "local"})
    plan, _ = resolve_script(ScriptArgs(Path("train.py")), RunArgs(), [], ctx)
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    write_json(plan.layout.manifest, build_manifest(plan, ["ftkit", "run", "--script", "train.py"], tmp_path))
    address = RunCopy(plan.layout, str(tmp_path / "copies"), print).update().destination
    with pytest.raises(PlanError, match="can't be continued from a copy") as caught:
        fetch_run(address, Workspace(tmp_path / "elsewhere"), print)
    assert caught.value.fix == "start the script again, where it is: ftkit run --script train.py"
