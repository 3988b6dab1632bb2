"""Options of the commands that sign, and of those that require a signature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def signing_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--sign` and `--key`; `what` completes the help of `--sign`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        key = click.option(
            "--key",
            metavar="FILE",
            type=_FILE,
            help="Private SSH key for --sign; or a public key whose private key the agent holds.",
        )
        sign = click.option("--sign", "signs", is_flag=True, help=f"Sign with an SSH key: {what}")
        return sign(key(function))

    return decorate


def require_signature_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--require-signature`, which refuses an unsigned `what`."""
    return click.option(
        "--require-signature",
        "public_key",
        metavar="KEY",
        type=_FILE,
        help=f"Refuse {what} that is not signed by this public SSH key, or by one of a file of allowed signers.",
    )


def signing_key(*, signs: bool, key: Path | None) -> Path | None:
    """Return the key to sign with; None if nothing is to be signed.

    Raises:
        UsageError: the options contradict each other.
        PrerequisiteError: it is no SSH key, or ssh-keygen is missing.
    """
    from ftkit.runs.signing import require_signing_key

    if signs and key is None:
        raise click.UsageError("--sign requires --key FILE, the private key", click.get_current_context())
    if not signs and key:
        raise click.UsageError("--key requires --sign", click.get_current_context())
    if key:
        require_signing_key(key)
    return key
