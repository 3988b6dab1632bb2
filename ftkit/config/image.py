"""An image definition: what `olmo3:25.02` is."""

from __future__ import annotations

import re

from pydantic import Field

from ftkit.config.digest import Digest
from ftkit.config.model import ModelType
from ftkit.config.strict import Name, OneLine, Spec, VariableName


class BaseImageSpec(Spec):
    """The image that another is built on."""

    reference: str
    """Registry, path and tag, such as `nvcr.io/nvidia/pytorch:25.02-py3`."""
    digest: Digest | None = None
    """Digest of the base. Unpinned if null."""


class ImageSpec(Spec):
    """A training image."""

    name: Name
    """First half of `NAME:TAG`."""
    tag: Name
    """Second half of `NAME:TAG`."""
    description: str
    """One line for `ftkit images`."""
    base: BaseImageSpec
    """The image that it is built on."""
    python: str = Field(default="3.12", pattern=r"^3\.\d+$")
    """Python of the base, which packages are locked for."""
    provided: dict[str, str] = Field(default_factory=dict)
    """Packages of the base that nothing may replace, with the beginning of their version; empty: any."""
    packages: tuple[str, ...] = ()
    """Packages to add, as pip writes requirements; `ftkit lock NAME:TAG` fixes them and what they need."""
    imports: tuple[str, ...] = ()
    """Modules that the self-check after a build imports."""
    families: tuple[ModelType, ...]
    """Model families that it serves. One of the four that are planned exactly is refused when it is not listed; any
    other gets a note."""
    default_recipe: Name
    """Recipe that `ftkit run --image NAME:TAG` runs when none is named."""
    environment: dict[VariableName, OneLine] = Field(default_factory=dict)
    """Variables set in the image."""

    @property
    def reference(self) -> str:
        """The image's name and tag as users write them."""
        return f"{self.name}:{self.tag}"

    @property
    def listed_packages(self) -> frozenset[str]:
        """The packages that it adds or has from its base by its own word, as the package index compares names."""
        added = (re.match(r"[A-Za-z0-9._-]*", line) for line in self.packages)
        names = [*self.provided, *(found[0] for found in added if found)]
        return frozenset(re.sub(r"[-_.]+", "-", name).lower() for name in names)
