"""From a plan to prepared data: read, format, tokenize, pack, write. Does nothing if it was done before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.data.conversations import texts_of
from ftkit.data.encoding import RowEncoder, find_answer_end, shorten
from ftkit.data.formats import DETECTION_ROWS, describe_format, read_example, resolve_format, unused_columns
from ftkit.data.packing import assign_packs, build_pack
from ftkit.data.rows import errors_at, write_json_lines
from ftkit.data.sources import read_splits
from ftkit.data.store import DataManifest, PackStore, PreparedData, new_prepared_data
from ftkit.data.tasks.sql_score import read_question
from ftkit.data.tokenizers import check_size, learn_tokenizer, load_tokenizer
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ftkit.config.data import Format
    from ftkit.config.recipe import RecipePlan
    from ftkit.data.encoding import Document
    from ftkit.data.rows import Row
    from ftkit.planning.plan import RunPlan

ROWS_AT_ONCE = 256
"""Rows that the tokenizer is given at once."""


def prepare(plan: RunPlan, report: Callable[[str], None]) -> PreparedData:
    """Prepare the data of a plan, or find it prepared.

    Raises:
        DataError: the data can't be used as the recipe asks.
    """
    prepared = PreparedData(plan.data_directory)
    if prepared.is_complete:
        report(f"data {plan.fingerprint}: prepared before")
        return prepared
    with new_prepared_data(prepared.root) as folder:
        manifest = _build(folder, plan, report)
        folder.write_manifest(manifest)
    if manifest.num_too_long:
        done = {"drop": "left out", "truncate": "cut after their last turn that fits", "split": "split"}
        report(f"{manifest.num_too_long:,} documents longer than a pack: {done[plan.recipe.data.too_long]}")
    report(
        f"data {plan.fingerprint}: {manifest.num_train_documents:,} documents in {manifest.num_train_packs:,} packs of "
        f"{manifest.sequence_length} tokens, {manifest.fill_ratio:.1%} full, {manifest.num_train_targets:,} targets"
    )
    return prepared


def _build(folder: PreparedData, plan: RunPlan, report: Callable[[str], None]) -> DataManifest:
    recipe, length = plan.recipe, plan.recipe.training.sequence_length
    report("reading rows")
    splits = read_splits(recipe.data.source)
    form = resolve_format(recipe.data.format, splits.train[:DETECTION_ROWS])
    report(f"format: {describe_format(form)}")
    _report_unused_columns(form, splits.train, report)
    for row in splits.validation if recipe.evaluation.sql_execution else ():
        with errors_at(row):
            read_question(row.columns)
    tokenizer = _tokenizer(recipe, form, splits.train, report)
    check_size(tokenizer, recipe.model.architecture.vocab_size, report)
    encoder = RowEncoder.of(tokenizer, recipe.data, form, recipe.model.architecture.vocab_size)
    tokenizer.save_pretrained(folder.tokenizer)
    report(f"tokenizing {len(splits.train) + len(splits.validation):,} examples")
    bad: list[DataError] = []
    train = _encode_all(encoder, splits.train, bad, report)
    validation = _encode_all(encoder, splits.validation, bad, report)
    num_rows = len(splits.train) + len(splits.validation) - len(bad)
    if len(train) + len(validation) > num_rows:
        report(
            f"{num_rows:,} conversations became {len(train) + len(validation):,} documents: the chat template rewrites "
            "earlier turns, and each trained turn is in the form in which inference sees it"
        )
    longest = max(len(document.tokens) for document in [*train, *validation])
    fitting = _fitting(train, recipe, longest, tokenizer), _fitting(validation, recipe, longest, tokenizer)
    report("packing")
    packs = [_pack(documents, length, tokenizer.pad_token_id) for documents in fitting]
    PackStore.write(folder.train, packs[0])
    PackStore.write(folder.validation, packs[1])
    write_json_lines(folder.validation_rows, splits.validation)
    return DataManifest(
        fingerprint=plan.fingerprint,
        sequence_length=length,
        num_train_documents=len(fitting[0]),
        num_train_packs=len(packs[0]),
        num_train_tokens=sum(len(document.tokens) for document in fitting[0]),
        num_train_targets=sum(document.num_targets for document in fitting[0]),
        num_validation_documents=len(fitting[1]),
        num_validation_packs=len(packs[1]),
        num_too_long=sum(len(document.tokens) > length for document in [*train, *validation]),
        longest_document=longest,
    )


def _report_unused_columns(form: Format, rows: Sequence[Row], report: Callable[[str], None]) -> None:
    unused = dict.fromkeys(name for row in rows for name in unused_columns(row.columns, form))
    if unused:
        report(f"columns that data.format does not use: {', '.join(sorted(unused))}")


def _tokenizer(recipe: RecipePlan, form: Format, train: Sequence[Row], report: Callable[[str], None]) -> Any:
    vocab_size = recipe.model.tokenizer.vocab_size
    if vocab_size is None:
        return load_tokenizer(recipe.model, None if form.kind == "text" else recipe.data.chat_template)
    report(f"learning a tokenizer of {vocab_size} tokens")
    texts = (text for row in train for text in _texts(row, recipe, form))
    return learn_tokenizer(texts, vocab_size, recipe.data.chat_template)


def _texts(row: Row, recipe: RecipePlan, form: Format) -> list[str]:
    with errors_at(row):
        return texts_of(read_example(row.columns, recipe.data, form))


def _encode_all(
    encoder: RowEncoder, rows: Sequence[Row], bad: list[DataError], report: Callable[[str], None]
) -> list[Document]:
    """Encode rows; those that can't be used are put to the others in `bad`, up to `data.skip_bad`."""
    documents: list[Document] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        for result in encoder.encode(rows[first : first + ROWS_AT_ONCE]):
            if isinstance(result, list):
                documents += result
                continue
            bad.append(result)
            if len(bad) > encoder.data.skip_bad:
                raise result
            report(f"left out: {result.what}")
    return documents


def _fitting(documents: Sequence[Document], recipe: RecipePlan, longest: int, tokenizer: Any) -> list[Document]:
    """Do with documents longer than a pack what the recipe says."""
    length, too_long = recipe.training.sequence_length, recipe.data.too_long
    num_longer = sum(len(document.tokens) > length for document in documents)
    if num_longer and too_long == "error":
        raise DataError(
            f"{num_longer:,} of {len(documents):,} documents are longer than a pack of {length} tokens "
            f"(the longest has {longest:,})",
            meaning="cutting them would train the model on answers without an end",
            fix="raise training.sequence_length, or set data.too_long: drop leaves them out, truncate cuts them after "
            "the last turn that fits, split is for plain text",
        )
    end = find_answer_end(tokenizer)
    fitting = [part for document in documents for part in shorten(document, length, too_long, end)]
    if num_longer and not fitting:
        raise DataError(
            f"none of {len(documents):,} documents fits a pack of {length} tokens (the longest has {longest:,})",
            fix="raise training.sequence_length",
        )
    return fitting


def _pack(documents: Sequence[Document], length: int, pad: int) -> NDArray[np.int32]:
    assignment = assign_packs([len(document.tokens) for document in documents], length)
    packs = [build_pack([documents[index] for index in pack], length, pad) for pack in assignment]
    return np.stack(packs) if packs else np.empty((0, 3, length), dtype=np.int32)
