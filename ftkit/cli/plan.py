"""`ftkit plan`: what a run would be."""

from __future__ import annotations

import os
from typing import Any

import click

from ftkit.cli.arguments import json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.plan_view import plan_facts, show_findings
from ftkit.config.context import Context
from ftkit.errors import NotFoundError
from ftkit.launch.preflight import check_image, run_checks
from ftkit.launch.resolve import resolve
from ftkit.planning.plan import plan_to_json


@click.command(
    "plan",
    cls=ExamplesCommand,
    short_help="Show what a run would be, and check that it fits.",
    examples=(
        "ftkit plan demo",
        "ftkit plan --image olmo3:25.02 --cluster mycluster --nodes 2",
        "ftkit plan demo training.global_batch_size=64 --json",
    ),
)
@run_options
@json_option
def command(words: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Show what a run would be, and check that it fits. Nothing is written or submitted.

    Takes the arguments of 'ftkit run', and ends as that would if files, weights, data, packages or memory
    are not there. An image that is not imported yet is a warning.
    """
    terminal = Terminal()
    plan = resolve(run_args(words, **options), Context.here())
    if as_json:
        terminal.data(plan_to_json(plan))
    else:
        terminal.facts(plan_facts(plan), is_data=True)
    try:
        check_image(plan)
    except NotFoundError as error:
        terminal.warn(f"{error.what}; {error.fix}")
    show_findings(run_checks(plan, os.environ), terminal)
