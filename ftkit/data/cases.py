"""Turn rows into evaluation data: documents for the loss, and prompts with reference completions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.config.data import AutoFormat, DataSpec, Format
from ftkit.data.conversations import Conversation, Message, trained_turns
from ftkit.data.encoding import IGNORED, Document, RowEncoder
from ftkit.data.formats import DETECTION_ROWS, read_example, resolve_format, unused_columns
from ftkit.data.prompts import conversation_of, encode_prompts, renderer_of
from ftkit.data.rows import Row, read_json_lines
from ftkit.data.store import PreparedData, SourcedRow
from ftkit.errors import DataError, one_line, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_TURNS = ("assistant", "last", "completion")


@dataclass(frozen=True)
class ModelInput:
    """Inputs that a model accepts.

    Attributes:
        label: name of the model in errors.
        max_length: context length in tokens; None if unknown.
    """

    tokenizer: Any
    label: str
    vocab_size: int
    max_length: int | None

    @classmethod
    def of(cls, tokenizer: Any, label: str, config: Any) -> ModelInput:
        """Read the limits from a transformers configuration."""
        text = config.get_text_config(decoder=True)
        return cls(tokenizer, label, text.vocab_size, getattr(text, "max_position_embeddings", None))


@dataclass(frozen=True)
class Case:
    """A prompt, tokenized as in training, with its reference completion.

    Attributes:
        number: index of the row.
        reference: tokens of the assistant turn in the data; None for a prompt without completion.
        message: the same turn as in the data.
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
    """The rows, documents and prompts of an evaluation.

    Attributes:
        sources: source of each row.
        documents: documents with the index of their row.
    """

    rows: list[Row]
    sources: list[str]
    documents: list[tuple[int, Document]]
    cases: list[Case]


def read_evaluation_rows(prepared: PreparedData | None, file: Path | None, limit: int) -> list[SourcedRow]:
    """Return the rows to evaluate on: those of a file, else those of the validation split of prepared data.

    Raises:
        DataError: there are none.
    """
    if file is not None:
        rows = [SourcedRow("", row) for row in read_json_lines(file)]
    elif prepared is None:
        raise DataError(
            "a model that is not a run has no validation split", fix="give rows to evaluate on: --data FILE"
        )
    elif not prepared.is_complete:
        raise DataError(
            f"there is no prepared data in {prepared.root}",
            meaning="it was removed, or the run was copied without its data",
            fix="prepare it again: ftkit data prepare RECIPE; or give rows to evaluate on: --data FILE",
        )
    else:
        rows = prepared.read_validation_rows()
    if not rows:
        raise DataError(
            "there are no rows to evaluate on",
            meaning="the file is empty, or the recipe has no validation split",
            fix="give other rows: --data FILE",
        )
    return take_rows(rows, limit)


def take_rows(rows: Sequence[SourcedRow], limit: int) -> list[SourcedRow]:
    """Return the first rows, taken from the sources in turn."""
    places: Counter[str] = Counter()
    turns = []
    for each in rows:
        turns.append(places[each.source])
        places[each.source] += 1
    return [rows[number] for number in sorted(range(len(rows)), key=turns.__getitem__)[:limit]]


def make_evaluation_set(
    model: ModelInput, rows: Sequence[SourcedRow], data: DataSpec | None, report: Callable[[str], None]
) -> EvaluationSet:
    """Render and tokenize rows as training does. The loss of a row without a completion covers the prompt.

    Raises:
        DataError: none of the rows can be used.
    """
    encoded: dict[int, _Encoded | DataError] = {}
    for source in dict.fromkeys(each.source for each in rows):  # each source may have its own format
        own = [number for number, each in enumerate(rows) if each.source == source]
        encoded |= zip(own, _encode(model, [rows[number].row for number in own], data), strict=True)
    kept: list[SourcedRow] = []
    documents: list[tuple[int, Document]] = []
    cases: list[Case] = []
    bad: list[DataError] = []
    for number, each in enumerate(rows):
        result = encoded[number]
        if isinstance(result, DataError):
            bad.append(result)
            continue
        found, turns = result
        documents += [(len(kept), document) for document in found]
        cases += [Case(len(kept), each.row.columns, *turn) for turn in turns]
        kept.append(each)
    for error in bad[:3]:
        report(f"skipped: {one_line(error)}")
    if not kept:
        raise bad[0]
    if len(bad) > 3:  # noqa: PLR2004 - three are shown
        report(f"skipped: {plural(len(bad) - 3, 'more row')}")
    return EvaluationSet([each.row for each in kept], [each.source for each in kept], documents, cases)


def untokenized_cases(row: Row, data: DataSpec, form: Format) -> list[Case]:
    """Return the cases of a row without their tokens; none if the row can't be used."""
    try:
        example = read_example(row.columns, data, form)
        if not isinstance(example, Conversation):
            return []
        places = trained_turns(example, data.train_on if data.train_on in _TURNS else "assistant")
    except DataError:
        return []
    return [Case(0, row.columns, [], [], example.messages[place], bool(example.tools)) for place in places]


_Turn = tuple[list[int], list[int] | None, Message | None, bool]
_Encoded = tuple[list[Document], list[_Turn]]


def _encode(model: ModelInput, rows: list[Row], data: DataSpec | None) -> list[_Encoded | DataError]:
    form = _format_of(rows, data)
    if form is None:
        renderer = renderer_of(model, data.template_options if data else {})
        prompts = encode_prompts(model, renderer, rows, data.format if data else None)
        return [prompt if isinstance(prompt, DataError) else _prompt(prompt) for prompt in prompts]
    data = data or DataSpec.model_validate({"source": "./rows.jsonl"})
    unused = {name for row in rows for name in unused_columns(row.columns, form)}
    train_on = data.train_on if data.train_on in _TURNS else "assistant"
    data = data.model_copy(update={"ignore_columns": (*data.ignore_columns, *sorted(unused)), "train_on": train_on})
    encoder = RowEncoder.of(model.tokenizer, data, form, model.vocab_size)
    encoded: list[_Encoded | DataError] = []
    for row, documents in zip(rows, encoder.encode(rows), strict=True):
        if isinstance(documents, DataError):
            encoded.append(documents)
        elif any(len(document.tokens) > (model.max_length or np.inf) for document in documents):
            encoded.append(DataError(f"{row.where}: longer than the model's context of {model.max_length:,} tokens"))
        else:
            encoded.append((documents, _turns(row, documents, data, form)))
    return encoded


def _format_of(rows: list[Row], data: DataSpec | None) -> Format | None:
    """Return the recipe's format if the rows have its columns, else the detected one; None for prompts only."""
    form = AutoFormat() if data is None else data.format
    if not isinstance(form, AutoFormat) and all(name in rows[0].columns for name in form.columns if name != "tools"):
        return form
    try:
        return resolve_format(AutoFormat(), rows[:DETECTION_ROWS])
    except DataError:
        conversation_of(rows[0].columns, form)  # raises an error if there is no prompt either
        return None


def _prompt(tokens: list[int]) -> _Encoded:
    labels = np.array([*tokens[1:], IGNORED], np.int32)
    return [Document(np.array(tokens, np.int32), labels)], [(tokens, None, None, False)]


def _turns(row: Row, documents: list[Document], data: DataSpec, form: Format) -> list[_Turn]:
    """Return the assistant turns of a row: each is a run of trained tokens after its prompt."""
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
    if len(messages) != len(turns):  # adjacent turns form one run of tokens
        messages = [None] * len(turns)
    return [(*turn, message, bool(example.tools)) for turn, message in zip(turns, messages, strict=True)]
