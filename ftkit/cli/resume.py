"""`ftkit resume`: submit a run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import RUN_HELP, follow_option, get_run, hf_token_option, job_environment, run_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "resume",
    cls=ExamplesCommand,
    short_help="Submit a run again; it continues from its newest checkpoint.",
    examples=("ftkit resume last", "ftkit resume demo --no-follow"),
    help=f"""Submit a run's own script again; the run continues from its newest checkpoint.

    {RUN_HELP}
    """,
)
@run_argument
@hf_token_option
@follow_option
def command(reference: str, *, hf_token_file: Path | None, follow: bool) -> None:
    """Submit a run again."""
    from ftkit.cli.image_check import require_same_image
    from ftkit.cli.run import report_submission
    from ftkit.launch.jobs import read_resumable_plan, resume
    from ftkit.launch.preflight import check_trackers
    from ftkit.runs.records import RecordTail

    terminal, environment = Terminal(), job_environment(hf_token_file)
    layout = get_run(reference).layout
    tail = RecordTail(layout.metrics, skips_old=True)  # follow shows only what this job writes
    plan = read_resumable_plan(layout)
    for warning in check_trackers(plan, environment):
        terminal.warn(warning)
    require_same_image(plan, terminal)
    run = resume(plan, environment)
    report_submission(run, terminal, does_follow=follow, tail=tail)
