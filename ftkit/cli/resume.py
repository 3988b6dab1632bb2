"""`ftkit resume`: submit a run again."""

from __future__ import annotations

import os

import click

from ftkit.cli.arguments import RUN_HELP, follow_option, get_run, hf_token_option, run_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.image_check import require_same_image
from ftkit.cli.run import report_submission
from ftkit.cli.terminal.console import Terminal
from ftkit.launch.jobs import read_resumable_plan, resume
from ftkit.launch.preflight import check_trackers
from ftkit.runs.records import RecordTail


@click.command(
    "resume",
    cls=ExamplesCommand,
    short_help="Submit a run again, from its newest checkpoint.",
    examples=("ftkit resume last", "ftkit resume demo --no-follow"),
    help=f"""Submit a run's own script again; it goes on from its newest checkpoint.

    {RUN_HELP}
    """,
)
@run_argument
@hf_token_option
@follow_option
def command(reference: str, *, follow: bool) -> None:
    """Submit a run again."""
    terminal = Terminal()
    layout = get_run(reference).layout
    tail = RecordTail(layout.metrics, skips_old=True)  # what earlier jobs wrote is not shown again
    plan = read_resumable_plan(layout)
    for warning in check_trackers(plan, os.environ):
        terminal.warn(warning)
    require_same_image(plan, terminal)
    run = resume(plan)
    report_submission(run, terminal, does_follow=follow, tail=tail)
