"""Open the data of a recipe for a command."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ftkit.cli.arguments import run_args
from ftkit.cli.commands import current_context
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.cli.terminal.console import Terminal
    from ftkit.data.inspection import DataInspector
    from ftkit.planning.plan import RunPlan


def open_data(terminal: Terminal, words: Sequence[str], **options: Any) -> tuple[RunPlan, DataInspector]:
    """Plan the run, read its training rows and load its tokenizer.

    Raises:
        PrerequisiteError: a package that tokenizes is missing here.
    """
    from ftkit.launch.resolve import resolve

    missing = [name for name in ("transformers", "tokenizers", "numpy") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"'ftkit data' needs packages that are not installed: {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'",
        )
    from ftkit.data.inspection import DataInspector
    from ftkit.data.prepare import open_encoder

    plan = resolve(run_args(words, **options), current_context())
    return plan, DataInspector(plan.recipe, open_encoder(plan.recipe, terminal.say), terminal.say)
