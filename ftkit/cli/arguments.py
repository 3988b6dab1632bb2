"""The arguments that commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftkit.cli.shell_completion import complete_cluster, complete_image, complete_recipe, complete_run
from ftkit.config.context import Context
from ftkit.errors import FtkitError, NotFoundError
from ftkit.launch.resolve import RunArgs, read_settings, resolve_workspace
from ftkit.runs.find import RunFolder, find_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.cli.terminal.console import Terminal
    from ftkit.planning.layout import Workspace
    from ftkit.runs.submission import SubmittedRun

SpecT = TypeVar("SpecT")

_WHAT_TO_RUN = (
    click.argument("words", metavar="[RECIPE] [KEY.PATH=VALUE]...", nargs=-1, shell_complete=complete_recipe),
    click.option(
        "--image",
        metavar="NAME:TAG",
        shell_complete=complete_image,
        help="Training image: one that 'ftkit images' lists, a .sqsh or .sif file, or HOST/PATH:TAG in a registry.",
    ),
    click.option("--nodes", "num_nodes", metavar="N", type=click.IntRange(min=1), help="Nodes to train on."),
    click.option("--gpus-per-node", metavar="N", type=click.IntRange(min=1), help="GPUs, and so processes, on each."),
    click.option(
        "--cluster", metavar="NAME", shell_complete=complete_cluster, help="Where to run; 'ftkit clusters' lists them."
    ),
    click.option("--name", metavar="NAME", help="Name of the run; the recipe's if not given."),
)


def _use_token_file(_context: click.Context, _option: click.Parameter, path: Path | None) -> None:
    """Name the file to the job, whose script reads it: until then the token is in no variable of a process."""
    if path is not None:
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            os.environ.pop(variable, None)
        os.environ["HF_TOKEN_PATH"] = str(path)


hf_token_option = click.option(
    "--hf-token-file",
    metavar="PATH",
    type=click.Path(exists=True, dir_okay=False, readable=True, resolve_path=True, path_type=Path),
    callback=_use_token_file,
    expose_value=False,
    help="File with the token for gated models; the job must see it too. Instead of HF_TOKEN.",
)
follow_option = click.option(
    "--follow/--no-follow", default=True, help="Watch the run until it ends (default), or return at once."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
run_argument = click.argument("reference", metavar="RUN", shell_complete=complete_run)

RUN_HELP = (
    "RUN is a name (the newest run of that name), an id or the beginning or end of one, a Slurm job id, or 'last'."
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that say what to run and where."""
    for decorate in reversed(_WHAT_TO_RUN):
        function = decorate(function)
    return function


def run_args(words: Sequence[str], **options: Any) -> RunArgs:
    """Tell the recipe from the overrides.

    Raises:
        UsageError: there is more than one recipe.
    """
    overrides = tuple(word for word in words if "=" in word)
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise click.UsageError(
            f"one recipe, please: got {', '.join(repr(word) for word in recipes)}. "
            "An override is written key.path=value, without spaces.",
            click.get_current_context(),
        )
    return RunArgs(recipe=recipes[0] if recipes else None, overrides=overrides, **options)


def current_workspace() -> Workspace:
    """Return the workspace that the settings name."""
    ctx = Context.here()
    return resolve_workspace(read_settings(RunArgs(), ctx), ctx)


def get_run(reference: str) -> RunFolder:
    """Return the run that was meant."""
    return find_run(reference, current_workspace())


def get_submitted_run(reference: str) -> SubmittedRun:
    """Return the run that was meant, with its job.

    Raises:
        NotFoundError: it has none.
    """
    folder = get_run(reference)
    run = folder.submitted
    if run is None:
        raise NotFoundError(
            f"{folder.id} was never submitted",
            meaning="the scheduler gave no clear answer when it was, or the folder is damaged",
            fix=f"submit it with 'ftkit resume {folder.id}'",
        )
    return run


def load_all(names: Sequence[str], load: Callable[[str], SpecT], terminal: Terminal) -> list[tuple[str, SpecT]]:
    """Read what a listing shows; warn of what can't be read."""
    loaded = []
    for name in names:
        try:
            loaded.append((name, load(name)))
        except FtkitError as error:
            terminal.warn(f"passed over {name}: {error}")
    return loaded
