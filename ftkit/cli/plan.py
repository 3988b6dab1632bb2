"""`ftkit plan`: preview a run."""

from __future__ import annotations

import os
from typing import Any

import click

from ftkit.cli.arguments import json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Terminal


@click.command(
    "plan",
    cls=ExamplesCommand,
    short_help="Preview a run and check that it fits.",
    examples=(
        "ftkit plan demo",
        "ftkit plan --image olmo3:25.02 --cluster mycluster --nodes 2",
        "ftkit plan demo training.global_batch_size=64 --json",
    ),
)
@run_options
@json_option
def command(words: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Preview a run and check that it fits. Nothing is written or submitted.

    Takes the arguments of 'ftkit run', and fails for the same reasons: missing files, weights, data, packages or
    memory. An image that is not imported yet is only a warning.
    """
    from ftkit.cli.image_check import missing_image
    from ftkit.cli.sweep import show_plans
    from ftkit.cli.terminal.plan_view import plan_facts, show_findings
    from ftkit.launch.inputs import count_documents
    from ftkit.launch.preflight import run_checks
    from ftkit.launch.resolve import resolve
    from ftkit.launch.sweep import expand, plan_sweep
    from ftkit.planning.plan import plan_to_json

    terminal, ctx = Terminal(), current_context()
    args = run_args(words, **options)
    trials = expand(args, ctx)
    if len(trials) > 1:
        plans = count_documents(plan_sweep(trials, ctx), os.environ)
        if as_json:
            terminal.data(f"[{','.join(map(plan_to_json, plans))}]\n")
        else:
            show_plans(plans, terminal, is_data=True)
        for plan in plans:
            show_findings(run_checks(plan, os.environ), terminal)
        return
    (plan,) = count_documents([resolve(args, ctx)], os.environ)
    if as_json:
        terminal.data(plan_to_json(plan))
    else:
        terminal.facts(plan_facts(plan), is_data=True)
    if missing := missing_image(plan):
        terminal.warn(f"{missing.what}; {missing.fix}")
    show_findings(run_checks(plan, os.environ), terminal)
