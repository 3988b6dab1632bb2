"""The kind of model that every spec is: frozen, and unknown keys are errors."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen model whose attribute docstrings are the descriptions in its JSON schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("a name is 1 to 63 letters, digits, '.', '_' or '-', and starts with a letter or digit")
    return value


def _check_variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError("an environment variable's name is letters, digits and '_', and starts with no digit")
    return value


def _check_one_line(value: str) -> str:
    if any(ord(character) < ord(" ") or character == "\x7f" for character in value):
        raise ValueError("control characters and line breaks can't stand in an #SBATCH line")
    return value


Name = Annotated[str, AfterValidator(_check_name)]
"""A name that is safe as a folder, a job name and a label."""

VariableName = Annotated[str, AfterValidator(_check_variable)]
OneLine = Annotated[str, AfterValidator(_check_one_line)]
