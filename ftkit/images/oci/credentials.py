"""Credentials and trusted certificates of a registry, and what a refusal means."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.image_reference import DOCKER_HUB, RegistryImage, shortened
from ftkit.errors import ImageError, PrerequisiteError, one_line
from ftkit.images.docker_engine import docker_sdk

if TYPE_CHECKING:
    from requests.adapters import HTTPAdapter


_NGC_HOST = "nvcr.io"
_NGC_USER = "$oauthtoken"
_CERTIFICATES: Final = ("/etc/docker/certs.d", "~/.config/docker/certs.d")
"""Where docker's engine looks for a registry's certificates, in a folder named `HOST:PORT`; the second is rootless."""


@dataclass(frozen=True)
class Credentials:
    username: str
    password: str = field(repr=False)


def from_user(host: str, username: str | None, password: str) -> Credentials:
    """Return credentials from the command line; NGC has one user name for everybody."""
    name = username or (_NGC_USER if host == _NGC_HOST else "")
    if not name or not password:
        what = "a password on standard input" if name else "a user name (--username)"
        raise ImageError(f"{host} needs {what}", fix='printf %s "$TOKEN" | ftkit push … --username U --password-stdin')
    return Credentials(name, password)


def find_credentials(host: str) -> Credentials | None:
    """Return the credentials for a registry from docker's configuration; None if it has none."""
    try:
        docker = docker_sdk()
    except PrerequisiteError:
        return None
    try:
        found = docker.auth.load_config().resolve_authconfig("docker.io" if host == DOCKER_HUB else host) or {}
    except docker.errors.DockerException as error:
        raise PrerequisiteError(
            f"docker's credential helper for {host} failed: {one_line(error)}",
            meaning="docker's config.json lists a helper that is not installed or not logged in",
            fix=f"see 'credsStore' and 'credHelpers' in ~/.docker/config.json, or run 'docker login {host}'",
        ) from error
    values = {key.lower(): value for key, value in found.items()}  # a helper's keys are capitalized
    return Credentials(values["username"], values.get("password") or "") if values.get("username") else None


def access_denied(reference: RegistryImage, credentials: Credentials | None, message: str = "") -> ImageError:
    """Return the error for a registry that denies access."""
    host = "docker.io" if reference.host == DOCKER_HUB else reference.host
    if credentials is None:
        what = f"{host} requires a login for {reference.path}, and there are no credentials for it"
        meaning = "the repository is private, or does not exist: registries don't distinguish these"
    else:
        what = f"{host} refused the credentials of user '{credentials.username}' for {reference.path}"
        meaning = "the password or token is wrong or has expired, or this user lacks permission"
    fix = f"docker login {host}, or give --username and --password-stdin"
    if host == _NGC_HOST:
        fix = f"docker login {host} --username '{_NGC_USER}', with an NGC API key as the password"
    return ImageError(what + (f": {message}" if message else ""), meaning=meaning, fix=fix)


def trusting_adapter(host: str) -> HTTPAdapter:
    """Return an adapter that trusts the system's certificates, and docker's for this registry, as docker does."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - comes with the extra

    context = ssl.create_default_context()
    for folder in _CERTIFICATES:
        for file in sorted(Path(folder).expanduser().joinpath(host).glob("*.crt")):
            try:
                context.load_verify_locations(file)
            except OSError as error:  # also of ssl
                raise PrerequisiteError(f"can't read docker's certificate {file}: {one_line(error)}") from error

    class Adapter(HTTPAdapter):  # type: ignore[misc] # requests has no types
        def init_poolmanager(self, *words: object, **options: object) -> None:
            super().init_poolmanager(*words, ssl_context=context, **options)

        def proxy_manager_for(self, *words: object, **options: object) -> Any:
            return super().proxy_manager_for(*words, ssl_context=context, **options)

    return Adapter()


def explain_tls(host: str, reason: str) -> ImageError:
    """Return the error for a failed TLS connection, with the reason of OpenSSL or the docker engine."""
    meaning = "the site's own authority has signed its certificate, and this machine does not trust it"
    fix = f"put that authority's certificate into {_CERTIFICATES[0]}/{host}/ca.crt, or set SSL_CERT_FILE to it"
    if "WRONG_VERSION_NUMBER" in reason or "server gave HTTP response" in reason:
        meaning = "the registry speaks plain HTTP, which is used only for registries on this machine"
        fix = f"correct the port, or forward one of this machine: ssh -L 5000:{host} LOGIN, and use localhost:5000"
    elif "mismatch" in reason or "certificate is valid for" in reason:
        meaning = "its certificate is for another host name, or another server answers at this address"
        fix = "use the name that is in the certificate"
    elif "expired" in reason or "not yet valid" in reason:
        meaning = ""
        fix = "renew the registry's certificate; check this machine's clock: date"
    return ImageError(f"the TLS connection to {shortened(host)} failed: {reason}", meaning=meaning, fix=fix)
