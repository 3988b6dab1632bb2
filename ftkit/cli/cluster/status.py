"""`ftkit cluster status`: show what was created."""

from __future__ import annotations

import click

from ftkit.cli.arguments import json_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Column, Terminal
from ftkit.cli.terminal.format import short_path


@click.command(
    "status",
    cls=ExamplesCommand,
    short_help="Show what was created.",
    examples=("ftkit cluster status train1", "ftkit cluster status train1 --json"),
)
@click.argument("name")
@json_option
def command(name: str, *, as_json: bool) -> None:
    """Show the completed steps of a cluster, and its current state at the provider."""
    from ftkit import process
    from ftkit.provision.plan import plan_provision
    from ftkit.provision.spec import restore_spec
    from ftkit.provision.state import clusters_folder, read_state
    from ftkit.provision.steps import placed

    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    outcomes = dict.fromkeys(state.found, "existed before") | dict.fromkeys(state.made, "created")
    if state.begun is not None:
        outcomes[state.begun] = "started, not finished"
    if as_json:
        terminal.json(
            {
                "name": name,
                "kind": state.kind,
                "folder": str(folder),
                "settings": state.settings,
                "steps": [
                    {"id": step.id, "title": step.title, "outcome": outcomes.get(step.id)} for step in provision.steps
                ],
            }
        )
        return
    terminal.facts(
        [("cluster", f"{name}, {state.kind}"), ("cost", provision.cost), ("folder", short_path(folder))], is_data=True
    )
    terminal.table(
        (Column("STEP"), Column("WHAT", can_shrink=True), Column("OUTCOME")),
        [(step.id, step.title, outcomes.get(step.id, "not yet")) for step in provision.steps],
    )
    for status_command in provision.status:
        terminal.data(process.run(placed(status_command, folder), timeout_seconds=120, cwd=folder).stdout)
