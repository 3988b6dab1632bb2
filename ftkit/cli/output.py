"""The output of all commands: verbosity, color, and escaping, so that data can't control the terminal."""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO, cast

import click
from click.core import ParameterSource

from ftkit import __version__
from ftkit.cli.terminal.format import printable
from ftkit.errors import redact
from ftkit.process import without_control

_KEY = "ftkit.output"  # key of a context's `meta`, which the contexts of a command line share
_log = logging.getLogger("ftkit")


class Output(NamedTuple):
    """How much a command prints, and whether in color."""

    quiet: bool = False
    verbose: bool = False
    color: bool | None = None  # None: the stream and the environment decide

    @property
    def words(self) -> list[str]:
        color = {None: [], True: ["--color"], False: ["--no-color"]}[self.color]
        return ["--quiet"] * self.quiet + ["--verbose"] * self.verbose + color


def current_output() -> Output:
    ctx = click.get_current_context(silent=True)
    return ctx.meta.get(_KEY, Output()) if ctx else Output()


def in_color(stream: IO[str]) -> bool:
    """Return whether to write in color: by the option, else by NO_COLOR and FORCE_COLOR, else if this is a terminal."""
    if (chosen := current_output().color) is not None:
        return chosen
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def _store(ctx: click.Context, parameter: click.Parameter, value: bool | None) -> None:  # noqa: FBT001 - click's interface
    if ctx.resilient_parsing or ctx.get_parameter_source(str(parameter.name)) is ParameterSource.DEFAULT:
        return
    before = ctx.meta.get(_KEY, Output())
    ctx.meta[_KEY] = before._replace(**{str(parameter.name): value})
    if parameter.name == "verbose" and not before.verbose:
        ctx.with_resource(_show_details())


@contextmanager
def _show_details() -> Iterator[None]:
    handler, level = _Details(), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.DEBUG)
    _log.debug("ftkit %s in %s, Python %s", __version__, Path(__file__).parents[1], sys.version.partition(" ")[0])
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)


class _Details(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(redact(record.getMessage(), os.environ), err=True)


_option = partial(click.Option, expose_value=False, callback=_store)
OUTPUT_OPTIONS = (
    _option(["-q", "--quiet"], is_flag=True, help="Print only data, warnings and errors."),
    _option(
        ["-v", "--verbose"], is_flag=True, help="Print which configuration files are read, and which programs are run."
    ),
    _option(
        ["--color/--no-color"],
        default=None,
        help="Print in color; default: on a terminal, unless FORCE_COLOR or NO_COLOR is set.",
    ),
)


class _Escaped:
    """A text stream that escapes what is written to it, by any library, with `printable`."""

    def __init__(self, styled: TextIO) -> None:
        self.styled = styled  # for ftkit's own colors: only escaped text may be written there

    def write(self, text: str) -> int:
        self.styled.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


def styled(stream: IO[str]) -> IO[str]:
    """Return the stream for text that is already escaped and may have ftkit's own colors."""
    return stream.styled if isinstance(stream, _Escaped) else stream


class _Log:
    """Stdout as a terminal for a log: no control codes, and escaped except carriage returns, which redraw bars."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, chunk: bytes) -> int:
        text = without_control(self._decoder.decode(chunk))
        sys.stdout.buffer.write("\r".join(map(printable, text.split("\r"))).encode())
        return len(chunk)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def log_output() -> IO[bytes]:
    """Return the stream to write a log to: escaped on a terminal, unchanged in a pipe."""
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
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            if os.path.sameopenfile(1, self.fileno()):
                raise
        except OSError:
            pass
        return len(data)
