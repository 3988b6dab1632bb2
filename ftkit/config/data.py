"""The data: its format, the chat template, and the trained tokens."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ftkit.config.data_sources import (
    FilesSource,
    FormatString,
    GeneratedSource,
    JinjaText,
    MixtureSource,
    SingleSource,
    Source,
    Task,
    ValidationSpec,
    columns_of,
    is_inline_template,
    variables_of,
)
from ftkit.errors import plural
from ftkit.paths import is_path
from ftkit.spec import NonNegativeInt, Spec

# --- Formats -----------------------------------------------------------------------------------------


class _Format(Spec):
    fixed_columns: ClassVar[tuple[str, ...]] = ()
    optional_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that the format uses; empty if unknown before rows are read."""
        return [*self.fixed_columns]

    @property
    def required(self) -> list[str]:
        """The columns that each row must have."""
        return [name for name in self.columns if name not in self.optional_columns]


class AutoFormat(_Format):
    """The format is detected from the first rows."""

    kind: Literal["auto"] = "auto"


class _LabeledFormat(_Format):
    label: str | None = None
    """For objective kto: the column with true or 1 if the completion is desirable, and false or 0 if it is not. In a
    list of turns, the completion is everything after the last user turn."""


class PromptCompletionFormat(_LabeledFormat):
    """Format strings over columns, for a prompt and a completion: one user turn, one assistant turn.

    If a prompt or completion is a single column with a list of turns, these turns are used.
    """

    kind: Literal["prompt-completion"] = "prompt-completion"
    prompt: FormatString = "{prompt}"
    """Text of the user turn. `{column}` is replaced by that column of the example; `{{` and `}}` are literal braces;
    null becomes empty text."""
    completion: FormatString = "{completion}"
    """Text of the assistant turn, a format string like the prompt."""
    system: FormatString | None = None
    """Text of a system turn before them. No system turn if null."""

    @property
    def columns(self) -> list[str]:
        names = [name for text in (self.system, self.prompt, self.completion) if text for name in columns_of(text)]
        return names + ([self.label] if self.label else [])

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        """Refuse a column's name without braces: every example would be trained on the name itself."""
        for key, text in (("prompt", self.prompt), ("completion", self.completion)):
            if not columns_of(text) and (key == "completion" or text.isidentifier()):
                raise ValueError(f"{key} names no column: it is the text {text!r} for each example; "
                                 "a column's name is written in braces, as in '{answer}'")  # fmt: skip
        return self


class JinjaFormat(_Format):
    """Jinja templates over an example's columns: one user turn, one assistant turn."""

    kind: Literal["jinja"] = "jinja"
    prompt: JinjaText
    """Text of the user turn: `{{ column }}`, conditions and loops over the columns."""
    completion: JinjaText
    """Text of the assistant turn."""
    system: JinjaText | None = None
    """Text of a system turn before them. No system turn if null."""

    @property
    def columns(self) -> list[str]:
        return [name for text in (self.system, self.prompt, self.completion) if text for name in variables_of(text)]


class MessagesFormat(_LabeledFormat):
    """A column that holds a conversation."""

    kind: Literal["messages"] = "messages"
    column: str = "messages"
    """The column with the list of turns."""
    style: Literal["openai", "sharegpt"] = "openai"
    """`openai`: role, content, tool_calls, reasoning_content, weight, …; `sharegpt`: from and value, with the roles
    human, gpt, system, tool, function_call, observation and their other names."""
    tools_column: str = "tools"
    """The column with the tools that the assistant may call, if the data has one: a list, or JSON text of a list."""

    @property
    def columns(self) -> list[str]:
        return [self.column, self.tools_column, *([self.label] if self.label else [])]

    @property
    def required(self) -> list[str]:
        return [name for name in self.columns if name != self.tools_column]


class AlpacaFormat(_Format):
    """Columns instruction, input and output, as in Alpaca; also `system` and `history` if present."""

    fixed_columns = ("instruction", "input", "output", "system", "history")
    optional_columns = ("input", "system", "history")
    kind: Literal["alpaca"] = "alpaca"


