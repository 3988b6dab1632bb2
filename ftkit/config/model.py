"""The model: its weights, its architecture and its tokeniser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from ftkit.config.strict import LARGEST_COUNT, WHOLE_NUMBER, HubIdOrFolder, PositiveFloat, PositiveInt, Spec

Family = Literal["gemma3_text", "llama", "olmo3", "qwen3"]
"""Families whose parameters and memory are planned exactly, and which every image and engine is tested with."""
FAMILIES: tuple[Family, ...] = get_args(Family)
NEVER_WINDOWED: tuple[Family, ...] = ("llama", "qwen3")
"""Those of them in which every layer sees all."""
ModelType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""What Hugging Face calls an architecture."""


class ArchitectureSpec(Spec):
    """The shape of a decoder, under the names that Hugging Face configurations use."""

    family: ModelType
    """Hugging Face's `model_type`. `gemma3_text`, `llama`, `olmo3` and `qwen3` are planned exactly. Any other causal
    language model of transformers has its parameters counted on the model itself, where its configuration and torch are
    on this machine, and is trained if it passes the proofs before step 1; its memory and speed are estimates."""
    vocab_size: PositiveInt
    """Rows of the embedding table."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width of the feed-forward layer."""
    num_hidden_layers: PositiveInt
    """Number of decoder layers."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key and value heads; fewer than query heads means grouped-query attention."""
    head_dim: PositiveInt
    """Width of one attention head."""
    max_position_embeddings: PositiveInt
    """Longest sequence that the model was made for."""
    sliding_window: PositiveInt | None = None
    """Tokens that a windowed layer looks back; none: every layer sees all."""
    full_attention_every: PositiveInt = 1
    """With a window: every so many layers, one has full attention (OLMo-3: 4, Gemma 3: 6)."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of the RMS normalisation."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the weights of a model that is trained from nothing."""

    @property
    def is_estimated(self) -> bool:
        """Whether counts that follow from this shape are estimates, because its family is not one of `FAMILIES`."""
        return self.family not in FAMILIES

    @property
    def layer_types(self) -> list[str]:
        """How far each layer looks back, in the words of Hugging Face configurations."""
        every = self.full_attention_every
        layers = range(1, self.num_hidden_layers + 1)
        return ["full_attention" if number % every == 0 else "sliding_attention" for number in layers]

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        return self


CountSource = Literal["formula", "model", "config", "family"]


@dataclass(frozen=True)
class Linear:
    """Linear layers of one name and size: `count` of them in all decoder layers together."""

    name: str
    inputs: int
    outputs: int
    count: int

    @property
    def size(self) -> int:
        """Weights of one of them."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelCounts:
    """Parameters of a model, before adapters.

    Attributes:
        source: how they were counted: by the formula of a known family; on the model itself, without its weights; by
            what config.json says of experts; or by what is usual for the family.
        layers: parameters of all decoder layers.
        largest_layer: parameters of the largest decoder layer.
        around: parameters outside the decoder layers, shared ones once.
        active: weights of matrices in the decoder layers that one token is multiplied by; of experts, of those alone
            that it is sent to.
        feed_forward: width of the feed-forward layers that one token goes through in a decoder layer.
        experts_per_token: experts that a token is sent to; 0 without any.
        linears: the linear layers in the decoder layers; experts that are stacked in one tensor are none.
    """

    source: CountSource
    layers: int
    largest_layer: int
    around: int
    active: int
    feed_forward: int
    experts_per_token: int
    linears: tuple[Linear, ...]

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layers + self.around

    @property
    def is_exact(self) -> bool:
        """Whether these are no estimates."""
        return self.source in {"formula", "model"}


class ArchitecturePlan(ArchitectureSpec):
    """A shape with its parameters counted."""

    counts: ModelCounts | None = None
    """None: they follow from the other fields."""

    @classmethod
    def of(cls, shape: ArchitectureSpec, counts: ModelCounts | None) -> ArchitecturePlan:
        """Put the counts beside the shape that they are of."""
        return cls.model_validate(
            {name: getattr(shape, name) for name in ArchitectureSpec.model_fields} | {"counts": counts}
        )


class TokenizerSpec(Spec):
    """Where the tokeniser comes from."""

    source: HubIdOrFolder = "model"
    """`model`: the one beside the weights. `trained`: a byte-level BPE learned from the training part.
    Otherwise a folder or a hub id."""
    vocab_size: Annotated[int, Field(ge=300, le=LARGEST_COUNT), WHOLE_NUMBER] | None = None
    """Size of a trained tokeniser's vocabulary, special tokens included."""

    @model_validator(mode="after")
    def _size_goes_with_training(self) -> Self:
        if (self.source == "trained") != (self.vocab_size is not None):
            raise ValueError("vocab_size is needed with source 'trained', and has no effect with any other")
        return self


class ModelSpec(Spec):
    """The model to fine-tune."""

    weights: HubIdOrFolder
    """A hub id such as `allenai/Olmo-3-1025-7B`, a folder (`/data/model`; `./model` in the recipe's folder), or
    `random` for an untrained model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    architecture: ArchitectureSpec
    """The shape: the name of a shipped one (`olmo3-7b`), or the fields themselves."""
    tokenizer: TokenizerSpec = TokenizerSpec()
    """Where the tokeniser comes from."""

    @model_validator(mode="after")
    def _random_has_no_revision(self) -> Self:
        if self.weights == "random" and self.revision is not None:
            raise ValueError("revision has no effect with weights 'random'")
        if self.weights == "random" and self.tokenizer.source == "model":
            raise ValueError("weights 'random' bring no tokeniser: set tokenizer.source")
        return self


class ModelPlan(ModelSpec):
    """The model with its parameters counted."""

    architecture: ArchitecturePlan
    """The shape."""

    @classmethod
    def of(cls, model: ModelSpec, counts: ModelCounts | None) -> ModelPlan:
        """Put the counts beside the model's shape."""
        fields = {name: getattr(model, name) for name in ModelSpec.model_fields}
        return cls.model_validate(fields | {"architecture": ArchitecturePlan.of(model.architecture, counts)})
