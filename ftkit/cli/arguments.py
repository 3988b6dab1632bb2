"""Arguments and options that several commands share, and the workspace, runs, and images that they select."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftkit.cli.commands import current_context
from ftkit.config.context import Context, list_images, list_names, read_settings_layers, workspace_folder
from ftkit.errors import ConfigError, FtkitError, NotFoundError, Problem
from ftkit.planning.layout import Workspace
from ftkit.runs.find import find_run, list_runs
from ftkit.runs.signing import require_signing_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ftkit.cli.terminal.console import Terminal
    from ftkit.config.request import Settings
    from ftkit.images.image_store import ImageStore
    from ftkit.launch.resolve import RunArgs
    from ftkit.runs.find import RunFolder
    from ftkit.runs.job import SubmittedRun


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
        here = Context.here()
        workspace = Workspace(workspace_folder(read_settings_layers(here, ["workspace"]), here))
        runs = list_runs(workspace)[:_NUM_RUNS]
        return _starting_with(incomplete, ["last", *(run.name for run in runs), *(run.id for run in runs)])
    return []


def _starting_with(incomplete: str, words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete)))


SpecT = TypeVar("SpecT")

RUN_HELP = (
    "RUN is a name (the newest run with that name), an id or the beginning or end of an id, a Slurm job id, or 'last'."
)


def check_run_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the name of a run, which folders and Slurm jobs get: it has the form of a recipe's name."""
    if value is None:
        return None
    from ftkit.spec import check_name

    try:
        return check_name(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}, got {value!r}.", ctx, param) from error


_PLACEMENT_OPTIONS = (
    click.option("--nodes", "num_nodes", metavar="N", type=click.IntRange(min=1), help="Number of nodes."),
    click.option("--gpus-per-node", metavar="N", type=click.IntRange(min=1), help="GPUs per node, one process each."),
    click.option(
        "--cluster",
        metavar="NAME",
        shell_complete=complete_cluster,
        help="Cluster profile ('ftkit cluster list' lists them). [env var: FTKIT_CLUSTER]",
    ),
)
_RUN_OPTIONS = (
    click.argument("words", metavar="[RECIPE] [KEY.PATH=VALUE]...", nargs=-1, shell_complete=complete_recipe),
    click.option(
        "--image",
        metavar="NAME:TAG",
        shell_complete=complete_image,
        help="Training image: one that 'ftkit images' lists, a .sqsh or .sif file, or HOST/PATH:TAG in a registry. "
        "[env var: FTKIT_IMAGE]",
    ),
    *_PLACEMENT_OPTIONS,
    click.option(
        "--name", metavar="NAME", callback=check_run_name, help="Name of the run; default: the recipe's name."
    ),
)

