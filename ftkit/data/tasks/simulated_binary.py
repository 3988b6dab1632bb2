"""The made-up file format of simulated binaries. No system knows it, so nothing in it can be executed.

A file is a magic number, the number of sections, a table with each section's name, offset and size, and the sections.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"SIMBIN01"
_COUNT = struct.Struct("<II")  # sections, and a field that is always 0
_ENTRY = struct.Struct("<8sII")  # name, offset, size

IMPORTS = "imports"
"""The section with the names of imported functions, each terminated by a zero."""


@dataclass(frozen=True)
class Section:
    """A named part of a binary; names have at most 8 ASCII characters."""

    name: str
    content: bytes


def header_size(num_sections: int) -> int:
    """Return the number of bytes before the first section."""
    return len(MAGIC) + _COUNT.size + num_sections * _ENTRY.size


def write_binary(sections: Sequence[Section]) -> bytes:
    """Lay sections one after another behind a header."""
    header, offset = [MAGIC, _COUNT.pack(len(sections), 0)], header_size(len(sections))
    for section in sections:
        header.append(_ENTRY.pack(section.name.encode(), offset, len(section.content)))
        offset += len(section.content)
    return b"".join(header) + b"".join(section.content for section in sections)


def read_binary(binary: bytes) -> list[Section]:
    """Read back what `write_binary` wrote.

    Raises:
        ValueError: it is not such a file.
    """
    if not binary.startswith(MAGIC):
        raise ValueError("not a simulated binary")
    num_sections, _ = _COUNT.unpack_from(binary, len(MAGIC))
    table = binary[header_size(0) : header_size(num_sections)]
    return [
        Section(name.rstrip(b"\0").decode(), binary[offset : offset + size])
        for name, offset, size in _ENTRY.iter_unpack(table)
    ]


def write_imports(names: Sequence[str]) -> Section:
    """Make the section of imported names."""
    return Section(IMPORTS, b"".join(name.encode() + b"\0" for name in names))


def read_imports(section: Section) -> list[str]:
    """Return the imported names, in their order in the file."""
    return section.content.decode().split("\0")[:-1]
