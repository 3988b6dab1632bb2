"""Turn rows into evaluation data: documents for the loss, and prompts with reference completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.config.data import AutoFormat, DataSpec, Format, JinjaFormat, PreferencesFormat, PromptCompletionFormat
from ftkit.data.conversations import Conversation, JsonObject, Message, is_turn, read_tools, read_turns, trained_turns
from ftkit.data.encoding import RowEncoder
from ftkit.data.limits import run_in_fork, try_rows
from ftkit.data.packing import IGNORED, Document
from ftkit.data.pictures import PictureProcessor, open_picture, thumbnail
from ftkit.data.preferences import Preferences, conversations_of, first_picture, with_pictures
from ftkit.data.prepared_data import PreparedData
from ftkit.data.readers import read_json_lines
from ftkit.data.rendering import ChatRenderer
from ftkit.data.row_formats import DETECTION_ROWS, read_example, read_prompt, resolve_format, roles_in, unused_columns
from ftkit.data.rows import Columns, Row
from ftkit.errors import DataError, one_line, plural
from ftkit.models.architecture import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ftkit.data.labels import Rendering
    from ftkit.planning.plan import RunPlan

_TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text")


@dataclass(frozen=True)
class ModelInput:
    """Inputs that a model accepts: at most `max_length` tokens, if known. `label` is the model's name in errors."""

    tokenizer: Any
    label: str
    vocab_size: int
    max_length: int | None
    model: ModelSpec | None = None  # its processor reads the pictures

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, label: str, config: PretrainedConfig, model: ModelSpec | None = None
    ) -> ModelInput:
        text = config.get_text_config(decoder=True)
        return cls(tokenizer, label, text.vocab_size, getattr(text, "max_position_embeddings", None), model)

    def processor(self, *, is_needed: bool) -> PictureProcessor | None:
        return PictureProcessor.of(self.model, self.tokenizer) if is_needed and self.model else None


class Prompt(list[int]):
    """The tokens of a prompt; `pictures` is the record of its pictures' arrays."""

    def __init__(self, tokens: Iterable[int], pictures: bytes = b"") -> None:
        super().__init__(tokens)
        self.pictures = pictures


@dataclass(frozen=True)
class Case:
    """A prompt of row `number`, tokenized as in training, and the assistant turn that the data has for it.

    `reference` holds the turn's tokens and `message` the turn; both are None without a completion.
    """

    number: int
    columns: Columns
    prompt: Prompt
    reference: list[int] | None = None
    message: Message | None = None
    has_tools: bool = False

    def thumbnail(self) -> str | None:
        """Return a small copy of the row's first picture; None if there is none, or if its file was moved."""
        source = first_picture(self.columns) if self.prompt.pictures else None
        with suppress(DataError):
            return thumbnail(open_picture(source, "")) if source else None
        return None


@dataclass(frozen=True)
class EvaluationSet:
    """The rows of an evaluation, the source of each, the documents with the index of their row, and the prompts."""

    rows: list[Row]
    sources: list[str]
    documents: list[tuple[int, Document]]
    cases: list[Case]


_Turn = tuple[Prompt, list[int] | None, Message | None, bool]
"""An assistant turn: the prompt's tokens, the turn's tokens, the turn as in the data, and whether there are tools."""
_Encoded = tuple[list[Document], list[_Turn]]


def read_evaluation_rows(plan: RunPlan | None, file: Path | None, limit: int) -> list[tuple[str, Row]]:
    """Return (source, row) to evaluate on: the rows of a file, else the validation split of a run's data."""
    if file is not None:
        rows = [("", row) for row in read_json_lines(file)]
    elif plan is None:
        raise DataError(
            "a model that is not a run has no validation split", fix="give rows to evaluate on: --data FILE"
        )
    elif not (prepared := PreparedData(plan.data.root)).is_complete:
        raise DataError(
            f"there is no prepared data in {prepared.root}",
            meaning="it was removed, or the run was copied without its data",
            fix="prepare it again: ftkit data prepare RECIPE; or give rows to evaluate on: --data FILE",
        )
    else:
        rows = prepared.read_validation_rows(plan.recipe.data.validation_sources)
    if not rows:
        raise DataError(
            "there are no rows to evaluate on",
            meaning="the file is empty, or the recipe has no validation split",
            fix="give other rows: --data FILE",
        )
    return take_rows(rows, limit)


def take_rows(rows: Sequence[tuple[str, Row]], limit: int) -> list[tuple[str, Row]]:
    """Return the first `limit` rows, round-robin over the sources."""
    places: Counter[str] = Counter()
    turns = []
    for source, _ in rows:
        turns.append(places[source])
        places[source] += 1
    return [rows[number] for number in sorted(range(len(rows)), key=turns.__getitem__)[:limit]]


