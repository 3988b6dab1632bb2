"""`ftkit config recipes`: list recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import json_option, load_all
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Column, Terminal
from ftkit.cli.terminal.format import count
from ftkit.config.context import Context, list_names

if TYPE_CHECKING:
    from ftkit.models.spec import ModelSpec


@click.command(
    "recipes",
    cls=ExamplesCommand,
    short_help="List recipes (model, data, training).",
    examples=("ftkit config recipes", "ftkit config recipes --json"),
)
@json_option
def command(*, as_json: bool) -> None:
    """List the recipes of the project, of your configuration, and of ftkit."""
    from ftkit.config.load import load_recipe

    terminal, ctx = Terminal(), Context.here()
    recipes = load_all(list_names("recipe", ctx), lambda name: load_recipe(name, ctx), terminal)
    if as_json:
        terminal.json([{"name": name, **recipe.model_dump(mode="json")} for name, recipe in recipes])
        return
    terminal.table(
        (Column("NAME"), Column("PARAMETERS", is_number=True), Column("DESCRIPTION", can_shrink=True)),
        [(name, _size(recipe.model), recipe.description) for name, recipe in recipes],
    )


def _size(model: ModelSpec) -> str:
    """Return a model's parameter count; `?` if its shape is not known without the network."""
    from ftkit.config.load import shipped_config
    from ftkit.models.parameters import count_by_config, count_model
    from ftkit.models.spec import ArchitectureSpec

    shape = model.architecture
    if isinstance(shape, ArchitectureSpec):
        return count(count_model(shape).total)
    config = shipped_config(model.weights)
    return "?" if config is None else count(count_by_config(config).total)
