"""Render each page as one file, with its style and charts, that loads nothing from the network."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ftkit import __version__
from ftkit.errors import PrerequisiteError, one_line
from ftkit.files import output_file

if TYPE_CHECKING:
    from ftkit.cli.page.comparison import ComparisonReport
    from ftkit.cli.page.report import RunReport

_FOLDER = Path(__file__).parent


def run_page(report: RunReport, *, refresh_seconds: int | None = None) -> str:
    """Return the page of one run; browsers reload it every `refresh_seconds`, if set."""
    return _render("report.html.j2", run=report, refresh_seconds=refresh_seconds)


def comparison_page(report: ComparisonReport, *, refresh_seconds: int | None = None) -> str:
    """Return the page of several runs side by side."""
    return _render("comparison.html.j2", report=report, refresh_seconds=refresh_seconds)


def save_page(page: str, path: Path) -> None:
    """Write a page atomically.

    Raises:
        PrerequisiteError: it can't be written there.
    """
    try:
        with output_file(path) as temporary:
            temporary.write_bytes(page.encode())
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {one_line(error)}",
            meaning="the folder does not exist, its disk is full, or you lack write permission",
            fix="write it to another file: ftkit report RUN --output FILE",
        ) from error


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clock"] = _clock
    environment.globals["zip"] = zip
    css = (_FOLDER / "page.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(
        css=css, version=__version__, written=_clock(time.time()), **values
    )


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
