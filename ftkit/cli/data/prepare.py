"""`ftkit data prepare`: tokenize and pack data, and download weights, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import hf_token_option, job_environment, run_args, run_options
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Terminal

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "prepare",
    cls=ExamplesCommand,
    short_help="Tokenize and pack data, and download weights.",
    examples=("ftkit data prepare demo", "ftkit data prepare mine.yaml --workers 8"),
)
@run_options
@click.option(
    "--workers", metavar="N", type=click.IntRange(min=1), help="Number of tokenizing processes; default: one per CPU."
)
@hf_token_option
def command(words: tuple[str, ...], *, workers: int | None, hf_token_file: Path | None, **options: Any) -> None:
    """Tokenize and pack the data of a run, and download its weights, before 'ftkit run'.

    Prints the folder of the prepared data. Needs no GPU. Does nothing if the data is already prepared.
    """
    from ftkit.launch.inputs import prepare_here
    from ftkit.launch.resolve import resolve

    terminal = Terminal()
    plan = resolve(run_args(words, **options), current_context())
    prepare_here(plan, job_environment(hf_token_file), terminal.say, workers)
    terminal.data(f"{plan.data_directory}\n")