def make_evaluation_set(
    model: ModelInput, rows: Sequence[tuple[str, Row]], data: DataSpec | None, report: Callable[[str], None]
) -> EvaluationSet:
    """Render and tokenize rows as training does. A pair contributes its chosen completion.

    If a row has no completion, the loss covers its prompt.
    """
    encoded: dict[int, _Encoded | DataError] = {}
    for source in dict.fromkeys(source for source, _ in rows):  # each source may have its own format
        own = [number for number, (name, _) in enumerate(rows) if name == source]
        encoded |= zip(own, _encode(model, [rows[number][1] for number in own], data, report), strict=True)
    found, bad = EvaluationSet([], [], [], []), list[DataError]()
    for number, (source, row) in enumerate(rows):
        result = encoded[number]
        if isinstance(result, DataError):
            bad.append(result)
            continue
        documents, turns = result
        found.documents.extend((len(found.rows), document) for document in documents)
        found.cases.extend(Case(len(found.rows), row.columns, *turn) for turn in turns)
        found.rows.append(row)
        found.sources.append(source)
    for error in bad[:3]:
        report(f"skipped: {one_line(error)}")
    if not found.rows:
        raise bad[0]
    if len(bad) > 3:  # noqa: PLR2004 - three are shown
        report(f"skipped: {plural(len(bad) - 3, 'more row')}")
    return found


def _encode(
    model: ModelInput, rows: list[Row], data: DataSpec | None, report: Callable[[str], None]
) -> list[_Encoded | DataError]:
    form = _format_of(rows, data)
    if form is None or ("user" in (roles := roles_in(rows, form).values()) and "assistant" not in roles):
        return _encode_prompts(model, rows, data)
    sees = model.model is not None and have_pictures(rows)
    data = data or DataSpec.model_validate({"source": "./rows.jsonl", "pictures": sees})
    unused = {name for row in rows for name in unused_columns(row.columns, data, form)}
    train_on = data.train_on if data.train_on in ("assistant", "last", "completion") else "assistant"
    data = data.model_copy(update={"ignore_columns": (*data.ignore_columns, *sorted(unused)), "train_on": train_on})
    pictures = model.processor(is_needed=bool(data.pictures))
    encoder = RowEncoder.of(model.tokenizer, data, form, model.vocab_size, pictures=pictures)
    encoded, num_earlier = list[_Encoded | DataError](), 0
    documents_of = encoder.encode(rows)
    dropped = [row for row, found in zip(rows, documents_of, strict=True) if found == []]
    prompts = iter(_encode_prompts(model, dropped, data) if dropped else [])
    for row, found in zip(rows, documents_of, strict=True):
        if isinstance(found, DataError):
            encoded.append(found)
            continue
        if not found:  # training drops a pair with equal sides; its prompt can still be completed
            prompt = next(prompts)
            encoded.append(prompt if isinstance(prompt, DataError) else ([], prompt[1]))
            continue
        if found[0].is_rejected:
            encoded.append(DataError(f"{row.where}: its label says that the completion is undesirable"))
            continue
        documents = found[:1] if isinstance(form, PreferencesFormat) else found
        if any(len(document.tokens) > (model.max_length or np.inf) for document in documents):
            encoded.append(DataError(f"{row.where}: longer than the model's context of {model.max_length:,} tokens"))
        else:
            turns = _turns(row, documents, data, form)
            if pictures:  # the record also has later pictures, which earlier prompts lack
                num_earlier += len(turns)
                turns = [turn for turn in turns if _has_all(turn[0], documents, pictures.inputs.token_ids)]
                num_earlier -= len(turns)
            encoded.append((documents, turns))
    if num_earlier:
        report(f"not completed, but in the loss: {plural(num_earlier, 'turn')} before later pictures")
    return encoded


def have_pictures(rows: Sequence[Row]) -> bool:
    return any(first_picture(row.columns) is not None for row in rows)


def _has_all(prompt: Prompt, documents: Sequence[Document], token_ids: Sequence[int]) -> bool:
    whole = next(each.tokens for each in documents if each.tokens[: len(prompt)].tolist() == prompt)
    return not np.isin(whole[len(prompt) :], token_ids).any()


def _format_of(rows: list[Row], data: DataSpec | None) -> Format | None:
    """Return the recipe's format if the rows have its columns, else the detected one; None for prompts only."""
    form = AutoFormat() if data is None else data.format
    if not isinstance(form, AutoFormat) and all(name in rows[0].columns for name in form.required):
        return form
    try:
        return resolve_format(AutoFormat(), rows[:DETECTION_ROWS])
    except DataError:
        prompt_of(rows[0].columns, form)  # raises an error if there is no prompt either
        return None


