"""`ftkit runs sync`: copy a run to an object store or a folder."""

from __future__ import annotations

import time

import click

from ftkit.cli.arguments import RUN_HELP, get_run, run_argument
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import PrerequisiteError


@click.command(
    "sync",
    cls=ExamplesCommand,
    short_help="Copy a run to an object store or a folder.",
    examples=("ftkit runs sync last ./copies", "ftkit runs sync demo ./copies --watch"),
    help=f"""Copy a run's complete checkpoints and exports to DEST/RUN, with what 'ftkit resume DEST/RUN' needs.

    DEST is s3://bucket/prefix, gs://bucket/prefix or a folder; default: the recipe's 'sync'. Existing files are not
    copied again. Each file is compared with the original by digest. Nothing is deleted there.

    {RUN_HELP}
    """,
)
@run_argument
@click.argument("destination", metavar="[DEST]", required=False)
@click.option("--watch", "does_watch", is_flag=True, help="Keep copying until the run has ended.")
def command(reference: str, destination: str | None, *, does_watch: bool) -> None:
    """Copy a run."""
    from ftkit.launch.job_states import observe
    from ftkit.planning.plan import read_plan
    from ftkit.runs.storage.sync import RunCopy

    terminal, run = Terminal(), get_run(reference)
    destination = destination or read_plan(run.layout).recipe.sync
    if destination is None:
        raise click.UsageError(f"give DEST: the recipe of {run.id} has no 'sync'", click.get_current_context())
    submitted = run.submitted
    copy = RunCopy(run.layout, destination, terminal.say)

    def is_over() -> bool:
        return not does_watch or submitted is None or observe(submitted).is_final

    status = copy.follow(is_over, time.sleep)
    if status.error:
        raise PrerequisiteError(
            f"{len(status.waiting)} of {len(status.waiting) + len(status.done)} parts are not copied: {status.error}",
            fix=f"repeat the command: ftkit runs sync {run.id} {destination}",
        )
    terminal.data(f"{status.destination}\n")
