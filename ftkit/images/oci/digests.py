"""Digests of large files: of the whole, and of each block, so that a difference can be named."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

BLOCK_SIZE: Final = 64 << 20
_CHUNK = 4 << 20


@dataclass(frozen=True)
class FileDigests:
    """Digests of one file."""

    size: int
    sha256: str
    blocks: tuple[str, ...]


def digest_file(
    path: Path, block_size: int = BLOCK_SIZE, advance: Callable[[int], None] = lambda _: None
) -> FileDigests:
    """Read a file once and compute all digests; those of the blocks on a second processor."""
    whole, blocks, size = hashlib.sha256(), list[str](), 0
    block = hashlib.sha256()
    with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        while chunk := file.read(min(_CHUNK, block_size - size % block_size)):
            pending = pool.submit(block.update, chunk)
            whole.update(chunk)
            pending.result()
            size += len(chunk)
            advance(len(chunk))
            if size % block_size == 0:
                blocks.append(block.hexdigest())
                block = hashlib.sha256()
    if size % block_size:
        blocks.append(block.hexdigest())
    return FileDigests(size, whole.hexdigest(), tuple(blocks))


def differing_ranges(expected: Sequence[str], found: Sequence[str], block_size: int) -> list[str]:
    """Name the parts of a file that differ, in bytes."""
    ranges = []
    for number, (old, new) in enumerate(zip(expected, found, strict=False)):
        if old != new:
            ranges.append(f"bytes {number * block_size} to {(number + 1) * block_size - 1}")
    return ranges
