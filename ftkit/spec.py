"""The base class of all specs: frozen, and unknown keys are errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError

from ftkit.paths import is_path

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue


class Spec(BaseModel):
    """A frozen model whose attribute docstrings are the descriptions in its JSON schema.

    Validators are built when a spec is first used, and docstrings are read when a message or a schema shows them: at
    import, both would take longer than planning a run. The modules of recipes don't use postponed annotations, because
    pydantic evaluates them far more slowly than Python does. A spec that is the default of a field is created by
    `model_construct()`, which needs no validator.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def extend(cls, base: Spec, **changes: object) -> Self:
        """Return a spec of this class with the fields of `base` and some others, without validation."""
        known = {name: getattr(base, name) for name in type(base).model_fields if name in cls.model_fields}
        return cast("Self", cls.model_construct(**known | changes))  # pydantic's plug-in for mypy says Spec

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add the attribute docstrings to the JSON schema."""
        reference = handler(core_schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        for name, text in attribute_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return reference


@cache
def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each attribute of a spec and of its base classes, by the attribute's name."""
    texts: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, Spec) or owner is Spec:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        statements = definition.body if isinstance(definition, ast.ClassDef) else []
        for attribute, below in pairwise(statements):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                match below:
                    case ast.Expr(ast.Constant(str(text))):
                        texts[attribute.target.id] = inspect.cleandoc(text)
    return texts


HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")
RUN = "run:"  # prefix of an earlier run's name as a model
_RUN = re.compile(r"run:[A-Za-z0-9][A-Za-z0-9._-]*(@(\d{1,18}|best|last))?")
SCHEMES = ("s3", "gs", "hf")  # schemes of data addresses


def _require(pattern: str, message: str) -> Callable[[str], str]:
    """Return a function that returns a text of this form, and raises ValueError for others."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(message)
        return value

    return check


def _check_data_path(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if separator and (scheme not in SCHEMES or not rest.strip("/")):
        raise ValueError(f"a data address is {', '.join(f'{each}://…' for each in SCHEMES)}; got {value[:80]!r}")
    return value


def _check_hub_id_or_folder(value: str) -> str:
    if is_path(value) or HUB_ID.fullmatch(value):
        return value
    if "://" in value:
        raise ValueError("addresses are not supported: give a Hugging Face hub id, or a folder")
    raise ValueError("not a Hugging Face hub id (NAME or OWNER/NAME); a folder begins with '/', './' or '~'")


def _check_weights(value: str) -> str:
    if not value.startswith(RUN):
        return _check_hub_id_or_folder(value)
    if not _RUN.fullmatch(value):
        raise ValueError(
            "a run is given as run:NAME or run:NAME@STEP (a step, best, or last); NAME is what 'ftkit status' takes"
        )
    return value


check_name = _require(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
    "a name is 1 to 63 letters, digits, '.', '_' or '-', and starts with a letter or digit",
)
Name = Annotated[str, AfterValidator(check_name)]  # a name that is safe as a folder, a job name and a label


def as_name(text: str, otherwise: str, most: int = 63) -> str:
    """Return a text as a name of at most so many characters; `otherwise` if nothing of it is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:most] or otherwise


_VARIABLE_RULE = "an environment variable's name has letters, digits and '_', and does not start with a digit"
VariableName = Annotated[str, AfterValidator(_require("[A-Za-z_][A-Za-z0-9_]*", _VARIABLE_RULE))]
_LINE_RULE = "an #SBATCH line can't contain control characters or line breaks"
OneLine = Annotated[str, AfterValidator(_require(r"[^\x00-\x1f\x7f]*", _LINE_RULE))]
DataPath = Annotated[str, AfterValidator(_check_data_path)]  # a path, a pattern of paths, or an address
HubIdOrFolder = Annotated[str, AfterValidator(_check_hub_id_or_folder)]
Weights = Annotated[str, AfterValidator(_check_weights)]


def _check_is_no_bool(kind: Literal["int_type", "float_type"]) -> BeforeValidator:
    """Refuse booleans, which pydantic would convert to 1 or 0: `max_steps: true` does not mean one step."""

    def check(value: object) -> object:
        if isinstance(value, bool):
            raise PydanticKnownError(kind)
        return value

    return BeforeValidator(check)


WHOLE_NUMBER, NUMBER = _check_is_no_bool("int_type"), _check_is_no_bool("float_type")
"""Must be last in an annotation, because a bound after it would be missing from the JSON schema."""

LARGEST_COUNT = 2**31 - 1
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_COUNT), WHOLE_NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT), WHOLE_NUMBER]
"""Counts, bounded so that arithmetic does not overflow and loops end."""

_TIME_LIMIT = Field(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")
TimeLimit = Annotated[
    OneLine,
    _TIME_LIMIT,
    BeforeValidator(
        lambda value: str(value) if type(value) is int else value,
        json_schema_input_type=Annotated[str, _TIME_LIMIT] | int,
    ),
]
"""A time limit in Slurm's format. YAML reads one of minutes alone as a number."""

Float = Annotated[float, NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0), NUMBER]

Seed = Annotated[int, Field(ge=0, lt=2**63), WHOLE_NUMBER]
