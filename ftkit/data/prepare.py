"""From a plan to prepared data: read, format, tokenize, pack, write. Does nothing if it was done before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.config.data import GeneratedSource
from ftkit.data.chat_templates import TEMPLATES
from ftkit.data.conversations import to_messages
from ftkit.data.encoding import encode, find_answer_end
from ftkit.data.packing import assign_packs, build_pack
from ftkit.data.rows import errors_at, write_json_lines
from ftkit.data.sources import read_splits
from ftkit.data.store import DataManifest, PackStore, PreparedData, new_prepared_data
from ftkit.data.tasks.sql_score import read_question
from ftkit.data.tokenizers import check_size, check_tokens, learn_tokenizer, load_tokenizer
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ftkit.config.recipe import RecipePlan
    from ftkit.data.conversations import Message
    from ftkit.data.encoding import Document
    from ftkit.data.rows import Row
    from ftkit.planning.plan import RunPlan


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
        report(f"{manifest.num_too_long:,} documents are longer than a pack, and left out")
    report(
        f"data {plan.fingerprint}: {manifest.num_train_documents:,} documents in {manifest.num_train_packs:,} packs of "
        f"{manifest.sequence_length} tokens, {manifest.fill_ratio:.1%} full, {manifest.num_train_targets:,} targets"
    )
    return prepared


def _build(folder: PreparedData, plan: RunPlan, report: Callable[[str], None]) -> DataManifest:
    recipe, length = plan.recipe, plan.recipe.training.sequence_length
    report("reading rows")
    splits = read_splits(recipe.data.source)
    _report_unused_columns(recipe, splits.train, report)
    for row in splits.validation if recipe.evaluation.sql_execution else ():
        with errors_at(row):
            read_question(row.columns)
    tokenizer = _tokenizer(recipe, splits.train, report)
    check_size(tokenizer, recipe.model.architecture.vocab_size, report)
    _check_answers_end(tokenizer, recipe)
    tokenizer.save_pretrained(folder.tokenizer)
    report(f"tokenizing {len(splits.train) + len(splits.validation):,} examples")
    train = _encode_all(tokenizer, recipe, splits.train)
    validation = _encode_all(tokenizer, recipe, splits.validation)
    longest = max(len(document.tokens) for document in [*train, *validation])
    fitting = _fitting(train, recipe, longest), _fitting(validation, recipe, longest)
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
        num_too_long=len(train) + len(validation) - len(fitting[0]) - len(fitting[1]),
        longest_document=longest,
    )


def _report_unused_columns(recipe: RecipePlan, rows: Sequence[Row], report: Callable[[str], None]) -> None:
    if isinstance(recipe.data.source, GeneratedSource):
        return
    unused = {name for row in rows for name in row.columns} - set(recipe.data.format.columns)
    if unused:
        report(f"columns that data.format does not use: {', '.join(sorted(unused))}")


def _tokenizer(recipe: RecipePlan, train: Sequence[Row], report: Callable[[str], None]) -> Any:
    vocab_size = recipe.model.tokenizer.vocab_size
    if vocab_size is None:
        return load_tokenizer(recipe.model, recipe.data.chat_template)
    report(f"learning a tokenizer of {vocab_size} tokens")
    texts = (message.content for row in train for message in _messages(row, recipe))
    return learn_tokenizer(texts, vocab_size, recipe.data.chat_template)


def _messages(row: Row, recipe: RecipePlan) -> list[Message]:
    with errors_at(row):
        return to_messages(row.columns, recipe.data.format)


def _check_answers_end(tokenizer: Any, recipe: RecipePlan) -> None:
    if recipe.data.train_on == "assistant" and find_answer_end(tokenizer) is None:
        raise DataError(
            "the chat template writes no special token after an assistant turn",
            meaning="the model would never learn where its answers end, and talk on to the limit",
            fix="set data.chat_template to a template whose tokens the tokenizer has: " + ", ".join(TEMPLATES),
        )


def _encode_all(tokenizer: Any, recipe: RecipePlan, rows: Sequence[Row]) -> list[Document]:
    every = recipe.data.train_on == "all"
    documents = []
    for row in rows:
        messages = _messages(row, recipe)
        with errors_at(row):
            document = encode(tokenizer, messages, all_tokens=every)
            check_tokens(tokenizer, document.tokens, recipe.model.architecture.vocab_size)
        documents.append(document)
    return documents


def _fitting(documents: Sequence[Document], recipe: RecipePlan, longest: int) -> list[Document]:
    """Leave out what is longer than a pack, if the recipe says so; otherwise refuse."""
    length = recipe.training.sequence_length
    fitting = [document for document in documents if len(document.tokens) <= length]
    left_out = len(documents) - len(fitting)
    if left_out and recipe.data.too_long == "error":
        raise DataError(
            f"{left_out:,} of {len(documents):,} documents are longer than a pack of {length} tokens "
            f"(the longest has {longest:,})",
            meaning="cutting them would train the model on answers without an end",
            fix="raise training.sequence_length, or set data.too_long=drop to leave them out",
        )
    if left_out and not fitting:
        raise DataError(
            f"none of {len(documents):,} documents fits a pack of {length} tokens (the longest has {longest:,})",
            fix="raise training.sequence_length",
        )
    return fitting


def _pack(documents: Sequence[Document], length: int, pad: int) -> NDArray[np.int32]:
    assignment = assign_packs([len(document.tokens) for document in documents], length)
    packs = [build_pack([documents[index] for index in pack], length, pad) for pack in assignment]
    return np.stack(packs) if packs else np.empty((0, 3, length), dtype=np.int32)
