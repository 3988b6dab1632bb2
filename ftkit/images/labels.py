"""The labels of an image, which record what it was built from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import ftkit
from ftkit.checkout import own_checkout, read_commit
from ftkit.config.image_reference import Digest

if TYPE_CHECKING:
    from ftkit.checkout import Commit
    from ftkit.config.image import ImageSpec

BUILD_KEY: Final = "ftkit.build-key"
LOCK: Final = "ftkit.lock-sha256"
REFERENCE: Final = "ftkit.reference"
UNPINNED: Final = "ftkit.base-unpinned"
_ZIP_EPOCH: Final = 315532800
"""1980-01-01 UTC, the earliest time that a zip file can store, in seconds since 1970."""


@dataclass(frozen=True)
class BaseInfo:
    """The base of an image.

    Attributes:
        reference: its name in a registry.
        digest: digest of its manifest; None if the engine knows none.
        id: its id in the docker engine.
        is_pinned: whether the build selected it by its digest.
    """

    reference: str
    digest: Digest | None
    id: Digest
    is_pinned: bool


def own_commit() -> Commit | None:
    """Return the commit of the checkout that ftkit runs from; None for an installed wheel."""
    checkout = own_checkout()
    return read_commit(checkout) if checkout else None


def make_labels(
    spec: ImageSpec, base: BaseInfo, *, lock_sha256: str, build_key: str, commit: Commit | None
) -> dict[str, str]:
    """Return the labels of an image that is about to be built."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    epoch = int(given) if given.isdigit() else commit.time if commit else _ZIP_EPOCH
    labels = {
        "org.opencontainers.image.title": spec.reference,
        "org.opencontainers.image.description": spec.description,
        "org.opencontainers.image.version": ftkit.__version__,
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "org.opencontainers.image.base.name": base.reference,
        REFERENCE: spec.reference,
        BUILD_KEY: build_key,
        "ftkit.version": ftkit.__version__,
        "ftkit.base-id": base.id,
        LOCK: lock_sha256,
        "ftkit.families": ",".join(spec.families),
        "ftkit.default-recipe": spec.default_recipe or "",
        "ftkit.source-date-epoch": str(epoch),
    }
    if base.digest:
        labels["org.opencontainers.image.base.digest"] = base.digest
    if not base.is_pinned:
        labels[UNPINNED] = "true"
    if commit:
        labels["org.opencontainers.image.revision"] = commit.id
        labels["ftkit.has-uncommitted-changes"] = str(commit.has_changes).lower()
    return labels
