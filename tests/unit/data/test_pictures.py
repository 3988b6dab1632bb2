from __future__ import annotations

import base64
import io
import json
import random
import resource
import struct
import subprocess
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.data.pictures import MAX_PIXELS, PictureInputs, from_record, open_picture, to_record
from ftkit.data.preferences import conversations_of, first_picture, portable
from ftkit.data.row_formats import read_example
from ftkit.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

RED, GREEN = (200, 10, 30), (20, 180, 60)


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(mode: str = "RGB", left: Any = RED, right: Any = GREEN) -> Image.Image:
    """Return a picture of 8 x 4 pixels with two colors."""
    image = Image.new(mode, (8, 4), left)
    image.paste(right, (4, 0, 8, 4))
    return image


def colors(content: bytes) -> tuple[Any, Any]:
    image = open_picture(content, "")
    assert (image.mode, image.size) == ("RGB", (8, 4))
    return image.getpixel((1, 1)), image.getpixel((6, 1))


def upright(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = halves().transpose(Image.Transpose.ROTATE_90 if orientation == 6 else Image.Transpose.ROTATE_180)
    return stored(turned, exif=exif)


def deep(values: tuple[int, int]) -> bytes:
    pixels = np.repeat([[*values]], 4, axis=1).repeat(4, axis=0).astype(np.uint16)
    return stored(Image.fromarray(pixels))


ANIMATION = stored(halves().quantize(), "GIF", save_all=True, append_images=[halves(left=GREEN).quantize()])
WHITE, GREY, BLACK = (255, 255, 255), (128, 128, 128), (0, 0, 0)
MODES = {
    "rgb": (stored(halves()), RED, GREEN),
    "turned by EXIF": (upright(6), RED, GREEN),
    "upside down by EXIF": (upright(3), RED, GREEN),
    "alpha": (stored(halves("RGBA", (*RED, 255), (*GREEN, 0))), RED, WHITE),
    "half alpha": (stored(halves("RGBA", (*BLACK, 128), (*GREEN, 255))), (127, 127, 127), GREEN),
    "grey with alpha": (stored(halves("LA", (128, 255), (0, 0))), GREY, WHITE),
    "grey": (stored(halves("L", 128, 0)), GREY, BLACK),
    "one bit": (stored(halves("1", 1, 0)), WHITE, BLACK),
    "palette": (stored(halves().quantize()), RED, GREEN),
    "transparent palette": (stored(halves().quantize(), transparency=0), None, None),
    "16 bits": (deep((128 << 8, 255)), GREY, BLACK),
    "CMYK": (stored(halves("CMYK", (0, 0, 0, 0), (0, 0, 0, 255)), "TIFF"), WHITE, BLACK),
    "animation": (ANIMATION, RED, GREEN),
    "webp": (stored(halves(), "WEBP", lossless=True), RED, GREEN),
    "bmp": (stored(halves(), "BMP"), RED, GREEN),
}


@pytest.mark.parametrize("kind", MODES)
def test_pictures_of_all_modes_are_rgb(kind: str) -> None:
    content, left, right = MODES[kind]
    found = colors(content)
    if left is None:
        assert WHITE in found
    else:
        assert found == (left, right)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG with a header of this size and little else."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))
        + chunk(b"IEND", b"")
    )


