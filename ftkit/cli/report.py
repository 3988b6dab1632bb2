"""`ftkit report`: write an HTML page about one or several runs."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, complete_run, get_runs
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import PrerequisiteError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from http.server import BaseHTTPRequestHandler

    from ftkit.data.inspection import Sample
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.find import RunFolder

_REFRESH_SECONDS = 15
_NUM_SAMPLES = 3
_SAMPLE_CHARACTERS = 3000


@click.command(
    "report",
    cls=ForwardedCommand,
    examples=(
        "ftkit report last",
        "ftkit report demo --output demo.html",
        "ftkit report demo other",
    ),
    help=f"""Write an HTML page about a run: the plan beside the measurements, curves, memory, time by activity,
    evaluation, and how to repeat it. The page is one file that needs no network: report.html in the run's
    folder or, for several runs, comparison.html in the current folder. Prints its path.

    {RUN_HELP} The id or the name of a sweep selects all of its runs.
    """,
)
@click.argument("references", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run)
@click.option("--output", "-o", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option("--live", is_flag=True, help="Serve an up-to-date page on this machine until Ctrl-C.")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=0, help="Port for --live; default: a free port."
)
def command(references: tuple[str, ...], *, output: Path | None, live: bool, port: int) -> None:
    """Write a page about runs."""
    from ftkit.cli.page.charts import require_matplotlib
    from ftkit.cli.page.write import save_page

    folders = get_runs(references)
    require_matplotlib()
    render = partial(_render, folders)
    if live:
        _serve(lambda: render(refresh_seconds=_REFRESH_SECONDS), port)
        return
    from ftkit.runs.metrics_file import find_damage

    for folder in folders:
        if problem := find_damage(folder.layout.metrics):
            Terminal().warn(f"{folder.id}: {problem}")
    path = output or (folders[0].layout.report if len(folders) == 1 else Path("comparison.html"))
    save_page(render(), path)
    Terminal().data(f"{short_path(path.absolute())}\n")


def write_report_at_end(layout: RunLayout, state: str) -> None:
    """Write the page of an ended run if its job did not: the run failed, or its image lacks matplotlib.

    Args:
        layout: the run's folder.
        state: its final state.

    Raises:
        PrerequisiteError: it can't be written.
    """
    from importlib.util import find_spec

    from ftkit.cli.page.charts import require_matplotlib
    from ftkit.cli.page.write import save_page

    if layout.report.exists() or os.environ.get("FTKIT_REPORT", "1") == "0" or find_spec("matplotlib") is None:
        return
    require_matplotlib()
    save_page(_run_page(layout, state), layout.report)


def _render(folders: Sequence[RunFolder], *, refresh_seconds: int | None = None) -> str:
    from ftkit.cli.page.write import comparison_page
    from ftkit.cli.terminal.comparison_view import comparison_report

    if len(folders) > 1:
        compared = comparison_report([folder.layout for folder in folders])
        return comparison_page(compared, refresh_seconds=refresh_seconds)
    return _run_page(folders[0].layout, _state(folders[0]), refresh_seconds)


def _run_page(layout: RunLayout, state: str, refresh_seconds: int | None = None) -> str:
    from ftkit.cli.page.report import read_report
    from ftkit.cli.page.write import run_page
    from ftkit.runs.repeat import judge

    verdict = judge(layout)
    report = read_report(layout, state, samples=_samples(layout), verdict="" if verdict is None else str(verdict))
    return run_page(report, refresh_seconds=refresh_seconds)


@cache
def _samples(layout: RunLayout) -> tuple[Sample, ...]:
    """Return documents of a run's first pack as the trainer sees them; none if data or tokenizer is missing here."""
    from importlib.util import find_spec

    from ftkit.errors import FtkitError
    from ftkit.planning.plan import read_plan_to_use

    if any(find_spec(name) is None for name in ("numpy", "tokenizers", "transformers")):
        return ()
    from ftkit.data.inspection import samples_of_packs
    from ftkit.data.prepared_data import PreparedData

    try:
        plan = read_plan_to_use(layout)
        if not plan.is_data_prepared:
            return ()
        found = list(islice(samples_of_packs(PreparedData(plan.data_directory), [0]), _NUM_SAMPLES))
    except (FtkitError, OSError, ValueError):  # a page without samples is better than none
        return ()
    return tuple(_shortened(each) for each in found)


def _shortened(sample: Sample) -> Sample:
    """Truncate a document's text to a few screens: a sequence can be as long as a book."""
    segments, left = [], _SAMPLE_CHARACTERS
    for segment in sample.segments:
        if left <= 0:
            break
        cut = segment.text if len(segment.text) <= left else f"{segment.text[:left]} …"
        segments.append(replace(segment, text=cut))
        left -= len(segment.text)
    return replace(sample, segments=tuple(segments))


def _state(folder: RunFolder) -> str:
    """Return the run's state as one word."""
    from ftkit.launch.job_states import observe_all
    from ftkit.runs.job import RunState
    from ftkit.runs.listing import read_entry
    from ftkit.runs.metrics_file import read_last_record
    from ftkit.runs.records import EndRecord

    last = read_last_record(folder.layout.metrics)
    if isinstance(last, EndRecord) and last.outcome == "completed":  # its job may still run, to write this page
        return RunState.COMPLETED
    entry = read_entry(folder)
    return observe_all([entry.run] if entry.run else []).state_of(entry).state


def _serve(render: Callable[[], str], port: int) -> None:
    """Serve a page on localhost, at an address that other users of the machine can't guess."""
    from http.server import ThreadingHTTPServer

    terminal, path = Terminal(), f"/{secrets.token_urlsafe(16)}"
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), page_handler(render, path))
    except OSError as error:
        raise PrerequisiteError(
            f"can't serve on port {port}: {one_line(error)}", fix="omit --port to use a free port"
        ) from error
    terminal.data(f"http://127.0.0.1:{server.server_port}{path}\n")
    terminal.say(
        f"Ctrl-C stops it. From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} HOST"
    )
    with server:
        server.serve_forever()


def page_handler(render: Callable[[], str], path: str) -> type[BaseHTTPRequestHandler]:
    """Return a handler that serves the current page at `path`, and nothing else."""
    from http import HTTPStatus
    from http.server import BaseHTTPRequestHandler

    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not secrets.compare_digest(self.path.encode(), path.encode()):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            content = render().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Log no requests."""

    return PageHandler
