"""Recognize files whose content is not what their name says, by their first bytes."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection


class _Kind(NamedTuple):
    """A kind of file: its name in a sentence, the pattern at its beginning, and the suffix that selects its reader."""

    name: str
    start: re.Pattern[bytes]
    suffix: str = ""
    advice: str = ""


def _kind(name: str, start: bytes, suffix: str = "", advice: str = "") -> _Kind:
    return _Kind(name, re.compile(start, re.DOTALL), suffix, advice)


_UNPACK: Final = "unpack it, and give the folder"
_WRITE: Final = "write its rows as JSON Lines or Parquet"
_KINDS: Final = (
    _kind("compressed by gzip", rb"\x1f\x8b", ".gz"),
    _kind("compressed by bzip2", rb"BZh[1-9]1AY&SY", ".bz2"),
    _kind("compressed by xz", rb"\xfd7zXZ", ".xz"),
    _kind("compressed by zstd", rb"\x28\xb5\x2f\xfd", ".zst"),
    _kind("compressed by lz4", rb"\x04\x22\x4d\x18", advice="decompress it: lz4 -d"),
    _kind("a ZIP archive", rb"PK(?:\x03\x04|\x05\x06)", advice=f"{_UNPACK}; save a spreadsheet as .csv"),
    _kind("a tar archive", rb".{257}ustar", advice=_UNPACK),
    _kind("a 7z archive", rb"7z\xbc\xaf\x27\x1c", advice=_UNPACK),
    _kind("a Parquet file", rb"PAR1", ".parquet"),
    _kind("an Arrow file", rb"(?:ARROW1|FEA1)", ".arrow"),
    _kind("an SQLite database", rb"SQLite format 3\0", advice=_WRITE),
    _kind("an HDF5 file", rb"\x89HDF", advice=_WRITE),
    _kind("a NumPy file", rb"\x93NUMPY", advice=_WRITE),
    _kind("a Python pickle", rb"\x80[\x02-\x05][\x8c\x95c(\]}K]", advice=_WRITE),
    _kind("a PDF", rb"%PDF-", advice='extract its text, and write it as JSON Lines: {"text": "…"}'),
    _kind("a web page", rb"(?i)(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head)\b",
          advice="a download got a page in place of the file: download it again, signed in if it is not public"),
)  # fmt: skip
START_BYTES: Final = 512
"""Bytes of a file's beginning from which its kind is recognized."""


def check_kind(start: bytes, file: str, expected: str, suffixes: Collection[str] = ()) -> None:
    """Refuse a file whose content is of another kind than its name says.

    Args:
        start: its first bytes, decompressed if the name has the suffix of a compression.
        file: its name.
        expected: what the reader reads, for the error.
        suffixes: suffixes of the kinds that the reader reads.

    Raises:
        DataError: it is of a known kind, and none of these.
    """
    found = next((kind for kind in _KINDS if kind.start.match(start)), None)
    if found is None or found.suffix in {*suffixes} - {""}:
        return
    raise DataError(
        f"{file} is {found.name}, not {expected}",
        meaning="the suffix of a file selects its reader" if found.suffix else "",
        fix=found.advice or f"rename it with the suffix {found.suffix}: mv {shlex.quote(file)} …{found.suffix}",
    )