hf_token_option = click.option(
    "--hf-token-file",
    metavar="PATH",
    type=click.Path(exists=True, dir_okay=False, readable=True, resolve_path=True, path_type=Path),
    help="File with the token for gated models. The job reads it too. Replaces HF_TOKEN.",
)
follow_option = click.option(
    "--follow/--no-follow", default=True, help="Follow the run until it ends (default), or return after submitting."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
run_argument = click.argument("reference", metavar="RUN", shell_complete=complete_run)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that select what to run and where."""
    return _decorated(function, _RUN_OPTIONS)


def placement_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select where to run."""
    return _decorated(function, _PLACEMENT_OPTIONS)


def _decorated(function: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    for decorate in reversed(options):
        function = decorate(function)
    return function


def run_args(words: Sequence[str], **options: Any) -> RunArgs:
    """Separate the recipe from the overrides.

    Raises:
        UsageError: there is more than one recipe.
    """
    from ftkit.launch.resolve import RunArgs

    overrides = tuple(word for word in words if "=" in word)
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise click.UsageError(
            f"expected one recipe, got {', '.join(repr(word) for word in recipes)}. "
            "Write an override as key.path=value, without spaces.",
            click.get_current_context(),
        )
    return RunArgs(recipe=recipes[0] if recipes else None, overrides=overrides, **options)


def job_environment(hf_token_file: Path | None) -> dict[str, str]:
    """Return the environment of the job and of requests to the hub.

    With a token file, it has only the path: the job script reads the token, so that no process list shows it.
    """
    environment = dict(os.environ)
    if hf_token_file is not None:
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            environment.pop(variable, None)
        environment["HF_TOKEN_PATH"] = str(hf_token_file)
    return environment


def current_settings() -> Settings:
    """Return the settings from files and variables, without the command's options."""
    from ftkit.config.request import load_settings

    return load_settings(current_context()).settings


def current_workspace() -> Workspace:
    """Return the workspace from the settings."""
    from ftkit.config.request import load_settings

    ctx = current_context()
    return Workspace(load_settings(ctx).workspace_folder(ctx))


def get_run(reference: str) -> RunFolder:
    """Return the run that `reference` selects."""
    return find_run(reference, current_workspace())


def get_run_or_sweep(reference: str) -> list[RunFolder]:
    """Return the run that `reference` selects; if there is none, the runs of the sweep with that id or name.

    Raises:
        NotFoundError: there is no such run or sweep.
    """
    from ftkit.runs.listing import find_sweep

    try:
        return [get_run(reference)]
    except NotFoundError:
        folders = [entry.folder for entry in find_sweep(reference, current_workspace())]
        if not folders:
            raise
        return folders


def get_runs(references: Sequence[str]) -> list[RunFolder]:
    """Return the selected runs without duplicates; the name of a sweep selects all of its runs.

    If a single reference could be a run or a sweep, it selects the sweep, since a comparison needs two runs.

    Raises:
        NotFoundError: there is no such run or sweep.
    """
    from ftkit.runs.listing import find_sweep

    found: dict[str, RunFolder] = {}
    for reference in references:
        sweep = [entry.folder for entry in find_sweep(reference, current_workspace())] if len(references) == 1 else []
        found |= {folder.id: folder for folder in sweep or get_run_or_sweep(reference)}
    return list(found.values())


def get_submitted_run(reference: str) -> SubmittedRun:
    """Return the run that `reference` selects, with its job.

    Raises:
        NotFoundError: the run has no job.
    """
    return get_submission(get_run(reference))


def get_submission(folder: RunFolder) -> SubmittedRun:
    """Return a run with its job.

    Raises:
        NotFoundError: it has no job.
    """
    from ftkit.launch.jobs import adopt_job
    from ftkit.runs.job import SubmittedRun

    if run := folder.submitted:
        return run
    submission, unasked = None, ""
    try:
        submission = adopt_job(folder.layout)
    except FtkitError as error:
        unasked = f"; Slurm can't be asked if it has a job of it: {error.what}"
    if submission is None:
        raise NotFoundError(
            f"{folder.id} was never submitted",
            meaning=f"the scheduler gave no clear answer to the submission, or the folder is damaged{unasked}",
            fix=f"submit it with 'ftkit resume {folder.id}'",
        )
    return SubmittedRun(folder.layout, submission)


def load_all(names: Sequence[str], load: Callable[[str], SpecT], terminal: Terminal) -> list[tuple[str, SpecT]]:
    """Load the specs for a listing; warn about files that can't be read."""
    loaded = []
    for name in names:
        try:
            loaded.append((name, load(name)))
        except FtkitError as error:
            terminal.warn(f"skipped {name}: {error}")
    return loaded


image_argument = click.argument("reference", metavar="NAME:TAG", shell_complete=complete_image)
registry_option = click.option(
    "--registry",
    metavar="HOST[/PATH]",
    help="Registry to push to and import from; default: 'registry:' in ftkit.yaml. [env var: FTKIT_REGISTRY]",
)


def image_store(workspace: Workspace | None = None) -> ImageStore:
    """Return the folder of imported images."""
    from ftkit.images.image_store import ImageStore

    return ImageStore((workspace or current_workspace()).images)


def registry_of(option: str | None) -> str | None:
    """Return the registry of the command line, else of the settings."""
    from ftkit.config.request import load_settings

    return option or load_settings(current_context()).settings.registry


def required_registry(option: str | None, reference: str) -> str:
    """Return the registry to push an image to.

    Raises:
        ConfigError: neither the command line nor a file sets one.
    """
    registry = registry_of(option)
    if not registry:
        user = current_context().user / "config.yaml"
        raise ConfigError(
            [Problem("", "registry", f"no registry is set to push {reference} to.",
                     f"Give --registry HOST/PATH (such as ghcr.io/you), or set 'registry: HOST/PATH' in ftkit.yaml "
                     f"or {user}. If the cluster's workspace is mounted on this machine, you need no registry: "
                     f"ftkit import {reference}")]
        )  # fmt: skip
    return registry


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def signing_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--sign` and `--key`; `what` completes the help of `--sign`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        key = click.option(
            "--key",
            metavar="FILE",
            type=_FILE,
            help="Private SSH key for --sign; or a public key whose private key the agent holds.",
        )
        sign = click.option("--sign", "signs", is_flag=True, help=f"Sign with an SSH key: {what}")
        return sign(key(function))

    return decorate


def require_signature_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--require-signature`, which refuses an unsigned `what`."""
    return click.option(
        "--require-signature",
        "public_key",
        metavar="KEY",
        type=_FILE,
        help=f"Refuse {what} that is not signed by this public SSH key, or by one of a file of allowed signers.",
    )


def signing_key(*, signs: bool, key: Path | None) -> Path | None:
    """Return the key to sign with; None if nothing is to be signed.

    Raises:
        UsageError: the options contradict each other.
        PrerequisiteError: it is no SSH key, or ssh-keygen is missing.
    """
    if signs and key is None:
        raise click.UsageError("--sign requires --key FILE, the private key", click.get_current_context())
    if not signs and key:
        raise click.UsageError("--key requires --sign", click.get_current_context())
    if key:
        require_signing_key(key)
    return key
