"""`ftkit config`: show settings and where each one is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit import assets
from ftkit.cli.arguments import json_option
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Cell, Column, Styled, Terminal
from ftkit.cli.terminal.format import short_path

if TYPE_CHECKING:
    from ftkit.config.request import LoadedSettings

_DEFAULT = "default"


@click.command(
    "show",
    cls=ExamplesCommand,
    short_help="Show settings and where each one is set.",
    examples=(
        "ftkit config",
        "FTKIT_CLUSTER=mycluster ftkit config",
        "ftkit config --json | jq -r .settings.workspace.value",
    ),
)
@json_option
def command(*, as_json: bool) -> None:
    """Show the settings, where each one is set, and which files were read.

    Later sources override earlier ones: your config.yaml, the project's ftkit.yaml, FTKIT_* variables, options.
    """
    from ftkit.config.context import DOTENV, read_dotenv
    from ftkit.config.request import load_settings

    terminal, ctx = Terminal(), current_context()
    loaded, variables = load_settings(ctx), sorted(read_dotenv(ctx.project))
    values = loaded.settings.model_dump() | {"workspace": str(loaded.workspace_folder(ctx))}
    if as_json:
        settings = {key: {"value": value, "from": _origin(loaded, key)} for key, value in values.items()}
        files = [{"path": str(path), "is_there": is_there} for path, is_there in loaded.files.items()]
        terminal.json({"settings": settings, "files": files, "project": str(ctx.project), "dotenv": variables})
        return
    terminal.table(
        (Column("SETTING"), Column("VALUE"), Column("FROM")),
        [(key, "-" if value is None else str(value), _origin(loaded, key)) for key, value in values.items()],
    )
    terminal.text(is_data=True)
    found: list[tuple[str, Cell]] = [
        (short_path(path), Styled("read", "green") if is_there else "not found")
        for path, is_there in loaded.files.items()
    ]
    if variables:
        found.append((short_path(ctx.project / DOTENV), f"sets {', '.join(variables)}, unless the environment does"))
    terminal.facts([*found, (short_path(assets.CLUSTERS.parent), "shipped with ftkit")], is_data=True)


def _origin(loaded: LoadedSettings, key: str) -> str:
    return loaded.layers.origins.get((key,), _DEFAULT)
