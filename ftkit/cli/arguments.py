"""Arguments and options that several commands share, and the workspace, runs, and images that they select.

The shell completes commands with this module, so pydantic is imported only when a command runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar, Unpack

import click

from ftkit.cli.commands import current_context
from ftkit.config.context import Context, list_images, list_names, read_settings_layers, workspace_folder
from ftkit.errors import ConfigError, FtkitError, NotFoundError, PrerequisiteError, Problem
from ftkit.planning.layout import Workspace
from ftkit.runs.find import RunFolder, find_run, list_runs
from ftkit.runs.signing import require_signing_key

if TYPE_CHECKING:
    from ftkit.cli.terminal.console import Terminal
    from ftkit.config.request import LoadedSettings
    from ftkit.images.image_store import ImageStore
    from ftkit.launch.code import CodeCopy
    from ftkit.launch.resolve import RunArgs
    from ftkit.planning.plan import CodePlan
    from ftkit.runs.job import SubmittedRun
    from ftkit.runs.listing import RunEntry

Completion = Callable[[click.Context, click.Parameter, str], list[str]]
Decorator = Callable[[Callable[..., object]], Callable[..., object]]
SpecT = TypeVar("SpecT")
_NUM_RUNS = 50

# --- Shell completion ---------------------------------------------------------------------------


def _completing(find: Callable[[Context], Sequence[str]]) -> Completion:
    return lambda _ctx, _param, incomplete: [name for name in find(Context.here()) if name.startswith(incomplete)]


complete_recipe = _completing(lambda ctx: list_names("recipe", ctx))
complete_cluster = _completing(lambda ctx: list_names("cluster", ctx))
complete_image = _completing(list_images)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    with suppress(Exception):
        runs = list_runs(_workspace_of_files())[:_NUM_RUNS]
        words = dict.fromkeys(["last", *(run.name for run in runs), *(run.id for run in runs)])
        return [word for word in words if word.startswith(incomplete)]
    return []


def complete_run_step(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a run as `complete_run` does, or after `@` one of its steps."""
    name, at, step = incomplete.rpartition("@")
    if not at:
        return complete_run(ctx, param, incomplete)
    with suppress(Exception):
        steps = [str(step) for step, _ in find_run(name, _workspace_of_files()).layout.list_checkpoints()]
        return [f"{name}@{each}" for each in ("best", "last", *steps) if each.startswith(step)]
    return []


def _workspace_of_files() -> Workspace:
    here = Context.here()
    return Workspace(workspace_folder(read_settings_layers(here, ["workspace"]), here))


def complete_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a recipe, the next part of an override's key, or its value."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={word}" for word in _words_of_overrides().get(key, []) if word.startswith(value)]
    if not ctx.params.get("words") and "." not in incomplete:
        return complete_recipe(ctx, param, incomplete)
    parts: dict[str, None] = {}
    for key in _words_of_overrides():
        if key.startswith(incomplete):
            section, dot, _ = key[len(incomplete) :].partition(".")
            parts[f"{incomplete}{section}{dot or '='}"] = None
    return [*parts]


def _words_of_overrides() -> dict[str, list[str]]:
    from ftkit.config.problems import words_of_overrides
    from ftkit.config.recipe import RecipeSpec

    return words_of_overrides(RecipeSpec)


# --- Shared arguments and options ------------------------------------------------------------------


def together(*options: Decorator) -> Decorator:
    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def number_option(
    *names: str, about: str, low: int = 1, high: int | None = None, default: int | None = None
) -> Decorator:
    return click.option(*names, metavar="N", type=click.IntRange(low, high), default=default, help=about)


def file_option(*names: str, about: str, exists: bool = True) -> Decorator:
    return click.option(*names, metavar="FILE", type=click.Path(exists, dir_okay=False, path_type=Path), help=about)


def folder_option(
    *names: str, about: str, exists: bool = True, multiple: bool = False, is_resolved: bool = False
) -> Decorator:
    kind = click.Path(exists, file_okay=False, resolve_path=is_resolved, path_type=Path)
    return click.option(*names, metavar="DIR", type=kind, multiple=multiple, help=about)


def dry_run_option(printed: str) -> Decorator:
    return click.option("--dry-run", is_flag=True, help=f"Print {printed}, and change nothing.")


def image_option(about: str) -> Decorator:
    return click.option("--image", metavar="NAME:TAG", shell_complete=complete_image, help=about)


