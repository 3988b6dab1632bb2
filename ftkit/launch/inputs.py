"""Inputs of a run before training: the recipe's local files, first rows, tokenized data, and downloaded weights."""

from __future__ import annotations

import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.data import AutoFormat, DataSpec, Format, describe_format, describe_in_both
from ftkit.config.data_sources import HubSource
from ftkit.data.preferences import first_picture
from ftkit.data.row_formats import DETECTION_ROWS, resolve_format
from ftkit.data.selection import first_rows, peek_rows
from ftkit.data.source_files import find_files, stamp, walk
from ftkit.errors import DataError, FtkitError, NotFoundError, UnreachableError
from ftkit.files import mapping, read_json_if_valid
from ftkit.hub.client import find_folder, find_tokenizer
from ftkit.models.folder import PROCESSOR_FILES, read_end_tokens
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import fixed_folder, is_address, is_pattern
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import DocumentFit, RunPlan

if TYPE_CHECKING:
    import os

    from ftkit.config.recipe import RecipeSpec
    from ftkit.data.encoding import RowEncoder
    from ftkit.data.packing import Document
    from ftkit.data.rows import Row

    _Samples = list[tuple[RowEncoder, Sequence[Document]]]

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*", "config.json",
    "generation_config.json",
)  # fmt: skip


def data_stamp(recipe: RecipeSpec) -> str:
    """Return a value that changes with the input files of the prepared data, or always if a store can't be reached."""
    stamps = []
    for key, place in recipe.data.files:
        if is_address(place):
            try:
                stamps.append(stamp(place, key))
            except UnreachableError:  # the checks warn
                stamps.append(f"{place} {secrets.token_hex(8)}")
    keys = {key for key, _ in recipe.data.files}
    paths = [(key, path) for key, path in local_paths(recipe) if key not in keys]
    patterns = (*_TOKENIZER_FILES, *(PROCESSOR_FILES if recipe.data.pictures else ()))
    files = {file: key for key, path in paths for file in _files_of(key, path, patterns)}
    files |= {file: key for key, file in data_files(recipe)}
    for file, key in sorted(files.items()):
        if (about := stat_path(key, file)) is not None:
            stamps.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(stamps)


