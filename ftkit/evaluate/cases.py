"""From rows to what is measured: documents for the loss, and assistant turns to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.config.data import AutoFormat, DataSpec, Format
from ftkit.data.conversations import Conversation, Message, trained_turns
from ftkit.data.encoding import IGNORED, Document, RowEncoder
from ftkit.data.formats import DETECTION_ROWS, read_example, resolve_format, unused_columns
from ftkit.data.rows import Row, errors_at, read_json_lines
from ftkit.data.sources import read_rows, split_of
from ftkit.data.store import PreparedData
from ftkit.errors import DataError, one_line
from ftkit.evaluate.prompts import conversation_of, encode_prompt, renderer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ftkit.evaluate.load import LoadedModel
    from ftkit.evaluate.source import Target
    from ftkit.planning.plan import RunPlan

_TURNS = ("assistant", "last", "completion")


@dataclass(frozen=True)
class SourcedRow:
    """A row with the name of its source."""

    source: str
    row: Row


@dataclass(frozen=True)
class Case:
    """An assistant turn to answer, with what was said before it in tokens, as training sees it.

    Attributes:
        number: of the row.
        reference: tokens of the data's own turn; None where there is only a prompt.
        message: the same as the data says it.
        has_tools: whether the model was offered tools.
    """

    number: int
    columns: dict[str, Any]
    prompt: list[int]
    reference: list[int] | None = None
    message: Message | None = None
    has_tools: bool = False


@dataclass(frozen=True)
class EvaluationSet:
    """What is measured.

    Attributes:
        sources: of each row.
        documents: with the number of their row.
    """

    rows: list[Row]
    sources: list[str]
    documents: list[tuple[int, Document]]
    cases: list[Case]


def read_evaluation_rows(target: Target, file: Path | None, limit: int) -> list[SourcedRow]:
    """Return the rows to evaluate on: those of a file, else those of the run's validation split.

    Raises:
        DataError: there are none.
    """
    if file is not None:
        rows = [SourcedRow("", row) for row in read_json_lines(file)]
    elif target.plan is None:
        raise DataError(
            "a model that is not a run has no validation split", fix="give rows to evaluate on: --data FILE"
        )
    else:
        rows = list(_validation_rows(target.plan))
    if not rows:
        raise DataError(
            "there are no rows to evaluate on",
            meaning="the file is empty, or the recipe has no validation split",
            fix="give others: --data FILE",
        )
    return rows[:limit]


def _validation_rows(plan: RunPlan) -> Iterator[SourcedRow]:
    data, prepared = plan.recipe.data, PreparedData(plan.data_directory)
    if len(data.sources) == 1 and prepared.validation_rows.is_file():
        for row in read_json_lines(prepared.validation_rows):
            yield SourcedRow("", row)
        return
    names = [source.name if len(data.sources) > 1 else "" for source in data.sources]
    for source, split, raw in read_rows(data):
        if split == "train":
            continue
        parsed = raw.parse()
        if parsed and (split or (data.validation and split_of(parsed.columns, data.validation))) == "validation":
            yield SourcedRow(names[source], parsed)


def make_evaluation_set(
    model: LoadedModel, rows: Sequence[SourcedRow], data: DataSpec | None, report: Callable[[str], None]
) -> EvaluationSet:
    """Render and tokenize rows as training does. Rows without a completion, prompts alone, are measured whole.

    Raises:
        DataError: none of the rows can be used.
    """
    kept: list[SourcedRow] = []
    documents: list[tuple[int, Document]] = []
    cases: list[Case] = []
    bad: list[DataError] = []
    for source in dict.fromkeys(each.source for each in rows):
        own = [each for each in rows if each.source == source]
        for each, result in zip(own, _encode(model, [each.row for each in own], data), strict=True):
            if isinstance(result, DataError):
                bad.append(result)
                continue
            found, turns = result
            documents += [(len(kept), document) for document in found]
            cases += [Case(len(kept), each.row.columns, *turn) for turn in turns]
            kept.append(each)
    for error in bad[:3]:
        report(f"left out: {one_line(error)}")
    if not kept:
        raise bad[0]
    if len(bad) > 3:  # noqa: PLR2004 - as many as are shown
        report(f"left out: {len(bad) - 3:,} rows more")
    return EvaluationSet([each.row for each in kept], [each.source for each in kept], documents, cases)


_Turn = tuple[list[int], list[int] | None, Message | None, bool]
_Encoded = tuple[list[Document], list[_Turn]]


def _encode(model: LoadedModel, rows: list[Row], data: DataSpec | None) -> list[_Encoded | DataError]:
    form = _format_of(rows, data)
    if form is None:
        return [_prompt(model, row, data) for row in rows]
    data = data or DataSpec.model_validate({"source": "./rows.jsonl"})
    unused = {name for row in rows for name in unused_columns(row.columns, form)}
    train_on = data.train_on if data.train_on in _TURNS else "assistant"
    data = data.model_copy(update={"ignore_columns": (*data.ignore_columns, *sorted(unused)), "train_on": train_on})
    config = model.hf_model.config.get_text_config(decoder=True)
    encoder = RowEncoder.of(model.tokenizer, data, form, config.vocab_size)
    longest = getattr(config, "max_position_embeddings", None)
    encoded: list[_Encoded | DataError] = []
    for row, documents in zip(rows, encoder.encode(rows), strict=True):
        if isinstance(documents, DataError):
            encoded.append(documents)
        elif longest is not None and any(len(document.tokens) > longest for document in documents):
            encoded.append(DataError(f"{row.where}: longer than the model's context of {longest:,} tokens"))
        else:
            encoded.append((documents, _turns(row, documents, data, form)))
    return encoded


def _format_of(rows: list[Row], data: DataSpec | None) -> Format | None:
    """Return the recipe's format where the rows have its columns, else the detected one; None for prompts alone."""
    form = AutoFormat() if data is None else data.format
    if not isinstance(form, AutoFormat) and all(name in rows[0].columns for name in form.columns if name != "tools"):
        return form
    try:
        return resolve_format(AutoFormat(), rows[:DETECTION_ROWS])
    except DataError:
        conversation_of(rows[0].columns, form)  # else it has no prompt either, and says so
        return None


