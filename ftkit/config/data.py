"""The data: where examples come from, how they become conversations, what is trained on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ftkit.config.format_string import FormatString, columns_of
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


class PromptCompletionFormat(Spec):
    """Columns filled into a prompt and a completion: one user turn, one assistant turn."""

    kind: Literal["prompt-completion"]
    prompt: FormatString
    """Text of the user's turn. `{column}` stands for an example's column, `{{` and `}}` for braces; a null is empty."""
    completion: FormatString
    """Text of the assistant's turn, with columns like the prompt."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [*columns_of(self.prompt), *columns_of(self.completion)]


class MessagesFormat(Spec):
    """A column that holds a conversation."""

    kind: Literal["messages"]
    column: str = "messages"
    """The column."""
    style: Literal["openai", "sharegpt"] = "openai"
    """`openai`: role and content; `sharegpt`: from and value. A turn with any other key is refused."""

    @property
    def columns(self) -> list[str]:
        """The columns that it uses."""
        return [self.column]


Source = Annotated[GeneratedSource | FilesSource | HubSource, Field(discriminator="kind")]
Format = Annotated[PromptCompletionFormat | MessagesFormat, Field(discriminator="kind")]


class DataSpec(Spec):
    """The data to train and evaluate on."""

    source: Source
    """Where examples come from."""
    format: Format
    """How an example becomes a conversation."""
    chat_template: Literal["model", "gemma", "chatml"] = "model"
    """How a conversation becomes text; `model`: the template that comes with the tokenizer."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens count in the loss: the assistant's turns with their end-of-turn token, or all."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with a document that is longer than a pack: refuse, or leave it out and say how many."""
