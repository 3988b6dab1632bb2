"""Pictures as a model's inputs: read, decoded, resized by the model's own processor, and stored as records."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ftkit.data.imports import import_transformers
from ftkit.data.labels import Rendering, any_of
from ftkit.data.rows import Row, errors_at
from ftkit.errors import DataError, missing_package_error, one_line, plural
from ftkit.files import read_small
from ftkit.paths import is_address

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError:  # rows without pictures need none
    _HAS_PILLOW = False
else:
    _HAS_PILLOW = True

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ftkit.models.architecture import ModelSpec

Arrays = dict[str, NDArray[Any]]
"""Inputs of a model by their names, such as `pixel_values` (uint8) and `image_grid_thw`."""
MAX_PIXELS: Final = 100_000_000
"""Maximum pixels of a picture: 300 MB in memory, and more than cameras have."""
MAX_BYTES: Final = 256 << 20  # of a picture's file
_MAX_SCANS: Final = 100  # of a progressive JPEG: each decodes the whole picture, and encoders write about ten
_FORMATS: Final = frozenset(("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"))
"""Accepted picture formats. Pillow also opens programs (EPS) and files that are not pictures."""
_THUMBNAIL: Final = (96, 96)  # maximum width and height
_ALIGNMENT: Final = 8  # bytes: of all arrays in a record, and of records in a file


@dataclass(frozen=True)
class PictureInputs:
    """How the pictures of documents become a model's inputs."""

    joined_at: dict[str, int]
    """Axis along which each input is concatenated over documents; other axes are padded with 0."""
    scale: tuple[float, ...]  # in `pixels = uint8 * scale + offset`, for each channel along `channel_axis`
    offset: tuple[float, ...]
    channel_axis: int
    token_ids: tuple[int, ...]  # tokens that the model replaces with picture features
    sample: str  # base64 of the record of one small black picture, compressed by zlib
    processor: str  # its class
    digest: str  # SHA-256 of its configuration, and of the versions of the libraries that resize

    def verify(self, pixels: NDArray[np.uint8], expected: NDArray[np.float32]) -> None:
        """Check that stored pixels equal the processor's, except for padding that it added after normalizing.

        Raises DataError: they differ by more than 1e-5, or, for bfloat16 pixels, by more than rounding.
        """
        shape = (-1, *[1] * (-1 - self.channel_axis))
        scale, offset = (np.array(each, np.float32).reshape(shape) for each in (self.scale, self.offset))
        is_rounded = not (expected.astype(np.float32).view(np.uint32) & 0xFFFF).any()
        largest = np.inf
        if pixels.shape == expected.shape:
            difference = np.abs(pixels * scale + offset - expected)
            largest = difference[(pixels != 0) | (expected != 0)].max(initial=0)
        if not largest <= (_ROUNDING if is_rounded else _TOLERANCE):
            raise DataError(
                f"pictures of {self.processor} can't be stored in 8 bits: pixels differ by {largest:.1g}",
                meaning="it changes pixels in other ways than by one scale and offset for each channel",
                fix="choose another model, or train on text: data.pictures=false",
            )


