from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import TrainingError
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


def test_each_start_is_added_with_what_the_container_says_of_itself(
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


def test_another_image_than_the_submitted_one_is_refused_and_written_down(manifest: Path, image: Path) -> None:
    (image / "requirements.lock").write_text("torch==2.6\n")
    with pytest.raises(TrainingError, match="another image than the run was submitted with"):
        record_start(manifest, image)
    assert json.loads(manifest.read_text())["starts"][0]["image"]["lock_sha256"] != LOCK


def test_an_image_that_says_nothing_is_refused_only_if_it_should(manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not there"):
        record_start(manifest, tmp_path / "none")
    manifest.write_text("{}")
    record_start(manifest, tmp_path / "none")
    assert json.loads(manifest.read_text())["starts"][0]["image"] == {}


@pytest.mark.parametrize("text", [None, "", "[]", '{"starts": 3}'])
def test_a_manifest_that_is_not_there_or_damaged_is_left_alone(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    record_start(path)
    assert (path.read_text() if path.exists() else None) == text
