"""Failures in practice: killed processes, full disks, unreachable registries, wrong passwords, damaged files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.images.squashfs import ENROOT_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Project, RunningRegistry
    from docker import APIClient

USER, SECRET = "alice", "correct-horse-4711"  # as conftest.py sets them up
IMAGE_ERROR, NOT_FOUND, PREREQUISITE, CONFIG = 10, 4, 5, 3


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# --- Killed --------------------------------------------------------------------------------------


def test_a_build_after_a_killed_one_succeeds(project: Project, bases: APIClient) -> None:
    project.define(base="slow:1")
    with project.start("build", "tiny:1", "--allow-unpinned") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Step" in line and "requirement" in line:
                break
        process.kill()
        process.communicate()
    assert not bases.images("ftkit/tiny")
    project.define()
    project.ok("build", "tiny:1", "--allow-unpinned")
    wait_until(lambda: not any("ftkit" in str(row.get("Labels")) for row in bases.containers(all=True)))


def has_begun_to_receive(registry: RunningRegistry) -> bool:
    return any(registry.config.parent.rglob("_uploads/*/data"))


def test_a_killed_push_can_be_repeated(project: Project, own_registry: RunningRegistry) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    words = ("push", "tiny:1", "--registry", own_registry.host)
    with own_registry.serving():
        project.kill_when(lambda: has_begun_to_receive(own_registry), *words)
        assert "@sha256:" in project.ok(*words).stdout


def test_a_killed_import_leaves_no_truncated_file_and_the_next_one_cleans_up(project: Project) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")

    def has_begun() -> bool:
        return any(path.stat().st_size > 1 << 20 for path in project.images.glob(".partial-*"))

    project.kill_when(has_begun, "import", "tiny:1")
    assert [path for path in project.images.iterdir() if path.suffix == ".sqsh" and not path.name.startswith(".")] == []
    project.ok("import", "tiny:1")
    assert project.unfinished() == []
    project.ok("verify", "tiny:1")


def test_the_container_of_a_killed_import_is_removed_by_the_next_one(project: Project, bases: APIClient) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.kill_when(lambda: bool(bases.containers(all=True, filters={"label": "ftkit.process"})), "import", "tiny:1")
    assert bases.containers(all=True, filters={"label": "ftkit.process"})
    project.ok("import", "tiny:1")
    assert bases.containers(all=True, filters={"label": "ftkit.process"}) == []


def test_a_killed_import_from_a_registry_cleans_up_its_downloads(project: Project, bases: APIClient) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("push", "tiny:1")
    bases.remove_image("ftkit/tiny:1", force=True)
    project.kill_when(lambda: any(project.images.glob(".partial-*.layers/*")), "import", "tiny:1")
    assert not (project.images / "tiny+1.sqsh").exists()
    project.ok("import", "tiny:1")
    assert project.unfinished() == []


# --- Disk space and permissions ------------------------------------------------------------------


@pytest.mark.parametrize("source", ["engine", "registry"])
def test_a_full_disk_is_reported_and_leaves_no_files(
    project: Project, tmp_path: Path, bases: APIClient, source: str
) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    if source == "registry":
        project.ok("push", "tiny:1")
        bases.remove_image("ftkit/tiny:1", force=True)
    with mounted(tmp_path / "small", "size=8m") as small:
        project.environment["FTKIT_WORKSPACE"] = str(small)
        done = project.call("import", "tiny:1")
        assert done.returncode == IMAGE_ERROR, done.stderr
        assert "disk is full" in done.stderr
        assert [path for path in small.rglob("*") if path.is_file() and path.stat().st_size] == []


def test_a_read_only_target_is_reported(project: Project, tmp_path: Path) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    with mounted(tmp_path / "fixed", "ro") as fixed:
        project.environment["FTKIT_WORKSPACE"] = str(fixed)
        done = project.call("import", "tiny:1")
    assert done.returncode == PREREQUISITE
    assert "Read-only file system" in done.stderr


# --- Registries ----------------------------------------------------------------------------------


def test_an_unreachable_registry_is_retried_and_then_reported(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    done = project.call("push", "tiny:1", "--registry", "127.0.0.1:9")
    assert done.returncode == IMAGE_ERROR
    assert re.findall(r"again in (\S+) s", done.stderr) == ["1", "3", "9"]
    assert "lost the connection" in done.stderr


def test_a_registry_that_restarts_during_a_push_is_not_a_failure(
    project: Project, own_registry: RunningRegistry
) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    with own_registry.serving():
        process = project.start("push", "tiny:1", "--registry", own_registry.host)
        wait_until(lambda: has_begun_to_receive(own_registry))
    time.sleep(0.5)
    with own_registry.serving(), process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert "@sha256:" in out


@pytest.mark.parametrize("given", ["wrong", ""])
def test_wrong_credentials_are_reported(project: Project, private_registry: str, given: str) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    words = ["push", "tiny:1", "--registry", private_registry]
    done = project.call(*words, "--username", USER, "--password-stdin", given=given) if given else project.call(*words)
    assert done.returncode == IMAGE_ERROR
    assert ("user 'alice'" if given else "no credentials") in done.stderr
    assert f"docker login {private_registry}" in done.stderr
    assert "trying again" not in done.stderr


def test_missing_credentials_of_an_import_are_reported(project: Project, private_registry: str) -> None:
    done = project.call("import", f"docker://{private_registry}#team/tiny:1")
    assert done.returncode == IMAGE_ERROR
    assert "no credentials" in done.stderr
    assert "--password-stdin" not in done.stderr  # an import has no such option


def test_credentials_are_not_written_anywhere(project: Project, private_registry: str, bases: APIClient) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    words = ("push", "tiny:1", "--registry", private_registry, "--username", USER, "--password-stdin")
    with project.start(*words, given=SECRET) as process:
        assert process.stdin is not None
        process.stdin.write(SECRET)
        process.stdin.close()
        process.stdin = None
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        said = "".join(process.communicate())
    assert process.returncode == 0, said
    project.ok("import", "tiny:1")
    written = b"".join(path.read_bytes() for path in project.images.iterdir() if path.is_file())
    about = json.dumps([bases.inspect_image("ftkit/tiny:1"), bases.history("ftkit/tiny:1")])
    for text in (said.encode(), command, written, about.encode()):
        assert SECRET.encode() not in text


def test_an_image_missing_from_a_registry_is_reported(project: Project, registry: str) -> None:
    done = project.call("import", f"docker://{registry}#team/nothing:1")
    assert done.returncode == NOT_FOUND
    assert "has no team/nothing:1" in done.stderr


# --- Builds --------------------------------------------------------------------------------------


def test_a_base_missing_from_all_registries_is_reported_and_can_come_from_the_engine(
    project: Project, registry: str
) -> None:
    project.define(base=f"{registry}/nowhere:1")
    done = project.call("build", "tiny:1")
    assert done.returncode == NOT_FOUND
    assert "does not resolve" in done.stderr
    assert "--allow-unpinned" in done.stderr


def test_an_unknown_base_is_reported(project: Project, registry: str) -> None:
    done = project.call("build", "tiny:1", "--allow-unpinned", "--base", f"{registry}/no/such:1")
    assert done.returncode == NOT_FOUND
    assert f"image {registry}/no/such:1 not found" in done.stderr


def test_the_last_lines_of_a_failed_build_step_are_shown(project: Project, bases: APIClient) -> None:
    project.define(base="broken:1")
    done = project.call("build", "tiny:1", "--allow-unpinned")
    assert done.returncode == IMAGE_ERROR
    assert "left-pad" in done.stderr
    assert "Step 8/" in done.stderr
    assert not bases.images("ftkit/tiny")


def test_an_image_that_fails_its_self_check_is_not_tagged(project: Project, bases: APIClient) -> None:
    project.define(base="replaced:1")
    done = project.call("build", "tiny:1", "--allow-unpinned")
    assert done.returncode == IMAGE_ERROR
    assert "torch" in done.stderr
    assert not bases.images("ftkit/tiny")


def test_a_self_check_without_output_is_a_failure(project: Project, bases: APIClient) -> None:
    project.define(base="silent:1")
    done = project.call("build", "tiny:1", "--allow-unpinned")
    assert done.returncode == IMAGE_ERROR
    assert "exit status 0" in done.stderr
    assert not bases.images("ftkit/tiny")


def test_an_unreadable_file_does_not_count_as_empty(programs: None, short_folder: Path) -> None:  # noqa: ARG001
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a file that another user can't read")
    folder = short_folder / "unreadable"
    folder.mkdir()
    (folder / "secret").write_text("x")
    (folder / "secret").chmod(0)
    out = short_folder / "out"
    out.mkdir(mode=0o777)
    for path in (short_folder, folder, out):
        path.chmod(0o777)
    command = ["mksquashfs", str(folder), str(out / "a.sqsh"), "-quiet", "-no-progress", *ENROOT_OPTIONS.split()]
    done = subprocess.run(command, user=65534, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout + done.stderr


def test_a_stale_lock_is_rejected(project: Project) -> None:
    file = project.define()
    file.write_text(file.read_text() + "packages: [left-pad==1]\n")
    done = project.call("build", "tiny:1", "--allow-unpinned")
    assert done.returncode == IMAGE_ERROR
    assert "ftkit images lock tiny:1" in done.stderr


@pytest.mark.parametrize(("name", "reason"), [("Tiny", "uppercase letters"), ("a..b", "not a valid name")])
def test_invalid_names_are_rejected_with_a_reason(project: Project, name: str, reason: str) -> None:
    project.define(name)
    done = project.call("build", f"{name}:1", "--allow-unpinned")
    assert done.returncode == CONFIG
    assert reason in done.stderr


def test_a_missing_engine_is_reported(project: Project) -> None:
    project.environment["DOCKER_HOST"] = "unix:///nonexistent.sock"
    done = project.call("build", "tiny:1", "--allow-unpinned")
    assert done.returncode == PREREQUISITE
    assert "/nonexistent.sock" in done.stderr


# --- Damaged imports -------------------------------------------------------------------------------


def test_a_changed_byte_is_detected_and_reported(project: Project) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    with (project.images / "tiny+1.sqsh").open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)
        file.seek(5_000_000)
        file.write(bytes([byte[0] ^ 1]))
    done = project.call("verify", "tiny:1")
    assert done.returncode == IMAGE_ERROR
    assert "bytes 0 to 67108863 differ" in done.stderr
    project.ok("import", "tiny:1", "--force")
    project.ok("verify", "tiny:1")


def test_a_truncated_file_is_detected_by_verify_and_run(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    os.truncate(project.images / "tiny+1.sqsh", 500_000)
    done = project.call("verify", "tiny:1")
    assert done.returncode == IMAGE_ERROR
    assert "truncated: 500000 bytes" in done.stderr
    run = project.call("run", "demo", "--image", "tiny:1", "--cluster", "slurm", "training.global_batch_size=32")
    assert run.returncode == IMAGE_ERROR
    assert "ftkit verify" in run.stderr
    project.ok("import", "tiny:1")  # a damaged file is imported again
    project.ok("verify", "tiny:1")


def test_a_run_without_the_image_suggests_the_import_command(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    done = project.call("run", "demo", "--image", "tiny:1", "--cluster", "slurm", "training.global_batch_size=32")
    assert done.returncode == NOT_FOUND
    assert "ftkit import tiny:1 --cluster slurm" in done.stderr


def test_a_run_imports_its_image_on_request(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    words = ("run", "demo", "training.global_batch_size=32", "--image", "tiny:1", "--cluster", "slurm")
    project.call(*words, "--import", "--no-follow")  # Slurm is not required here
    project.ok("verify", "tiny:1")


def test_two_concurrent_imports_do_the_work_once(project: Project) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    with project.start("import", "tiny:1") as first, project.start("import", "tiny:1") as second:
        said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sum("building squashfs" in text for text in said) == 1
    assert sum("is already imported" in text for text in said) == 1
    project.ok("verify", "tiny:1")