def check_run_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Validate the name of a run, which folders and Slurm jobs get; its form is that of a recipe's name."""
    if value is None:
        return None
    from ftkit.spec import check_name

    try:
        return check_name(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}, got {value!r}.", ctx, param) from error


def name_option(default: str) -> Decorator:
    return click.option("--name", metavar="NAME", callback=check_run_name, help=f"Name of the run; default: {default}.")


def time_option(default: str) -> Decorator:
    return click.option(
        "--time", "time_limit", metavar="LIMIT", help=f"Time limit in Slurm's format (2-00:00:00); default: {default}."
    )


def signing_options(what: str) -> Decorator:
    return together(
        click.option("--sign", "signs", is_flag=True, help=f"Sign with an SSH key: {what}"),
        file_option("--key", about="Private SSH key for --sign; or a public key whose private key the agent holds."),
    )


def require_signature_option(what: str) -> Decorator:
    return file_option(
        "--require-signature", "public_key",
        about=f"Refuse {what} that is not signed by this public SSH key, or by one of a file of allowed signers.",
    )  # fmt: skip


run_argument = click.argument("reference", metavar="RUN", shell_complete=complete_run)
image_argument = click.argument("reference", metavar="NAME:TAG", shell_complete=complete_image)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", is_flag=True, help="Ask nothing: answer every question with yes.")
output_option = file_option("--output", "-o", about="File to write.", exists=False)
import_option = click.option(
    "--import", "import_missing", is_flag=True, help="Import the image first if it is missing."
)
cluster_option = click.option(
    "--cluster", metavar="NAME", shell_complete=complete_cluster,
    help="Cluster profile ('ftkit cluster list' lists them). [env var: FTKIT_CLUSTER]",
)  # fmt: skip
registry_option = click.option(
    "--registry", metavar="HOST[/PATH]",
    help="Registry to push to and import from; default: 'registry:' in ftkit.yaml. [env var: FTKIT_REGISTRY]",
)  # fmt: skip
hf_token_option = click.option(
    "--hf-token-file", metavar="PATH",
    type=click.Path(exists=True, dir_okay=False, readable=True, resolve_path=True, path_type=Path),
    help="File with the token for gated models. The job reads it too. Replaces HF_TOKEN.",
)  # fmt: skip
follow_option = click.option(
    "--follow/--no-follow", default=True, help="Follow until it ends or answers (default), or return after submitting."
)
placement_options = together(
    number_option("--nodes", "num_nodes", about="Number of nodes."),
    number_option("--gpus-per-node", about="GPUs per node, one process each."),
    number_option("--processes-per-node", about="Processes per node, without GPUs."),
    cluster_option,
)
run_options = together(
    click.argument("words", metavar="[RECIPE] [KEY.PATH=VALUE]...", nargs=-1, shell_complete=complete_words),
    image_option(
        "Training image: one that 'ftkit images' lists, a .sqsh or .sif file, or HOST/PATH:TAG in a registry. "
        "[env var: FTKIT_IMAGE]"
    ),
    placement_options,
    name_option("the recipe's name"),
)
"""What to run, and where: the arguments of `run_args`."""


class PlacementOptions(TypedDict):
    """Values of `placement_options`."""

    num_nodes: int | None
    gpus_per_node: int | None
    processes_per_node: int | None
    cluster: str | None


class RunOptions(PlacementOptions):
    """Values of `run_options`, without the words."""

    image: str | None
    name: str | None


# --- What they select ------------------------------------------------------------------------------


def usage_error(text: str) -> click.UsageError:
    """Return an error that also prints the usage of the command."""
    return click.UsageError(text, click.get_current_context())


def run_args(words: Sequence[str], *, code: tuple[CodePlan, ...] = (), **options: Unpack[RunOptions]) -> RunArgs:
    """Separate the recipe from the overrides."""
    from ftkit.launch.resolve import RunArgs

    overrides = tuple(word for word in words if "=" in word)
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        listed = ", ".join(map(repr, recipes))
        raise usage_error(f"expected one recipe, got {listed}. Write an override as key.path=value, without spaces.")
    return RunArgs(recipe=recipes[0] if recipes else None, overrides=overrides, code=code, **options)


def job_environment(hf_token_file: Path | None) -> dict[str, str]:
    """Return the environment of the job and of requests to the hub.

    With a token file, it contains only the path: the job script reads the token, so that no process list shows it.
    """
    environment = dict(os.environ)
    if hf_token_file is not None:
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            environment.pop(variable, None)
        environment["HF_TOKEN_PATH"] = str(hf_token_file)
    return environment


