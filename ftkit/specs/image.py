"""An image definition: what `olmo3:25.02` is."""

from __future__ import annotations

from pydantic import Field

from ftkit.specs.model import Family
from ftkit.specs.strict import Name, Spec, VariableName


class BaseImageSpec(Spec):
    """The image that another is built on."""

    reference: str
    """Registry, path and tag, such as `nvcr.io/nvidia/pytorch:25.02-py3`."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Digest of the base; none: unpinned."""


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
    families: tuple[Family, ...]
    """Model families that it serves."""
    default_recipe: Name
    """Recipe that `ftkit run --image NAME:TAG` runs when none is named."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Variables set in the image."""

    @property
    def reference(self) -> str:
        """The image's name and tag as users write them."""
        return f"{self.name}:{self.tag}"