def _encode_prompts(model: ModelInput, rows: list[Row], data: DataSpec | None) -> list[_Encoded | DataError]:
    pictures = model.processor(is_needed=have_pictures(rows))
    renderer = renderer_of(model.tokenizer, model.label, data.template_options if data else {}, pictures)
    prompts = encode_prompts(model.tokenizer, renderer, rows, data.format if data else None, pictures)
    return [prompt if isinstance(prompt, DataError) else _prompt(prompt) for prompt in prompts]


def _prompt(tokens: Prompt) -> _Encoded:
    labels = np.array([*tokens[1:], IGNORED], np.int32)
    return [Document(np.array(tokens, np.int32), labels, pictures=tokens.pictures)], [(tokens, None, None, False)]


def _turns(row: Row, documents: list[Document], data: DataSpec, form: Format) -> list[_Turn]:
    """Return the assistant turns of a row: each is a contiguous run of trained tokens after its prompt."""
    example = read_example(row.columns, data, form)
    if isinstance(example, Preferences):
        example = example.chosen
    if not isinstance(example, Conversation):
        return []
    turns: list[tuple[Prompt, list[int]]] = []
    for document in documents:
        counts = np.flatnonzero(document.labels != IGNORED)
        for run in np.split(counts, np.flatnonzero(np.diff(counts) > 1) + 1):
            begin, end = int(run[0]) + 1, int(run[-1]) + 2
            prompt = Prompt(document.tokens[:begin].tolist(), document.pictures)
            turns.append((prompt, document.tokens[begin:end].tolist()))
    messages: list[Message | None] = [example.messages[place] for place in trained_turns(example, data.train_on)]
    if len(messages) != len(turns):  # adjacent turns form one run of tokens
        messages = [None] * len(turns)
    return [(*turn, message, bool(example.tools)) for turn, message in zip(turns, messages, strict=True)]


def renderer_of(
    tokenizer: PreTrainedTokenizerBase, label: str, options: JsonObject, pictures: PictureProcessor | None = None
) -> ChatRenderer:
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer of {label} has no chat template",
            meaning="it is a base model, which was not trained on conversations",
            fix="try a model that was trained on conversations",
        )
    return ChatRenderer.of(tokenizer, options, mark=pictures.token if pictures else "")


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    renderer: ChatRenderer,
    rows: Sequence[Row],
    form: Format | None,
    pictures: PictureProcessor | None = None,
) -> list[Prompt | DataError]:
    """Return the tokens of each row's prompt, with the header of the assistant turn, or its error with file and line.

    `form` reads rows that have its columns. Other rows need a list of turns or a column with a prompt.
    """
    data = DataSpec.model_validate({"source": "./rows.jsonl", "pictures": pictures is not None})

    def rendered(row: Row) -> Rendering:
        (conversation,) = conversations_of(with_pictures(prompt_of(row.columns, form), row.columns, data))
        return renderer.prompt(conversation)

    found = run_in_fork(renderer, try_rows, rendered, rows)
    return [
        each if isinstance(each, DataError) else encode_prompt(tokenizer, row, each, pictures)
        for row, each in zip(rows, found, strict=True)
    ]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, row: Row, rendering: Rendering, pictures: PictureProcessor | None
) -> Prompt | DataError:
    expanded = pictures.expand_row(row, [rendering]) if pictures else [rendering]
    if isinstance(expanded, DataError):
        return expanded
    return Prompt(encode_text(tokenizer, expanded[0].text), expanded[0].record)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def prompt_of(columns: Columns, form: Format | None) -> Conversation:
    if isinstance(form, PromptCompletionFormat | JinjaFormat):
        prompt_only = form.model_copy(update={"completion": form.prompt})
        if all(name in columns for name in prompt_only.columns):
            return read_prompt(columns, form)
    for style in ("openai", "sharegpt"):
        for name, value in columns.items():
            if isinstance(value, list) and value and all(is_turn(turn, style) for turn in value):
                messages = tuple(read_turns(value, name, style, ()))
                end = max((number for number, each in enumerate(messages, 1) if each.role != "assistant"), default=0)
                if not end:
                    raise DataError("all turns are the assistant's", fix="add the user's turn before them")
                given = [columns[key] for key in ("tools", "functions") if columns.get(key)]
                return Conversation(messages[:end], tuple(tool for each in given for tool in read_tools(each)))
    for name in _TEXT_COLUMNS:
        if isinstance(columns.get(name), str):
            added = ("input", "context") if name == "instruction" else ()
            more = [str(columns[each]) for each in added if columns.get(each)]
            return Conversation((Message("user", "\n\n".join([columns[name], *more])),))
    raise DataError(
        f"there is no prompt in the columns {', '.join(columns) or '(none)'}",
        meaning=f"a prompt is a list of turns (messages, conversations), or one of {', '.join(_TEXT_COLUMNS)}",
        fix='rename a column: each line is e.g. {"prompt": "..."}',
    )
