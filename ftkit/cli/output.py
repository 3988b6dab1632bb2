"""Options of every command, and of `ftkit` itself: how much to print, and whether in color."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from click.core import ParameterSource

from ftkit import __version__
from ftkit.errors import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = "ftkit.output"
"""Key of a context's `meta`, which the contexts of a command line share."""
_log = logging.getLogger("ftkit")


@dataclass(frozen=True)
class Output:
    """How much a command prints, and whether in color.

    Attributes:
        quiet: print only data, warnings and errors.
        verbose: also print which files are read and which programs are run.
        color: whether to print in color; None if the stream and the environment decide.
    """

    quiet: bool = False
    verbose: bool = False
    color: bool | None = None

    @property
    def words(self) -> list[str]:
        """The options, as they are typed."""
        color = {None: [], True: ["--color"], False: ["--no-color"]}[self.color]
        return ["--quiet"] * self.quiet + ["--verbose"] * self.verbose + color


def current_output() -> Output:
    """Return the options of this call."""
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
    ctx.meta[_KEY] = replace(before, **{str(parameter.name): value})
    if parameter.name == "verbose" and not before.verbose:
        ctx.with_resource(_show_details())


@contextmanager
def _show_details() -> Iterator[None]:
    """Print ftkit's own debug messages during the block."""
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
    """Writes messages to stderr, without secrets."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(redact(record.getMessage(), os.environ), err=True)


_option = partial(click.Option, expose_value=False, callback=_store)
OUTPUT_OPTIONS = (
    _option(["-q", "--quiet"], is_flag=True, help="Print only data, warnings and errors."),
    _option(
        ["-v", "--verbose"],
        is_flag=True,
        help="Print which configuration files are read, and which programs are run.",
    ),
    _option(
        ["--color/--no-color"],
        default=None,
        help="Print in color; default: on a terminal, unless FORCE_COLOR or NO_COLOR is set.",
    ),
)


class WithOutputOptions(click.Command):
    """A command with the output options, which may also be typed before its name."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, the output options, and `--help`."""
        own, added = len(self.params), super().get_params(ctx)
        return [*added[:own], *OUTPUT_OPTIONS, *added[own:]]
