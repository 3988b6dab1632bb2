"""What the shell offers after TAB. Nothing here may fail: a broken file gives no words, not an error."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ftkit.config.context import Context, list_images, list_names
from ftkit.launch.resolve import RunArgs, read_settings, resolve_workspace
from ftkit.runs.find import list_runs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import click

_NUM_RUNS = 50


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the recipes."""
    del ctx, param
    return _starting(list_names("recipe", Context.here()), incomplete)


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the clusters."""
    del ctx, param
    return _starting(list_names("cluster", Context.here()), incomplete)


def complete_image(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the images."""
    del ctx, param
    return _starting(list_images(Context.here()), incomplete)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names and ids of the newest runs."""
    del ctx, param
    with suppress(Exception):
        here = Context.here()
        runs = list_runs(resolve_workspace(read_settings(RunArgs(), here), here))[:_NUM_RUNS]
        return _starting(["last", *(run.name for run in runs), *(run.id for run in runs)], incomplete)
    return []


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete)))
