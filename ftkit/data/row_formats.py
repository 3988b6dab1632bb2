"""Detect the format of rows, and turn rows into conversations or texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ftkit.config.data import (
    ROLES,
    AlpacaFormat,
    AutoFormat,
    DataSpec,
    DollyFormat,
    Format,
    JinjaFormat,
    MessagesFormat,
    PreferencesFormat,
    PromptCompletionFormat,
    TaskFormat,
    TextFormat,
    describe_format,
    label_of,
    normalized_role,
)
from ftkit.config.data_sources import columns_of, parse_format_string
from ftkit.config.objectives import OPTIONS
from ftkit.data.conversations import (
    Conversation,
    Message,
    PlainText,
    blank_turn,
    check_calls,
    is_turn,
    read_tools,
    read_turns,
    style_of,
    turns_in,
)
from ftkit.data.preferences import PICTURE_COLUMNS, Example, read_preferences, with_pictures
from ftkit.data.tasks import read_pair
from ftkit.errors import DataError, closest, one_line

if TYPE_CHECKING:
    import jinja2

    from ftkit.config.objectives import Objective
    from ftkit.data.rows import Columns, Row

DETECTION_ROWS = 100  # number of rows from which a format is detected
METADATA = frozenset(
    ("id", "_id", "idx", "index", "uid", "uuid", "guid", "hash", "source", "dataset", "origin", "url", "split",
     "language", "lang", "license", "timestamp", "created_at", "date", "category", "tags", "parallel_tool_calls",
     "__index_level_0__", "", "Unnamed: 0")
)  # fmt: skip
"""Metadata columns, which are skipped and listed in a message. The last three are names of an index from pandas."""
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output"))
_TURN_COLUMNS = frozenset(("messages", "conversations", "conversation"))
_REDUNDANT = {AlpacaFormat: ("text",), MessagesFormat: ("system", "functions")}
"""Redundant columns of a format. Alpaca's `text` is a rendering of its other columns."""


def resolve_format(form: Format, rows: Sequence[Row], ignored: Collection[str] = ()) -> Format:
    if not isinstance(form, AutoFormat):
        return form
    if not rows:
        raise DataError("there are no rows to detect the format from", fix="check data.source")
    shapes = Counter(frozenset(row.columns) for row in rows)
    ((commonest, _),) = shapes.most_common(1)  # rows of another shape are bad rows
    for alike in (rows, [row for row in rows if row.columns.keys() == commonest]):
        columns = set.intersection(*(set(row.columns) for row in alike))
        if {"chosen", "rejected"} <= columns:
            return PreferencesFormat()
        detected = _detect_turns(columns, alike) or _detect_by_columns(columns)
        if isinstance(detected, MessagesFormat | PromptCompletionFormat) and "label" in columns - {*ignored}:
            num_labels = sum(_label_in(row.columns["label"]) is not None for row in alike)
            return detected.model_copy(update={"label": "label" if num_labels * 2 > len(alike) else None})
        if detected is not None:
            return detected
    raise _unknown_format(rows, commonest)


def _unknown_format(rows: Sequence[Row], names: frozenset[str]) -> DataError:
    where, columns = rows[0].where, rows[0].columns
    if found := sorted(names & _TURN_COLUMNS):
        num_empty = sum(row.columns.get(found[0]) == [] for row in rows)
        what = "an empty list" if num_empty * 2 > len(rows) else "not a list of turns"
        return DataError(
            f"{where}: column '{found[0]}' is {what} in most of the first rows, such as "
            f"{str(columns.get(found[0]))[:80]}",
            meaning="a turn is an object with role and content, or with from and value",
            fix="correct the data, or select another column: data.format={kind: messages, column: NAME}",
        )
    prompt, completion = [*columns][:2] if len(columns) > 1 else ("question", "answer")
    return DataError(
        f"{where}: no known format has the columns {', '.join(sorted(names)) or '(none)'}",
        meaning="known: turns (messages, conversations), instruction and output, prompt and completion, text; of "
        "preferences: chosen and rejected",
        fix="set how a row becomes a conversation, e.g. data.format.kind=prompt-completion "
        f"data.format.prompt='\"{{{prompt}}}\"' data.format.completion='\"{{{completion}}}\"'; "
        "or a pair: data.format={kind: preferences, prompt: NAME, chosen: NAME, rejected: NAME}",
    )