def current_settings() -> LoadedSettings:
    """Return the settings from files and variables, without the command's options."""
    from ftkit.config.request import load_settings

    return load_settings(current_context())


def current_workspace() -> Workspace:
    return Workspace(current_settings().workspace_folder(current_context()))


def get_run(reference: str) -> RunFolder:
    """Return the run that `reference` selects; a usage error if it selects a step."""
    folder, step = get_run_step(reference)
    if step:
        raise usage_error(f"'{reference}' is a step of {folder.id}, and the command takes a run")
    return folder


def get_run_step(reference: str) -> tuple[RunFolder, str]:
    from ftkit.runs.compare import find_run_step

    return find_run_step(reference, current_workspace())


def get_sweep(reference: str) -> list[RunEntry]:
    """Return the runs of the sweep with that id or name; empty if there is no such sweep."""
    from ftkit.runs.listing import find_sweep

    return find_sweep(reference, current_workspace())


def get_run_or_sweep(reference: str) -> list[RunFolder]:
    """Return the run that `reference` selects; if there is none, the runs of the sweep with that id or name."""
    try:
        return [get_run(reference)]
    except NotFoundError:
        folders = [entry.folder for entry in get_sweep(reference)]
        if not folders:
            raise
        return folders


def get_runs(references: Sequence[str]) -> list[RunFolder]:
    """Return the selected runs without duplicates; the name of a sweep selects all of its runs.

    A single reference that matches both a run and a sweep selects the sweep, since a comparison needs two runs.
    """
    found: dict[str, RunFolder] = {}
    for reference in references:
        sweep = [entry.folder for entry in get_sweep(reference)] if len(references) == 1 else []
        found |= {folder.id: folder for folder in sweep or get_run_or_sweep(reference)}
    return list(found.values())


def get_submission(folder: RunFolder) -> SubmittedRun:
    """Return a run with its job; NoAnswerError if Slurm can't tell whether it accepted one."""
    from ftkit.launch.submission import find_submission
    from ftkit.runs.job import SubmittedRun

    submission, unasked = None, ""
    try:
        submission = find_submission(folder.layout)
    except PrerequisiteError as error:
        unasked = f"; Slurm can't be asked if it has a job of it: {error.what}"
    if submission is None:
        raise NotFoundError(
            f"{folder.id} was never submitted",
            meaning=f"the scheduler gave no clear answer to the submission, or the folder is damaged{unasked}",
            fix=f"submit it with 'ftkit resume {folder.id}'",
        )
    return SubmittedRun(folder.layout, submission)


def load_all(names: Sequence[str], load: Callable[[str], SpecT], terminal: Terminal) -> list[tuple[str, SpecT]]:
    loaded = []
    for name in names:
        try:
            loaded.append((name, load(name)))
        except FtkitError as error:
            terminal.warn(f"skipped {name}: {error}")
    return loaded


def image_store() -> ImageStore:
    from ftkit.images.image_store import ImageStore

    return ImageStore(current_workspace().images)


def registry_of(option: str | None) -> str | None:
    return option or current_settings().settings.registry


def required_registry(option: str | None, reference: str) -> str:
    registry = registry_of(option)
    if not registry:
        fix = (
            f"Give --registry HOST/PATH (such as ghcr.io/you), or set 'registry: HOST/PATH' in ftkit.yaml or "
            f"{current_context().user / 'config.yaml'}. If the cluster's workspace is mounted on this machine, you "
            f"need no registry: ftkit import {reference}"
        )
        raise ConfigError([Problem("", "registry", f"no registry is set to push {reference} to.", fix)])
    return registry


def signing_key(*, signs: bool, key: Path | None) -> Path | None:
    if signs != bool(key):
        raise usage_error("--sign and --key FILE, the private key, require each other")
    if key:
        require_signing_key(key)
    return key


# --- Submitting ---------------------------------------------------------------------------------


class SubmitRequest(NamedTuple):
    """How to submit a run; `command` is the typed command line, for the manifest."""

    command: Sequence[str]
    environment: Mapping[str, str]
    copies: Sequence[CodeCopy]
    where: str = "job"  # data is prepared: in a job, here, or with-training
    import_missing: bool = False


def split_script_args(words: tuple[str, ...], typed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separate the arguments of `ftkit run` from those of the script, which follow the first `--`."""
    args = tuple(typed[typed.index("--") + 1 :]) if "--" in typed else ()
    return words[: len(words) - len(args)], args
