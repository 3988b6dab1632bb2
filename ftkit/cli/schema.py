"""`ftkit config schema`: print a JSON schema, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ftkit import assets
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal

if TYPE_CHECKING:
    from ftkit.spec import Spec


@click.command(
    "schema",
    cls=ExamplesCommand,
    short_help="Print a JSON schema for editors.",
    examples=(
        "ftkit config schema recipe > recipe.schema.json",
        "# and at the top of a recipe, for editors with the YAML language server:",
        "# yaml-language-server: $schema=recipe.schema.json",
    ),
)
@click.argument("kind", type=click.Choice(["recipe", "cluster", "image"]))
def command(kind: str) -> None:
    """Print the JSON schema of recipe, cluster or image files."""
    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.spec import Spec

    for spec in _subclasses(Spec):
        spec.model_rebuild()  # pydantic 2.12 writes a default only if the validator of its class is built
    specs: dict[str, type[Spec]] = {"recipe": RecipeSpec, "cluster": ClusterProfile, "image": ImageSpec}
    schema = _without_required(specs[kind].model_json_schema())
    if kind != "image":
        schema["properties"]["extends"] = {
            "type": "string",
            "description": f"Name of the {kind} that this one extends.",
        }
    if kind == "recipe":
        shape = schema["$defs"]["ModelSpec"]["properties"]["architecture"]
        shipped = sorted(path.stem for path in assets.ARCHITECTURES.glob("*.yaml"))
        shape["anyOf"] = [{"enum": shipped}, {"$ref": shape.pop("$ref")}]
    Terminal().json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def _subclasses(spec: type[Spec]) -> list[type[Spec]]:
    return [each for child in spec.__subclasses__() for each in (child, *_subclasses(child))]


def _without_required(schema: Any) -> Any:
    """Drop `required`: a file that extends another sets only some keys. ftkit validates the merged result."""
    if isinstance(schema, dict):
        return {
            ("anyOf" if key == "oneOf" else key): _without_required(value)
            for key, value in schema.items()
            if key not in ("required", "discriminator") or not isinstance(value, list | dict)
        }
    return [_without_required(part) for part in schema] if isinstance(schema, list) else schema