def check_format(data: DataSpec, form: Format, objective: Objective) -> None:
    """Check that the objective can train on rows of this format, and that `too_long: split` applies to it."""
    is_pairs, label = isinstance(form, PreferencesFormat), label_of(form)
    if (is_pairs or label) and objective not in OPTIONS:
        raise DataError(
            f"the rows are preference data: {'pairs (chosen, rejected)' if is_pairs else 'completions with a label'}",
            meaning=f"with objective {objective}, the model would learn what is not preferred too",
            fix="set training.objective=dpo or another one on preferences; or select what is preferred: "
            "data.format={kind: messages, column: chosen} and data.ignore_columns=[rejected]"
            if is_pairs
            else "set training.objective=kto; select what is preferred: "
            f"jq -c 'select(.{label}) | del(.{label})' FILE > preferred.jsonl; or, if the label means something else, "
            f"set data.ignore_columns=[{label}]",
            name="pairs" if is_pairs else "labeled-completions",
        )
    if objective in OPTIONS and not (is_pairs or (label and objective == "kto")):
        raise DataError(
            f"training.objective is {objective}, but the rows have no {'label' if objective == 'kto' else 'pairs'}: "
            f"{describe_format(form)}",
            meaning="a pair has the columns chosen and rejected, and most often prompt; a label, for kto, is true or "
            "false in the column label",
            fix="give a data set with pairs, or name its columns: data.format={kind: preferences, chosen: NAME, …}; "
            "for kto: {kind: messages, label: NAME}",
        )
    if is_pairs or label:
        for key, value, allowed in (
            ("too_long", data.too_long, ("auto", "error", "drop")),
            ("train_on", data.train_on, ("assistant", "completion", "last")),
        ):
            if value not in allowed:
                raise DataError(
                    f"data.{key} is '{value}', but the rows are {'pairs' if is_pairs else 'completions with a label'}",
                    meaning="what is preferred are whole completions",
                    fix=f"set it to one of {', '.join(allowed)}",
                )
    if data.too_long == "split" and form.kind != "text":
        raise DataError(
            "data.too_long is 'split', but the rows are conversations",
            meaning="later parts would lack the turns before them",
            fix="set it to 'truncate', which cuts after a turn that fits, or 'drop'",
        )


_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _label_in(value: object) -> bool | None:
    return _LABELS.get(str(value).lower())


def read_label(columns: Columns, column: str) -> bool:
    if (label := _label_in(columns.get(column))) is None:
        raise DataError(
            f"column '{column}' is not a label: {str(columns.get(column))[:80]}",
            meaning="a label is true or 1 for a desirable completion, false or 0 for an undesirable one",
            fix="correct or remove this example",
        )
    return label


def _detect_turns(columns: set[str], rows: Sequence[Row]) -> Format | None:
    def is_turns(value: object, style: str) -> bool:
        turns = turns_in(value)
        return bool(turns) and all(is_turn(turn, style) for turn in turns)

    for style in ("openai", "sharegpt"):
        names = [name for name in rows[0].columns if name in columns]
        found = [name for name in names if sum(is_turns(row.columns[name], style) for row in rows) * 2 > len(rows)]
        if len(found) == 1:
            return MessagesFormat(column=found[0], style=style)
    return None


def describe_roles(rows: Sequence[Row], form: Format) -> str:
    """Describe which role names of the first rows are aliases of roles; empty if none."""
    names = roles_in(rows, form).items()
    renamed = [f"'{name}' is {role}" for name, role in names if role and normalized_role(name) != role]
    return f"; {', '.join(renamed)}" if renamed else ""


def roles_in(rows: Sequence[Row], form: Format) -> dict[str, str | None]:
    """Return the role of each role name of rows with turns; None for names of no role."""
    if not isinstance(form, MessagesFormat):
        return {}
    key = "role" if form.style == "openai" else "from"
    turns = [turn for row in rows for turn in turns_in(row.columns.get(form.column)) if isinstance(turn, dict)]
    return {name: ROLES.get(normalized_role(name)) for turn in turns if isinstance(name := turn.get(key), str)}


def _detect_by_columns(columns: set[str]) -> Format | None:
    if {"instruction", "output"} <= columns:
        return AlpacaFormat()
    if {"instruction", "response"} <= columns:
        return DollyFormat()
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= columns:
            return PromptCompletionFormat(prompt=f"{{{prompt}}}", completion=f"{{{completion}}}")
    return TextFormat() if "text" in columns else None


