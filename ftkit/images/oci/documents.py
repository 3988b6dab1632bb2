"""Documents of the OCI image format, validated as they arrive from registries and engines."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ftkit.config.image_reference import Digest, shortened
from ftkit.errors import ImageError

ModelT = TypeVar("ModelT", bound=BaseModel)

_LARGEST_SIZE: Final = 1 << 50
_MOST_LAYERS: Final = 1000
"""Docker makes 127 at most."""


def _as_text(value: str) -> str:
    """Refuse what no file can contain: NUL, and lone surrogates."""
    value.encode()
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


Text = Annotated[str, AfterValidator(_as_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda value: () if value is None else value)]
Labels = Annotated[dict[Text, Text], BeforeValidator(lambda value: {} if value is None else value)]
Volumes = Annotated[dict[Text, object], BeforeValidator(lambda value: {} if value is None else value)]
Size = Annotated[int, Field(strict=True, ge=0, le=_LARGEST_SIZE)]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Platform(_Answer):
    """The platform of a manifest in an index."""

    os: str = ""
    architecture: str = ""


class Descriptor(_Answer):
    """A document or blob, by its digest and size in bytes."""

    digest: Digest
    size: Size
    platform: Platform | None = None


class Manifest(_Answer):
    """An image: its configuration, and its layers from the lowest up, compressed as the registry has them."""

    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Field(max_length=_MOST_LAYERS)]


class Index(_Answer):
    """One image for several architectures."""

    manifests: tuple[Descriptor, ...]


class RunConfig(_Answer):
    """How an image is run, with the keys that docker and OCI share."""

    environment: Texts = Field(default=(), alias="Env")
    entrypoint: Texts = Field(default=(), alias="Entrypoint")
    command: Texts = Field(default=(), alias="Cmd")
    working_directory: Text | None = Field(default=None, alias="WorkingDir")
    volumes: Volumes = Field(default_factory=dict, alias="Volumes")
    labels: Labels = Field(default_factory=dict, alias="Labels")


class RootFilesystem(_Answer):
    """Digests of the uncompressed layers, which tie a configuration to its content."""

    diff_ids: Annotated[tuple[Digest, ...], BeforeValidator(lambda value: () if value is None else value)]


class Configuration(_Answer):
    """An image's configuration, whose digest is the image's id."""

    rootfs: RootFilesystem
    config: RunConfig | None = None
    created: str | None = None


class _Kind(_Answer):
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
    kind = read_answer(_Kind, body, f"{whose} has a manifest that")
    if kind.manifests is not None and (kind.config is not None or kind.layers is not None):
        raise ImageError(
            f"{whose} has a manifest that is an index as well",
            meaning="programs would read different images from it; this does not happen by accident",
            fix="don't use this image, and report it to the registry's administrator",
        )
    if kind.manifests is not None:
        return read_answer(Index, body, f"{whose} has an index that")
    if kind.schema_version == 1:
        raise ImageError(f"{whose} is in a format of 2015 that ftkit can't read", fix="push it again")
    return read_answer(Manifest, body, f"{whose} has a manifest that")


def read_answer(model: type[ModelT], body: bytes, what: str) -> ModelT:
    """Read JSON of a given shape; `what` begins the message when it has another.

    Raises:
        ImageError: it is not JSON, or has another schema.
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
        ImageError: it is of another shape than docker's.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ImageError(f"{whose} can't be read: {_first(error)}", fix="see 'docker inspect' of the image") from error


def _first(error: ValidationError) -> str:
    detail = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    said = detail["msg"].removeprefix("Value error, ")
    return f"{shortened(place)}: {said}" if place else said
