"""The data: where examples come from, how they become conversations, what is trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ftkit.specs.strict import Spec


class GeneratedSource(Spec):
    """Examples made by a generator that ftkit ships."""

    kind: Literal["generated"]
    generator: Literal["text-to-sql"]
    """The task."""
    num_train: PositiveInt
    """Examples to train on."""
    num_heldout: NonNegativeInt = 0
    """Examples held out for evaluation; none of them is in the training part."""
    seed: NonNegativeInt = 0
    """Another seed makes other examples."""


class FilesSource(Spec):
    """Examples in JSON Lines files."""

    kind: Literal["files"]
    train: str
    """A .jsonl file, one object a line; relative to the recipe's folder."""
    heldout: str | None = None
    """A .jsonl file to evaluate on; without it, `num_heldout` examples are taken from `train`."""
    num_train: PositiveInt | None = None
    """Take so many of the shuffled examples; none: all."""
    num_heldout: NonNegativeInt = 0
    """Hold so many examples out for evaluation."""
    seed: NonNegativeInt = 0
    """Seed of the shuffle."""


class HubSource(Spec):
    """Examples in a data set of the Hugging Face hub."""

    kind: Literal["hub"]
    dataset: str
    """Hub id, or a folder that `datasets.load_dataset` reads."""
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
    seed: NonNegativeInt = 0
    """Seed of the shuffle."""


class PromptCompletionFormat(Spec):
    """Columns filled into a prompt and a completion: one user turn, one assistant turn."""

    kind: Literal["prompt-completion"]
    prompt: str
    """Text of the user's turn; `{column}` stands for an example's column."""
    completion: str
    """Text of the assistant's turn; `{column}` stands for an example's column."""


class MessagesFormat(Spec):
    """A column that holds a conversation."""

    kind: Literal["messages"]
    column: str = "messages"
    """The column."""
    style: Literal["openai", "sharegpt"] = "openai"
    """`openai`: role and content; `sharegpt`: from and value."""


Source = Annotated[GeneratedSource | FilesSource | HubSource, Field(discriminator="kind")]
Format = Annotated[PromptCompletionFormat | MessagesFormat, Field(discriminator="kind")]


class DataSpec(Spec):
    """The data to train and evaluate on."""

    source: Source
    """Where examples come from."""
    format: Format
    """How an example becomes a conversation."""
    chat_template: Literal["model", "gemma", "chatml"] = "model"
    """How a conversation becomes text; `model`: the template that comes with the tokeniser."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens count in the loss: the assistant's turns with their end-of-turn token, or all."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with a document that is longer than a pack: refuse, or leave it out and say how many."""
