"""`ftkit cluster list`: list cluster profiles."""

from __future__ import annotations

import click

from ftkit.cli.arguments import json_option, load_all
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Column, Styled, Terminal
from ftkit.config.context import Context, list_names


@click.command(
    "list",
    cls=ExamplesCommand,
    short_help="List cluster profiles.",
    examples=("ftkit cluster list", "ftkit cluster list --json"),
)
@json_option
def command(*, as_json: bool) -> None:
    """List the cluster profiles of the project, of your configuration, and of ftkit."""
    from ftkit.config.load import load_cluster
    from ftkit.config.request import load_settings

    terminal, ctx = Terminal(), Context.here()
    chosen = load_settings(ctx).settings.cluster
    profiles = load_all(list_names("cluster", ctx), lambda name: load_cluster(name, ctx), terminal)
    if as_json:
        terminal.json(
            [
                {"name": name, "is_default": name == chosen, **profile.model_dump(mode="json")}
                for name, profile in profiles
            ]
        )
        return
    terminal.table(
        (
            Column("NAME"),
            Column("SCHEDULER"),
            Column("GPUS/NODE", is_number=True),
            Column("DESCRIPTION", can_shrink=True),
        ),
        [
            (
                Styled(f"{name} (default)", "bold") if name == chosen else name,
                profile.scheduler,
                "auto" if profile.device == "auto" else str(profile.gpus_per_node),
                profile.description,
            )
            for name, profile in profiles
        ],
    )
