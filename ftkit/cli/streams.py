"""Standard streams: closed ones, ones that can't be written, and terminals, which texts of others must not control."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import IO, Any, cast

from ftkit.cli.terminal.format import printable


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
        sys.stderr = _Escaping(io.BufferedWriter(messages), stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without `×` must not make the command fail


def styled(stream: IO[str]) -> IO[str]:
    """Return a stream for texts that ftkit has made printable, and that have colors and cursor movements of its own."""
    return cast("IO[str]", _Styled(stream)) if isinstance(stream, _Escaping) else stream


def data_output() -> IO[bytes]:
    """Return stdout for data that may be anybody's: unchanged in a pipe or file, printable on a terminal."""
    return cast("IO[bytes]", _OnTerminal(sys.stdout.buffer)) if sys.stdout.isatty() else sys.stdout.buffer


class _Escaping(io.TextIOWrapper):
    """Makes all that is written printable: warnings of Python and of libraries quote data too."""

    def write(self, text: str) -> int:
        """Write a text; carriage returns stay, with which libraries redraw progress bars."""
        super().write(printable(text, keep="\r"))
        return len(text)


class _Styled:
    """Writes to a stream as it would without escaping."""

    def __init__(self, stream: _Escaping) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _OnTerminal:
    """Makes bytes in UTF-8 printable; carriage returns of progress bars stay."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, chunk: bytes) -> int:
        self._output.write(printable(self._decoder.decode(chunk), keep="\r").encode())
        return len(chunk)

    def flush(self) -> None:
        self._output.flush()


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
