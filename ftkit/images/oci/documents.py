"""Documents of the OCI image format, validated as they arrive from registries and engines."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ftkit.config.image_reference import Digest, shortened
from ftkit.errors import ImageError

ModelT = TypeVar("ModelT", bound=BaseModel)

_MAX_SIZE: Final = 1 << 50
_MAX_LAYERS: Final = 1000
"""Docker's limit is 127."""


def _as_text(value: str) -> str:
    """Refuse text that enroot's files can't store: with NUL, or with a lone surrogate.

    Raises:
        ValueError: it has one.
    """
    value.encode()
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


Text = Annotated[str, AfterValidator(_as_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda value: () if value is None else value)]
Labels = Annotated[dict[Text, Text], BeforeValidator(lambda value: {} if value is None else value)]
Volumes = Annotated[dict[Text, object], BeforeValidator(lambda value: {} if value is None else value)]
Size = Annotated[int, Field(strict=True, ge=0, le=_MAX_SIZE)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Platform(_Document):
    """The platform of a manifest in an index."""

    os: str = ""
    architecture: str = ""


class Descriptor(_Document):
    """A reference to a document or blob, with its digest, and its size in bytes."""

    digest: Digest
    size: Size
    platform: Platform | None = None


class Manifest(_Document):
    """An image: its configuration, and its layers from the lowest up, compressed as in the registry."""

    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Field(max_length=_MAX_LAYERS)]


class Index(_Document):
    """One image for several architectures."""

    manifests: tuple[Descriptor, ...]


class RunConfig(_Document):
    """How an image is run, with the keys that docker and OCI share."""

    environment: Texts = Field(default=(), alias="Env")
    entrypoint: Texts = Field(default=(), alias="Entrypoint")
    command: Texts = Field(default=(), alias="Cmd")
    working_directory: Text | None = Field(default=None, alias="WorkingDir")
    volumes: Volumes = Field(default_factory=dict, alias="Volumes")
    labels: Labels = Field(default_factory=dict, alias="Labels")


class RootFilesystem(_Document):
    """Digests of the uncompressed layers, through which a configuration determines an image's content."""

    diff_ids: Annotated[tuple[Digest, ...], BeforeValidator(lambda value: () if value is None else value)]


class Configuration(_Document):
    """An image's configuration, whose digest is the image's id."""

    rootfs: RootFilesystem
    config: RunConfig | None = None
    created: str | None = None


class _Kind(_Document):
    """The fields that determine the kind of a document."""

    schema_version: int | None = Field(default=None, alias="schemaVersion")
    manifests: object = None
    config: object = None
    layers: object = None


def read_document(body: bytes, whose: str) -> Index | Manifest:
    """Parse an index or a manifest.

    Raises:
        ImageError: it is neither, or could be read as both.
    """
    kind = parse_json(_Kind, body, f"{whose} has a manifest that")
    if kind.manifests is not None and (kind.config is not None or kind.layers is not None):
        raise ImageError(
            f"{whose} has a manifest that is also an index",
            meaning="different programs would read different images from it; this does not happen by accident",
            fix="don't use this image, and report it to the registry's administrator",
        )
    if kind.manifests is not None:
        return parse_json(Index, body, f"{whose} has an index that")
    if kind.schema_version == 1:
        raise ImageError(
            f"{whose} is in schema 1 of docker's manifests (until 2015), which ftkit can't read", fix="push it again"
        )
    return parse_json(Manifest, body, f"{whose} has a manifest that")


def parse_json(model: type[ModelT], body: bytes, what: str) -> ModelT:
    """Parse JSON and validate it; `what` begins the error's message.

    Raises:
        ImageError: it is not JSON, or does not match the schema.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise ImageError(
            f"{what} can't be read: {_first(error)}",
            meaning="this is not a registry, a proxy responds in its place, or the pushed content is damaged",
            fix="check the registry's address; push the image again if it is yours",
        ) from error


def read_run_config(values: object, whose: str) -> RunConfig:
    """Validate the configuration of an image in a docker engine.

    Raises:
        ImageError: it does not match docker's schema.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ImageError(f"{whose} can't be read: {_first(error)}", fix="see 'docker inspect' of the image") from error


def _first(error: ValidationError) -> str:
    detail = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    return f"{shortened(place)}: {message}" if place else message
