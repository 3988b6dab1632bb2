"""Image references: a name, a file, an address in a registry, or a name in the docker engine; and digests.

User input is parsed here, once; all other code uses the types, never the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic_core import CoreSchema, core_schema

from ftkit.errors import ConfigError, Problem
from ftkit.paths import absolute_path, is_path

DIGEST_PATTERN: Final = r"sha256:[0-9a-f]{64}"
_DIGEST: Final = re.compile(DIGEST_PATTERN)
_LONGEST_SHOWN: Final = 80


class Digest(str):
    """`sha256:` and 64 lowercase hexadecimal digits; any other text raises ValueError.

    Digests from registries, engines and files are used in paths, addresses and labels, so they are validated on
    arrival.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text; `re.fullmatch` does not allow a line break at the end."""
        if not isinstance(text, str) or not _DIGEST.fullmatch(text):
            raise ValueError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {shortened(text)}")
        return super().__new__(cls, text)

    @property
    def hex(self) -> str:
        """The 64 digits without the algorithm."""
        return self.removeprefix("sha256:")

    @property
    def file_name(self) -> str:
        return f"sha256-{self.hex}"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> CoreSchema:
        """Allow fields of this type in specs and manifests; in a JSON schema it is a string with a pattern."""
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(strict=True), serialization=core_schema.to_string_ser_schema(),
            metadata={"pydantic_js_updates": {"pattern": f"^{DIGEST_PATTERN}$"}},
        )  # fmt: skip


def shortened(value: object) -> str:
    """Escape and shorten an untrusted value for a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


DOCKER_HUB = "registry-1.docker.io"

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*(?::(?P<port>[0-9]{{1,5}}))?"
_LARGEST_PORT: Final = 65535
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_NAMED = re.compile(rf"(?P<path>{_COMPONENT}(?:/{_COMPONENT})*)(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{DIGEST_PATTERN}))?")
_DOCKERD: Final = "dockerd://"

ImageFormat = Literal["sqsh", "sif"]  # squashfs, which enroot and pyxis read, or Apptainer's SIF


@dataclass(frozen=True)
class NamedImage:
    """An image with a definition: `NAME:TAG`."""

    reference: str

    @property
    def docker_name(self) -> str:
        """Its name in the docker engine, prefixed with `ftkit/` so that it can't shadow other images."""
        return f"ftkit/{self.reference}"

    @property
    def tag(self) -> str:
        return self.reference.partition(":")[2]

    def file_name(self, image_format: ImageFormat) -> str:
        """Return the name of its imported file, or of the link to it."""
        return f"{self.reference.replace(':', '+')}.{image_format}"

    def in_registry(self, registry: str) -> RegistryImage:
        """Return its address below `registry`, which is `HOST` or `HOST/PATH`. Raises like `parse_reference`."""
        return parse_reference(f"{registry.removeprefix('docker://').rstrip('/')}/{self.reference}")

    def __str__(self) -> str:
        return self.reference


@dataclass(frozen=True)
class ImageFile:
    """A squashfs or SIF file, by its absolute path."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class RegistryImage:
    """An image in a registry: `HOST/PATH:TAG@DIGEST`."""

    host: str
    path: str
    tag: str
    digest: Digest | None = None

    @property
    def repository(self) -> str:
        """Host and path in the docker engine's notation."""
        return f"{'docker.io' if self.host == DOCKER_HUB else self.host}/{self.path}"

    @property
    def wanted(self) -> str:
        """Reference to request from the registry: the digest if known, else the tag."""
        return self.digest or self.tag

    @property
    def pinned(self) -> str:
        """The full reference in the docker engine's notation, by digest if there is one."""
        return f"{self.repository}@{self.digest}" if self.digest else self.tagged

    @property
    def tagged(self) -> str:
        """The address by tag, which may move to another image."""
        return f"{self.repository}:{self.tag}"

    @property
    def enroot_uri(self) -> str:
        """The address in enroot's notation, with `#` after the host, which every release supports.

        It is by digest if there is one, which enroot before 4.0 refuses.
        """
        which = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"docker://{self.host}#{self.path}{which}"

    @property
    def named(self) -> NamedImage:
        """Name of the imported image: the last part of its path, and its tag."""
        return NamedImage(f"{self.path.rpartition('/')[2]}:{self.tag}")

    def __str__(self) -> str:
        return self.tagged + (f"@{self.digest}" if self.digest else "")


