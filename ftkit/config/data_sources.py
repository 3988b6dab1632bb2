"""Data sources: files, addresses, the hub, a generator, and mixtures of them; the validation split; a task's file.

Recipes combine columns in format strings and Jinja templates, which are validated here.
"""

import ast
import hashlib
import re
import string
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ftkit.spec import (
    HUB_ID,
    NUMBER,
    DataPath,
    HubIdOrFolder,
    NonNegativeInt,
    OneLine,
    PositiveFloat,
    PositiveInt,
    Seed,
    Spec,
)

_BRACES = "write {{ and }} for braces that belong to the text"


@lru_cache(maxsize=16)
def parse_format_string(text: str) -> tuple[tuple[str, str | None], ...]:
    """Split a format string into pieces: literal text, and the column that follows it (None after the last).

    Raises ValueError: a brace is not closed, or encloses more than a column's name.
    """
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"not a format string ({error}): {_BRACES}") from error
    for _, column, specification, conversion in pieces:
        if column is None:
            continue
        if not column.strip() or specification or conversion or any(each in column for each in '.[]{}"'):
            written = column + (f"!{conversion}" if conversion else "") + (f":{specification}" if specification else "")
            raise ValueError(f"{{{written}}} is not a column name in braces: {_BRACES}")
    return tuple((literal, column) for literal, column, _, _ in pieces)


def columns_of(text: str) -> list[str]:
    """Return the columns that a format string uses, in order."""
    return [column for _, column in parse_format_string(text) if column is not None]


def _check_format_string(text: str) -> str:
    parse_format_string(text)
    return text


FormatString = Annotated[str, AfterValidator(_check_format_string)]


@lru_cache(maxsize=16)
def variables_of(text: str) -> list[str]:
    """Return the variables that a Jinja template reads, in alphabetical order.

    Raises ValueError: it is not a Jinja template.
    """
    import jinja2.meta  # noqa: PLC0415 - only recipes with a template need it

    try:
        parsed = jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"]).parse(text)  # noqa: S701
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"not a Jinja template: line {error.lineno}: {error.message}") from error
    return sorted(jinja2.meta.find_undeclared_variables(parsed))


def _check_jinja(text: str) -> str:
    if not variables_of(text):
        raise ValueError("this Jinja template uses no column: write {{ column }}")
    return text


def is_inline_template(text: str) -> bool:
    """Return whether a text is a Jinja template rather than the name of a template or a file."""
    return "{{" in text or "{%" in text


JinjaText = Annotated[str, AfterValidator(_check_jinja)]


class GeneratedSource(Spec):
    """Rows from the task's function `generate(seed, num_train, num_heldout, **options)`."""

    kind: Literal["generated"]
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of `generate`."""
    num_train: PositiveInt
    """Number of examples to train on."""
    num_heldout: NonNegativeInt = 0
    """Number of examples in the validation split."""
    seed: Seed = 0
    """Seed for `generate`."""

    @property
    def name(self) -> str:
        return "generated"


DATA_FILE = re.compile(
    r"\.(jsonl|ndjson|json|parquet|csv|tsv|arrow|feather|txt|md)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)


def _short_name(place: str) -> str:
    """Return the last meaningful part of a path, address or id: a source's name in plan and metrics."""
    parts = [part for part in place.split("/") if part.strip("*.")]
    return parts[-1] if parts else place


class _SampledSource(Spec):
    """Number of rows to take from a source."""

    num_train: PositiveInt | None = None
    """Number of rows to sample. All if null."""
    num_heldout: NonNegativeInt = 0
    """Number of rows for the validation split."""
    weight: PositiveFloat | None = None
    """Share of this source in a list of sources, relative to the other weights; excludes `num_train`."""
    seed: Seed = 0
    """Seed of the sample."""

    @model_validator(mode="after")
    def _weight_or_number(self) -> Self:
        if self.weight is not None and self.num_train is not None:
            raise ValueError("weight and num_train both set the number of rows: leave one of them out")
        return self


class FilesSource(_SampledSource):
    """Rows in files, also compressed: JSON Lines, JSON, Parquet, CSV, TSV, Arrow, or txt and md (one row per file)."""

    kind: Literal["files"]
    train: DataPath
    """A file, a folder or a pattern (`data/*.parquet`), relative to the recipe's folder; or an address (`s3://…`,
    `gs://…`, `hf://…`). The suffix selects the format; files with an unknown suffix are JSON Lines."""
    heldout: DataPath | None = None
    """Files whose rows are the validation split. If null, `num_heldout` rows of `train` are the validation split."""

    @property
    def name(self) -> str:
        return _short_name(self.train)

    @model_validator(mode="after")
    def _validation_rows_are_chosen_in_one_way(self) -> Self:
        if self.heldout is not None and self.num_heldout:
            raise ValueError(f"num_heldout ({self.num_heldout}) has no effect with heldout: leave one of them out")
        return self


