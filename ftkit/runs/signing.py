"""Detached signatures of files, with an installed program: minisign, ssh-keygen, or cosign."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal

from ftkit import process
from ftkit.errors import NotFoundError, PrerequisiteError, UnusableFileError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

Signer = Literal["minisign", "ssh-keygen", "cosign"]
SIGNERS: tuple[Signer, ...] = ("minisign", "ssh-keygen", "cosign")
Purpose = Literal["ftkit-bundle", "ftkit-image"]
"""Namespace of ssh-keygen's signatures: a signature with another namespace is not valid."""
PRINCIPAL: Final = "ftkit"
"""Identity of the signer in ssh-keygen's allowed-signers file."""
SUFFIXES: dict[Signer, str] = {"minisign": ".minisig", "ssh-keygen": ".sig", "cosign": ".sigstore.json"}
_UNLOGGED: Final = "--tlog-upload=false"
"""cosign would publish each signature in a public log for good, through the internet; with a key, no log is needed."""
_MAX_KEY_BYTES: Final = 1 << 20
_KEY_MARKS: Final[dict[str, Signer]] = {
    "minisign": "minisign",
    "SIGSTORE PRIVATE KEY": "cosign",
    "COSIGN PRIVATE KEY": "cosign",
    "PRIVATE KEY": "ssh-keygen",
    "ssh-": "ssh-keygen",
    "ecdsa-": "ssh-keygen",
}
"""Text in a private key's file (for ssh-keygen, also in a public key's, whose private key an agent has)."""


class SignatureError(UnusableFileError):
    """A signature does not match its file, or the key."""


def find_signer(key: Path, name: Signer | None = None) -> Signer:
    """Return the program to sign with: `name` if given, else the one that a private key is for.

    Raises:
        PrerequisiteError: it is not installed, or the key belongs to none of the programs.
    """
    text = _key_text(key)
    kinds = [signer for mark, signer in _KEY_MARKS.items() if mark in text]
    signer = name or next(iter(kinds), None)
    if signer is None:
        raise PrerequisiteError(
            f"{key} is not a key of {', '.join(SIGNERS)}",
            fix="give another private key: --key FILE; or choose the program: --signer NAME",
        )
    if shutil.which(signer) is None:
        raise PrerequisiteError(
            f"{signer} is not on PATH",
            meaning=f"{key} is a key of {signer}",
            fix="install it; on Debian and Ubuntu: apt-get install openssh-client, or minisign",
        )
    return signer


def sign(path: Path, key: Path, signer: Signer, purpose: Purpose) -> Path:
    """Sign a file with a private key and return the signature's file, which is in the same folder.

    On a terminal, the program may ask for the key's passphrase.

    Raises:
        PrerequisiteError: the program is missing, or failed.
    """
    signature = path.with_name(path.name + SUFFIXES[signer])
    signature.unlink(missing_ok=True)
    commands: dict[Signer, list[str]] = {
        "minisign": ["minisign", "-S", "-s", str(key), "-m", str(path), "-x", str(signature)],
        "ssh-keygen": ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", purpose, str(path)],
        "cosign": ["cosign", "sign-blob", "--yes", _UNLOGGED, "--key", str(key), "--bundle", str(signature), str(path)],
    }
    if signer == "cosign" and "--use-signing-config" in process.run(["cosign", "sign-blob", "--help"]).stdout:
        commands[signer].insert(2, "--use-signing-config=false")  # from 2.6 on; its services include the public log
    if sys.stdin is not None and sys.stdin.isatty():
        code, output = process.run_asking(commands[signer]), ""
    else:
        done = process.run(commands[signer])
        code, output = done.returncode, _reason(done.stderr.strip() or done.stdout.strip())
    if code != 0 or not signature.is_file():
        raise PrerequisiteError(
            f"{signer} did not sign {path.name}: {one_line(output) if output else f'exit code {code}'}",
            meaning=f"{key} is not a private key of {signer}, or needs a passphrase that was not typed",
            fix="give another key: --key FILE; choose its program: --signer NAME; or load the key into an agent",
        )
    return signature


def signatures_beside(path: Path) -> dict[Signer, Path]:
    """Return the signatures of a file, by the program that made them."""
    beside = {signer: path.with_name(path.name + suffix) for signer, suffix in SUFFIXES.items()}
    return {signer: signature for signer, signature in beside.items() if signature.is_file()}


