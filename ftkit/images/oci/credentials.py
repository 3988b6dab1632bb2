"""Credentials for a registry: from docker's configuration and its helpers, or from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftkit.config.image_reference import DOCKER_HUB
from ftkit.errors import ImageError, PrerequisiteError, one_line

if TYPE_CHECKING:
    from ftkit.config.image_reference import RegistryImage

_NGC_HOST = "nvcr.io"
_NGC_USER = "$oauthtoken"
_DOCKER_HUB_ENTRY = "docker.io"


@dataclass(frozen=True)
class Credentials:
    """A user name and a password; `repr` hides the password."""

    username: str
    password: str = field(repr=False)

    def for_docker(self) -> dict[str, str]:
        """Return them for the docker SDK."""
        return {"username": self.username, "password": self.password}


def from_user(host: str, username: str | None, password: str) -> Credentials:
    """Return credentials from the command line; NGC has one user name for everybody.

    Raises:
        ImageError: the user name is missing, or the password is empty.
    """
    name = username or (_NGC_USER if host == _NGC_HOST else "")
    if not name or not password:
        what = "a user name (--username)" if not name else "a password on standard input"
        raise ImageError(f"{host} needs {what}", fix='printf %s "$TOKEN" | ftkit push … --username U --password-stdin')
    return Credentials(name, password)


def find(host: str) -> Credentials | None:
    """Return the credentials for a registry from docker's configuration; None if it has none.

    Raises:
        PrerequisiteError: its credential helper fails.
    """
    try:
        from docker import auth  # noqa: PLC0415
        from docker.errors import DockerException  # noqa: PLC0415
    except ImportError:
        return None
    entry = _DOCKER_HUB_ENTRY if host == DOCKER_HUB else host
    try:
        found = auth.load_config().resolve_authconfig(entry)
    except DockerException as error:
        raise PrerequisiteError(
            f"docker's credential helper for {host} failed: {one_line(error)}",
            meaning="docker's config.json lists a helper that is not installed or not logged in",
            fix=f"see 'credsStore' and 'credHelpers' in ~/.docker/config.json, or run 'docker login {host}'",
        ) from error
    if not found or (not found.get("Username") and not found.get("username")):
        return None
    return Credentials(
        found.get("Username") or found.get("username"), found.get("Password") or found.get("password") or ""
    )


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
