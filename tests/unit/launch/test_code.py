"""Copies of the user's code in a run folder."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import ConfigError
from ftkit.files import digest_of
from ftkit.launch import code
from ftkit.launch.code import (
    copies_of_run,
    copy_code,
    copy_selected,
    files_of,
    sent_files,
)

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_a_checkout_is_copied_as_git_tracks_it_with_its_commit(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "helper.py", "deleted.py", "model.bin", ".gitignore")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.com")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "deleted.py").unlink()
    write(tmp_path, "new.py", ".env", "lib/__pycache__/part.pyc")
    copy = copy_code(tmp_path, "script", "--script", needs="train.py")
    assert sorted(copy.files) == [".gitignore", "helper.py", "new.py", "train.py"]
    assert (len(copy.plan.commit or ""), copy.plan.has_uncommitted_changes) == (40, True)
    assert copy.plan.sha256 == digest_of(copy.files)
    write(tmp_path, "scratch.bin")
    assert (
        "scratch.bin" in copy_code(tmp_path, "script", "--script", needs="scratch.bin").files
    )  # ignored by git, but listed explicitly


def test_a_plain_folder_is_copied_without_hidden_files_and_ftkits_output(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "lib/part.py", "lib/__pycache__/part.pyc", ".venv/x.py", "runs/a/plan.json")
    copy = copy_code(tmp_path, "script", "--script", exclude=[tmp_path / "runs"])
    assert sorted(copy.files) == ["lib/part.py", "train.py"]
    assert sorted(files_of([copy])) == ["code/script/lib/part.py", "code/script/train.py"]


def test_copies_reach_another_machine_unchanged_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path, "a/train.py", "mine/__init__.py")
    copies = [
        copy_code(tmp_path / "a", "script", "--script"),
        *copy_selected([tmp_path / "a" / ".." / "mine"], is_dev=False),
    ]
    for path, content in sent_files(copies, "there").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert copy_selected([], is_dev=False, sent=tmp_path / "there") == copies
    assert copies[1].plan.source == str(tmp_path / "mine")
    write(tmp_path, "there/script/more.py")
    with pytest.raises(ConfigError, match="was changed"):
        copy_selected([], is_dev=False, sent=tmp_path / "there")


def test_the_digest_distinguishes_names_from_contents() -> None:
    assert len({digest_of(each) for each in ({"a": b"bc"}, {"ab": b"c"}, {"a": b"b", "c": b""}, {})}) == 4


def test_a_folder_larger_than_the_code_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_LIMIT_BYTES", 10)
    write(tmp_path, "long-name-and-content.py")
    with pytest.raises(ConfigError, match="too many"):
        copy_code(tmp_path, "script", "--script")


def test_a_package_keeps_its_name_and_a_folder_of_modules_does_not(tmp_path: Path) -> None:
    write(tmp_path, "mylib/__init__.py", "modules/loose.py", "other/mylib/__init__.py")
    package, modules = copy_selected([tmp_path / "mylib", tmp_path / "modules"], is_dev=False)
    assert (list(package.files), list(modules.files)) == (["mylib/__init__.py"], ["loose.py"])
    with pytest.raises(ConfigError, match="same name"):
        copy_selected([tmp_path / "mylib", tmp_path / "other" / "mylib"], is_dev=False)


def test_the_copy_of_ftkit_itself_is_a_package_with_its_data() -> None:
    (copy,) = copy_selected([], is_dev=True)
    assert {
        "ftkit/__init__.py",
        "ftkit/train/script_process.py",
        "ftkit/recipes/qwen3-8b-tools-full.yaml",
    } <= copy.files.keys()


def test_a_rerun_uses_the_same_code_or_reports_what_is_missing_or_changed(tmp_path: Path) -> None:
    write(tmp_path, "mylib/__init__.py")
    (copy,) = copy_selected([tmp_path / "mylib"], is_dev=False)
    run = tmp_path / "run"
    manifest = {"code": {copy.plan.name: asdict(copy.plan)}}
    with pytest.raises(ConfigError, match="is not here"):
        copies_of_run(manifest, run / "code", allows_changes=False)
    assert copies_of_run(manifest, run / "code", allows_changes=True) == []
    write(run / "code" / "with-mylib", "mylib/__init__.py", "mylib/__pycache__/x.pyc")
    (run / "code" / "with-mylib" / "mylib" / "__init__.py").write_bytes(copy.files["mylib/__init__.py"])
    assert copies_of_run(manifest, run / "code", allows_changes=False) == [copy]
    write(run / "code" / "with-mylib", "mylib/new.py")
    with pytest.raises(ConfigError, match="was changed"):
        copies_of_run(manifest, run / "code", allows_changes=False)
    other = {"code": {name: values | {"import_from": "."} for name, values in manifest["code"].items()}}
    with pytest.raises(ConfigError, match="another version"):
        copies_of_run(other, run / "code", allows_changes=True)