@dataclass(frozen=True)
class DockerdImage:
    """An image in the docker engine with any name: `dockerd://NAME:TAG` in enroot's notation."""

    docker_name: str

    @property
    def named(self) -> NamedImage:
        """Name of the imported image."""
        return parse_reference(self.docker_name).named

    def __str__(self) -> str:
        return _DOCKERD + self.docker_name


AnyImage = NamedImage | ImageFile | RegistryImage
"""Values of `--image`. Parsing the text of a value returns an equal value."""
ImportableImage = NamedImage | RegistryImage | DockerdImage
"""Images that can be imported into a file."""


def parse_importable(text: str, folder: Path) -> ImportableImage:
    """Parse the image of an import: like `parse_image`, but `dockerd://NAME:TAG` instead of a file."""
    key = "NAME:TAG|URI"
    if text.startswith(_DOCKERD):
        parse_reference(text.removeprefix(_DOCKERD), key=key)
        return DockerdImage(text.removeprefix(_DOCKERD))
    image = parse_image(text, folder, key=key)
    if isinstance(image, ImageFile):
        what = f"{text} is the path of an image file, which needs no import."
        raise ConfigError([Problem("", key, what, f"To run in it: ftkit run --image {text}")])
    return parse_name(image.reference) if isinstance(image, NamedImage) else image


def image_file(container_image: str | None) -> Path | None:
    """Return the container's image file; None for an address, a name in the docker engine, or no container."""
    return Path(container_image) if container_image and container_image.startswith("/") else None


def parse_image(text: str, folder: Path, where: str = "", key: str = "--image") -> AnyImage:
    """Parse `NAME:TAG`; a path, or a file name with an image's suffix; or an address with or without `docker://`.

    Relative paths are relative to `folder`; messages have `where` and `key`. Raises ConfigError: it is none of these.
    """
    if is_path(text) or ("://" not in text and text.endswith((".sqsh", ".squashfs", ".sif"))):
        return ImageFile(absolute_path(text, folder, where, key))
    if "/" not in text and "#" not in text:
        return NamedImage(text)
    if "://" in text and not text.startswith("docker://"):
        what = f"{text!r} is not NAME:TAG, a .sqsh or .sif file, or docker://HOST/PATH:TAG."
        raise ConfigError([Problem(where, key, what)])
    return parse_reference(text, where, key)


def parse_reference(text: str, where: str = "", key: str = "") -> RegistryImage:
    """Parse `[docker://][HOST/ or HOST#]PATH[:TAG][@sha256:...]`; the default host is Docker Hub.

    Raises ConfigError: it is not a valid reference.
    """
    bare = text.removeprefix("docker://")
    if "#" in bare:
        host, _, rest = bare.partition("#")
    else:
        first, slash, after = bare.partition("/")
        is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
        host, rest = (first, after) if is_host else (DOCKER_HUB, bare)
    found, named = re.fullmatch(_HOST, host), _NAMED.fullmatch(rest)
    if not found or int(found["port"] or 0) > _LARGEST_PORT:
        what = f"{text!r} is not a reference to an image: {host!r} is not a host."
        raise ConfigError([Problem(where, key, what, _GRAMMAR)])
    if not named:
        what = f"{text!r} is not a reference to an image: {_reason(rest)}."
        raise ConfigError([Problem(where, key, what, _GRAMMAR)])
    path = named["path"]
    if host in ("docker.io", "index.docker.io"):
        host = DOCKER_HUB
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    return RegistryImage(host, path, named["tag"] or "latest", Digest(named["digest"]) if named["digest"] else None)


def parse_name(text: str) -> NamedImage:
    """Parse `NAME:TAG`, which must be valid in the docker engine and in a registry.

    Raises ConfigError with the reason if it is not valid.
    """
    name, _, tag = text.partition(":")
    if "/" in name or not tag or not _NAMED.fullmatch(text):
        reason = _reason(text) if tag else f"{text!r} has no tag"
        raise ConfigError([Problem("", "", f"{text!r} can't be an image's name: {reason}.", _GRAMMAR)])
    return NamedImage(text)


_GRAMMAR = "The form is HOST/PATH:TAG; PATH has lowercase letters and digits, with single '.', '_' or '-' between them."


def _reason(rest: str) -> str:
    name, _, tag = rest.partition("@")[0].rpartition(":")
    name = name or tag
    if name != name.lower():
        return f"uppercase letters are not allowed in {name!r}"
    if not re.fullmatch(rf"{_COMPONENT}(?:/{_COMPONENT})*", name):
        return f"{name!r} is not a valid name"
    return f"{rest!r} has no valid tag or digest"


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine, judged by address, not by a prefix of its name.

    Registries on this machine are used without TLS.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
