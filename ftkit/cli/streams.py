"""Standard streams: text from data can't control the terminal, whichever library prints it."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from ftkit.cli.terminal.format import printable
from ftkit.process import without_colors

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Escaped:
    """A text stream that escapes what is written to it, by any library, with `printable`.

    Attributes:
        styled: the stream below, for ftkit's own colors; only escaped text may be written there.
    """

    def __init__(self, styled: TextIO) -> None:
        self.styled = styled

    def write(self, text: str) -> int:
        """Write escaped text."""
        self.styled.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write escaped lines."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


def styled(stream: IO[str]) -> IO[str]:
    """Return the stream to which text is written that is escaped already, and may have ftkit's own colors."""
    return stream.styled if isinstance(stream, _Escaped) else stream


class _Log:
    """Stdout as a terminal for a log: without colors, escaped, except carriage returns, with which bars are redrawn."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, chunk: bytes) -> int:
        """Write a part of a log; it may end within a character."""
        text = without_colors(self._decoder.decode(chunk))
        sys.stdout.buffer.write("\r".join(map(printable, text.split("\r"))).encode())
        return len(chunk)

    def flush(self) -> None:
        """Write what is buffered."""
        sys.stdout.buffer.flush()


def log_output() -> IO[bytes]:
    """Return where a log is written: escaped on a terminal, byte for byte in a pipe."""
    sys.stdout.flush()
    return cast("IO[bytes]", _Log()) if sys.stdout.isatty() else sys.stdout.buffer


def open_standard_streams() -> None:
    """Make the standard streams usable, whatever state the caller left them in.

    Streams that the caller closed (`>&-`) are connected to /dev/null: the next files to be opened would get their
    descriptors, and what programs print would end up in them. Messages that stderr can't take are dropped, because a
    command that does its work must not fail because its log is on a full disk.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - it takes no keyword
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    stderr = sys.stderr
    if stderr is sys.__stderr__ and stderr is not None:  # not a test's own
        messages: io.RawIOBase = _Messages(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(messages), stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without `×` must not make the command fail
    sys.stdout, sys.stderr = _escaped(sys.stdout), _escaped(sys.stderr)


def _escaped(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, _Escaped) else cast("TextIO", _Escaped(stream))


class _Messages(io.FileIO):
    """A descriptor that drops what can't be written, unless the reader of both output streams is gone."""

    def write(self, data: bytes) -> int:  # type: ignore[override] # any buffer, as io.FileIO
        """Write to the descriptor; return the number of bytes that are done with."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            if os.path.sameopenfile(1, self.fileno()):
                raise
        except OSError:
            pass
        return len(data)
