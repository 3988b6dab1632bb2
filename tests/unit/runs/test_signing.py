"""Signatures are valid for one file, key and purpose; made by ssh-keygen itself."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.runs.signing import PRINCIPAL, SignatureError, require_signing_key, sign, signature_file, verify_beside

if TYPE_CHECKING:
    from pathlib import Path


def make_key(folder: Path, name: str) -> Path:
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, capture_output=True)
    return key


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path, "key")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file"
    path.write_bytes(b"content")
    return path


def test_a_signature_is_valid_only_for_its_file_and_key(key: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify_beside(file, public(key), "ftkit-bundle")
    assert sign(file, key, "ftkit-bundle") == signature_file(file)
    verify_beside(file, public(key), "ftkit-bundle")
    file.write_bytes(b"contents")
    with pytest.raises(SignatureError):
        verify_beside(file, public(key), "ftkit-bundle")
    sign(file, make_key(tmp_path, "other"), "ftkit-bundle")
    with pytest.raises(SignatureError):
        verify_beside(file, public(key), "ftkit-bundle")


def test_a_public_key_does_not_sign_and_a_private_one_does_not_verify(key: Path, file: Path) -> None:
    moved = key.rename(key.with_suffix(".moved"))
    with pytest.raises(PrerequisiteError, match="a file"):
        sign(file, public(key), "ftkit-bundle")
    signature_file(file).write_text("x")
    with pytest.raises(PrerequisiteError, match=r"key\.moved"):
        verify_beside(file, moved, "ftkit-bundle")


def test_a_signature_is_valid_only_for_its_purpose_and_allowed_signers(key: Path, file: Path, tmp_path: Path) -> None:
    signers = tmp_path / "signers"
    sign(file, key, "ftkit-bundle")
    with pytest.raises(SignatureError):
        verify_beside(file, public(key), "ftkit-image")
    signers.write_text(f'# ours\n{PRINCIPAL} namespaces="ftkit-bundle" {public(key).read_text()}')
    verify_beside(file, signers, "ftkit-bundle")
    signers.write_text(f"somebody@else {public(key).read_text()}")
    with pytest.raises(SignatureError):
        verify_beside(file, signers, "ftkit-bundle")


def test_a_file_that_is_no_ssh_key_is_refused_before_work_is_done(
    key: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_signing_key(key)
    require_signing_key(public(key))
    with pytest.raises(PrerequisiteError, match="a file"):
        require_signing_key(file)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PrerequisiteError, match="ssh-keygen"):
        require_signing_key(key)
    with pytest.raises(PrerequisiteError, match="ssh-keygen"):
        sign(file, key, "ftkit-bundle")
