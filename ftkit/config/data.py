"""The data: where examples come from, how they become conversations, what is trained on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ftkit.config.format_string import FormatString, JinjaText, columns_of, is_inline_template, variables_of
from ftkit.config.paths import is_path
from ftkit.config.strict import WHOLE_NUMBER, HubIdOrFolder, LocalPath, NonNegativeInt, PositiveInt, Seed, Spec


class BinarySizes(Spec):
    """Sizes of simulated binaries; all between the two are as likely."""

    smallest: Annotated[int, Field(ge=1024), WHOLE_NUMBER] = 2048
    """Bytes of the smallest binary."""
    largest: Annotated[int, Field(ge=1024), WHOLE_NUMBER] = 6144
    """Bytes of the largest binary."""

    @model_validator(mode="after")
    def _smallest_is_not_larger(self) -> Self:
        if self.smallest > self.largest:
            raise ValueError(f"smallest ({self.smallest}) is more than largest ({self.largest})")
        return self


class GeneratedSource(Spec):
    """Examples made by a generator that ftkit ships."""

    kind: Literal["generated"]
    generator: Literal["text-to-sql", "malware-analysis"]
    """The task. `text-to-sql`: columns sql_context, sql_prompt, sql. `malware-analysis`: columns binary (simulated, in
    hexadecimal digits), verdict, analysis; every other one is malicious."""
    binary_bytes: BinarySizes | None = None
    """For generator malware-analysis, all sizes between the two being as likely; none: the defaults. A byte, which is
    two hexadecimal digits, is about 1.2 tokens where up to three digits make a token, and 2 where each stands alone."""
    num_train: PositiveInt
    """Examples to train on."""
    num_heldout: NonNegativeInt = 0
    """Examples held out for evaluation; none of them is in the training part."""
    seed: Seed = 0
    """Another seed makes other examples."""

    @property
    def binary_sizes(self) -> BinarySizes:
        """How large simulated binaries are."""
        return self.binary_bytes or BinarySizes()

    @model_validator(mode="after")
    def _binaries_belong_to_malware_analysis(self) -> Self:
        if self.generator != "malware-analysis" and self.binary_bytes is not None:
            raise ValueError(f"binary_bytes has no effect with generator '{self.generator}': leave it out")
        return self


class FilesSource(Spec):
    """Examples in JSON Lines files."""

    kind: Literal["files"]
    train: LocalPath
    """A .jsonl file, one object a line; relative to the recipe's folder."""
    heldout: LocalPath | None = None
    """A .jsonl file to evaluate on; without it, `num_heldout` examples are taken from `train`."""
    num_train: PositiveInt | None = None
    """Take so many of the shuffled examples; none: all."""
    num_heldout: NonNegativeInt = 0
    """Hold so many examples of `train` out for evaluation; not together with `heldout`, which is taken whole."""
    seed: Seed = 0
    """Seed of the shuffle."""

    @model_validator(mode="after")
    def _examples_are_held_out_in_one_way(self) -> Self:
        if self.heldout is not None and self.num_heldout:
            raise ValueError(f"num_heldout ({self.num_heldout}) has no effect with heldout: leave one of them out")
        return self


class HubSource(Spec):
    """Examples in a data set of the Hugging Face hub."""

    kind: Literal["hub"]
    dataset: HubIdOrFolder
    """Hub id, or a folder that `datasets.load_dataset` reads (`./data`, relative to the recipe's folder)."""
    subset: str | None = None
    """Name of the data set's configuration."""
    split: str = "train"
    """Split to take examples from."""
    revision: str | None = None
    """Branch, tag or commit."""
    num_train: PositiveInt | None = None
    """Take so many of the shuffled examples; none: all."""
    num_heldout: NonNegativeInt = 0
    """Hold so many examples out for evaluation."""
    seed: Seed = 0
    """Seed of the shuffle."""


class AutoFormat(Spec):
    """The format is detected from the first rows, and shown."""

    kind: Literal["auto"] = "auto"

    @property
    def columns(self) -> list[str]:
        """The columns that it uses: known once rows are seen."""
        return []


