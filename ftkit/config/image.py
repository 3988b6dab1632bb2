"""Image definitions, and the recorded digests of their bases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from ftkit.config.image_reference import Digest, parse_reference
from ftkit.errors import ConfigError, Problem
from ftkit.files import read_small
from ftkit.models.architecture import ModelType
from ftkit.spec import Name, OneLine, Spec, VariableName


class BaseImageSpec(Spec):
    """The base of an image."""

    reference: str
    """Registry, path and tag, such as `nvcr.io/nvidia/pytorch:25.02-py3`."""
    digest: Digest | None = None
    """Digest of the base. Unpinned if null."""


class ImageSpec(Spec):
    """An image to train in, or to serve trained models with."""

    name: Name
    """First half of `NAME:TAG`."""
    tag: Name
    """Second half of `NAME:TAG`."""
    description: str
    """One line for `ftkit images`."""
    purpose: Literal["training", "serving"] = "training"
    """The command that runs it: `ftkit run` (`training`) or `ftkit serve` (`serving`)."""
    base: BaseImageSpec
    """The image to build on."""
    python: str = Field(default="3.12", pattern=r"^3\.\d+$")
    """Python version of the base, for which packages are locked."""
    provided: dict[str, str] = Field(default_factory=dict)
    """Packages of the base that must not be replaced, each with a version prefix; empty: any version."""
    packages: tuple[str, ...] = ()
    """Packages to add, as pip requirements; `ftkit images lock NAME:TAG` pins them and their dependencies."""
    extra_packages: tuple[str, ...] = ()
    """Packages to add to those of the extended definition. The lock is then next to this definition."""
    imports: tuple[str, ...] = ()
    """Modules that the self-check after a build imports."""
    families: tuple[ModelType, ...] = ()
    """Model families of a training image. If one of the four measured families is not listed, it is refused; any other
    unlisted family gets a note."""
    default_recipe: Name | None = None
    """Default recipe of `ftkit run --image NAME:TAG`; required for a training image."""
    environment: dict[VariableName, OneLine] = Field(default_factory=dict)
    """Variables set in the image."""

    @model_validator(mode="after")
    def _recipes_belong_to_training(self) -> Self:
        if self.purpose == "training" and not (self.families and self.default_recipe):
            raise ValueError("a training image needs families and a default_recipe; else set purpose to 'serving'")
        if self.purpose == "serving" and (self.families or self.default_recipe):
            raise ValueError("a serving image has no families and no default_recipe: it serves what vLLM can")
        return self

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tag}"

    @property
    def all_packages(self) -> tuple[str, ...]:
        return self.packages + self.extra_packages

    @property
    def listed_packages(self) -> frozenset[str]:
        """Normalized names of the packages that it adds, and of those that it lists as provided by its base."""
        added = (re.match(r"[A-Za-z0-9._-]*", line) for line in self.all_packages)
        names = [*self.provided, *(found[0] for found in added if found)]
        return frozenset(re.sub(r"[-_.]+", "-", name).lower() for name in names)


BASE_LOCK_NAME: Final = "bases.lock"


def read_base_lock(path: Path) -> dict[str, Digest]:
    """Return the digest of each base by its `HOST/PATH:TAG`; nothing if there is no file.

    Raises ConfigError: it can't be read, or a line is not a reference with a digest.
    """
    fix = "Correct it, or remove it: the next build writes a new one."
    try:
        text = read_small(path).decode()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"can't be read: {error}.", fix)]) from error
    found = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        base = parse_reference(line.strip(), f"{path}:{number}")
        if base.digest is None:
            raise ConfigError([Problem(f"{path}:{number}", "", f"{line!r} has no digest.", fix)])
        found[base.tagged] = base.digest
    return found


def base_lock_text(digests: Mapping[str, Digest]) -> str:
    return (
        "# Digest of each base when 'ftkit build' first used it; later builds use the same digest.\n"
        "# 'ftkit build NAME:TAG --repin' resolves the tag again. Keep this file with the definitions.\n"
    ) + "".join(f"{base}@{digest}\n" for base, digest in sorted(digests.items()))
