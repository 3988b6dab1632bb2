from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import TrainingError
from ftkit.planning.layout import RunLayout
from ftkit.runs.failure import RankError, first_error, write_rank_error
from ftkit.runs.manifest import record_start

if TYPE_CHECKING:
    from pathlib import Path

LOCK = hashlib.sha256(b"torch==2.7\n").hexdigest()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "opt"
    folder.mkdir()
    (folder / "image.json").write_text('{"name": "olmo3", "tag": "25.02"}')
    (folder / "requirements.lock").write_text("torch==2.7\n")
    return folder


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"run": "x", "image_lock_sha256": LOCK}))
    return path


def test_each_start_is_recorded_with_the_containers_manifest(
    manifest: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CONTAINER_IMAGE", "/images/sha256-1.sqsh")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    record_start(manifest, image)
    record_start(manifest, image)
    values = json.loads(manifest.read_text())
    assert values["run"] == "x"
    first, second = values["starts"]
    assert (first["container_image"], first["job_id"]) == ("/images/sha256-1.sqsh", "7")
    assert first["image"] == second["image"] == {"reference": "olmo3:25.02", "lock_sha256": LOCK}


def test_an_image_other_than_the_submitted_one_is_rejected_and_recorded(manifest: Path, image: Path) -> None:
    (image / "requirements.lock").write_text("torch==2.6\n")
    with pytest.raises(TrainingError, check=lambda error: error.name == "other-image"):
        record_start(manifest, image)
    assert json.loads(manifest.read_text())["starts"][0]["image"]["lock_sha256"] != LOCK


def test_data_that_was_prepared_again_into_other_packs_is_not_trained_on(tmp_path: Path) -> None:
    layout, none = RunLayout(tmp_path / "runs" / "x"), tmp_path / "none"
    data = tmp_path / "data" / "1a2b" / "manifest.json"
    for folder in (data.parent, layout.root):
        folder.mkdir(parents=True)

    def start_on(packs: str) -> None:
        data.write_text(json.dumps({"digests": {"train": packs, "tokenizer": packs}}))
        record_start(layout.manifest, none)

    layout.manifest.write_text('{"data_fingerprint": "1a2b"}')
    start_on("a")
    start_on("b")  # nothing was trained yet
    layout.checkpoint(5).mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(TrainingError, check=lambda error: error.name == "other-data"):
            start_on("a")
    start_on("b")
    starts = json.loads(layout.manifest.read_text())["starts"]
    assert [start["data"].get("train") for start in starts] == ["a", "b", None, None, "b"]


def test_an_image_without_a_manifest_is_rejected_only_if_one_is_expected(manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="missing"):
        record_start(manifest, tmp_path / "none")
    manifest.write_text("{}")
    record_start(manifest, tmp_path / "none")
    assert json.loads(manifest.read_text())["starts"][0]["image"] == {}


def test_a_failure_repeated_at_the_same_step_of_a_job_is_not_retried(tmp_path: Path) -> None:
    layout, none = RunLayout(tmp_path), tmp_path / "none"
    layout.manifest.write_text("{}")

    def fail(num_restarts: int, rank: int, message: str) -> None:
        record_start(layout.manifest, none, num_restarts=num_restarts)
        write_rank_error(layout.rank_error(rank), RankError(time.time(), rank, "n1", "SIGSEGV", message, "", 1))

    fail(0, 3, "at 0x7f12 of process 812")
    fail(1, 2, "at 0x7e45 of process 977")
    with pytest.raises(TrainingError, check=lambda error: error.name == "repeated-failure"):
        fail(2, 1, "never")
    layout.rank_error(3).unlink()  # as starting ranks do
    layout.rank_error(2).unlink()
    fail(0, 1, "at 0x7e45 of process 977")  # another job may retry
    fail(1, 1, "something else")
    fail(2, 1, "something else")
    assert [start["restart"] for start in json.loads(layout.manifest.read_text())["starts"]] == [0, 1, 2, 0, 1, 2]


def test_a_rank_that_only_lost_another_one_did_not_fail_first(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    lost = RankError(1.0, 0, "n1", "RuntimeError", "[pair.cc:534] Connection closed by peer [10.0.0.2]:5", "", 1)
    write_rank_error(layout.rank_error(0), lost)
    assert first_error(layout, since=0) == lost
    write_rank_error(layout.rank_error(1), RankError(2.0, 1, "n2", "SIGKILL", "rank 1 was ended", "", 1))
    found = first_error(layout, since=0)
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize("text", [None, "", "[]", '{"starts": 3}'])
def test_a_missing_or_damaged_manifest_is_not_changed(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    record_start(path)
    assert (path.read_text() if path.exists() else None) == text