def local_paths(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders in a recipe, each with its key. The data does not depend on the teacher: skip it."""
    files = recipe.data.files
    for key, place in recipe.paths:
        if key != "training.distill.teacher":
            yield key, fixed_folder(place) if (key, place) in files and is_pattern(place) else Path(place)


def data_files(recipe: RecipeSpec) -> Iterator[tuple[str, Path]]:
    """Yield the data files on this machine, each with its key."""
    for key, place in recipe.data.files:
        if not is_address(place):
            yield from ((key, Path(file)) for file in find_files(place, key))


def _files_of(key: str, path: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that the prepared data depends on: a model's tokenizer files, or all files of a dataset."""
    about = stat_path(key, path)
    if about is None or not stat.S_ISDIR(about.st_mode):
        return [] if about is None else [path]
    if key == "data.source.dataset":
        return walk(path, key)
    return [file for pattern in patterns for file in path.glob(pattern) if file.is_file()]


def stat_path(key: str, path: Path) -> os.stat_result | None:
    """Return the status of the file at a path; None if there is none. Raises `NotFoundError` if it can't be read."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotFoundError(
            f"{key}: can't read {path}: {error.strerror}",
            fix="check the path, and your permissions on its parent folders",
        ) from error


# --- The first rows --------------------------------------------------------------------------------


def read_available(data: DataSpec) -> Iterator[tuple[Row, Format]]:
    """Yield the first rows that this machine can read, with their format."""
    with suppress(UnreachableError):  # `check_examples` warns
        yield from with_formats(data, peek_rows(data))


def with_formats(data: DataSpec, rows: list[Row]) -> Iterator[tuple[Row, Format]]:
    """Yield rows with their format; each source of a mixture may have its own. Tasks are not run."""
    if not rows or data.format.kind == "task":
        return
    is_mixture = isinstance(data.format, AutoFormat) and len(data.sources) > 1
    for group in _rows_by_source(data) if is_mixture else [rows]:
        form = resolve_format(data.format, group[:DETECTION_ROWS], data.ignore_columns)
        yield from ((row, form) for row in group)


def _rows_by_source(data: DataSpec) -> list[list[Row]]:
    """Return the first rows of each source on this machine."""
    local = [number for number, source in enumerate(data.sources) if not isinstance(source, HubSource)]
    return [first_rows(data, number, DETECTION_ROWS) for number in local]


def available_formats(data: DataSpec) -> list[Format]:
    """Return the recipe's format, or the detected formats of its first rows; empty if this machine can't read them."""
    if not isinstance(data.format, AutoFormat):
        return [data.format]
    try:
        return [form for _, form in read_available(data)]
    except FtkitError:
        return []  # the checks report why


def find_pictures(data: DataSpec) -> bool | None:
    """Return whether the first rows of a recipe's data have pictures; None if this machine can't read them."""
    try:
        rows = [row.columns for row in peek_rows(data)]
    except FtkitError:
        return None  # the checks report why
    return any(first_picture(columns, data.ignore_columns) is not None for columns in rows) if rows else None


def describe_detected(data: DataSpec) -> str:
    """Describe in one line the detected formats of a recipe's data, if the recipe sets none."""
    try:
        forms = [describe_format(form) for _, form in read_available(data)]
    except FtkitError:  # the checks report why; it may not be the format
        groups: list[list[Row]] = []
        with suppress(FtkitError):
            groups = _rows_by_source(data)
        try:
            forms = [describe_format(resolve_format(data.format, rows, data.ignore_columns)) for rows in groups]
        except FtkitError:
            return "of no known format"
    return f"{', '.join(dict.fromkeys(forms))} (detected)" if forms else "format detected once rows are read"


MAX_ROWS_WITH_PICTURES = 32  # maximum number of rows whose pictures are processed for a plan
MAX_CHARACTERS = 4 << 20  # maximum characters that are tokenized for a plan, in about a second


def count_documents(plans: Sequence[RunPlan], environment: Mapping[str, str]) -> list[RunPlan]:
    """Return plans with the number of samples that fit in their packs, if known; shared rows are read once."""
    read: list[tuple[tuple[object, ...], tuple[_Samples, float | None]]] = []
    counted = []
    for plan in plans:
        if plan.data.is_prepared:
            counted.append(_count_prepared(plan))
            continue
        recipe, length = plan.recipe, plan.recipe.training.sequence_length
        key = recipe.data, recipe.model, recipe.training.documents_per_sample
        known = next((samples for other, samples in read if other == key), None)
        if known is None:
            known = _read_samples(plan, environment)
            read.append((key, known))
        found, saved = known
        too_long = Counter[str]({encoder.too_long: 0 for encoder, _ in found})
        too_long.update(outcome for encoder, sample in found if (outcome := encoder.fit(sample, length)[0]))
        longest = max((sum(len(each.tokens) for each in sample) for _, sample in found), default=0)
        num_fitting = len(found) - too_long.total()
        fit = DocumentFit(len(found), num_fitting, longest, is_complete=False, too_long=dict(too_long), saved=saved)
        counted.append(replace(plan, documents=fit if found else None))
    return counted


def _count_prepared(plan: RunPlan) -> RunPlan:
    prepared = read_json_if_valid(plan.data.manifest, dict[str, object]) or {}
    total, num_too_long, longest = (prepared.get(name) for name in ("num_documents", "num_too_long", "max_seqlen"))
    if not (isinstance(total, int) and isinstance(num_too_long, int) and isinstance(longest, int) and total):
        return replace(plan, documents=None)
    outcomes = mapping(prepared.get("too_long"))
    too_long = {outcome: number for outcome, number in outcomes.items() if isinstance(number, int)}
    total //= plan.recipe.training.documents_per_sample
    stored, shared = (prepared.get(name) for name in ("num_train_tokens", "num_shared_tokens"))
    saved = shared / (shared + stored) if isinstance(stored, int) and isinstance(shared, int) and shared else None
    fit = DocumentFit(total, total - num_too_long, longest, is_complete=True, too_long=too_long, saved=saved)
    in_both, name = prepared.get("num_in_both"), plan.recipe.training.sample_name
    note = describe_in_both(in_both, plan.recipe.data, name) if isinstance(in_both, int) else ""
    return replace(plan, documents=fit, notes=(*plan.notes, *filter(None, [note])))


def _read_samples(plan: RunPlan, environment: Mapping[str, str]) -> tuple[_Samples, float | None]:
    """Return the samples of the first rows and the result of `share_saved`; none and None if they can't be read."""
    recipe = plan.recipe
    environment = {**environment, **plan.cluster.environment}
    home = Workspace(plan.workspace).hub_home
    folder = find_tokenizer(recipe.model, environment, home)
    if folder is None or find_spec("transformers") is None:
        return [], None
    from ftkit.data.encoding import RowEncoder  # noqa: PLC0415 - seconds of imports
    from ftkit.data.pictures import PictureProcessor  # noqa: PLC0415
    from ftkit.data.tokenizers import load_listed_tokenizer  # noqa: PLC0415
    from ftkit.data.workers import BatchEncoder, share_saved  # noqa: PLC0415

    weights = find_folder(recipe.model, environment, home) or folder
    model = recipe.model.model_copy(update={"weights": str(weights), "revision": None})  # without the hub
    found: list[tuple[RowEncoder, list[Document]]] = []
    rows: list[tuple[Row, Format]] = []
    left = MAX_CHARACTERS
    try:
        for row, form in read_available(recipe.data):
            if left < 0 or (recipe.data.pictures and len(rows) == MAX_ROWS_WITH_PICTURES):
                break
            left -= sum(len(str(value)) for value in row.columns.values())
            rows.append((row, form))
        ends = read_end_tokens(folder) if (folder / CONFIG_FILE).is_file() else []
        for form, pairs in groupby(rows, itemgetter(1)):
            template = None if form.kind == "text" else recipe.data.chat_template
            tokenizer = load_listed_tokenizer(folder, recipe.model, template)
            pictures = PictureProcessor.of(model, tokenizer) if recipe.data.pictures else None
            encoder = RowEncoder.of(tokenizer, recipe.data, form, recipe.model.architecture.vocab_size, ends, pictures)
            encoded = encoder.encode([row for row, _ in pairs])
            found += [(encoder, documents) for documents in encoded if not isinstance(documents, DataError)]
    except Exception:  # noqa: BLE001 - damaged files raise anything; the checks report them
        return [], None
    saved, num = share_saved(recipe, [documents for _, documents in found]), recipe.training.documents_per_sample
    shared = BatchEncoder(recipe, {}, shares_prompts=saved is not None).shared
    packed = ((encoder, shared(documents)) for encoder, documents in found)
    return [(encoder, row[first : first + num]) for encoder, row in packed for first in range(0, len(row), num)], saved
