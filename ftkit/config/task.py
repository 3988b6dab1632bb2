"""A task: a Python file of the project with functions that generate, format and score rows.

Loading a recipe reads and parses the file; `ftkit.data.tasks` runs it. The file's text is part of the plan, so a job
runs what was submitted, and no node needs the file.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated

from pydantic import BeforeValidator

from ftkit.spec import OneLine, Spec

METRIC_PARAMETERS = ["row", "completion"]
"""A public function with these parameters is a metric."""
_GENERATE_PARAMETERS = ("seed", "num_train", "num_heldout")


class TaskFile(Spec):
    """A task's file, and its text once the recipe is loaded."""

    file: OneLine
    text: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The public functions of the file by name, read without running it.

        Raises:
            SyntaxError: the file is not Python.
        """
        parsed = ast.parse(self.text, self.file).body
        return {each.name: each for each in parsed if isinstance(each, ast.FunctionDef) and each.name[0] != "_"}

    @property
    def metrics(self) -> list[str]:
        """The names of the functions that score completions."""
        return [name for name, each in self.functions.items() if _parameters(each) == METRIC_PARAMETERS]

    def find_problems(self, needed: tuple[str, ...], options: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Yield lines and problems of a file with the `needed` functions, whose `generate` gets the `options`."""
        try:
            functions = self.functions
        except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes
            yield getattr(error, "lineno", None) or 1, f"it is not Python: {getattr(error, 'msg', error)}."
            return
        for name in needed:
            if name not in functions:
                yield 1, f"it has no function '{name}'."
        if "generate" in needed and "generate" in functions:
            found = functions["generate"]
            own = _parameters(found)
            missing = [name for name in _GENERATE_PARAMETERS if name not in own]
            if missing:
                yield found.lineno, f"'generate' has no parameter {', '.join(missing)}."
            unknown = [name for name in options if name not in own or name in _GENERATE_PARAMETERS]
            if unknown and found.args.kwarg is None:
                yield found.lineno, f"'generate' has no option {', '.join(unknown)}."


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


def _from_path(value: object) -> object:
    return {"file": value} if isinstance(value, str) else value


Task = Annotated[TaskFile, BeforeValidator(_from_path, json_schema_input_type=str)]