def unused_columns(row: Columns, data: DataSpec, form: Format) -> list[str]:
    """Return the columns with a value that the format does not use, in the row's order; a task may use all."""
    if isinstance(form, TaskFormat):
        return []
    known = {*form.columns, *_REDUNDANT.get(type(form), ()), *(PICTURE_COLUMNS if data.pictures else ())}
    return [name for name, value in row.items() if name not in known and value not in (None, "", [], {})]


def read_example(columns: Columns, data: DataSpec, form: Format) -> Example:
    _check_columns(columns, data, form)
    return with_pictures(_read(columns, data, form), columns, data)


def _read(columns: Columns, data: DataSpec, form: Format) -> Example:  # noqa: PLR0911 - one for each format
    match form:
        case MessagesFormat():
            return _read_conversation(columns, form, data.ignore_columns)
        case AlpacaFormat():
            return _read_alpaca(columns)
        case DollyFormat():
            return _conversation(None, _joined(columns, "context"), _required(columns, "response"))
        case PromptCompletionFormat():
            return _read_pair(columns, form, data.ignore_columns)
        case JinjaFormat():
            completion = _render(form.completion, columns, "completion")
            return _conversation(*_prompt(columns, form), completion)
        case PreferencesFormat():
            return read_preferences(columns, form, data)
        case TextFormat():
            return PlainText(_required(columns, form.column))
        case TaskFormat():
            return _read_pair(read_pair(data, columns), PromptCompletionFormat(), data.ignore_columns)
        case AutoFormat():
            raise TypeError("the format is resolved before rows are read")


def unknown_columns(columns: Columns, data: DataSpec, form: Format) -> list[str]:
    """Return the columns of a row that would be lost; none if the user selected the columns."""
    chooses = isinstance(form, JinjaFormat)
    if isinstance(form, PromptCompletionFormat):
        chooses = not isinstance(data.format, AutoFormat) and form != PromptCompletionFormat()
    known = {*METADATA, *data.ignore_columns}
    return [] if chooses else [name for name in unused_columns(columns, data, form) if name not in known]


def _check_columns(columns: Columns, data: DataSpec, form: Format) -> None:
    missing = [name for name in form.required if name not in columns and not isinstance(form, JinjaFormat)]
    absent = missing or [name for name in form.columns if name not in columns]
    if not missing and not (unknown := unknown_columns(columns, data, form)):
        return
    unused = unused_columns(columns, data, form)
    similar = next((f"did you mean '{name}' by '{each}'? " for each in absent if (name := closest(each, unused))), "")
    if missing:
        is_nested = missing[0].partition(".")[0] in columns
        raise DataError(
            f"no column {', '.join(map(repr, missing))}: the row has {', '.join(columns) or 'none'}",
            meaning=f"the format is {describe_format(form)}, as set or as detected from the first rows",
            fix="columns inside others have no names here: read them with the functions of a data.task, or write the "
            "rows anew, as with flatten() of datasets"
            if is_nested
            else f"{similar}correct data.format, or remove this row",
        )
    raise DataError(
        f"columns that the format does not know: {', '.join(unknown)}",
        meaning=f"the format is {describe_format(form)}; their values would be lost",
        fix=f"{similar}leave them out: data.ignore_columns=[{', '.join(unknown)}]; or use them in data.format"
        + "; for a multimodal model: data.pictures=true" * any(name in PICTURE_COLUMNS for name in unknown),
    )


def _read_conversation(columns: Columns, form: MessagesFormat, ignored: Collection[str]) -> Conversation:
    messages = tuple(read_turns(columns.get(form.column), form.column, form.style, ignored))
    system = columns.get("system")
    if isinstance(system, str) and system and "system" not in (*ignored, form.column):
        if messages[0].role == "system":
            raise DataError("there is a system turn and a column 'system'", fix="data.ignore_columns=[system]")
        messages = (Message("system", system), *messages)
    tools = [columns[name] for name in (form.tools_column, "functions") if name in columns and name not in ignored]
    schemas = tuple(schema for value in tools for schema in read_tools(value))
    check_calls(messages, schemas)
    return Conversation(messages, schemas)


def _read_alpaca(columns: Columns) -> Conversation:
    earlier: list[Message] = []
    history = columns.get("history") or []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise DataError(f"history is not a list of question and answer: {str(turn)[:80]}", fix="correct the data")
        earlier += [Message("user", turn[0]), Message("assistant", turn[1])]
    system = _text(columns.get("system"), "system") or None
    whole = _conversation(system, _joined(columns, "input"), _required(columns, "output"))
    *before, user, assistant = whole.messages
    return Conversation((*before, *earlier, user, assistant), num_prompt=len(before) + len(earlier) + 1)


