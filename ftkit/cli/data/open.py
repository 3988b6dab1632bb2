"""Open the data of a recipe for a command."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ftkit.cli.commands import current_context
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from ftkit.cli.terminal.console import Terminal
    from ftkit.data.inspection import DataInspector
    from ftkit.launch.resolve import RunArgs


def open_data(terminal: Terminal, args: RunArgs) -> DataInspector:
    """Resolve the recipe, read its first training rows and load its tokenizer. No cluster is needed.

    Raises:
        PrerequisiteError: a package that tokenizes is missing here.
    """
    from ftkit.launch.resolve import resolve_recipe

    missing = [name for name in ("transformers", "tokenizers", "numpy") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"'ftkit data' needs packages that are not installed: {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'",
        )
    from ftkit.data.inspection import DataInspector
    from ftkit.data.prepare import open_encoder

    recipe = resolve_recipe(args, current_context())
    return DataInspector(recipe, open_encoder(recipe, terminal.say), terminal.say)
