"""Pictures as a model's inputs: the arrays of a document's pictures, stored as one record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PICTURE: Final = "\ufdd1"
"""Mark of a picture in a turn's content: a Unicode noncharacter, which texts don't contain."""
Arrays = dict[str, NDArray[Any]]
"""Inputs of a model by their names, such as `pixel_values` (uint8) and `image_grid_thw`."""
_ALIGNMENT: Final = 8
"""Bytes: of all arrays in a record, and of records in a file."""


@dataclass(frozen=True)
class PictureInputs:
    """How the pictures of documents become a model's inputs.

    Attributes:
        joined_at: the axis of each input at which those of documents are concatenated; other axes are padded with 0.
        scale: of `pixels = uint8 * scale + offset`, for each channel along `channel_axis` of the pixels.
        token_ids: tokens at which the model puts features of pictures.
        sample: base64 of the record of one small blank picture.
        processor: the class of the processor.
        digest: SHA-256 of its configuration, and of the versions of the libraries that resize.
    """

    joined_at: dict[str, int]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    channel_axis: int
    token_ids: tuple[int, ...]
    sample: str
    processor: str
    digest: str


def to_record(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays as one record, which describes itself: each array's name, type and shape, and its values."""
    values = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in arrays.items()}
    header = json.dumps([[name, array.dtype.str, array.shape] for name, array in values.items()]).encode()
    parts = [len(header).to_bytes(_ALIGNMENT, "little"), header, *(array.tobytes() for array in values.values())]
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def from_record(record: bytes | memoryview) -> Arrays:
    """Return the arrays of a record: read-only views of it."""
    view = memoryview(record)
    end = _ALIGNMENT + int.from_bytes(view[:_ALIGNMENT], "little")
    arrays: Arrays = {}
    for name, dtype, shape in json.loads(bytes(view[_ALIGNMENT:end])):
        begin = end + -end % _ALIGNMENT
        end = begin + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(view[begin:end], dtype).reshape(shape)
        arrays[name].flags.writeable = False
    return arrays
