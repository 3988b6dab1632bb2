"""Detached signatures of files, by a program that is installed: minisign, ssh-keygen, or cosign."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal

from ftkit import process
from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

Signer = Literal["minisign", "ssh-keygen", "cosign"]
SIGNERS: tuple[Signer, ...] = ("minisign", "ssh-keygen", "cosign")
Purpose = Literal["ftkit-bundle", "ftkit-image"]
"""Namespace of ssh-keygen's signatures: one for another purpose is not valid."""
PRINCIPAL: Final = "ftkit"
"""Who signs, by ssh-keygen's file of allowed signers."""
SUFFIXES: dict[Signer, str] = {"minisign": ".minisig", "ssh-keygen": ".sig", "cosign": ".sigstore.json"}
_MAX_KEY_BYTES: Final = 1 << 20


class SignatureError(FtkitError):
    """A signature does not fit the file that it is beside, or the key."""

    exit_code = PrerequisiteError.exit_code


def find_signer(name: Signer | None = None) -> Signer:
    """Return the named program, or the first of `SIGNERS`, that is installed.

    Raises:
        PrerequisiteError: none is.
    """
    wanted = (name,) if name else SIGNERS
    for each in wanted:
        if shutil.which(each):
            return each
    raise PrerequisiteError(
        f"nothing here can sign: {', '.join(wanted)}",
        meaning="signatures are made by one of these programs",
        fix="install one; on Debian and Ubuntu: apt-get install openssh-client, or minisign",
    )


def sign(path: Path, key: Path, signer: Signer, purpose: Purpose) -> Path:
    """Sign a file with a private key and return the signature's file, which is beside it.

    On a terminal, the program may ask for the key's passphrase.

    Raises:
        PrerequisiteError: the program is missing, or refused.
    """
    signature = path.with_name(path.name + SUFFIXES[signer])
    signature.unlink(missing_ok=True)
    commands: dict[Signer, list[str]] = {
        "minisign": ["minisign", "-S", "-s", str(key), "-m", str(path), "-x", str(signature)],
        "ssh-keygen": ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", purpose, str(path)],
        "cosign": ["cosign", "sign-blob", "--yes", "--key", str(key), "--bundle", str(signature), str(path)],
    }
    if sys.stdin is not None and sys.stdin.isatty():
        code, output = process.run_asking(commands[signer]), ""
    else:
        done = process.run(commands[signer])
        code, output = done.returncode, (done.stderr.strip() or done.stdout.strip())
    if code != 0 or not signature.is_file():
        raise PrerequisiteError(
            f"{signer} did not sign {path.name}: {one_line(output) if output else f'exit code {code}'}",
            meaning=f"{key} is no private key of {signer}, or needs a passphrase that nobody typed",
            fix="give another key: --key FILE; choose its program: --signer NAME; or load the key into an agent",
        )
    return signature


def signatures_beside(path: Path) -> dict[Signer, Path]:
    """Return the signatures beside a file, by the program that made them."""
    beside = {signer: path.with_name(path.name + suffix) for signer, suffix in SUFFIXES.items()}
    return {signer: signature for signer, signature in beside.items() if signature.is_file()}


def verify_beside(path: Path, key: Path, purpose: Purpose) -> Signer:
    """Check the signature beside a file with a public key and return the program that did.

    Raises:
        NotFoundError: there is no signature.
        SignatureError: it does not fit, or is of another program than the key.
        PrerequisiteError: the key can't be read, or the program is missing.
    """
    found, signer = signatures_beside(path), key_kind(key)
    if not found:
        raise NotFoundError(
            f"{path} has no signature beside it",
            meaning="it was not signed, or the signature was not copied along",
            fix=f"get the file {path.name}{SUFFIXES[signer]}, or leave --require-signature out",
        )
    if signer not in found:
        raise SignatureError(
            f"{path.name} is signed with {', '.join(found)}, and {key} is a public key of {signer}",
            fix=f"give the public key of who signed it, or get the file {path.name}{SUFFIXES[signer]}",
        )
    verify(path, found[signer], key, purpose)
    return signer


def verify(path: Path, signature: Path, key: Path, purpose: Purpose) -> None:
    """Check one signature of a file.

    Args:
        path: the file.
        signature: by the program whose public key `key` is.
        key: the public key; for ssh-keygen, also a file of allowed signers (`ssh-keygen(1)`) with `PRINCIPAL`, or `*`.
        purpose: of the signature.

    Raises:
        SignatureError: it does not fit.
        PrerequisiteError: the key can't be read, or the program is missing.
    """
    signer = key_kind(key)
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        allowed = _allowed_signers(key, Path(folder)) if signer == "ssh-keygen" else key
        commands: dict[Signer, list[str]] = {
            "minisign": ["minisign", "-V", "-p", str(key), "-m", str(path), "-x", str(signature)],
            "cosign": ["cosign", "verify-blob", "--key", str(key), "--bundle", str(signature), str(path)],
            "ssh-keygen": [
                "ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", PRINCIPAL, "-n", purpose, "-s", str(signature),
            ],
        }  # fmt: skip

        def feed(stdin: IO[bytes]) -> None:
            if signer == "ssh-keygen":  # which reads what was signed
                with path.open("rb") as file:
                    shutil.copyfileobj(file, stdin)

        done = process.run_with_input(commands[signer], feed)
    if done.returncode != 0:
        raise SignatureError(
            f"{path.name} is not as its signer left it: {one_line(done.stderr)}",
            meaning=f"the file or its signature was changed, or somebody else signed it than {key} says",
            fix="get both files again from who made them",
        )


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
        raise PrerequisiteError(f"can't read the public key {key}: {one_line(error)}") from error


def _allowed_signers(key: Path, folder: Path) -> Path:
    """Return a file of allowed signers: the one given, or one made of a plain public key (`id_ed25519.pub`)."""
    lines = [line for line in _key_text(key).splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(_is_public_key(line.split()) for line in lines):
        return key
    made = folder / "signers"
    made.write_text("".join(f"{PRINCIPAL} {line}\n" for line in lines), encoding="utf-8")
    return made


def _is_public_key(words: Sequence[str]) -> bool:
    """Whether words are a line of a public key's file: its type, and the key in base64, which repeats the type."""
    return len(words) > 1 and words[0].startswith(("ssh-", "ecdsa-", "sk-")) and words[1].startswith("AAAA")
