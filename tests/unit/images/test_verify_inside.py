"""The self-check of an imported file, with stand-ins for enroot."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from ftkit import process
from ftkit.errors import ImageError
from ftkit.images.events import ignore_progress
from ftkit.images.image_store import ImportManifest
from ftkit.images.inside import PASSED
from ftkit.images.verify import verify_inside

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = ImportManifest(
    reference="a:1", image_id="", registry_digest="", source="", made_by="", format="sqsh", file="a.sqsh", size=0,
    sha256="", block_size=1, blocks=(), labels={}, sbom="", imported=0, ftkit_version="",
)  # fmt: skip


@pytest.fixture
def enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in first on PATH that runs the files CHECK and REMOVE and records its variables."""
    script = tmp_path / "bin" / "enroot"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/bash\ncd {tmp_path}; echo "$@" >>calls\ncase $1 in\n'
        'start) env >variables; eval "$(cat CHECK)" ;;\nremove) eval "$(cat REMOVE 2>/dev/null)" ;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.defpath}")
    monkeypatch.setattr("shutil.which", lambda name: name if name == "enroot" else None)
    return tmp_path


def check(folder: Path) -> str:
    return verify_inside(folder / "a.sqsh", MANIFEST, ignore_progress)


def test_only_the_success_message_of_the_self_check_counts(enroot: Path) -> None:
    (enroot / "CHECK").write_text(f"echo a banner; echo '{PASSED}'")
    assert check(enroot) == ""
    created, _, removed = (enroot / "calls").read_text().splitlines()
    assert created.split()[3] == removed.split()[-1]


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("exit 0", "did not start:\n    exit status 0, no output"),
        ("echo a banner", "did not start:\n    a banner"),
        ("echo python3: not found >&2; exit 127", "did not start:\n    python3: not found"),
        ("echo a banner; exit 127", "did not start:\n    a banner"),
        ("echo torch is gone; exit 1", "fails its self-check:\n    torch is gone"),
        (f"echo '{PASSED}'; exit 1", "fails its self-check"),
    ],
)
def test_any_other_output_is_a_failure(enroot: Path, says: str, reason: str) -> None:
    (enroot / "CHECK").write_text(says)
    with pytest.raises(ImageError) as caught:
        check(enroot)
    assert reason in caught.value.what


def test_variables_of_the_host_do_not_reach_the_check(enroot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/host")
    monkeypatch.setenv("ENROOT_DATA_PATH", "/data")
    (enroot / "CHECK").write_text(f"echo '{PASSED}'")
    check(enroot)
    variables = (enroot / "variables").read_text().splitlines()
    assert not [line for line in variables if line.startswith("PYTHONPATH")]
    assert {"ENROOT_DATA_PATH=/data", "ENROOT_LOGIN_SHELL=no"} <= set(variables)


@pytest.mark.parametrize(("remove", "said"), [("echo busy >&2; exit 1", "busy"), ("sleep 60", "did not answer within")])
def test_a_container_that_cannot_be_removed_does_not_change_the_verdict(
    enroot: Path, monkeypatch: pytest.MonkeyPatch, remove: str, said: str
) -> None:
    def run(args: list[str], *, timeout_seconds: float, environment: object = None) -> process.ProgramOutput:
        del environment
        assert timeout_seconds > 600
        if args[1] == "remove" and remove.startswith("sleep"):
            raise process.ProgramTimeoutError("enroot", timeout_seconds)
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        return process.ProgramOutput(done.returncode, done.stdout, done.stderr)

    monkeypatch.setattr(process, "run", run)
    (enroot / "REMOVE").write_text(remove)
    (enroot / "CHECK").write_text(f"echo '{PASSED}'")
    left = check(enroot)
    assert said in left
    assert "enroot remove --force -- ftkit-verify-" in left
    (enroot / "CHECK").write_text("echo torch is gone; exit 1")
    with pytest.raises(ImageError, match="torch is gone"):
        check(enroot)
