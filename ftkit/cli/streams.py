"""Standard streams that are closed, or that can't be written."""

from __future__ import annotations

import io
import os
import sys


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