def _prompt(model: LoadedModel, row: Row, data: DataSpec | None) -> _Encoded | DataError:
    try:
        with errors_at(row):
            renderer = renderer_of(model, data.template_options if data else {})
            tokens = encode_prompt(model, renderer, conversation_of(row.columns, data.format if data else None))
    except DataError as error:
        return error
    labels = np.array([*tokens[1:], IGNORED], np.int32)
    return [Document(np.array(tokens, np.int32), labels)], [(tokens, None, None, False)]


def _turns(row: Row, documents: list[Document], data: DataSpec, form: Format) -> list[_Turn]:
    """Return the assistant turns of a row: each is a run of tokens that count, behind those that are its prompt."""
    example = read_example(row.columns, data, form)
    if not isinstance(example, Conversation):
        return []
    turns: list[tuple[list[int], list[int]]] = []
    for document in documents:
        counts = np.flatnonzero(document.labels != IGNORED)
        for run in np.split(counts, np.flatnonzero(np.diff(counts) > 1) + 1):
            begin, end = int(run[0]) + 1, int(run[-1]) + 2
            turns.append((document.tokens[:begin].tolist(), document.tokens[begin:end].tolist()))
    places = trained_turns(example, data.train_on)
    messages: list[Message | None] = [example.messages[place] for place in places]
    if len(messages) != len(turns):  # turns without anything between them are one run of tokens
        messages = [None] * len(turns)
    return [(*turn, message, bool(example.tools)) for turn, message in zip(turns, messages, strict=True)]
