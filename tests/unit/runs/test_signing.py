"""Signatures are valid for one file, key and purpose; made by the real programs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.runs.signing import (
    PRINCIPAL,
    SUFFIXES,
    SignatureError,
    Signer,
    find_signer,
    key_kind,
    sign,
    verify_beside,
)

if TYPE_CHECKING:
    from conftest import FakePrograms


@dataclass(frozen=True)
class KeyPair:
    """Keys of one program."""

    signer: Signer
    private: Path
    public: Path


def make_keys(signer: Signer, folder: Path, name: str) -> KeyPair:
    if shutil.which(signer) is None:
        pytest.skip(f"needs {signer}")
    private, public = folder / (f"{name}.key" if signer == "cosign" else name), folder / f"{name}.pub"
    commands = {
        "cosign": ["cosign", "generate-key-pair", "--output-key-prefix", folder / name],
        "ssh-keygen": ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", private],
        "minisign": ["minisign", "-G", "-W", "-s", private, "-p", public],
    }
    subprocess.run(commands[signer], check=True, capture_output=True)
    return KeyPair(signer, private, public)


@pytest.fixture(params=["ssh-keygen", "minisign", "cosign"])
def keys(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyPair:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    return make_keys(request.param, tmp_path, "key")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file"
    path.write_bytes(b"content")
    return path


def test_a_signature_is_valid_only_for_its_file_and_key(keys: KeyPair, file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no signature"):
        verify_beside(file, keys.public, "ftkit-bundle")
    signature = sign(file, keys.private, keys.signer, "ftkit-bundle")
    assert signature == file.with_name(file.name + SUFFIXES[keys.signer])
    assert verify_beside(file, keys.public, "ftkit-bundle") == keys.signer
    file.write_bytes(b"contents")
    with pytest.raises(SignatureError, match="does not match its signature"):
        verify_beside(file, keys.public, "ftkit-bundle")
    sign(file, make_keys(keys.signer, tmp_path, "other").private, keys.signer, "ftkit-bundle")
    with pytest.raises(SignatureError, match="does not match its signature"):
        verify_beside(file, keys.public, "ftkit-bundle")


@pytest.mark.parametrize("newer", ["", "--use-signing-config=true:"])
def test_cosign_publishes_nothing_in_a_public_log(newer: str, file: Path, programs: FakePrograms) -> None:
    signature = file.with_name(file.name + SUFFIXES["cosign"])
    programs.add("cosign", f'case "$*" in *--help*) echo "{newer}" ;; *) : >"{signature}" ;; esac')
    (file.parent / "key.pub").write_text("-----BEGIN PUBLIC KEY-----\n")
    sign(file, file.parent / "key", "cosign", "ftkit-bundle")
    verify_beside(file, file.parent / "key.pub", "ftkit-bundle")
    signed, verified = [call for call in programs.calls() if "--help" not in call]
    assert "--tlog-upload=false" in signed
    assert ("--use-signing-config=false" in signed) == bool(newer)
    assert "--insecure-ignore-tlog=true" in verified


def test_a_public_key_does_not_sign_and_a_private_one_does_not_verify(keys: KeyPair, file: Path) -> None:
    keys.private.rename(keys.private.with_suffix(".moved"))
    with pytest.raises(PrerequisiteError, match="did not sign"):
        sign(file, keys.public, keys.signer, "ftkit-bundle")
    file.with_name(file.name + SUFFIXES[keys.signer]).write_text("x")
    with pytest.raises(PrerequisiteError, match="is a private key"):
        verify_beside(file, keys.private.with_suffix(".moved"), "ftkit-bundle")


def test_an_ssh_signature_is_valid_only_for_its_purpose_and_allowed_signers(file: Path, tmp_path: Path) -> None:
    keys, signers = make_keys("ssh-keygen", tmp_path, "key"), tmp_path / "signers"
    sign(file, keys.private, "ssh-keygen", "ftkit-bundle")
    with pytest.raises(SignatureError):
        verify_beside(file, keys.public, "ftkit-image")
    signers.write_text(f'# ours\n{PRINCIPAL} namespaces="ftkit-bundle" {keys.public.read_text()}')
    verify_beside(file, signers, "ftkit-bundle")
    signers.write_text(f"somebody@else {keys.public.read_text()}")
    with pytest.raises(SignatureError):
        verify_beside(file, signers, "ftkit-bundle")


def test_a_key_that_does_not_match_the_signing_program_is_reported(file: Path, tmp_path: Path) -> None:
    sign(file, make_keys("ssh-keygen", tmp_path, "key").private, "ssh-keygen", "ftkit-bundle")
    key = tmp_path / "minisign.pub"
    key.write_text("untrusted comment: minisign public key 0\nRWQ\n")
    with pytest.raises(SignatureError, match=r"signed with ssh-keygen, and .* is a public key of minisign"):
        verify_beside(file, key, "ftkit-bundle")
    key.write_text("-----BEGIN PUBLIC KEY-----\n")
    assert key_kind(key) == "cosign"


def test_the_signing_program_follows_from_the_key(keys: KeyPair, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_signer(keys.private) == keys.signer
    with pytest.raises(PrerequisiteError, match="is not a key of minisign, ssh-keygen, cosign"):
        find_signer(file)
    file.write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PrerequisiteError, match="cosign is not on PATH"):
        find_signer(file)
