"""Shell completion of names. It never fails: without completions if a file is damaged."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ftkit.config.context import Context, list_images, list_names, read_settings_layers, workspace_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    import click

_NUM_RUNS = 50


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a recipe."""
    del ctx, param
    return _starting_with(incomplete, list_names("recipe", Context.here()))


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a cluster profile."""
    del ctx, param
    return _starting_with(incomplete, list_names("cluster", Context.here()))


def complete_image(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an image."""
    del ctx, param
    return _starting_with(incomplete, list_images(Context.here()))


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name or id of one of the newest runs."""
    del ctx, param
    with suppress(Exception):
        from ftkit.planning.layout import Workspace
        from ftkit.runs.find import list_runs

        here = Context.here()
        workspace = Workspace(workspace_folder(read_settings_layers(here, ["workspace"]), here))
        runs = list_runs(workspace)[:_NUM_RUNS]
        return _starting_with(incomplete, ["last", *(run.name for run in runs), *(run.id for run in runs)])
    return []


def _starting_with(incomplete: str, words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete)))