class DollyFormat(_Format):
    """Columns instruction, context and response, as in Dolly."""

    fixed_columns = ("instruction", "context", "response")
    optional_columns = ("context",)
    kind: Literal["dolly"] = "dolly"


class TextFormat(_Format):
    """A column of plain text, for continued pretraining: no chat template, an end token after each text."""

    kind: Literal["text"] = "text"
    column: str = "text"
    """The column with the text."""
    parse_special_tokens: bool = False
    """Whether special tokens in a text, such as `<|im_end|>`, are parsed: for texts that are already rendered."""

    @property
    def columns(self) -> list[str]:
        return [self.column]


class PreferencesFormat(_Format):
    """Columns with a chosen and a rejected completion of a prompt: texts, or lists of turns.

    Without a prompt, both are conversations, and their common leading turns are the prompt; a text may consist of
    `Human:` and `Assistant:` turns. A list of several rejected completions makes several pairs.
    """

    kind: Literal["preferences"] = "preferences"
    prompt: str = "prompt"
    """The column with the prompt, if the data has one."""
    chosen: str = "chosen"
    """The column with the chosen completion."""
    rejected: str = "rejected"
    """The column with the rejected completion, or a list of several."""

    @property
    def columns(self) -> list[str]:
        return [self.prompt, *self.required, "system", "tools", *self.scores]

    @property
    def required(self) -> list[str]:
        return [self.chosen, self.rejected]

    @property
    def scores(self) -> tuple[str, str]:
        """The columns for the scores of both completions, which the data may have."""
        return f"score_{self.chosen}", f"score_{self.rejected}"


class TaskFormat(_Format):
    """The functions `prompt(row)` and `completion(row)` of the task return the prompt and the completion."""

    kind: Literal["task"] = "task"


_AnyFormat = Annotated[
    AutoFormat | MessagesFormat | AlpacaFormat | DollyFormat | PromptCompletionFormat | JinjaFormat | TextFormat
    | PreferencesFormat | TaskFormat, Field(discriminator="kind")
]  # fmt: skip
FormatName = Literal[
    "auto", "messages", "sharegpt", "alpaca", "dolly", "prompt-completion", "text", "preferences", "task"
]
"""Names of formats that need no fields."""


def _from_name(value: object) -> object:
    if value == "sharegpt":
        return {"kind": "messages", "style": "sharegpt", "column": "conversations"}
    if isinstance(value, str) and value != "jinja" and value not in get_args(FormatName):
        raise ValueError(
            f"'{value}' is not a format: write {', '.join(get_args(FormatName))}, or a mapping such as "
            "{kind: jinja, prompt: …, completion: …}"
        )
    return {"kind": value} if isinstance(value, str) else value


Format = Annotated[_AnyFormat, BeforeValidator(_from_name, json_schema_input_type=_AnyFormat | FormatName)]

CHAT_TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "olmo", "phi4")
"""The chat templates that ftkit ships."""


def _check_chat_template(value: str) -> str:
    if value == "model" or value in CHAT_TEMPLATES or is_path(value) or is_inline_template(value):
        return value
    raise ValueError(
        f"'{value}' is not a chat template: write model, {', '.join(CHAT_TEMPLATES)}, a file as ./FILE, or Jinja text"
    )


ChatTemplateText = Annotated[str, AfterValidator(_check_chat_template)]
"""`model`, the name of a shipped template, a file, or Jinja text."""
Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "chatbot", "bot", "ai", "bard", "bing", "claude"),
                    "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "function_result", "tool_result", "tool_output"), "tool"),
}  # fmt: skip
"""Roles by their names in datasets and chat templates: ShareGPT, Cohere (chatbot), OpenAssistant (prompter), …"""
CALL_ROLES = ("function_call", "function_calls", "tool_call", "tool_calls")
"""ShareGPT roles of assistant turns whose text is the JSON of tool calls."""