def _joined(columns: Columns, second: str) -> str:
    return "\n\n".join(filter(None, (_required(columns, "instruction"), _text(columns.get(second), second))))


def _read_pair(columns: Columns, form: PromptCompletionFormat, ignored: Collection[str]) -> Conversation:
    prompt, completion = (_turns_of(columns, text, ignored) for text in (form.prompt, form.completion))
    if prompt is None and completion is None:
        return _conversation(*_prompt(columns, form), _fill(form.completion, columns, "completion"))
    if prompt is None or completion is None:
        raise DataError("one of prompt and completion is a list of turns and the other is text", fix="correct the data")
    return Conversation((*prompt, *completion), num_prompt=len(prompt))


def _turns_of(columns: Columns, text: str, ignored: Collection[str]) -> tuple[Message, ...] | None:
    """Return the turns of a format string that consists of one column with a list of turns, else None."""
    pieces = parse_format_string(text)
    column = pieces[0][1] if len(pieces) == 1 and pieces[0][0] == "" else None
    value = columns.get(column) if column else None
    style = style_of(value) if isinstance(value, list) else None
    return tuple(read_turns(value, str(column), style, ignored)) if style else None


def _prompt(columns: Columns, form: PromptCompletionFormat | JinjaFormat) -> tuple[str | None, str]:
    fill = _render if isinstance(form, JinjaFormat) else _fill
    system = fill(form.system, columns, "system") if form.system else None
    return system, fill(form.prompt, columns, "prompt")


def read_prompt(columns: Columns, form: PromptCompletionFormat | JinjaFormat) -> Conversation:
    return Conversation(_prompt_turns(*_prompt(columns, form)))


def _prompt_turns(system: str | None, prompt: str) -> tuple[Message, ...]:
    return (*([Message("system", system)] if system else []), Message("user", prompt))


def _conversation(system: str | None, prompt: str, completion: str) -> Conversation:
    if not completion.strip():
        raise blank_turn()
    before = _prompt_turns(system, prompt)
    return Conversation((*before, Message("assistant", completion)), num_prompt=len(before))


def _fill(template: str, columns: Columns, key: str) -> str:
    names = columns_of(template)
    if names and all(columns[name] is None for name in names):
        raise DataError(
            f"all columns of data.format.{key} are null: {', '.join(names)}",
            fix="correct data.format, or remove this example",
        )
    pieces = parse_format_string(template)
    return "".join(literal + ("" if name is None else _text(columns[name], name)) for literal, name in pieces)


def _required(columns: Columns, name: str) -> str:
    if columns.get(name) is None:
        raise DataError(f"column '{name}' is null", fix="correct data.format, or remove this example")
    return _text(columns[name], name)


def _text(value: object, column: str) -> str:
    """Return the text of a column; null becomes empty text, as in Alpaca's `input`."""
    if value is None:
        return ""
    is_finite = isinstance(value, float) and math.isfinite(value)
    if is_finite or (isinstance(value, str | int) and not isinstance(value, bool)):
        return str(value)
    raise DataError(
        f"column '{column}' is neither text nor a number: {str(value)[:80]}",
        meaning=f"the model would be trained on Python's spelling of a {type(value).__name__}",
        fix=f"use {{{{ {column} | {'join' if isinstance(value, list) else 'tojson'} }}}} in a template "
        "(data.format.kind=jinja), or turn the column into text"
        if isinstance(value, list | dict)
        else "correct this example, or remove it",
    )


@lru_cache(maxsize=8)
def _compile(text: str) -> jinja2.Template:
    import jinja2.sandbox  # noqa: PLC0415 - only recipes with a template need it

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, extensions=["jinja2.ext.loopcontrols"], keep_trailing_newline=True
    )
    return environment.from_string(text)


def _render(template: str, columns: Columns, key: str) -> str:
    try:
        return _compile(template).render(dict(columns))
    except Exception as error:  # a template may raise anything: Jinja's errors, Python's
        raise DataError(
            f"the template data.format.{key} can't be rendered: {one_line(error)}",
            meaning=f"the data has: {', '.join(sorted(columns))}",
            fix="correct data.format in the recipe, or remove this example",
        ) from error