BAD = {
    "truncated": (stored(Image.effect_noise((64, 64), 50))[:-900], "can't be decoded"),
    "truncated JPEG": (stored(Image.effect_noise((64, 64), 50), "JPEG")[:-300], "can't be decoded"),
    "corrupt": (b"\x89PNG\r\n\x1a\n" + bytes(50), "no known format|can't be decoded"),
    "text": (b"not a picture", "no known format"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known format"),
    "bomb": (bomb(60_000, 60_000), r"exceeds limit|60,000 x 60,000"),
    "large": (bomb(10_001, 10_000), "10,001 x 10,000 pixels, more than 100,000,000"),
    "scans": (stored(halves(), "JPEG") + b"\xff\xda" * 200, "more than 100 scans"),
    "32 bits": (stored(Image.fromarray(np.full((4, 4), 140_000, np.int32)), "TIFF"), "32-bit"),
    "floating point": (stored(Image.new("F", (8, 4), 0.5), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_usable_picture_is_refused_without_decoding_it(kind: str) -> None:
    content, message = BAD[kind]
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(DataError, match=message):
        open_picture(content, "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "AVIF"])
def test_damaged_bytes_of_any_format_are_errors_of_the_row(kind: str) -> None:
    if kind not in Image.SAVE:
        pytest.skip("Pillow lacks this format")
    content, chance = stored(Image.effect_noise((32, 32), 50).convert("RGB"), kind), random.Random(0)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for place in chance.sample(range(len(content)), 5):
            damaged[place] = chance.randrange(256)
        try:
            open_picture(bytes(damaged), "")
        except DataError:
            num_refused += 1
    assert num_refused


def test_a_picture_of_the_largest_size_is_within_the_limit() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    assert MAX_PIXELS < Image.MAX_IMAGE_PIXELS * 2  # which Pillow itself refuses


def test_pictures_are_found_beside_the_data(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(stored(halves()))
    (tmp_path / "empty.png").touch()
    for source, folder in (("in/a.png", tmp_path), (str(tmp_path / "in/a.png"), ""), ("a.png", tmp_path / "in")):
        assert open_picture(source, str(folder)).size == (8, 4)
    uri = f"data:image/png;base64,{base64.b64encode(stored(halves())).decode()}"
    assert open_picture(uri, "").size == (8, 4)
    wrong: tuple[tuple[object, str], ...] = (
        ("empty.png", "empty"), ("absent.png", "No such file"), (".", "not a regular file"), ("a\0b", "null byte"),
        ("data:;base64,@@", "not valid base64"), ("https://example.org/a.png", "not on this machine"),
        ("s3://bucket/a.png", "not on this machine"), ("", "neither"), (3, "neither"), (None, "neither"),
    )  # fmt: skip
    for wrong_source, message in wrong:
        with pytest.raises(DataError, match=message):
            open_picture(wrong_source, str(tmp_path))
    with pytest.raises(DataError, match="not on this machine"):
        open_picture("a.png", "s3://bucket/data")


def test_a_row_in_another_folder_still_has_its_pictures() -> None:
    uri = "data:;base64,eA=="
    turns = [{"role": "user", "content": [{"type": "text", "text": "a.png"}, {"type": "image", "image": "a.png"}]}]
    columns = {
        "images": ["b.png", {"bytes": b"x", "path": "c.png"}, {"path": "d.png"}],
        "image": uri,
        "messages": turns,
    }
    assert portable(columns, "/data") == {
        "images": ["/data/b.png", {"bytes": uri, "path": "/data/c.png"}, {"path": "/data/d.png"}],
        "image": uri,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "a.png"}, {"type": "image", "image": "/data/a.png"}]}],
    }  # fmt: skip


def test_rows_of_text_need_no_pillow() -> None:
    blocked = "import sys; sys.modules['PIL'] = None; from ftkit.data.pictures import open_picture"
    subprocess.run([sys.executable, "-c", f"{blocked}; import ftkit.data.prepared_data"], check=True)
    program = f"{blocked}; open_picture('a.png', '.')"
    failed = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "PrerequisiteError" in failed.stderr


def turns_of(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}, {"role": "assistant", "content": "A"}]


EVERY_LAYOUT: list[dict[str, Any]] = [
    {"messages": turns_of({"type": "image", key: value})}
    for key, value in (
        ("image", "a.png"), ("url", "a.png"), ("image_url", {"url": "a.png"}), ("path", "a.png"),
        ("bytes", stored(halves())), ("base64", base64.b64encode(stored(halves())).decode()),
        ("image", {"bytes": stored(halves()), "path": "gone.png"}),
    )
]  # fmt: skip
EVERY_LAYOUT += [
    {"messages": json.dumps(turns_of({"type": "image", "image": "a.png"}))},
    {"messages": turns_of({"type": "image"}), "images": ["a.png"]},
    {"messages": turns_of({"type": "image", "index": 0}), "images": '["a.png"]'},
    {"messages": turns_of({"type": "image"}), "image": "a.png"},
]


@pytest.mark.parametrize("columns", EVERY_LAYOUT, ids=repr)
def test_a_validation_row_of_every_layout_has_its_picture_in_another_folder(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    data, form = (
        DataSpec.model_validate({"source": "./rows.jsonl", "pictures": True}),
        MessagesFormat(column="messages"),
    )
    (tmp_path / "a.png").write_bytes(stored(halves()))
    moved = json.loads(json.dumps(portable(columns, str(tmp_path))))
    example = read_example(moved, data, form)
    (source,) = (source for turn in conversations_of(example)[0].messages for source in turn.pictures)
    assert open_picture(source, "/nowhere").size == halves().size


def test_parts_take_pictures_of_a_column_by_their_indices() -> None:
    data, form = (
        DataSpec.model_validate({"source": "./rows.jsonl", "pictures": True}),
        MessagesFormat(column="messages"),
    )
    columns = {"messages": turns_of(*({"type": "image", "index": each} for each in (1, 0))), "images": ["a", "b"]}
    (conversation,) = conversations_of(read_example(columns, data, form))
    assert conversation.messages[0].pictures == ("b", "a")
    columns["messages"] = turns_of(*({"type": "image", "index": each} for each in (1, 1)))
    with pytest.raises(DataError):
        read_example(columns, data, form)


def test_a_part_that_preparation_refuses_is_a_picture_to_the_plan() -> None:
    assert first_picture({"messages": turns_of({"type": "image", "source": {"alt": "A cat"}})}) is not None


def test_pixels_that_a_processor_changes_in_other_ways_are_refused() -> None:
    inputs = PictureInputs({"pixel_values": 0}, (0.1, 0.2, 0.3), (1, 2, 3), -3, (7,), "", "P", "")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    expected = pixels * np.array([0.1, 0.2, 0.3]).reshape(3, 1, 1) + np.array([1, 2, 3]).reshape(3, 1, 1)
    inputs.verify(pixels, expected)
    padded = expected.copy()
    padded[0, 0, 0, 0] = 0  # of a pixel 0: padding
    inputs.verify(pixels, padded)
    padded[1, 0, 0, 0] += 1e-4
    with pytest.raises(DataError, match=r"differ by 0\.0001"):
        inputs.verify(pixels, padded)
    with pytest.raises(DataError, match="differ by inf"):
        inputs.verify(pixels[:1], expected)


def test_a_record_has_the_arrays_of_all_types_and_shapes() -> None:
    arrays = {
        "pixel_values": np.arange(30, dtype=np.uint8).reshape(2, 3, 5),
        "image_grid_thw": np.array([[1, 2, 3]]),
        "mask": np.zeros((0, 4), bool),
        "big-endian": np.array([1.5, 2], ">f4"),
        "scalar": np.array(7, np.int32),
    }
    record = to_record(arrays)
    found = from_record(record)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("<")
        assert np.array_equal(found[name], array)
    with pytest.raises(ValueError, match="read-only"):
        found["scalar"][...] = 1
    aligned = from_record(memoryview(bytes(8) + record)[8:])
    assert all(array.ctypes.data % 8 == 0 for array in aligned.values())
