"""Files that `ftkit rm --unused` may remove, and files that runs still need."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from ftkit.launch.prune import find_prunable, prune, remove_folder
from ftkit.process import start_time

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakePrograms, RunMaker

    from ftkit.planning.layout import Workspace
    from ftkit.runs.job import SubmittedRun

DAY = 24 * 3600.0


def use(run: SubmittedRun, fingerprint: str, *, exit_code: int | None, has_checkpoint: bool = False) -> None:
    plan = json.loads(run.layout.plan.read_text())
    plan["fingerprint"] = fingerprint
    run.layout.plan.write_text(json.dumps(plan))
    if exit_code is not None:
        run.layout.job_exit_code(run.job_id).write_text(f"{exit_code}\n")
    if has_checkpoint:
        run.layout.checkpoint(10).mkdir(parents=True)


def prepare(workspace: Workspace, name: str, age: float = 2 * DAY) -> Path:
    folder = workspace.data / name
    folder.mkdir(parents=True)
    (folder / "packs").write_bytes(b"1234")
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def runs(make_run: RunMaker, programs: FakePrograms) -> dict[str, SubmittedRun]:
    programs.answer("squeue", "")
    programs.answer("sacct", "")
    found = {name: make_run(name, scheduler="local") for name in ("completed", "failed", "resumable")}
    use(found["completed"], "used", exit_code=0)
    found["completed"].layout.metrics.write_text("")
    use(found["failed"], "of-failed", exit_code=1)
    use(found["resumable"], "of-resumable", exit_code=1, has_checkpoint=True)
    return found


def test_failed_runs_without_a_checkpoint_and_unused_data_are_removed(
    runs: dict[str, SubmittedRun], workspace: Workspace
) -> None:
    for name in ("used", "of-failed", "of-resumable", "forgotten"):
        prepare(workspace, name)
    young = prepare(workspace, "young", age=DAY / 2)
    found = find_prunable(workspace, now=1e9)
    assert found.warnings == []
    assert [(item.kind, item.path.name) for item in found.items] == [
        ("run", runs["failed"].id),
        ("data", "forgotten"),
        ("data", "of-failed"),
    ]
    assert prune(found.items) == sum(item.size_bytes for item in found.items)
    assert sorted(path.name for path in workspace.data.iterdir()) == ["of-resumable", "used", young.name]
    assert sorted(path.name for path in workspace.runs.iterdir()) == sorted(
        [runs["completed"].id, runs["resumable"].id]
    )
    with_checkpoints = find_prunable(workspace, with_checkpoints=True, now=1e9)
    assert [item.path.name for item in with_checkpoints.items] == [runs["resumable"].id, "of-resumable"]


def test_no_data_is_removed_while_a_plan_cannot_be_read(runs: dict[str, SubmittedRun], workspace: Workspace) -> None:
    prepare(workspace, "forgotten")
    runs["completed"].layout.plan.write_text("{")
    found = find_prunable(workspace, now=1e9)
    assert [item.kind for item in found.items] == ["run"]
    assert "no prepared data" in found.warnings[-1]


def test_what_an_interrupted_removal_left_does_not_prevent_another_and_is_removed(
    runs: dict[str, SubmittedRun], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ftkit.launch.prune.shutil.rmtree", lambda _: signal.raise_signal(signal.SIGINT))
        for _ in range(2):
            folder = prepare(workspace, "again")
            with pytest.raises(KeyboardInterrupt):
                remove_folder(folder)
    items = find_prunable(workspace).items
    assert not [each for each in items if each.path.name.endswith(".deleted")]  # they may be in progress
    items = find_prunable(workspace, now=time.time() + 2 * DAY).items
    found = [each for each in items if each.path.name.endswith(".deleted")]
    assert len(found) == 2
    prune(found)
    assert [*workspace.data.iterdir()] == []
    assert runs["completed"].layout.root.is_dir()


def test_a_run_that_was_resumed_in_the_meantime_is_kept(runs: dict[str, SubmittedRun], workspace: Workspace) -> None:
    found = find_prunable(workspace, now=1e9)
    failed = runs["failed"]
    failed.layout.job_exit_code(failed.submission.job_id).unlink()
    failed.layout.state.unlink(missing_ok=True)
    submission = json.loads(failed.layout.submission.read_text())
    alive = {"job_id": str(os.getpid()), "process_start": start_time(os.getpid())}
    failed.layout.submission.write_text(json.dumps(submission | alive))
    with pytest.raises(ExceptionGroup, match="some folders"):
        prune(found.items)
    assert failed.layout.root.is_dir()
