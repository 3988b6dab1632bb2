"""Open fsspec's drivers of object stores; missing packages and networks are reported immediately, in one way."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final

from ftkit.errors import PrerequisiteError, UnreachableError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

ADVICE: Final[Mapping[str, str]] = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'",
    "gs": "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run 'hf auth login', or set HF_TOKEN",
}
"""What to do about missing credentials, by scheme."""
_LOGGERS = ("gcsfs", "google.auth", "s3fs")
"""Libraries that log a warning or a traceback for each attempt, and then raise the error."""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_HOSTS: Final = {
    "gs": ("storage.googleapis.com", (*_PROXIES, "STORAGE_EMULATOR_HOST")),
    "s3": ("s3.amazonaws.com", (*_PROXIES, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")),
}
"""Hosts of stores; and variables that reach a store by another one, so that its name need not be resolved here."""


def open_driver(scheme: str, **options: Any) -> Any:
    """Return fsspec's file system of a scheme; nothing is read or written yet.

    Raises:
        PrerequisiteError: the driver's package is missing.
        UnreachableError: the store can't be reached from this machine.
    """
    try:
        import fsspec  # noqa: PLC0415 - heavy, and only needed for addresses

        found = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise PrerequisiteError(
            f"{scheme}:// needs a package that is missing here: {one_line(error)}",
            fix="pip install 'ftkit[storage]'",
        ) from error
    for name in _LOGGERS:
        if not (logger := logging.getLogger(name)).handlers:
            logger.addHandler(logging.NullHandler())
    if scheme == "gs":  # gcsfs retries for minutes without a network
        _check_name(scheme)
    return found(**options)


def is_unreachable(error: BaseException, scheme: str) -> bool:
    """Return whether an error of a driver is the network's, as that of missing credentials is without a network."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror | ConnectionError | TimeoutError):
            return True
        cause = cause.__cause__ or cause.__context__
    try:
        _check_name(scheme)
    except UnreachableError:
        return True
    return False


def _check_name(scheme: str) -> None:
    host, other_ways = _HOSTS.get(scheme, ("", ()))
    if not host or any(map(os.environ.get, other_ways)):
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise UnreachableError(
            f"this machine can't find {host}: {error.strerror or one_line(error)}",
            meaning="it has no network, or reaches the internet only through a proxy",
            fix="set HTTPS_PROXY if there is a proxy, or use a machine with network",
        ) from error
