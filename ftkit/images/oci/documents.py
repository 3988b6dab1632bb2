"""Documents of the OCI image format, validated as they arrive from registries and engines."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ftkit.config.image_reference import Digest, shortened
from ftkit.errors import ImageError

ModelT = TypeVar("ModelT", bound=BaseModel)

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
_MAX_LAYERS: Final = 1000  # Docker's limit is 127


def _as_text(value: str) -> str:
    """Refuse text that enroot's files can't store: with NUL, or with a lone surrogate, which raises ValueError."""
    value.encode()
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


_Size = Annotated[int, Field(strict=True, ge=0, le=1 << 50)]
_Text = Annotated[str, AfterValidator(_as_text)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda value: () if value is None else value)]
_Labels = Annotated[dict[_Text, _Text], BeforeValidator(lambda value: {} if value is None else value)]
_Volumes = Annotated[dict[_Text, object], BeforeValidator(lambda value: {} if value is None else value)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Platform(_Document):
    os: str = ""
    architecture: str = ""
    variant: str | None = None


class Descriptor(BaseModel):
    """A reference to a document or blob, with its digest, and its size in bytes; other fields are kept unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    digest: Digest
    size: _Size
    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default="", alias="artifactType")
    platform: Platform | None = None


class Manifest(_Document):
    """An image: its configuration, and its layers from the lowest up, compressed as in the registry. Or an artifact."""

    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Field(max_length=_MAX_LAYERS)]
    artifact_type: str = Field(default="", alias="artifactType")


class Index(_Document):
    """One image for several architectures, or the artifacts that refer to an image."""

    manifests: tuple[Descriptor, ...]


class RunConfig(_Document):
    """How an image is run, with the keys that docker and OCI share."""

    environment: _Texts = Field(default=(), alias="Env")
    entrypoint: _Texts = Field(default=(), alias="Entrypoint")
    command: _Texts = Field(default=(), alias="Cmd")
    working_directory: _Text | None = Field(default=None, alias="WorkingDir")
    volumes: _Volumes = Field(default_factory=dict, alias="Volumes")
    labels: _Labels = Field(default_factory=dict, alias="Labels")


class Configuration(_Document):
    """An image's configuration, whose digest is the image's id; `diff_ids` are of the uncompressed layers."""

    diff_ids: tuple[Digest, ...] = Field(validation_alias=AliasPath("rootfs", "diff_ids"))
    os: str | None = None
    architecture: str | None = None
    config: RunConfig | None = None
    created: str | None = None


class TokenResponse(_Document):
    """The response of a token service; older services set `token`, newer ones `access_token`."""

    token: str | None = None
    access_token: str | None = None


class DocumentKind(_Document):
    """The fields that determine the kind of a document."""

    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    manifests: object = None
    config: object = None
    layers: object = None


def untrusted(what: str) -> ImageError:
    """Return the error for content that differs from the digests or documents that lead to it."""
    return ImageError(
        what,
        meaning="a download or a disk is corrupted, a broken program pushed it, or someone changed the image",
        fix="try again; if it persists, don't use the image, and report it to the registry's administrator",
        name="untrusted-image",
    )


def read_document(body: bytes, whose: str) -> Index | Manifest:
    kind = parse_json(DocumentKind, body, f"{whose} has a manifest that")
    if kind.manifests is None:
        return parse_json(Manifest, body, f"{whose} has a manifest that")
    if kind.config is not None or kind.layers is not None:
        raise untrusted(f"{whose} has a manifest that is also an index: different programs would read different images")
    return parse_json(Index, body, f"{whose} has an index that")


def parse_json(model: type[ModelT], body: bytes, what: str) -> ModelT:
    """Parse JSON and validate it; `what` begins the error's message."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_document(error, what) from error


def invalid_document(error: ValidationError, what: str) -> ImageError:
    """Return the error for a document with another schema; `what` begins its message."""
    detail = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    return ImageError(
        f"{what} can't be read: {f'{shortened(place)}: ' if place else ''}{message}",
        meaning="this is not a registry, a proxy responds in its place, or the pushed content is damaged",
        fix="check the registry's address; push the image again if it is yours",
    )
