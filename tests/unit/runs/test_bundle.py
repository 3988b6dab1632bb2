"""Bundles: reproducible byte for byte, and safe to extract from untrusted archives."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.files import DamagedFileError, write_json
from ftkit.planning.plan import read_plan
from ftkit.runs.manifest import build_manifest
from ftkit.runs.repeat import unpack, write_bundle

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker


@pytest.fixture
def bundle(make_run: RunMaker, records: Any, tmp_path: Path) -> Path:
    run = make_run()
    write_json(run.layout.manifest, build_manifest(read_plan(run.layout), ["ftkit"], tmp_path))
    records.write(run, records.step(1, 2.0))
    first, second = tmp_path / "first.tar", tmp_path / "second.tar"
    lock = tmp_path / "a.lock"
    lock.write_text("torch==1\n")
    members = write_bundle(run.layout, first, lock)
    run.layout.metrics.touch()
    write_bundle(run.layout, second, lock)
    assert first.read_bytes() == second.read_bytes()
    assert members == sorted(members)
    assert {"manifest.json", "metrics.jsonl", "plan.json", "recipe.json", "requirements.lock"} <= set(members)
    return first


def test_a_bundle_contains_what_a_rerun_needs(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"manifest.json", "metrics.jsonl", "plan.json"}


def test_a_run_without_manifest_has_no_bundle(make_run: RunMaker, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no manifest\.json"):
        write_bundle(make_run().layout, tmp_path / "x.tar")


def test_a_failed_bundle_leaves_no_files(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run()
    run.layout.manifest.write_text("{}")
    with pytest.raises(PrerequisiteError, match="--output"):
        write_bundle(run.layout, tmp_path / "missing" / "x.tar")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("name", ["../manifest.json", "/manifest.json", "run/../../manifest.json"])
def test_only_run_files_are_extracted_from_an_untrusted_archive_into_its_folder(name: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "foreign.tar", tmp_path / "a" / "b"
    with tarfile.open(path, "w") as archive:
        for member, content in ((name, b"{}"), ("run/id_rsa", b"key")):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("run/plan.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    unpack(path, folder)
    assert [each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*") if each.is_file()] == [
        "foreign.tar",
        "a/b/manifest.json",
    ]


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_bundle_is_rejected(bundle: Path, tmp_path: Path, damage: str) -> None:
    if damage == "cut":
        bundle.write_bytes(bundle.read_bytes()[:900])
    else:
        with tarfile.open(bundle, "w"):
            pass
    with pytest.raises(DamagedFileError):
        unpack(bundle, tmp_path / "there")


def test_a_file_too_large_for_a_bundle_is_named(
    make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.runs.repeat._MAX_MEMBER_BYTES", 2**20)
    layout = make_run().layout
    write_json(layout.manifest, build_manifest(read_plan(layout), ["ftkit"], tmp_path))
    layout.metrics.touch()
    os.truncate(layout.metrics, 2**40)
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl"):
        write_bundle(layout, tmp_path / "b.tar")