def verify_beside(path: Path, key: Path, purpose: Purpose) -> Signer:
    """Verify the signature of a file with a public key and return the program that did.

    Raises:
        NotFoundError: there is no signature.
        SignatureError: it does not match, or was made by another program than the key's.
        PrerequisiteError: the key can't be read, or the program is missing.
    """
    found, signer = signatures_beside(path), key_kind(key)
    if not found:
        raise NotFoundError(
            f"{path} has no signature next to it",
            meaning="it was not signed, or the signature was not copied with it",
            fix=f"get the file {path.name}{SUFFIXES[signer]}, or omit --require-signature",
        )
    if signer not in found:
        raise SignatureError(
            f"{path.name} is signed with {', '.join(found)}, and {key} is a public key of {signer}",
            fix=f"give the public key of its signer, or get the file {path.name}{SUFFIXES[signer]}",
        )
    verify(path, found[signer], key, purpose)
    return signer


def verify(path: Path, signature: Path, key: Path, purpose: Purpose) -> None:
    """Verify one signature of a file.

    Args:
        path: the file.
        signature: the signature, made by the program that `key` is for.
        key: the public key; for ssh-keygen, also a file of allowed signers (`ssh-keygen(1)`) with `PRINCIPAL`, or `*`.
        purpose: the signature's namespace.

    Raises:
        SignatureError: it does not match.
        PrerequisiteError: the key can't be read, or the program is missing.
    """
    signer = key_kind(key)
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        allowed = _allowed_signers(key, Path(folder)) if signer == "ssh-keygen" else key
        commands: dict[Signer, list[str]] = {
            "minisign": ["minisign", "-V", "-p", str(key), "-m", str(path), "-x", str(signature)],
            "cosign": [
                "cosign", "verify-blob", "--insecure-ignore-tlog=true", "--key", str(key), "--bundle", str(signature),
                str(path),
            ],
            "ssh-keygen": [
                "ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", PRINCIPAL, "-n", purpose, "-s", str(signature),
            ],
        }  # fmt: skip

        def feed(stdin: IO[bytes]) -> None:
            if signer == "ssh-keygen":  # which reads the signed file
                with path.open("rb") as file:
                    shutil.copyfileobj(file, stdin)

        done = process.run_with_input(commands[signer], feed)
    if done.returncode != 0:
        raise SignatureError(
            f"{path.name} does not match its signature: {one_line(_reason(done.stderr))}",
            meaning=f"the file or its signature was changed, or it was not signed with the private key of {key}",
            fix="get both files again from their author",
        )


def _reason(output: str) -> str:
    """Return the error in a program's output; cosign prints warnings before it, and the same error once more."""
    return next((line for line in output.splitlines() if line.startswith("Error: ")), output)


def key_kind(key: Path) -> Signer:
    """Return the program that a public key is for, by its first line.

    Raises:
        PrerequisiteError: the file can't be read, or is a private key.
    """
    text = _key_text(key)
    if "PRIVATE KEY" in text or "secret key" in text.partition("\n")[0]:
        raise PrerequisiteError(
            f"{key} is a private key", meaning="a signature is checked with the public one", fix="give the public key"
        )
    if text.startswith("-----BEGIN PUBLIC KEY"):
        return "cosign"
    return "minisign" if text.startswith("untrusted comment:") else "ssh-keygen"


def _key_text(key: Path) -> str:
    try:
        with key.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise PrerequisiteError(f"can't read the key {key}: {one_line(error)}") from error


def _allowed_signers(key: Path, folder: Path) -> Path:
    """Return an allowed-signers file: the given one, or one made from a plain public key (`id_ed25519.pub`)."""
    lines = [line for line in _key_text(key).splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(_is_public_key(line.split()) for line in lines):
        return key
    signers = folder / "signers"
    signers.write_text("".join(f"{PRINCIPAL} {line}\n" for line in lines), encoding="utf-8")
    return signers


def _is_public_key(words: Sequence[str]) -> bool:
    """Return whether words are a line of a public key file: its type, and the key in base64, which repeats the type."""
    return len(words) > 1 and words[0].startswith(("ssh-", "ecdsa-", "sk-")) and words[1].startswith("AAAA")
