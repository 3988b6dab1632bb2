"""`ftkit report` and `ftkit compare`: write an HTML page about one or several runs; show runs side by side."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli import arguments
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.page.charts import require_matplotlib
from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import comparison_page, run_page, save_page
from ftkit.cli.terminal.comparison_view import comparison_as_json, show_comparison, show_curves
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import PrerequisiteError, one_line
from ftkit.launch.job_states import observe_all
from ftkit.runs.compare import read_run
from ftkit.runs.job import RunState
from ftkit.runs.listing import read_entry
from ftkit.runs.metrics_file import read_last_record, scan_records
from ftkit.runs.records import EndRecord

if TYPE_CHECKING:
    from ftkit.runs.find import RunFolder

_references_argument = click.argument(
    "references", metavar="RUN...", nargs=-1, required=True, shell_complete=arguments.complete_run
)


@forwarded_command("report", "ftkit report last", "ftkit report demo --output demo.html", "ftkit report demo other")
@_references_argument
@arguments.output_option
@click.option("--live", is_flag=True, help="Serve an up-to-date page on this machine until Ctrl-C.")
@arguments.number_option("--port", low=0, high=65535, default=0, about="Port for --live; default: a free port.")
def report_command(references: tuple[str, ...], *, output: Path | None, live: bool, port: int) -> None:
    """Write an HTML page about a run, or about several side by side.

    It has the plan beside the measurements, curves, memory, time by activity, evaluation, and how to repeat the run.
    The page is one file that needs no network: report.html in the run's folder or, for several runs, comparison.html in
    the current folder. Prints its path.

    {RUN} The id or the name of a sweep selects all of its runs.
    """
    if (output and live) or (port and not live):
        raise arguments.usage_error("--live serves the page, on --port, and writes no --output")
    terminal, folders = Terminal(), arguments.get_runs(references)
    require_matplotlib()
    if live:
        _serve(partial(_render, folders, refresh_seconds=15), port, terminal)
        return
    for folder in folders:
        if problem := scan_records(folder.layout.metrics):
            terminal.warn(f"{folder.id}: {problem}")
    path = output or (folders[0].layout.report if len(folders) == 1 else Path("comparison.html"))
    save_page(_render(folders), path)
    if len(folders) > 1:
        show_curves([read_run(folder.layout) for folder in folders], terminal, is_data=False)
    terminal.data(f"{short_path(path.absolute())}\n")


def _render(folders: Sequence[RunFolder], refresh_seconds: int | None = None) -> str:
    if len(folders) > 1:
        return comparison_page([folder.layout for folder in folders], refresh_seconds=refresh_seconds)
    layout, state = folders[0].layout, RunState.COMPLETED
    last = read_last_record(layout.metrics)
    if not isinstance(last, EndRecord) or last.outcome != "completed":  # else its job may still write this page
        entry = read_entry(folders[0])
        state = observe_all([entry.run] if entry.run else []).state_of(entry).state
    return run_page(read_report(layout, state), refresh_seconds=refresh_seconds)


def _serve(render: Callable[[], str], port: int, terminal: Terminal) -> None:
    """Serve a page on localhost, at an address that other users of the machine can't guess."""
    path = f"/{secrets.token_urlsafe(16)}"
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), page_handler(render, path))
    except OSError as error:
        raise PrerequisiteError(
            f"can't serve on port {port}: {one_line(error)}", fix="omit --port to use a free port"
        ) from error
    port = server.server_port
    terminal.data(f"http://127.0.0.1:{port}{path}\n")
    terminal.say(f"Ctrl-C stops it. From another machine: ssh -L {port}:127.0.0.1:{port} HOST")
    with server:
        server.serve_forever()


def page_handler(render: Callable[[], str], path: str) -> type[BaseHTTPRequestHandler]:
    """Return a handler that serves the current page at `path`, and nothing else."""

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

        def log_message(self, *args: object) -> None: ...

    return PageHandler


@forwarded_command("compare", "ftkit compare demo other", "ftkit compare demo other --json | jq .results")
@_references_argument
@arguments.json_option
def compare_command(references: tuple[str, ...], *, as_json: bool) -> None:
    """Show runs side by side: differences in recipe, data, image, versions and cluster; results; and losses.

    Losses are shown where all have a record: after the same number of tokens, or else at the same step. The last line
    says whether the losses are equal, bit for bit. 'ftkit report' writes a page with the same, and curves.

    {RUN} The id or the name of a sweep selects all of its runs.
    """
    terminal, layouts = Terminal(), [folder.layout for folder in arguments.get_runs(references)]
    if len(layouts) < 2:  # noqa: PLR2004 - a comparison needs two
        raise arguments.usage_error("compare needs at least two different runs")
    runs = [read_run(layout) for layout in layouts]
    if as_json:
        terminal.json(comparison_as_json(runs))
    else:
        show_comparison(runs, terminal)
