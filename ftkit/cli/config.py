"""`ftkit config`: settings, recipes, JSON schemas for editors, and the completion script of shells."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete, ZshComplete

from ftkit import assets
from ftkit.cli.arguments import json_option, load_all
from ftkit.cli.commands import BashCompletion, command, current_context
from ftkit.cli.main import COMPLETE_VARIABLE, PROGRAM, cli
from ftkit.cli.terminal.console import Facts, Styled, Terminal
from ftkit.cli.terminal.format import count, short_path
from ftkit.config.cluster import ClusterProfile
from ftkit.config.context import DOTENV, Context, list_names, read_dotenv
from ftkit.config.image import ImageSpec
from ftkit.config.layers import COMMAND_LINE
from ftkit.config.load import load_recipe, shipped_config
from ftkit.config.recipe import RecipeSpec
from ftkit.config.request import LoadedSettings, load_settings
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.models.parameters import count_by_config, count_model
from ftkit.spec import Spec

_SCRIPT_EDITS = {
    "bash": {
        'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD':
            'COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS"',
        "    return 0\n": "    [[ ${COMPREPLY[0]} == *[.=] ]] && compopt -o nospace\n    return 0\n",
    },
    "zsh": {"compadd -U": 'compadd -U -S "${${completions[1]:#*[.=]}:+ }"'},
}  # fmt: skip
"""Changes to click's scripts: bash passes the line unsplit, and adds no space after a part of an override."""


@command(
    "show",
    "ftkit config",
    "FTKIT_CLUSTER=mycluster ftkit config",
    "ftkit config --json | jq -r .settings.workspace.value",
)
@json_option
def show_command(*, as_json: bool) -> None:
    """Show the settings, where each one is set, and which files were read.

    Later sources override earlier ones: your config.yaml, the project's ftkit.yaml, FTKIT_* variables, options.
    """
    terminal, ctx = Terminal(), current_context()
    loaded, variables = load_settings(ctx), sorted(read_dotenv(ctx.project))
    values = loaded.settings.model_dump() | {"workspace": str(loaded.workspace_folder(ctx))}
    if as_json:
        settings = {key: {"value": value, "from": _origin(loaded, key)} for key, value in values.items()}
        files = [{"path": str(path), "is_there": is_there} for path, is_there in loaded.files.items()]
        terminal.json({"settings": settings, "files": files, "project": str(ctx.project), "dotenv": variables})
        return
    rows = [(key, "-" if value is None else str(value), _origin(loaded, key)) for key, value in values.items()]
    terminal.table(("SETTING", "VALUE", "FROM"), rows)
    terminal.text()
    found: Facts = [
        (short_path(path), Styled("read", "green") if is_there else "not found")
        for path, is_there in loaded.files.items()
    ]
    if variables:
        found.append((short_path(ctx.project / DOTENV), f"sets {', '.join(variables)}, unless the environment does"))
    terminal.facts([*found, (short_path(assets.CLUSTERS.parent), "shipped with ftkit")], is_data=True)


def _origin(loaded: LoadedSettings, key: str) -> str:
    origin = loaded.layers.origins.get((key,), "default")
    return f"--{key}" if origin == COMMAND_LINE else origin


@command("recipes", "ftkit config recipes", "ftkit config recipes --json")
@json_option
def recipes_command(*, as_json: bool) -> None:
    """List the recipes of the project, of your configuration, and of ftkit."""
    terminal, ctx = Terminal(), Context.here()
    recipes = load_all(list_names("recipe", ctx), lambda name: load_recipe(name, ctx), terminal)
    if as_json:
        terminal.json([{"name": name, **recipe.model_dump(mode="json")} for name, recipe in recipes])
        return
    rows = [(name, _size(recipe.model), recipe.description) for name, recipe in recipes]
    terminal.table(("NAME", "#PARAMETERS", "DESCRIPTION…"), rows)


def _size(model: ModelSpec) -> str:
    """Return a model's parameter count; `?` if its shape is not known without the network."""
    shape = model.architecture
    if isinstance(shape, ArchitectureSpec):
        return count(count_model(shape).total)
    config = shipped_config(model.weights)
    return "?" if config is None else count(count_by_config(config).total)


@command(
    "schema",
    "ftkit config schema recipe > recipe.schema.json",
    "# and at the top of a recipe, for editors with the YAML language server:",
    "# yaml-language-server: $schema=recipe.schema.json",
)
@click.argument("kind", type=click.Choice(["recipe", "cluster", "image"]))
def schema_command(kind: str) -> None:
    """Print the JSON schema of recipe, cluster or image files."""
    for spec in _subclasses(Spec):
        spec.model_rebuild()  # pydantic 2.12 writes a default only if the validator of its class is built
    specs: dict[str, type[Spec]] = {"recipe": RecipeSpec, "cluster": ClusterProfile, "image": ImageSpec}
    schema = specs[kind].model_json_schema()
    _drop_required(schema)
    if kind != "image":
        about = f"Name of the {kind} that this one extends."
        schema["properties"]["extends"] = {"type": "string", "description": about}
    if kind == "recipe":
        shape = schema["$defs"]["ModelSpec"]["properties"]["architecture"]
        shipped = sorted(path.stem for path in assets.ARCHITECTURES.glob("*.yaml"))
        shape["anyOf"] = [{"enum": shipped}, {"$ref": shape.pop("$ref")}]
    Terminal().json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def _subclasses(spec: type[Spec]) -> list[type[Spec]]:
    return [each for child in spec.__subclasses__() for each in (child, *_subclasses(child))]


def _drop_required(schema: object) -> None:
    """Drop `required`: a file that extends another sets only some keys. ftkit validates the merged result."""
    parts: list[object] = schema if isinstance(schema, list) else []
    if isinstance(schema, dict):
        for key in ("required", "discriminator"):
            if isinstance(schema.get(key), list | dict):
                del schema[key]
        if "oneOf" in schema:
            schema["anyOf"] = schema.pop("oneOf")
        parts = list(schema.values())
    for part in parts:
        _drop_required(part)


@command(
    "completion",
    'eval "$(ftkit config completion bash)"    # in ~/.bashrc',
    'eval "$(ftkit config completion zsh)"     # in ~/.zshrc',
    "ftkit config completion fish > ~/.config/fish/completions/ftkit.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the script that completes commands, recipes, clusters, images and runs after TAB."""
    completions = {"bash": BashCompletion, "zsh": ZshComplete, "fish": FishComplete}
    script = completions[shell](cli, {}, PROGRAM, COMPLETE_VARIABLE).source()
    for before, after in _SCRIPT_EDITS.get(shell, {}).items():
        script = script.replace(before, after)
    Terminal().data(script + "\n")