def normalized_role(name: str) -> str:
    """Return a role's name, normalized in case and separators."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


Packing = Literal["auto", "off"]
TrainOn = Literal["assistant", "last", "completion", "all"]
TooLong = Literal["error", "drop", "truncate", "split"]
"""How documents longer than a pack are handled, as resolved for a format."""


def _check_option(value: object) -> object:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("an option of a template is text, a number, true, or false")  # noqa: TRY004
    return value


def _check_train_on(value: object) -> object:
    names = [normalized_role(str(name)) for name in value] if isinstance(value, list) else []
    if names and all(name in ROLES or name in CALL_ROLES for name in names):
        return list(dict.fromkeys(ROLES.get(name, "assistant") for name in names))
    if isinstance(value, str) and value in get_args(TrainOn):
        return value
    raise ValueError(
        f"write {', '.join(get_args(TrainOn))}, or a list of roles: [{', '.join(get_args(Role))}] or some of them"
    )


_TemplateOption = Annotated[bool | int | float | str, BeforeValidator(_check_option)]


class DataSpec(Spec):
    """The data to train and evaluate on."""

    source: Source
    """Source of the rows: a path, an address or a hub id; a list of these, or of mappings `{source: …, weight: …}`; or
    one mapping with a kind."""
    task: Task | None = None
    """A Python file with functions that generate, format and score rows, relative to the recipe's folder. Preparation,
    `ftkit data` and evaluation run it; planning does not."""
    validation: ValidationSpec | None = None
    """The validation split. If null, the source's `num_heldout` or `heldout` defines it; without these, there is no
    validation split."""
    format: Format = AutoFormat.model_construct()
    """How an example becomes a conversation or a text. If null, it is detected from the first rows."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of an example, and keys of a turn, to ignore. Any other unknown column or key is an error, except plain
    metadata such as `id` and `source`."""
    chat_template: ChatTemplateText = "model"
    """The template that renders conversations as text. `model`: the tokenizer's own; the name of a shipped template
    (`chatml`, which Qwen's models use too, `gemma`, `llama3`, `mistral`, `olmo`, `phi4`); a file (`./chat.jinja`,
    relative to the recipe's folder); or Jinja text."""
    template_options: dict[str, _TemplateOption] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false` of Qwen 3 or `reasoning_effort` of gpt-oss."""
    train_on: Annotated[TrainOn | list[Role], BeforeValidator(_check_train_on)] = "assistant"
    """Which tokens count in the loss: all assistant turns with their end-of-turn token (`assistant`), only the last one
    (`last`), the completion (`completion`), or all tokens (`all`); or a list of roles whose turns count, by ftkit's or
    the data's names. A turn's own `weight` or `train` takes precedence."""
    too_long: Literal["auto", "error", "drop", "truncate", "split"] = "auto"
    """How to handle a document longer than a pack: refuse it, drop it, truncate it after the last trained turn that
    fits (drop it if it has pictures), or (text only) split it. `auto` splits plain text, and refuses conversations.
    Affected documents are counted and reported."""
    skip_bad: NonNegativeInt = 0
    """Maximum number of bad examples to skip; each is reported with file and line."""
    contradictions: Literal["refuse", "drop"] = "refuse"
    """How to handle pairs with equal sides, pairs that contradict an earlier row, and completions with both labels:
    refuse the data, or drop them. `ftkit data check` counts them."""
    share_prompts: bool | None = None
    """Whether both sides of a pair attend to one copy of their prompt; needs kernels that take any mask (`flex`,
    `sdpa`). If null, true if this saves at least a fifth of the tokens of the first rows' pairs (llama, qwen3)."""
    pictures: bool | None = None
    """Whether the model sees the pictures of messages; requires a multimodal model, whose vision tower is then part of
    the run. If null, true if the first rows that can be read at planning time have pictures."""
    packing: Packing = "auto"
    """`auto`: several documents per row, if a check before step 1 shows that the model keeps them apart. Otherwise, and
    with `off`, one right-padded document per row, which is slower. Steps have the same documents either way."""

    @property
    def sources(self) -> tuple[SingleSource, ...]:
        return self.source.sources if isinstance(self.source, MixtureSource) else (self.source,)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources in plan and metrics; if several have the same, their index is appended."""
        names = [source.name for source in self.sources]
        return tuple(f"{name}.{place}" if names.count(name) > 1 else name for place, name in enumerate(names))

    @property
    def mixed_sources(self) -> tuple[str, ...]:
        """Names of the sources in metrics; empty for a single source."""
        return self.source_names if len(self.sources) > 1 else ()

    @property
    def validation_sources(self) -> tuple[str, ...]:
        """The same for metrics of the validation split; empty also if its rows are in a file of their own."""
        return () if self.validation and self.validation.file else self.mixed_sources

    def resolve_too_long(self, form: Format) -> TooLong:
        if self.too_long != "auto":
            return self.too_long
        return "split" if form.kind == "text" else "error"

    @property
    def _sources_hold_out(self) -> bool:
        return any(each.num_heldout or getattr(each, "heldout", None) for each in self.sources)

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self._sources_hold_out

    @property
    def files(self) -> list[tuple[str, str]]:
        """Files, patterns and addresses to read, by key."""
        listed = isinstance(self.source, MixtureSource)
        files = []
        for number, source in enumerate(self.sources):
            key = f"data.source[{number}]" if listed else "data.source"
            if isinstance(source, FilesSource):
                files.append((f"{key}.train", source.train))
                files += [(f"{key}.heldout", source.heldout)] if source.heldout else []
        if self.validation and self.validation.file:
            files.append(("data.validation.file", self.validation.file))
        return files

    @property
    def task_functions(self) -> tuple[str, ...]:
        generates = ("generate",) if isinstance(self.source, GeneratedSource) else ()
        return generates + (("prompt", "completion") if isinstance(self.format, TaskFormat) else ())

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.validation is not None and self._sources_hold_out:
            raise ValueError("validation, and the source's num_heldout or heldout, set the same thing: keep one")
        if self.task is None and self.task_functions:
            raise ValueError(f"a Python file with {' and '.join(self.task_functions)} is needed: set data.task")
        return self


def label_of(form: Format) -> str | None:
    return form.label if isinstance(form, PromptCompletionFormat | MessagesFormat) else None


def describe_too_long(outcomes: Mapping[str, int]) -> str:
    """Describe the outcomes of documents longer than a pack, from their counts."""
    words = {"drop": "dropped", "truncate": "truncated", "split": "split", "error": "refused"}
    if counts := {outcome: number for outcome, number in outcomes.items() if number}:
        return ", ".join(f"{number:,} {words[outcome]}" for outcome, number in counts.items())
    return f"longer ones are {' or '.join(words[outcome] for outcome in outcomes)}"


def describe_in_both(number: int, data: DataSpec, sample: str) -> str:
    """Describe validation samples that are also trained on, by their number; empty if there are none."""
    drawn = data.validation and data.validation.fraction and data.validation.by == "draw"
    fix = "; data.validation.by=hash keeps equal rows in one split" if drawn else ""
    return f"{plural(number, f'validation {sample}')} also trained on, which lowers the loss{fix}" if number else ""


_DESCRIPTIONS = {
    "messages": "{0.style} turns in column '{0.column}'",
    "prompt-completion": "prompt and completion from columns {columns}",
    "jinja": "Jinja templates over columns {columns}",
    "text": "plain text in column '{0.column}'",
    "preferences": "preferences in columns '{0.chosen}' and '{0.rejected}'",
    "task": "prompt and completion of the task",
}


def describe_format(form: Format) -> str:
    return _DESCRIPTIONS.get(form.kind, form.kind).format(form, columns=", ".join(form.columns))
