"""The rows of a recipe's data that can be read before a job is submitted, and how many documents fit the packs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ftkit.config.data import AutoFormat, describe_format
from ftkit.config.sources import HubSource
from ftkit.data.formats import DETECTION_ROWS, resolve_format
from ftkit.data.sources import first_rows, peek_rows
from ftkit.errors import DataError, FtkitError, UnreachableError
from ftkit.files import read_json_if_valid
from ftkit.hub.client import find_tokenizer
from ftkit.models.folder import read_end_tokens
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.planning.layout import DataLayout, Workspace
from ftkit.planning.plan import DocumentFit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftkit.config.data import DataSpec, Format
    from ftkit.data.rows import Row
    from ftkit.planning.plan import RunPlan


def read_available(data: DataSpec) -> Iterator[tuple[Row, Format]]:
    """Yield the rows that can be read from here, with their format."""
    with suppress(UnreachableError):  # `check_examples` warns
        yield from with_formats(data, peek_rows(data))


def with_formats(data: DataSpec, rows: list[Row]) -> Iterator[tuple[Row, Format]]:
    """Yield rows with their format; each source of a mixture may have its own. Tasks are not run."""
    if not rows or data.format.kind == "task":
        return
    if isinstance(data.format, AutoFormat) and len(data.sources) > 1:
        local = [number for number, source in enumerate(data.sources) if not isinstance(source, HubSource)]
        groups = [first_rows(data, number, DETECTION_ROWS) for number in local]
    else:
        groups = [rows]
    for group in groups:
        form = resolve_format(data.format, group[:DETECTION_ROWS])
        yield from ((row, form) for row in group)


def describe_detected(data: DataSpec) -> str:
    """Describe the formats that the first rows of a recipe's data have, if the recipe sets none, in one line."""
    try:
        forms = [describe_format(form) for _, form in read_available(data)]
    except FtkitError:
        return "of no known format"  # the checks report why
    return f"{', '.join(dict.fromkeys(forms))} (detected)" if forms else "format detected once rows are read"


MAX_CHARACTERS = 4 << 20
"""Maximum length of the texts that are tokenized for a plan, which takes about a second."""


def count_documents(plans: Sequence[RunPlan], environment: Mapping[str, str]) -> list[RunPlan]:
    """Return plans with the numbers of documents that fit their packs, where the data or its tokenizer is here.

    Args:
        plans: the plans; rows that several of them read are tokenized once.
        environment: the variables that the hub's libraries read.
    """
    lengths: dict[str, list[int]] = {}
    counted = []
    for plan in plans:
        if plan.is_data_prepared:
            counted.append(replace(plan, documents=_count_prepared(plan)))
            continue
        key = plan.recipe.model_dump_json(include={"data", "model"})
        if key not in lengths:
            lengths[key] = _read_lengths(plan, environment)
        found, most = lengths[key], plan.recipe.training.sequence_length
        fit = DocumentFit(len(found), sum(each <= most for each in found), max(found, default=0), is_complete=False)
        counted.append(replace(plan, documents=fit if found else None))
    return counted


def _count_prepared(plan: RunPlan) -> DocumentFit | None:
    prepared = read_json_if_valid(DataLayout(plan.data_directory).manifest, dict[str, Any]) or {}
    total, num_too_long, longest = (prepared.get(name) for name in ("num_documents", "num_too_long", "max_seqlen"))
    if not (isinstance(total, int) and isinstance(num_too_long, int) and isinstance(longest, int) and total):
        return None  # an earlier version prepared it
    return DocumentFit(total, total - num_too_long, longest, is_complete=True)


def _read_lengths(plan: RunPlan, environment: Mapping[str, str]) -> list[int]:
    """Return the tokens of each document of the first rows; none if they or the tokenizer can't be read from here."""
    recipe = plan.recipe
    environment = {**environment, **plan.cluster.environment}
    folder = find_tokenizer(recipe.model, environment, Workspace(plan.workspace).hub_home)
    if folder is None or find_spec("transformers") is None:
        return []
    from ftkit.data.encoding import RowEncoder  # noqa: PLC0415 - seconds of imports
    from ftkit.data.tokenizers import load_listed_tokenizer  # noqa: PLC0415

    lengths: list[int] = []
    try:
        ends = read_end_tokens(folder) if (folder / CONFIG_FILE).is_file() else []
        for form, pairs in groupby(_limited(read_available(recipe.data)), itemgetter(1)):
            template = None if form.kind == "text" else recipe.data.chat_template
            tokenizer = load_listed_tokenizer(folder, recipe.model, template)
            encoder = RowEncoder.of(tokenizer, recipe.data, form, recipe.model.architecture.vocab_size, ends)
            for documents in encoder.encode([row for row, _ in pairs]):
                if not isinstance(documents, DataError):
                    lengths += [len(document.tokens) for document in documents]
    except Exception:  # noqa: BLE001 - damaged files raise anything; the checks report them
        return []
    return lengths


def _limited(rows: Iterator[tuple[Row, Format]]) -> Iterator[tuple[Row, Format]]:
    left = MAX_CHARACTERS
    for row, form in rows:
        if left < 0:
            return
        left -= sum(len(str(value)) for value in row.columns.values())
        yield row, form
