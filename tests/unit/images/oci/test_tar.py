"""Tar streams, compared with Python's tarfile."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.errors import ImageError
from ftkit.images.oci.tar import (
    END,
    FILE,
    FOLDER,
    LINK,
    SYMLINK,
    Member,
    TarReader,
    write_member,
    write_padding,
)

NAMES = st.text("abcäß .-_", min_size=1, max_size=60).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=6).map("/".join)


def archive(entries: list[tuple[tarfile.TarInfo, bytes]], kind: int) -> io.BytesIO:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=kind) as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    output.seek(0)
    return output


def read_all(stream: io.BytesIO) -> list[tuple[Member, bytes]]:
    reader = TarReader(stream)
    return [(member, b"".join(reader.content())) for member in reader]


@given(
    st.dictionaries(PATHS, st.binary(max_size=2000), max_size=8),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_every_file_of_an_archive_is_read(files: dict[str, bytes], kind: int) -> None:
    found = read_all(archive([(tarfile.TarInfo(path), data) for path, data in files.items()], kind))
    assert [(member.path.decode(), data) for member, data in found] == list(files.items())


@given(st.lists(st.tuples(PATHS, st.sampled_from([FILE, LINK, SYMLINK, FOLDER]), PATHS, st.binary(max_size=1500))))
def test_tarfile_reads_the_written_members(members: list[tuple[str, bytes, str, bytes]]) -> None:
    stream = io.BytesIO()
    for path, kind, target, data in members:
        content = data if kind == FILE else b""
        link = target.encode() if kind in (LINK, SYMLINK) else b""
        write_member(stream, Member(path.encode(), kind, 0o751, 1_234_567, len(content), link))
        stream.write(content)
        write_padding(stream, len(content))
    stream.write(END)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        for entry, (path, kind, target, data) in zip(tar, members, strict=True):
            assert (entry.name, entry.type, entry.mode, entry.mtime) == (path, kind, 0o751, 1_234_567)
            assert (entry.uid, entry.gid) == (0, 0)
            if kind == FILE:
                content = tar.extractfile(entry)
                assert content is not None
                assert content.read() == data
            elif kind != FOLDER:
                assert entry.linkname == target


def test_a_truncated_stream_is_an_error() -> None:
    whole = archive([(tarfile.TarInfo("a"), bytes(5000))], tarfile.PAX_FORMAT).getvalue()
    with pytest.raises(ImageError, match="truncated"):
        read_all(io.BytesIO(whole[:3000]))


def test_a_stream_without_an_end_marker_is_an_error() -> None:
    whole = archive([(tarfile.TarInfo("a"), bytes(512))], tarfile.PAX_FORMAT).getvalue()
    with pytest.raises(ImageError, match="truncated"):
        read_all(io.BytesIO(whole[:1024]))


def test_a_damaged_header_is_an_error() -> None:
    whole = bytearray(archive([(tarfile.TarInfo("a"), b"x")], tarfile.PAX_FORMAT).getvalue())
    whole[5] ^= 1
    with pytest.raises(ImageError, match="damaged"):
        read_all(io.BytesIO(bytes(whole)))


def test_a_path_outside_the_root_is_rejected() -> None:
    with pytest.raises(ImageError, match=r"a/\.\./\.\./etc/passwd"):
        read_all(archive([(tarfile.TarInfo("a/../../etc/passwd"), b"x")], tarfile.PAX_FORMAT))


def test_a_9_gb_file_has_its_size_in_an_extended_header() -> None:
    stream = io.BytesIO()
    write_member(stream, Member(b"large", FILE, size=9 << 30))
    stream.seek(0)
    assert next(iter(TarReader(stream))).size == 9 << 30


def header() -> bytearray:
    return bytearray(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT))


def with_checksum(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("field", [b"-7", b"0o17", b"1_0", b"+7", b"12 34", b"99", b"\xb2\xb3"])
def test_a_size_that_is_not_octal_is_an_error(field: bytes) -> None:
    block = header()
    block[124:136] = field.ljust(12, b"\0")
    with pytest.raises(ImageError, match="damaged"):
        read_all(io.BytesIO(with_checksum(block) + bytes(4096)))


@pytest.mark.parametrize(
    "record",
    [
        b"size=-1",
        b"size=1e3",
        b"size=" + b"9" * 5000,
        b"size=",
        b"size= 7",
        b"size=\xd9\xa3",
        b"path=a\0b",
        b"path=" + b"d/" * 5000,
        b"path=" + b"n" * 256,
        b"path=../../etc/passwd",
        b"linkpath=a\0b",
        b"GNU.sparse.major=1",
    ],
)
def test_an_invalid_extended_header_is_an_error(record: bytes) -> None:
    length = len(record) + 2
    while len(b"%d %s\n" % (length, record)) != length:
        length += 1
    records = b"%d %s\n" % (length, record)
    stream = io.BytesIO()
    extended = tarfile.TarInfo("pax")
    extended.type, extended.size = tarfile.XHDTYPE, len(records)
    stream.write(extended.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512))
    link = tarfile.TarInfo("a")
    link.type, link.linkname = tarfile.SYMTYPE, "b"
    stream.write(link.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    stream.seek(0)
    with pytest.raises(ImageError):
        read_all(stream)


@pytest.mark.parametrize(
    "record", [b"7 a=b\n9", b"999999999999999999999 a=b\n", b"0 a=b\n", b"1 a\n", b"x a=b\n", b"2 "]
)
def test_an_extended_header_record_of_wrong_length_is_an_error(record: bytes) -> None:
    extended = tarfile.TarInfo("pax")
    extended.type, extended.size = tarfile.XHDTYPE, len(record)
    data = extended.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512) + bytes(1024)
    with pytest.raises(ImageError, match="damaged"):
        read_all(io.BytesIO(data))