class PromptCompletionFormat(Spec):
    """Columns filled into a prompt and a completion: one user turn, one assistant turn.

    Where a prompt or completion is one column and that holds a list of turns, these are the turns.
    """

    kind: Literal["prompt-completion"] = "prompt-completion"
    prompt: FormatString = "{prompt}"
    """Text of the user turn. `{column}` stands for an example's column, `{{` and `}}` for braces; a null is empty."""
    completion: FormatString = "{completion}"
    """Text of the assistant turn, with columns like the prompt."""
    system: FormatString | None = None
    """Text of a system turn before them. Without it there is none."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [name for text in (self.system, self.prompt, self.completion) if text for name in columns_of(text)]


class JinjaFormat(Spec):
    """Jinja templates over an example's columns: one user turn, one assistant turn."""

    kind: Literal["jinja"] = "jinja"
    prompt: JinjaText
    """Text of the user turn: `{{ column }}`, conditions and loops over the columns."""
    completion: JinjaText
    """Text of the assistant turn."""
    system: JinjaText | None = None
    """Text of a system turn before them. Without it there is none."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [name for text in (self.system, self.prompt, self.completion) if text for name in variables_of(text)]


class MessagesFormat(Spec):
    """A column that holds a conversation."""

    kind: Literal["messages"] = "messages"
    column: str = "messages"
    """The column with the list of turns."""
    style: Literal["openai", "sharegpt"] = "openai"
    """`openai`: role, content, tool_calls, reasoning_content, weight, …; `sharegpt`: from and value, with the roles
    human, gpt, system, tool, function_call, observation and their other names."""
    tools_column: str = "tools"
    """The column with the tools that the assistant may call, if the data has it: a list, or JSON text of one."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [self.column, self.tools_column]


class AlpacaFormat(Spec):
    """Columns instruction, input and output, as of Alpaca; with `system` and `history` where the data has them."""

    kind: Literal["alpaca"] = "alpaca"

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return ["instruction", "input", "output", "system", "history"]


class DollyFormat(Spec):
    """Columns instruction, context and response, as of Dolly."""

    kind: Literal["dolly"] = "dolly"

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return ["instruction", "context", "response"]


class TextFormat(Spec):
    """A column of plain text, for continued pretraining: no chat template, an end token after each text."""

    kind: Literal["text"] = "text"
    column: str = "text"
    """The column with the text."""
    parse_special_tokens: bool = False
    """Whether `<|im_end|>` and the like in a text become special tokens: for texts that were rendered before."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [self.column]


Source = Annotated[GeneratedSource | FilesSource | HubSource, Field(discriminator="kind")]
_AnyFormat = Annotated[
    AutoFormat | MessagesFormat | AlpacaFormat | DollyFormat | PromptCompletionFormat | JinjaFormat | TextFormat,
    Field(discriminator="kind"),
]
FormatName = Literal["auto", "messages", "sharegpt", "alpaca", "dolly", "prompt-completion", "text"]
"""Formats that need no more than their name."""


def _from_name(value: object) -> object:
    """Read `format: sharegpt` as the mapping that it is short for."""
    if value == "sharegpt":
        return {"kind": "messages", "style": "sharegpt", "column": "conversations"}
    return {"kind": value} if isinstance(value, str) else value


Format = Annotated[_AnyFormat, BeforeValidator(_from_name, json_schema_input_type=_AnyFormat | FormatName)]

CHAT_TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "olmo", "phi4")
"""The chat templates that ftkit ships."""


def _check_chat_template(value: str) -> str:
    if value == "model" or value in CHAT_TEMPLATES or is_path(value) or is_inline_template(value):
        return value
    raise ValueError(
        f"'{value}' is no chat template: write model, {', '.join(CHAT_TEMPLATES)}, a file as ./FILE, or Jinja text"
    )


ChatTemplateText = Annotated[str, AfterValidator(_check_chat_template)]
"""`model`, the name of a shipped template, a file, or Jinja text."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


class DataSpec(Spec):
    """The data to train and evaluate on."""

    source: Source
    """Where examples come from."""
    format: Format = AutoFormat()
    """How an example becomes a conversation or a text; a name, or a mapping with the format's own fields. Left out, it
    is detected from the first rows."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of an example, and keys of a turn, that are left out. Any that the format does not know is an error
    otherwise, apart from plain metadata such as `id` and `source`."""
    chat_template: ChatTemplateText = "model"
    """How a conversation becomes text. `model`: the template that comes with the tokenizer; the name of a shipped one
    (`chatml`, which Qwen's models use too, `gemma`, `llama3`, `mistral`, `olmo`, `phi4`); a file (`./chat.jinja`,
    relative to the recipe's folder); or Jinja text."""
    template_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false` of Qwen 3 or `reasoning_effort` of gpt-oss."""
    train_on: Literal["assistant", "last", "completion", "all"] | list[Role] = "assistant"
    """Which tokens count in the loss: those of all assistant turns with their end-of-turn token, of the last one, of
    the completion, or all tokens; or the roles whose turns count. A turn's own `weight` or `train` goes first."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a document longer than a pack: refuse it, leave it out, cut it after the last trained turn that
    fits, or (text only) split it. What was done is counted and shown."""
    skip_bad: NonNegativeInt = 0
    """So many examples that can't be used are left out, each shown with its place; one more is an error."""
