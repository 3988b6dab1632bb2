"""How to train, how to evaluate, and how much of a cluster to ask for."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ftkit.specs.strict import OneLine, Spec

EngineChoice = Literal["auto", "fsdp2"]
Precision = Literal["bf16", "fp32"]


class TrainingSpec(Spec):
    """The optimisation."""

    method: Literal["full"] = "full"
    """Which parameters are trained."""
    engine: EngineChoice = "auto"
    """How the model is spread over processes; `auto` chooses, and the plan says why."""
    precision: Precision = "bf16"
    """Precision of forward and backward; master weights and optimizer states are fp32."""
    sequence_length: PositiveInt
    """Tokens in a pack."""
    micro_batch_size: PositiveInt = 1
    """Packs that one process holds at a time."""
    global_batch_size: PositiveInt
    """Packs in an optimizer step, over all processes and accumulation steps."""
    max_steps: PositiveInt | None = None
    """Train for so many optimizer steps; give this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Go over the data so many times; give this or max_steps."""
    learning_rate: PositiveFloat
    """Highest learning rate, reached after the warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the learning rate goes on after the warm-up."""
    warmup_ratio: NonNegativeFloat = Field(default=0.03, le=1)
    """Part of all steps in which the learning rate rises from 0."""
    min_learning_rate_ratio: NonNegativeFloat = Field(default=0.0, le=1)
    """Where cosine and linear end, as a part of the highest."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    checkpoint_every_steps: PositiveInt = 300
    """A checkpoint every so many steps; there is always one at the end."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay."""
    log_every_steps: PositiveInt = 10
    """A record in metrics.jsonl every so many steps."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the order of the data."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError("give exactly one of max_steps and num_epochs")
        return self

    @model_validator(mode="after")
    def _betas_are_rates(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {list(self.betas)}")
        return self


class SqlExecutionSpec(Spec):
    """Run the model's SQL in sqlite and compare the rows with those of the reference answer."""

    num_questions: PositiveInt = 100
    """Held-out questions to ask."""
    max_new_tokens: PositiveInt = 128
    """Longest answer."""


class EvaluationSpec(Spec):
    """What is measured on the held-out part, before training and after it."""

    every_steps: PositiveInt | None = None
    """Held-out perplexity every so many steps as well."""
    max_packs: PositiveInt = 64
    """Held-out packs that the perplexity is measured on, at most."""
    sql_execution: SqlExecutionSpec | None = None
    """For text-to-SQL data."""


class ResourcesSpec(Spec):
    """How much of a cluster the recipe was made for; options of `ftkit run` come after it."""

    num_nodes: PositiveInt = 1
    """Nodes."""
    gpus_per_node: PositiveInt | None = None
    """GPUs, and so processes, on each node; none: what the cluster's nodes have."""
    time_limit: OneLine | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")
    """Slurm's words: `minutes`, `hours:minutes:seconds` or `days-hours:minutes:seconds`; none: the profile's."""
