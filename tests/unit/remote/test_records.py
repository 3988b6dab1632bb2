from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ftkit.files import file_lock, write_json
from ftkit.remote.remote_runs import Records
from ftkit.remote.ssh import Login

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LOGIN = Login("cluster", "login", (), "/work")


def test_runs_are_recorded_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    class OtherProcessWaitsError(Exception):
        pass

    def write(path: Path, content: Any) -> None:
        def on_wait() -> None:
            waits.append(path.name)
            raise OtherProcessWaitsError

        try:
            with file_lock(tmp_path / ".runs.lock", on_wait):
                pass
        except OtherProcessWaitsError:
            write_json(path, content)

    monkeypatch.setattr("ftkit.remote.remote_runs.write_json", write)
    records = Records(tmp_path)
    for run in ("a-20261123T100000Z-1111", "b-20261123T100000Z-2222"):
        records.add([run], LOGIN, tmp_path)
    assert waits == ["runs.json", "runs.json"]
    assert [run.id for run in records.runs()] == ["a-20261123T100000Z-1111", "b-20261123T100000Z-2222"]


def test_a_whole_name_finds_a_run_before_the_beginning_of_a_newer_one(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add(["exp-20260101T000000Z-aaaa", "exp-lora-20260602T000000Z-bbbb"], LOGIN, tmp_path)
    for reference, found in (("exp", "exp-2"), ("exp-", "exp-lora"), ("last", "exp-lora"), ("aaaa", "exp-2")):
        run = records.find(reference)
        assert run
        assert run.id.startswith(found)
    assert records.find("other") is None


def test_a_submission_that_a_full_disk_left_empty_is_submitted_under_a_new_id(tmp_path: Path) -> None:
    records, ids = Records(tmp_path), []
    for _ in range(2):
        with contextlib.suppress(InterruptedError), records.submission(LOGIN, tmp_path, ("run",)) as submission:
            ids.append(submission)
            raise InterruptedError
    assert ids[0] == ids[1]  # the same command is the same submission
    (file,) = (tmp_path / "unanswered").iterdir()
    file.write_text("")
    with records.submission(LOGIN, tmp_path, ("run",)) as submission:
        assert len(submission) == len(ids[0])
    assert not file.exists()