def to_record(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Serialize arrays as one self-describing record: the name, type, shape and values of each array."""
    values = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in arrays.items()}
    header = json.dumps([[name, array.dtype.str, array.shape] for name, array in values.items()]).encode()
    parts = [len(header).to_bytes(_ALIGNMENT, "little"), header, *(array.tobytes() for array in values.values())]
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def from_record(record: bytes | memoryview) -> Arrays:
    """Return the arrays of a record as read-only views."""
    view = memoryview(record)
    end = _ALIGNMENT + int.from_bytes(view[:_ALIGNMENT], "little")
    arrays: Arrays = {}
    for name, dtype, shape in json.loads(bytes(view[_ALIGNMENT:end])):
        begin = end + -end % _ALIGNMENT
        end = begin + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(view[begin:end], dtype).reshape(shape)
        arrays[name].flags.writeable = False
    return arrays


def open_picture(source: object, folder: str) -> Image.Image:
    """Decode a picture as RGB: upright, transparency on white, only the first frame of an animation.

    `source` is bytes, a `data:` URI, or a path relative to `folder`.

    Raises DataError: it can't be read, is not a picture, or exceeds `MAX_BYTES` or `MAX_PIXELS`; PrerequisiteError:
    Pillow is missing.
    """
    if not _HAS_PILLOW:
        raise missing_package_error(["PIL"])
    content, name = _read(source, folder)
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes and damaged metadata
            with Image.open(io.BytesIO(content), formats=sorted(_FORMATS & Image.OPEN.keys())) as image:
                if image.width * image.height > MAX_PIXELS:
                    size = f"{image.width:,} x {image.height:,} pixels"
                    raise _bad(name, f"{size}, more than {MAX_PIXELS:,}")  # noqa: TRY301 - not of a decoder
                if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _MAX_SCANS:
                    raise _bad(name, f"a JPEG of more than {_MAX_SCANS} scans")  # noqa: TRY301
                ImageOps.exif_transpose(image, in_place=True)
                image.load()
                return image if image.mode == "RGB" and not image.has_transparency_data else _to_rgb(image, name)
    except UnidentifiedImageError:
        known = "an SVG, a drawing without pixels" if b"<svg" in content[:1024] else "in no known format"
        raise _bad(name, known if content else "empty") from None
    except DataError:
        raise
    except Exception as error:  # decoders raise anything
        raise _bad(name, f"it can't be decoded: {one_line(error)}") from error


def _read(source: object, folder: str) -> tuple[bytes, str]:
    """Return the bytes of a picture, and its name in errors."""
    if isinstance(source, bytes):
        return source, f"of {plural(len(source), 'byte')}"
    if not isinstance(source, str) or not source:
        raise _bad(str(source)[:80], "neither a path nor bytes")
    source = source.removeprefix("file://")
    if source.startswith("data:"):
        try:
            content = base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise _bad(f"'{source[:40]}…'", f"not valid base64: {error}") from error
        return content, f"'{source[:40]}…'"
    if is_address(source) or is_address(folder):
        raise _bad(f"'{source}'", "not on this machine", "download pictures, or write them as bytes into Parquet files")
    path = Path(folder, source)
    try:
        return read_small(path, MAX_BYTES), f"'{path}'"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        fix = "correct the path, which is relative to the folder of the data file, or remove this example"
        raise _bad(f"'{path}'", one_line(getattr(error, "strerror", None) or error), fix) from error


def _bad(name: str, reason: str, fix: str = "correct or remove this example") -> DataError:
    return DataError(f"the picture {name} can't be used: {reason}", fix=fix)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow clips to 8 or loads as 32
        values = np.asarray(image)
        if values.min(initial=0) < 0 or values.max(initial=0) > np.iinfo(np.uint16).max:
            raise _bad(name, "its pixels are 32-bit numbers of unknown range")
        image = Image.fromarray((values >> 8 if values.max(initial=0) > 255 else values).astype(np.uint8))  # noqa: PLR2004
    if image.mode == "F":
        raise _bad(name, "its pixels are floating-point numbers of unknown range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def thumbnail(picture: Image.Image) -> str:
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail(_THUMBNAIL)
    small.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def load_processor(source: str, revision: str | None = None) -> ProcessorMixin:
    """Load the processor of a model by its folder or hub id, without code of its own."""
    return import_transformers().AutoProcessor.from_pretrained(source, revision=revision, trust_remote_code=False)


@dataclass
class PictureProcessor:
    """A model's own processor, which resizes pictures and writes the tokens of each."""

    processor: Any
    token: str  # written for a picture by chat templates
    inputs: PictureInputs
    core: re.Pattern[str]  # finds the special tokens in the expansion of a picture
    _is_proven: bool = False

    @classmethod
    def of(cls, model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> PictureProcessor:
        """Load the processor of a model, and probe its arrays with small pictures.

        Raises DataError: the model has none, it needs another package, or it works in an unsupported way;
        PrerequisiteError: Pillow is missing.
        """
        if not _HAS_PILLOW:
            raise missing_package_error(["PIL"])
        source, transformers = model.weights, import_transformers()
        try:
            processor = load_processor(source, model.revision)
            config = transformers.AutoConfig.from_pretrained(source, revision=model.revision, trust_remote_code=False)
        except Exception as error:  # it imports classes by the names in files
            raise DataError(
                f"can't load the processor of '{source}': {one_line(error)}",
                meaning="its files are missing or broken, or its class needs another package, such as torchvision",
                fix="copy preprocessor_config.json and processor_config.json too, or install the package; or train on "
                "text: data.pictures=false",
            ) from error
        token = getattr(processor, "image_token", None)
        ids = [getattr(each, name, None) for each in (config, processor) for name in _TOKEN_IDS]
        token_ids = tuple(each for each in ids if isinstance(each, int))[:1]
        if not token or not token_ids or not hasattr(processor, "replace_image_token"):
            raise DataError(
                f"the processor of '{source}' is {type(processor).__name__}, which writes no tokens of pictures",
                meaning=f"the model sees none, or transformers {transformers.__version__} is too old for this",
                fix="choose a multimodal model or a newer transformers, or train on text: data.pictures=false",
            )
        inputs, expansion = _probe(processor, token, token_ids)
        own, other = (
            each(expansion, add_special_tokens=False)["input_ids"] for each in (tokenizer, processor.tokenizer)
        )
        if own != other:
            raise DataError(
                f"the tokenizer of '{source}' has other tokens of pictures than its processor",
                fix="set model.tokenizer.source=model, or correct the files of the processor",
            )
        core = any_of(frozenset(str(each) for each in tokenizer.added_tokens_decoder.values()))
        if not core.search(expansion):
            raise _unknown(processor, "it writes no special tokens for a picture")
        return cls(processor, token, inputs, core)

    def process(self, pictures: Sequence[Image.Image]) -> tuple[list[str], Arrays]:
        """Return the text that replaces each picture's token, and the arrays of all pictures.

        Raises DataError: the processor refuses the pictures; on the first call, also if its own pixels differ.
        """
        try:
            expansions, arrays = _call(self.processor, self.token, [pictures], is_raw=True)
            expected = None if self._is_proven else _call(self.processor, self.token, [pictures])[1]["pixel_values"]
        except Exception as error:  # a processor may raise anything, such as for extreme shapes
            sizes = " and ".join(f"{each.width:,} x {each.height:,}" for each in pictures)
            raise _bad(f"of {sizes} pixels", one_line(error)) from error
        if any(name.endswith("mask") and not array.all() for name, array in arrays.items()):
            raise DataError(
                "the processor pads the pictures of a row to the size of the largest",
                meaning="it does so after normalizing, which does not fit into 8 bits",
                fix="give rows with pictures of one shape, or with one picture",
            )
        if expected is not None:
            self.inputs.verify(arrays["pixel_values"], expected)
            self._is_proven = True
        return expansions, arrays

    def expand_row(self, row: Row, renderings: list[Rendering] | DataError) -> list[Rendering] | DataError:
        """Return a row's renderings with its pictures expanded, or the row's error."""
        if isinstance(renderings, DataError) or not renderings:
            return renderings
        sources = max((each.pictures for each in renderings), key=len)  # the other renderings have the first of these
        try:
            with errors_at(row):
                opened = [open_picture(source, row.folder) for _, source in sources]
                return [self._expand(each, opened[: len(each.pictures)]) for each in renderings]
        except DataError as error:
            return error

    def _expand(self, rendering: Rendering, pictures: Sequence[Image.Image]) -> Rendering:
        """Replace each picture's token in a rendering with the text that the processor writes for the picture.

        The text from its first to its last special token is not trained; tokenizers split there anyway.
        """
        if not pictures:
            return rendering
        expansions, arrays = self.process(pictures)
        places = [place for place, _ in rendering.pictures]
        shifts = list(accumulate((len(each) - len(self.token) for each in expansions), initial=0))

        def moved(place: int) -> int:
            return place + shifts[bisect_left(places, place)]

        bounds = [0, *chain.from_iterable((place, place + len(self.token)) for place in places), len(rendering.text)]
        kept = [rendering.text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
        found = [list(self.core.finditer(each)) for each in expansions]
        return Rendering(
            "".join(chain.from_iterable(zip(kept, (*expansions, ""), strict=True))),
            tuple((moved(begin), moved(end)) for begin, end in rendering.spans),
            tuple(map(moved, rendering.cuts)),
            rendering.pictures,
            tuple(
                (moved(at) + each[0].start(), moved(at) + each[-1].end())
                for at, each in zip(places, found, strict=True)
            ),
            to_record(arrays),
        )


_TOKEN_IDS: Final = ("image_token_id", "image_token_index")
_TEXT_INPUTS: Final = ("text_replacement_offsets", "token_type_ids", "mm_token_type_ids")
_PROBE_SIZE: Final = (64, 64)  # width and height of the pictures that probe a processor
_TOLERANCE: Final = 1e-5
_ROUNDING: Final = 2**-7  # of bfloat16 between 1 and 4, with that of scale and offset


def _call(
    processor: Any, token: str, samples: Sequence[Sequence[Image.Image]], *, is_raw: bool = False
) -> tuple[list[str], Arrays]:
    """Return the text that replaces each picture of the first sample, and the arrays; raw pixels are uint8."""
    result = processor(
        images=[list(pictures) for pictures in samples],
        text=[token * len(pictures) for pictures in samples],
        return_text_replacement_offsets=True,
        return_tensors="pt",
        **({"do_rescale": False, "do_normalize": False} if is_raw else {}),
    )
    skipped = {*_TEXT_INPUTS, *processor.tokenizer.model_input_names}
    tensors = {name: value for name, value in result.items() if name not in skipped}
    arrays = {name: np.asarray(each.float() if each.is_floating_point() else each) for name, each in tensors.items()}
    arrays |= {name: value.astype(bool) for name, value in arrays.items() if name.endswith("mask")}
    pixels = arrays["pixel_values"]
    if is_raw and pixels.dtype != np.uint8:
        arrays["pixel_values"] = pixels.astype(np.uint8)
        if not np.array_equal(pixels, arrays["pixel_values"]):
            raise _unknown(processor, "resized pixels are not whole numbers from 0 to 255")
    return [each["replacement"] for each in result["text_replacement_offsets"][0]], arrays


def _probe(processor: Any, token: str, token_ids: tuple[int, ...]) -> tuple[PictureInputs, str]:
    """Probe a processor with a black and a white picture; return its arrays' properties and the text of a picture."""
    black, white = (Image.new("RGB", _PROBE_SIZE, color) for color in ("black", "white"))
    (expansion, *_), one = _call(processor, token, [[black]], is_raw=True)
    together, apart = (_call(processor, token, each, is_raw=True)[1] for each in ([[black] * 2], [[black]] * 2))
    low, high = (_call(processor, token, [[each]])[1]["pixel_values"] for each in (black, white))
    joined_at = {}
    for name, array in one.items():
        shapes = (each[name].shape for each in (together, apart))
        axes = (axis for shape in shapes for axis, size in enumerate(array.shape) if shape[axis] == 2 * size)
        if array.dtype == object or (axis := next(axes, None)) is None:
            raise _unknown(processor, f"its input {name} has no axis of pictures")
        joined_at[name] = axis
    channels = -3 if low.ndim > 3 and low.shape[-3] == 3 else -1  # noqa: PLR2004 - channels before height and width
    offset, last = (np.moveaxis(each, channels, -1).reshape(-1, each.shape[channels])[0] for each in (low, high))
    scale = (last.astype(np.float64) - offset) / 255
    settings = [processor.to_json_string(), processor.image_processor.to_json_string(), *_versions()]
    inputs = PictureInputs(
        joined_at, tuple(scale.tolist()), tuple(offset.tolist()), channels, token_ids,
        sample=base64.b64encode(zlib.compress(to_record(one))).decode(),
        processor=type(processor).__name__,
        digest=hashlib.sha256("\n".join(settings).encode()).hexdigest(),
    )  # fmt: skip
    inputs.verify(one["pixel_values"], low)
    return inputs, expansion


def _versions() -> Iterator[str]:
    for package in ("pillow", "numpy", "torchvision", "transformers"):
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def _unknown(processor: Any, reason: str) -> DataError:
    return DataError(
        f"pictures can't be prepared with {type(processor).__name__}: {reason}",
        fix="choose another model, or train on text: data.pictures=false",
    )
