from __future__ import annotations

import hashlib
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ftkit
from ftkit.checkout import list_files, read_changes, read_commit
from ftkit.launch.code import copy_code

if TYPE_CHECKING:
    from collections.abc import Callable

HOOKS = (
    "post-index-change",
    "pre-auto-gc",
    "reference-transaction",
    "post-checkout",
    "pre-commit",
    "fsmonitor-watchman",
)


def git(folder: Path, *words: str, stdin: str | None = None) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True, input=stdin
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "-c", "init.defaultBranch=main", "init", "-q")
    (folder / "kept.py").write_text("one\n")
    (folder / "deleted.py").write_text("gone\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def modify(folder: Path) -> None:
    """Change content, and only times, so that git must read the files again."""
    (folder / "deleted.py").unlink()
    (folder / "new.py").write_text("new\n")
    os.utime(folder / "kept.py", (1, 1))


def test_the_commit_of_a_checkout_is_read_with_whether_it_is_clean(checkout: Path, tmp_path: Path) -> None:
    commit = read_commit(checkout)
    assert commit is not None
    assert commit.id == git(checkout, "rev-parse", "HEAD").strip()
    assert commit.time == int(git(checkout, "log", "-1", "--format=%ct"))
    assert not commit.has_changes
    os.utime(checkout / "kept.py", (1, 1))
    assert read_commit(checkout) == commit
    (checkout / "new").touch()
    changed = read_commit(checkout)
    assert changed is not None
    assert changed.has_changes
    assert (read_commit(tmp_path), list_files(tmp_path), read_changes(tmp_path)) == (None, None, "")


def test_the_diff_applied_to_the_commit_restores_the_code(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert read_changes(checkout) == ""
    (checkout / "kept.py").write_text("two\n")
    (checkout / "new.py").write_text("new\n")
    (checkout / "*").write_text("star\n")
    before = {path: path.read_bytes() for path in (checkout / ".git").rglob("*") if path.is_file()}
    changes = read_changes(checkout)
    read_commit(checkout)
    assert {path: path.read_bytes() for path in (checkout / ".git").rglob("*") if path.is_file()} == before
    git(tmp_path, "clone", "-q", str(checkout), str(copy))
    git(copy, "apply", stdin=changes)
    for name in ("kept.py", "new.py", "*"):
        assert (copy / name).read_text() == (checkout / name).read_text()


def test_a_change_in_the_second_of_the_last_commit_is_found(checkout: Path) -> None:
    second = (1_700_000_000, 1_700_000_000)
    git(checkout, "config", "core.trustCtime", "false")
    os.utime(checkout / "kept.py", second)
    git(checkout, "update-index", "--refresh")
    os.utime(checkout / ".git/index", second)
    (checkout / "kept.py").write_text("two\n")
    os.utime(checkout / "kept.py", second)
    assert "+two" in read_changes(checkout)


def test_a_diff_is_recorded_during_a_merge_with_conflicts(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "checkout", "-qb", "other")
    for branch, text in (("other", "two\n"), ("main", "three\n")):
        git(checkout, "checkout", "-q", branch)
        (checkout / "kept.py").write_text(text)
        git(checkout, "commit", "-qam", text)
    with suppress(subprocess.CalledProcessError):
        git(checkout, "merge", "-q", "other")
    merged = (checkout / "kept.py").read_text()
    assert "<<<" in merged
    git(tmp_path, "clone", "-q", str(checkout), str(tmp_path / "copy"))
    git(tmp_path / "copy", "apply", stdin=read_changes(checkout))
    assert (tmp_path / "copy/kept.py").read_text() == merged


def test_a_checkout_without_a_commit_has_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "new.py").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/part.py").touch()
    assert read_commit(tmp_path) is None
    assert list_files(tmp_path) == ["lib/part.py", "new.py"]
    assert list_files(tmp_path / "lib") == ["part.py"]


def test_a_forged_index_lists_no_files_outside_the_checkout(checkout: Path) -> None:
    (checkout / "aa").mkdir()
    for path in (checkout.parent / "secret", checkout / "aa/secret"):
        path.touch()
    git(checkout, "add", ".")
    index = checkout / ".git/index"
    forged = index.read_bytes()[:-20].replace(b"aa/secret", b"../secret")
    index.write_bytes(forged + hashlib.sha1(forged, usedforsecurity=False).digest())
    assert "../secret" in git(checkout, "ls-files")
    assert list_files(checkout) == ["aa/secret", "deleted.py", "kept.py"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: git(folder, "update-index", "--split-index"),
        lambda folder: git(folder, "pack-refs", "--all"),
        lambda folder: git(folder, "gc", "-q"),
        lambda folder: git(folder, "config", "core.fileMode", "false"),
        lambda folder: (folder / ".git/info/exclude").unlink(),
        lambda folder: git(folder, "sparse-checkout", "set", "--no-cone", "kept.py"),
    ],
)
def test_layouts_and_settings_of_repositories_are_honored(change: Callable[[Path], object], checkout: Path) -> None:
    change(checkout)
    if git(checkout, "config", "core.fileMode").strip() == "false":
        (checkout / "kept.py").chmod(0o755)
    commit = read_commit(checkout)
    assert commit is not None
    assert not commit.has_changes
    assert list_files(checkout) == ["deleted.py", "kept.py"]
    assert read_changes(checkout) == ""


