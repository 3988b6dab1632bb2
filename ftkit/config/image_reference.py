"""Image references: a name, a file, an address in a registry, or a name in the docker engine; and digests.

What a user types is parsed here, once; everything after that asks the type, never the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic_core import core_schema

from ftkit.config.paths import absolute_path, is_path
from ftkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

DIGEST_PATTERN: Final = r"sha256:[0-9a-f]{64}"
_DIGEST: Final = re.compile(DIGEST_PATTERN)
_LONGEST_SHOWN: Final = 80


class Digest(str):
    """`sha256:` and 64 small hexadecimal digits; text that is anything else never becomes one.

    What a registry, an engine or a file calls a digest ends up in paths, addresses and labels: so each is made one of
    these where it arrives.

    Raises:
        ValueError: it is no digest, or one of another algorithm.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text; `re.fullmatch` takes no line break at the end."""
        if not isinstance(text, str) or not _DIGEST.fullmatch(text):
            raise ValueError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {shortened(text)}")
        return super().__new__(cls, text)

    @property
    def hex(self) -> str:
        """The 64 digits alone."""
        return self.removeprefix("sha256:")

    @property
    def file_name(self) -> str:
        """The digest as the name of a file."""
        return f"sha256-{self.hex}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let specs and manifests declare fields of this type; in JSON schemas it is text with a pattern."""
        del source, handler
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(strict=True), serialization=core_schema.to_string_ser_schema(),
            metadata={"pydantic_js_updates": {"pattern": f"^{DIGEST_PATTERN}$"}},
        )  # fmt: skip


def shortened(value: object) -> str:
    """Return a stranger's value as a message can show it: escaped, and no longer than a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


DOCKER_HUB = "registry-1.docker.io"

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*(?::(?P<port>[0-9]{{1,5}}))?"
_LARGEST_PORT: Final = 65535
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_NAMED = re.compile(rf"(?P<path>{_COMPONENT}(?:/{_COMPONENT})*)(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{DIGEST_PATTERN}))?")


_FILE_SUFFIXES: Final = (".sqsh", ".squashfs", ".sif")
_DOCKERD: Final = "dockerd://"
_DOCKER_PREFIX: Final = "ftkit/"
"""Images built here are `ftkit/NAME:TAG` in the docker engine, so that they hide no image of another origin."""

ImageFormat = Literal["sqsh", "sif"]
"""squashfs, which enroot and pyxis read, or Apptainer's SIF."""


@dataclass(frozen=True)
class NamedImage:
    """An image that has a definition: `NAME:TAG`."""

    reference: str

    @property
    def docker_name(self) -> str:
        """Its name in the docker engine: `REPOSITORY:TAG`."""
        return _DOCKER_PREFIX + self.reference

    @property
    def docker_repository(self) -> str:
        """Its name in the docker engine without the tag."""
        return self.docker_name.removesuffix(f":{self.tag}")

    @property
    def tag(self) -> str:
        """The second half of `NAME:TAG`."""
        return self.reference.partition(":")[2]

    def file_name(self, image_format: ImageFormat) -> str:
        """Return the name of its imported file, or of the link to that."""
        return f"{self.reference.replace(':', '+')}.{image_format}"

    def in_registry(self, registry: str) -> RegistryImage:
        """Return where it is pushed to: below `registry`, which is `HOST` or `HOST/PATH`.

        Raises:
            ConfigError: no image can be called so there.
        """
        return parse_reference(f"{registry.removeprefix('docker://').rstrip('/')}/{self.reference}")

    def __str__(self) -> str:
        return self.reference


@dataclass(frozen=True)
class ImageFile:
    """A squashfs or SIF file, by its absolute path."""

    path: Path

    @property
    def is_sif(self) -> bool:
        """Whether it is in Apptainer's format, which enroot and pyxis can't read."""
        return self.path.suffix == ".sif"

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
        """Host and path as the docker engine takes them."""
        host = "docker.io" if self.host == DOCKER_HUB else self.host
        return f"{host}/{self.path}"

    @property
    def wanted(self) -> str:
        """What to ask the registry for: the digest if it is known, else the tag."""
        return self.digest or self.tag

    @property
    def pinned(self) -> str:
        """The whole as the docker engine takes it; by digest if there is one."""
        return f"{self.repository}@{self.digest}" if self.digest else self.tagged

    @property
    def tagged(self) -> str:
        """The address by its tag, whatever image that is at the moment."""
        return f"{self.repository}:{self.tag}"

    @property
    def docker_uri(self) -> str:
        """The address as Apptainer takes it."""
        return f"docker://{self.pinned}"

    @property
    def enroot_uri(self) -> str:
        """The address in enroot's words, with `#` after the host, which every release understands.

        By digest if there is one, which enroot takes from 4.0 on; older ones refuse it.
        """
        which = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"docker://{self.host}#{self.path}{which}"

    @property
    def named(self) -> NamedImage:
        """The name that it is imported under: the last part of its path, and its tag."""
        return NamedImage(f"{self.path.rpartition('/')[2]}:{self.tag}")

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine: such ones speak no TLS."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return self.tagged + (f"@{self.digest}" if self.digest else "")