class HubSource(_SampledSource):
    """Rows of a dataset on the Hugging Face hub."""

    kind: Literal["hub"]
    dataset: HubIdOrFolder
    """Hub id, or a folder that `datasets.load_dataset` reads (`./data`, relative to the recipe's folder)."""
    subset: str | None = None
    """Name of the dataset's configuration."""
    split: str = "train"
    """Split to take rows from."""
    revision: str | None = None
    """Branch, tag or commit."""

    @property
    def name(self) -> str:
        return _short_name(self.dataset) + (f"/{self.subset}" if self.subset else "")


_ListedSource = Annotated[FilesSource | HubSource, Field(discriminator="kind")]


class MixtureSource(Spec):
    """Several sources, interleaved evenly.

    With weights, each source contributes its share of the rows. Rows are never repeated: the source that limits the
    total is used in full, and the others are sampled. Without weights, each source contributes all rows, or
    `num_train` of them.
    """

    kind: Literal["mixture"]
    sources: Annotated[tuple[_ListedSource, ...], Field(min_length=1, max_length=1000)]
    """The sources."""

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> Self:
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            raise ValueError(f"only {', '.join(weighted)} has a weight: give every source one, or none")
        return self

    @property
    def seed(self) -> int:
        """Seed of the sample: the first source's."""
        return self.sources[0].seed


def expand_source(value: object) -> object:
    """Read the short forms of `data.source`: a path, an address, a hub id, or a list of these and of mappings.

    A mapping in a list may be `{source: chats.jsonl, weight: 2}`.
    """
    if isinstance(value, str):
        is_hub = HUB_ID.fullmatch(value) and not DATA_FILE.search(value)
        return {"kind": "hub", "dataset": value} if is_hub else {"kind": "files", "train": value}
    if not isinstance(value, list | tuple):
        return value
    sources: list[object] = []
    for each in value:
        if isinstance(each, dict) and isinstance(each.get("source"), str):
            rest = {key: setting for key, setting in each.items() if key != "source"}
            sources.append({**cast("dict[str, object]", expand_source(each["source"])), **rest})
        else:
            sources.append(expand_source(each) if isinstance(each, str) else each)
    return {"kind": "mixture", "sources": sources}


_AnySource = Annotated[GeneratedSource | FilesSource | HubSource | MixtureSource, Field(discriminator="kind")]
_ShortSource = str | list[str | dict[str, object]]
Source = Annotated[_AnySource, BeforeValidator(expand_source, json_schema_input_type=_AnySource | _ShortSource)]
SingleSource = GeneratedSource | FilesSource | HubSource


class ValidationSpec(Spec):
    """The validation split, defined by one of `count`, `fraction` and `file`."""

    count: PositiveInt | None = None
    """Number of rows, over all sources."""
    fraction: Annotated[float, Field(gt=0, lt=1), NUMBER] | None = None
    """Fraction of the rows: each row is drawn with this probability."""
    by: Literal["draw", "hash"] = "draw"
    """How `fraction` selects rows. `draw`: by the row's position and the seed. `hash`: by the row's content alone, so a
    row stays in its split when the data grows or moves, and equal rows are in the same split."""
    file: DataPath | None = None
    """Files or an address, as in a source. All rows are used."""
    seed: Seed = 0
    """Seed of the sampling."""

    @model_validator(mode="after")
    def _rows_are_chosen_in_one_way(self) -> Self:
        given = [key for key in ("count", "fraction", "file") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of count, fraction and file; got {', '.join(given) or 'none'}")
        if self.by == "hash" and self.fraction is None:
            raise ValueError("by: hash requires fraction")
        return self


# --- A task: a Python file of the project with functions that generate, format and score rows ----------------
#
# Loading a recipe reads and parses the file; `ftkit.data.tasks` runs it. The file's text is part of the plan, so a job
# runs what was submitted, and no node needs the file.

METRIC_PARAMETERS = ["row", "completion"]  # a public function with these parameters is a metric
_GENERATE_PARAMETERS = ("seed", "num_train", "num_heldout")


class TaskFile(Spec):
    """A task's file, and its text after the recipe is loaded."""

    file: OneLine
    text: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    @lru_cache(maxsize=16)  # noqa: B019 - few files, which sweeps and plans load again
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The public functions of the file by name, read without running it.

        Raises SyntaxError: the file is not Python.
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
        yield from ((1, f"it has no function '{name}'.") for name in needed if name not in functions)
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


Task = Annotated[
    TaskFile,
    BeforeValidator(lambda value: {"file": value} if isinstance(value, str) else value, json_schema_input_type=str),
]
