"""Which certificates of registries are trusted, and what a failed TLS connection means."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import shortened
from ftkit.errors import ImageError, PrerequisiteError, one_line

if TYPE_CHECKING:
    from requests.adapters import HTTPAdapter

_DOCKER_FOLDERS: Final = ("/etc/docker/certs.d", "~/.config/docker/certs.d")
"""Where docker's engine looks for a registry's certificates, in a folder named `HOST:PORT`; the second is rootless."""


def trusting_adapter(host: str) -> HTTPAdapter:
    """Return an adapter that trusts what docker and enroot trust, and not only the certificates of requests.

    These are the machine's certificates, those of `SSL_CERT_FILE` or `SSL_CERT_DIR` in their place, and docker's for
    this registry.

    Raises:
        PrerequisiteError: a certificate of docker's can't be read.
    """
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - comes with the extra

    context = ssl.create_default_context()
    for folder in _DOCKER_FOLDERS:
        for file in sorted(Path(folder).expanduser().joinpath(host).glob("*.crt")):
            try:
                context.load_verify_locations(file)
            except OSError as error:  # also of ssl
                raise PrerequisiteError(f"can't read docker's certificate {file}: {one_line(error)}") from error

    class Adapter(HTTPAdapter):  # type: ignore[misc] # requests has no types
        def init_poolmanager(self, *words: Any, **options: Any) -> None:
            super().init_poolmanager(*words, ssl_context=context, **options)

        def proxy_manager_for(self, *words: Any, **options: Any) -> Any:
            return super().proxy_manager_for(*words, ssl_context=context, **options)

    return Adapter()


def explain_tls(host: str, reason: str) -> ImageError:
    """Return the error for a failed TLS connection, with the reason of OpenSSL or the docker engine."""
    what = f"the TLS connection to {shortened(host)} failed: {reason}"
    if "WRONG_VERSION_NUMBER" in reason or "server gave HTTP response" in reason:
        return ImageError(
            what,
            meaning="the registry speaks plain HTTP, which is used only for registries on this machine",
            fix=f"correct the port, or forward one of this machine: ssh -L 5000:{host} LOGIN, and use localhost:5000",
        )
    if "mismatch" in reason or "certificate is valid for" in reason:
        return ImageError(
            what,
            meaning="its certificate is for another host name, or another server answers at this address",
            fix="use the name that is in the certificate",
        )
    if "expired" in reason or "not yet valid" in reason:
        return ImageError(what, fix="renew the registry's certificate; check this machine's clock: date")
    return ImageError(
        what,
        meaning="the site's own authority has signed its certificate, and this machine does not trust it",
        fix=f"put that authority's certificate into {_DOCKER_FOLDERS[0]}/{host}/ca.crt, or set SSL_CERT_FILE to it",
    )
