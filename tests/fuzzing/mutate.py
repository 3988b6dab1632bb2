"""Mutations of values and bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 63, -(1 << 63), 10**10, 10**400, 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "~", "~nobody/x", "../../../etc/passwd", "a" * 5000, "\0", "\x1b[2J\n", "\u2028", "\ud800",
    "{x.__class__}", "{x:>3000000000}", "%s", "$(id)", "1e5", "0x1f", "true", "sha256:", "sha256:" + "0" * 64,
    "sha256:" + "a" * 63 + "\n",
    "sha512:" + "a" * 128, "linux", "amd64", "application/vnd.oci.image.index.v1+json", "https://evil.example.net/",
    [], [[]], ["1"] * 5, {}, {"": None}, {"a": [1]}, {"digest": "x"},
)  # fmt: skip

_DEEP = (b"[", b'{"a":', b'{"event": "step", "step":')
_WHOLE = (b"", b"\xff\xfe", b"\0" * 999, b"9" * 5000, b"null", b"\n\n", b"[]", b"{}", "\u00e4".encode("latin-1") * 9)
_NUMBERS = (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-1\0" * 4)
"""Sizes that a header of a tar file can't have."""


def damaged_value(rng: random.Random, value: Any) -> Any:
    """Replace, drop, repeat or nest one part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {other: part for other, part in value.items() if other != key}
        return value | {key: damaged_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((0, 2, 50))
        return [*value[:place], damaged_value(rng, value[place]), *value[place + 1 :]]
    if rng.random() < 0.4:
        return near_value(rng, value)
    return [value] if rng.random() < 0.1 else rng.choice(ODD_VALUES)


def near_value(rng: random.Random, value: Any) -> Any:
    """Return another value of the same type, which may be valid."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value - 1, value + 1, value * 2, value // 2, value * 1000, 10**12))
        case float():
            return rng.choice((value * 2, value / 1000, -value, 1e-300))
        case str():
            return rng.choice((value.upper(), value + "x", value[:-1], value * 2, value + " "))
        case _:
            return rng.choice(ODD_VALUES)


def damaged_bytes(rng: random.Random, data: bytes, pieces: tuple[bytes, ...] = _NUMBERS) -> bytes:
    """Cut, flip, insert, remove, repeat or replace some bytes.

    Args:
        rng: random number generator.
        data: what to damage.
        pieces: byte sequences with a meaning in this format, used as replacements.
    """
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(result) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del result[place:]
        elif kind == 1 and place < len(result):
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            result[place:place] = rng.randbytes(rng.choice((1, 4, 512)))
        elif kind == 3:
            result[place : place + rng.choice((1, 12, 512))] = b""
        elif kind == 4:
            piece = rng.choice(pieces)
            result[place : place + rng.choice((0, len(piece)))] = piece
        else:
            result += result[place : place + 1024]
    return bytes(result)


def damaged_json(rng: random.Random, content: bytes) -> bytes:
    """Damage a JSON or JSON Lines file: its bytes, its values, or both."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(_DEEP) * rng.choice((100, 50_000))
    if kind == 1:
        return rng.choice(_WHOLE)
    if kind <= 3:
        return damaged_bytes(rng, content)
    try:
        parts = [json.loads(content)]
    except ValueError:
        parts = [json.loads(line) for line in content.splitlines() if line.startswith(b"{")] or [{}]
    for _ in range(rng.choice((1, 1, 3))):
        index = rng.randrange(len(parts))
        parts[index] = damaged_value(rng, parts[index])
    return b"".join(json.dumps(part).encode() + b"\n" for part in parts)
