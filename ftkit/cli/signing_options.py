"""Options of the commands that sign, and of those that require a signature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.runs.signing import Signer

_SIGNERS = ["minisign", "ssh-keygen", "cosign"]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def signing_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--sign`, `--key` and `--signer`; `what` completes the help of `--sign`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--signer", type=click.Choice(_SIGNERS), help="Program that signs; default: follows from the key."
            ),
            click.option(
                "--key",
                metavar="FILE",
                type=_FILE,
                help="Private key for --sign; for ssh-keygen, also a public key whose private key the agent holds.",
            ),
            click.option("--sign", "signs", is_flag=True, help=f"Sign with minisign, ssh-keygen or cosign: {what}"),
        ):
            function = option(function)
        return function

    return decorate


def require_signature_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--require-signature`, which refuses an unsigned `what`."""
    return click.option(
        "--require-signature",
        "public_key",
        metavar="KEY",
        type=_FILE,
        help=f"Refuse {what} that is not signed by this public key (minisign, SSH, cosign; or allowed signers).",
    )


def required_signer(*, signs: bool, key: Path | None, signer: Signer | None) -> tuple[Signer, Path] | None:
    """Return the program and the key to sign with; None if nothing is to be signed.

    Raises:
        UsageError: the options contradict each other.
        PrerequisiteError: the program is not installed, or none accepts the key.
    """
    from ftkit.runs.signing import find_signer

    if signs and key is None:
        raise click.UsageError("--sign requires --key FILE, the private key", click.get_current_context())
    if not signs and (key or signer):
        raise click.UsageError("--key and --signer require --sign", click.get_current_context())
    return (find_signer(key, signer), key) if key else None
