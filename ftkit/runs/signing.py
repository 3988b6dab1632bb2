"""Detached SSH signatures of files (`ssh-keygen -Y`), made with an SSH key and verified with its public key."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, Literal

from ftkit import process
from ftkit.errors import NotFoundError, PrerequisiteError, UnusableFileError, one_line

Purpose = Literal["ftkit-bundle", "ftkit-certificate", "ftkit-image"]
"""Namespace of a signature: a signature with another namespace is not valid."""
PRINCIPAL: Final = "ftkit"  # identity of the signer in an allowed-signers file
_MAX_KEY_BYTES: Final = 1 << 20


class SignatureError(UnusableFileError):
    """A signature does not match its file or the key."""


def require_signing_key(key: Path) -> None:
    """Refuse a file that is not an SSH key, before any work is done."""
    _require_ssh_keygen()
    text = _key_text(key)
    if "PRIVATE KEY" not in text and not _is_public_key(text.split()):
        fix = "give another key: --key FILE, such as ~/.ssh/id_ed25519"
        raise PrerequisiteError(f"{key} is not an SSH key", fix=fix)


def signature_file(path: Path) -> Path:
    """Return the path that ssh-keygen gives to a file's signature."""
    return path.with_name(f"{path.name}.sig")


def sign(path: Path, key: Path, purpose: Purpose) -> Path:
    """Sign a file and return the signature's file, which is in the same folder.

    `key` is the private key, or a public key whose private key the agent holds. On a terminal, ssh-keygen may ask for
    the key's passphrase.
    """
    signature = signature_file(path)
    signature.unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", purpose, str(path)]
    if sys.stdin is not None and sys.stdin.isatty():
        code, output = process.run_attached(command, stdout=sys.stderr.fileno()), ""
    else:
        done = process.run(command)
        code, output = done.returncode, done.stderr.strip() or done.stdout.strip()
    if code != 0 or not signature.is_file():
        raise PrerequisiteError(
            f"ssh-keygen did not sign {path.name}: {one_line(output) if output else f'exit code {code}'}",
            meaning=f"{key} is not a private SSH key, or needs a passphrase that was not typed",
            fix="give another key: --key FILE; or load the key into an agent",
        )
    return signature


def verify_beside(path: Path, key: Path, purpose: Purpose) -> None:
    """Verify the signature next to a file. Arguments and errors as in `verify`."""
    signature = signature_file(path)
    if not signature.is_file():
        raise NotFoundError(
            f"{path} has no signature next to it",
            meaning="it was not signed, or the signature was not copied with it",
            fix=f"get the file {signature.name}, or omit --require-signature",
        )
    verify(path, signature, key, purpose)


def verify(path: Path, signature: Path, key: Path, purpose: Purpose) -> None:
    """Verify a signature of a file with a public key, or a file of allowed signers (`ssh-keygen(1)`) with `PRINCIPAL`.

    Raises `SignatureError` if it does not match; `PrerequisiteError` if the key can't be read, or ssh-keygen is
    missing.
    """
    _require_ssh_keygen()
    text = _key_text(key)
    if "PRIVATE KEY" in text:
        meaning = "a signature is checked with the public one"
        raise PrerequisiteError(f"{key} is a private key", meaning=meaning, fix="give the public key")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        signers = key
        if lines and all(_is_public_key(line.split()) for line in lines):  # such as id_ed25519.pub
            signers = Path(folder, "signers")
            signers.write_text("".join(f"{PRINCIPAL} {line}\n" for line in lines), encoding="utf-8")

        def feed(stdin: IO[bytes]) -> None:
            with path.open("rb") as file:
                shutil.copyfileobj(file, stdin)

        asked = ["-f", str(signers), "-I", PRINCIPAL, "-n", purpose, "-s", str(signature)]
        done = process.run_with_input(["ssh-keygen", "-Y", "verify", *asked], feed)
    if done.returncode != 0:
        raise SignatureError(
            f"{path.name} does not match its signature: {one_line(done.stderr)}",
            meaning=f"the file or its signature was changed, or it was not signed with the private key of {key}",
            fix="get both files again from their author",
        )


def _require_ssh_keygen() -> None:
    if shutil.which("ssh-keygen") is None:
        raise PrerequisiteError(
            "ssh-keygen is not on PATH",
            meaning="signatures are made and verified with OpenSSH",
            fix="install it; on Debian and Ubuntu: apt-get install openssh-client",
        )


def _key_text(key: Path) -> str:
    try:
        with key.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise PrerequisiteError(f"can't read the key {key}: {one_line(error)}") from error


def _is_public_key(words: Sequence[str]) -> bool:
    # A line of a public key file has its type, and the key in base64, which repeats the type.
    return len(words) > 1 and words[0].startswith(("ssh-", "ecdsa-", "sk-")) and words[1].startswith("AAAA")