@dataclass(frozen=True)
class DockerdImage:
    """An image of the docker engine under any name: `dockerd://NAME:TAG`, as enroot writes it."""

    docker_name: str

    @property
    def named(self) -> NamedImage:
        """The name that it is imported under."""
        return parse_reference(self.docker_name).named

    def __str__(self) -> str:
        return _DOCKERD + self.docker_name


AnyImage = NamedImage | ImageFile | RegistryImage
"""Whatever `--image` takes. The text of one parses to the same one again."""

ImportableImage = NamedImage | RegistryImage | DockerdImage
"""Whatever can be imported into a file."""


def parse_importable(text: str, folder: Path, key: str = "NAME:TAG|URI") -> ImportableImage:
    """Parse what is to be imported: as `parse_image` does, or `dockerd://NAME:TAG`.

    Raises:
        ConfigError: it is none of these, a name that no image can have, or a file, which needs no import.
    """
    if text.startswith(_DOCKERD):
        parse_reference(text.removeprefix(_DOCKERD), key=key)
        return DockerdImage(text.removeprefix(_DOCKERD))
    image = parse_image(text, folder, key=key)
    if isinstance(image, ImageFile):
        raise ConfigError(
            [Problem("", key, f"{text} is a file already: there is nothing to import.",
                     f"Run in it as it is: ftkit run --image {text}")]
        )  # fmt: skip
    return parse_name(image.reference) if isinstance(image, NamedImage) else image


def image_file(container_image: str | None) -> Path | None:
    """Return the file that a container runs in; None for an address, a name in the docker engine, or no container."""
    return Path(container_image) if container_image and container_image.startswith("/") else None


def parse_image(text: str, folder: Path, where: str = "", key: str = "--image") -> AnyImage:
    """Parse what names an image.

    Args:
        text: `NAME:TAG`; a path, or whatever ends like an image file; an address with or without `docker://`.
        folder: the folder that a relative path belongs to.
        where: the place of the text, for messages.
        key: its key or option, for messages.

    Raises:
        ConfigError: it is none of these.
    """
    if is_path(text) or ("://" not in text and text.endswith(_FILE_SUFFIXES)):
        return ImageFile(absolute_path(text, folder, where, key))
    if "/" not in text and "#" not in text:
        return NamedImage(text)
    if "://" in text and not text.startswith("docker://"):
        raise ConfigError(
            [Problem(where, key, f"{text!r} is none of NAME:TAG, a .sqsh or .sif file, and docker://HOST/PATH:TAG.")]
        )
    return parse_reference(text, where, key)


def parse_reference(text: str, where: str = "", key: str = "") -> RegistryImage:
    """Parse `[docker://][HOST/ or HOST#]PATH[:TAG][@sha256:...]`; without a host it is Docker Hub's.

    Raises:
        ConfigError: it is no legal reference.
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
        raise ConfigError(
            [Problem(where, key, f"{text!r} is no reference to an image: {host!r} is no host.", _GRAMMAR)]
        )
    if not named:
        raise ConfigError([Problem(where, key, f"{text!r} is no reference to an image: {_reason(rest)}.", _GRAMMAR)])
    path = named["path"]
    if host in ("docker.io", "index.docker.io"):
        host = DOCKER_HUB
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    digest = Digest(named["digest"]) if named["digest"] else None
    return RegistryImage(host, path, named["tag"] or "latest", digest)


_GRAMMAR = "It is written HOST/PATH:TAG, PATH in small letters, digits and single '.', '_' or '-' between them."


def _reason(rest: str) -> str:
    name, _, tag = rest.partition("@")[0].rpartition(":")
    name = name or tag
    if not rest:
        return "there is nothing after the host"
    if any(character.isspace() or not character.isprintable() for character in rest):
        return "blanks and control characters are not allowed"
    if name != name.lower():
        return f"capital letters are not allowed in {name!r}"
    if not re.fullmatch(rf"{_COMPONENT}(?:/{_COMPONENT})*", name):
        return f"{name!r} is no legal name"
    return f"{rest!r} has no legal tag or digest"


def is_loopback(host: str) -> bool:
    """Tell whether a host, with or without a port, is this machine: by its address, not by how its name begins."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def parse_name(text: str) -> NamedImage:
    """Parse `NAME:TAG`, which can name an image in the docker engine and in a registry.

    Raises:
        ConfigError: it can't, and why.
    """
    name, _, tag = text.partition(":")
    if "/" in name or not tag or not _NAMED.fullmatch(text):
        reason = _reason(text) if tag else f"{text!r} has no tag"
        raise ConfigError([Problem("", "", f"{text!r} can't name an image: {reason}.", _GRAMMAR)])
    return NamedImage(text)