def test_worktrees_sha256_and_ignored_files_are_read_as_git_reads_them(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "-q", str(tmp_path / "linked"))
    sha256 = tmp_path / "sha256"
    git(tmp_path, "init", "-q", "--object-format=sha256", str(sha256))
    (sha256 / "kept.py").touch()
    git(sha256, "add", ".")
    git(sha256, "commit", "-qm", "first")
    (tmp_path / "ignored").write_text("*.swp\n")
    for folder in (tmp_path / "linked", sha256):
        git(folder, "config", "core.excludesFile", str(tmp_path / "ignored"))
        (folder / "a.swp").touch()
        (tmp_path / "checkout/.git/info/exclude").write_text("*.bak\n")
        commit = read_commit(folder)
        assert commit is not None
        assert not commit.has_changes
        assert "kept.py" in (list_files(folder) or ())
        assert "a.swp" not in (list_files(folder) or ())
    (tmp_path / "linked/a.bak").touch()
    assert "a.bak" not in (list_files(tmp_path / "linked") or ())


def test_a_repository_of_another_user_is_not_read(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.process.run", _as_another_user(ftkit.checkout.process.run))
    assert read_commit(checkout) is None
    (Path.home() / ".gitconfig").write_text(f"[safe]\n\tdirectory = {checkout}\n")
    assert read_commit(checkout) is not None


def _as_another_user(run: Callable[..., object]) -> Callable[..., object]:
    def changed(words: list[str], *, environment: dict[str, str]) -> object:
        return run(words, environment=environment | {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"})

    return changed


def hostile_repository(checkout: Path, marker: Path) -> None:
    """Give a repository each setting by which git starts programs; each appends its name to a marker file."""

    def program(name: str) -> str:
        path = marker.with_name(f"run-{re.sub(r'[^a-z0-9]', '-', name)}")
        path.write_text(f"#!/bin/sh\necho {path.name} >>{marker}\ncat 2>/dev/null\nexit 0\n")
        path.chmod(0o755)
        return str(path)

    git(checkout, "clone", "-q", "--bare", ".", str(marker.with_name("remote.git")))
    git(checkout, "submodule", "--quiet", "add", str(marker.with_name("remote.git")), "sub")
    (checkout / ".gitattributes").write_text("*.py filter=evil diff=evil merge=evil\nnew.py filter=e=v\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    included = marker.with_name("included")
    included.write_text(f'[filter "e=v"]\n\tclean = {program("included")}\n')
    hooks = marker.with_name("hooks")
    hooks.mkdir(exist_ok=True)
    for folder in (checkout / ".git", checkout / ".git/modules/sub"):
        settings = {
            "core.fsmonitor": program("fsmonitor"), "core.hooksPath": str(hooks), "core.pager": program("pager"),
            "core.editor": program("editor"), "core.sshCommand": program("ssh"), "core.gitProxy": program("proxy"),
            "core.askPass": program("askpass"), "core.alternateRefsCommand": program("refs"),
            "diff.external": program("external"), "diff.evil.command": program("command"),
            "diff.evil.textconv": program("textconv"), "merge.evil.driver": program("merge"),
            "filter.evil.clean": program("clean"), "filter.evil.smudge": program("smudge"),
            "filter.evil.process": program("process"), "filter.evil.required": "true",
            "gpg.program": program("gpg"), "log.showSignature": "true", "status.submoduleSummary": "true",
            "credential.helper": program("credential"), "alias.status": f"!{program('alias')}",
            "pager.status": program("pager-status"), "pager.rev-parse": program("pager-rev-parse"),
            "interactive.diffFilter": program("interactive"), "include.path": str(included),
            "extensions.partialClone": "origin", "remote.origin.promisor": "true", "remote.origin.url": "ext::false",
            "remote.origin.uploadpack": program("uploadpack"), "protocol.ext.allow": "always",
            "core.untrackedCache": "true", "core.splitIndex": "true", "gc.auto": "1",
        }  # fmt: skip
        for key, value in settings.items():
            git(checkout, "config", "--file", str(folder / "config"), key, value)
    for hook in HOOKS:
        Path(program(hook)).rename(hooks / hook)
        (checkout / ".git/hooks").mkdir(exist_ok=True)
        (checkout / ".git/hooks" / hook).write_bytes((hooks / hook).read_bytes())
        (checkout / ".git/hooks" / hook).chmod(0o755)
    (checkout / "sub/changed.py").touch()
    git(checkout, "clone", "-q", str(marker.with_name("remote.git")), str(checkout / "nested"))
    git(checkout / "nested", "config", "core.fsmonitor", program("nested"))


def hostile_environment(checkout: Path, monitor: Path) -> dict[str, str]:
    """Return variables by which git starts programs or reads another repository."""
    programs = ("EXTERNAL_DIFF", "SSH_COMMAND", "SSH", "ASKPASS", "PAGER", "EDITOR", "PROXY_COMMAND", "SEQUENCE_EDITOR")
    return {f"GIT_{name}": str(monitor) for name in programs} | {
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": str(monitor),
        "GIT_CONFIG_PARAMETERS": f"'core.fsmonitor'='{monitor}'", "GIT_CONFIG_GLOBAL": str(checkout / ".git/config"),
        "GIT_CONFIG_SYSTEM": str(checkout / ".git/config"), "GIT_DIR": str(checkout / ".git"),
        "GIT_WORK_TREE": str(checkout), "GIT_INDEX_FILE": "/nowhere", "GIT_EXEC_PATH": str(monitor.parent),
        "GIT_TRACE": str(monitor.with_name("marker")), "GIT_TEMPLATE_DIR": str(checkout / ".git"),
    }  # fmt: skip


def test_no_program_that_a_repository_or_the_environment_names_is_started(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    hostile_repository(checkout, marker)
    marker.unlink(missing_ok=True)
    modify(checkout)
    head = (checkout / ".git/HEAD").read_text()
    for key, value in hostile_environment(checkout, tmp_path / "run-fsmonitor").items():
        monkeypatch.setenv(key, value)
    commit, listed, changes = read_commit(checkout), list_files(checkout), read_changes(checkout)
    copied = copy_code(checkout, "script", "--script", needs="new.py")
    assert not marker.exists(), marker.read_text()
    assert commit is not None
    assert commit.has_changes
    assert {"kept.py", "deleted.py", "new.py"} <= set(listed or ())
    assert "+new" in changes
    assert {"kept.py", "new.py"} <= copied.files.keys()
    assert (checkout / ".git/HEAD").read_text() == head


def test_the_hostile_repository_starts_programs_when_git_is_called_plainly(checkout: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    hostile_repository(checkout, marker)
    marker.unlink(missing_ok=True)
    modify(checkout)
    (checkout / "kept.py").write_text("two\n")
    without_process = ("config", "--remove-section", "filter.evil")
    with_clean = ("config", "filter.evil.clean", str(tmp_path / "run-clean"))
    calls = (("status",), without_process, with_clean, ("diff",), ("diff", "--no-ext-diff"), ("add", "--all"))
    for words in calls:
        subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, check=False)
    started = set(marker.read_text().split())
    names = ("fsmonitor", "process", "clean", "command", "textconv", "post-index-change")
    assert {f"run-{name}" for name in names} <= started


def test_no_other_module_reads_a_checkout_with_git() -> None:
    package = Path(ftkit.__file__).parent
    callers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"""["']git["'],(?! "clone")""", path.read_text(encoding="utf-8"))
    }
    assert callers == {"checkout.py"}
