"""The model: its weights, its architecture and its tokenizer."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from ftkit.models.families import MEASURED
from ftkit.models.vision import VisionPlan
from ftkit.spec import (
    LARGEST_COUNT,
    NUMBER,
    RUN,
    WHOLE_NUMBER,
    HubIdOrFolder,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Spec,
    Weights,
)

ModelType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # Hugging Face's name of an architecture


class RopeScalingSpec(Spec):
    """Rotary positions beyond those that the weights were trained on, as in transformers' `rope_parameters`."""

    rope_type: Literal["dynamic", "linear", "llama3", "yarn"]
    """Scaling of the frequencies. `linear` (Chen et al. 2023), `dynamic`, `yarn` (Peng et al. 2023), `llama3`."""
    factor: Annotated[float, Field(gt=1), NUMBER]
    """Factor by which the number of positions grows."""
    original_max_position_embeddings: PositiveInt | None = None
    """Number of positions that the weights were trained on. That of config.json if null."""
    beta_fast: PositiveFloat | None = None
    """With `yarn`: number of rotations above which frequencies are kept. 32 if null."""
    beta_slow: PositiveFloat | None = None
    """With `yarn`: number of rotations below which frequencies are interpolated. 1 if null."""
    low_freq_factor: PositiveFloat | None = None
    """Required by `llama3`: number of rotations below which frequencies are divided by `factor`."""
    high_freq_factor: PositiveFloat | None = None
    """Required by `llama3`: number of rotations above which frequencies are kept."""

    @model_validator(mode="after")
    def _fields_belong_to_the_type(self) -> Self:
        owners = {"beta_fast": "yarn", "beta_slow": "yarn", "low_freq_factor": "llama3", "high_freq_factor": "llama3"}
        for name, owner in owners.items():
            if owner != self.rope_type and getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with rope_type '{self.rope_type}': leave it out")
            if owner == self.rope_type == "llama3" and getattr(self, name) is None:
                raise ValueError(f"rope_type 'llama3' needs {name}")
        return self

    def of_weights(self, positions: int) -> Self:
        """Fill in the number of positions that the weights were trained on."""
        original = self.original_max_position_embeddings or positions
        return self.model_copy(update={"original_max_position_embeddings": original})

    @property
    def positions(self) -> int:
        """Number of scaled positions, once those of the weights are filled in."""
        return int(self.factor * (self.original_max_position_embeddings or 0))


class ArchitectureFields(Spec):
    """The shape of a decoder, with the names of Hugging Face configurations; unset fields are null."""

    family: ModelType | None = None
    """Hugging Face's `model_type`. Of `gemma3_text`, `llama`, `olmo3` and `qwen3`, memory and speed are predicted from
    measurements. Any other causal language model of transformers is planned by estimates, and trained if it passes the
    checks before step 1."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding table."""
    hidden_size: PositiveInt | None = None
    """Width of the residual stream."""
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward layer."""
    num_hidden_layers: PositiveInt | None = None
    """Number of decoder layers."""
    num_experts: Annotated[PositiveInt, Field(ge=2)] | None = None
    """Routed experts of a layer. If null, those of the family's class in transformers."""
    num_attention_heads: PositiveInt | None = None
    """Query heads."""
    num_key_value_heads: PositiveInt | None = None
    """Key and value heads; fewer than query heads means grouped-query attention."""
    head_dim: PositiveInt | None = None
    """Width of one attention head."""
    max_position_embeddings: PositiveInt | None = None
    """Maximum sequence length. More positions than in config.json of pretrained weights need `rope_scaling`."""
    sliding_window: PositiveInt | None = None
    """Window of sliding-window attention, in tokens. Full attention in all layers if null."""
    full_attention_every: PositiveInt | None = None
    """With a window: the interval of layers with full attention (OLMo-3: 4, Gemma 3: 6)."""
    tie_word_embeddings: bool | None = None
    """Whether the output projection is the embedding table."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary position embedding."""
    rope_scaling: RopeScalingSpec | None = None
    """More positions than the weights were trained on: applied to the model and written to the export."""
    rms_norm_eps: PositiveFloat | None = None
    """Epsilon of the RMS normalization."""
    initializer_range: PositiveFloat | None = None
    """Standard deviation of randomly initialized weights."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and groups is not None and heads % groups:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({groups})")
        return self


class ArchitectureSpec(ArchitectureFields):
    """The complete shape of a decoder."""

    family: ModelType
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    full_attention_every: PositiveInt = 1
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    initializer_range: PositiveFloat = 0.02

    @property
    def is_measured(self) -> bool:
        """Whether memory and step times of its family were measured, rather than only estimated."""
        return self.family in MEASURED

    @property
    def layer_types(self) -> list[str]:
        """Type of each layer's attention, as in Hugging Face configurations."""
        every = self.full_attention_every
        layers = range(1, self.num_hidden_layers + 1)
        return ["full_attention" if number % every == 0 else "sliding_attention" for number in layers]


CountSource = Literal["formula", "model", "config", "family"]


@dataclass(frozen=True)
class Linear:
    """Linear layers with the same name and size: `count` is their number in all decoder layers."""

    name: str
    inputs: int
    outputs: int
    count: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix that each routed expert has; transformers 5 stacks those of a layer in one parameter.

    `parts` are the names of the matrices that it is joined from, such as `gate_proj` and `up_proj`. They are targets of
    adapters, and so is `name`. An expert's matrix has `inputs` columns and `outputs` rows; `count` layers have it.
    """

    name: str
    parts: tuple[str, ...]
    experts: int
    inputs: int
    outputs: int
    count: int

    @property
    def size(self) -> int:
        """Weights of all experts of a layer."""
        return self.experts * self.inputs * self.outputs

    def num_ranks(self, targets: Collection[str]) -> int:
        """Return how many times the rank of other adapters the adapter of each expert has; 0 without one.

        The parts share an adapter with the rank of all together, as in peft.
        """
        if self.name in targets:
            return 1
        return len(self.parts) if self.parts and {*self.parts} <= {*targets} else 0

    def missing_parts(self, targets: Collection[str]) -> list[str]:
        """Return the parts that are no targets although others are: parts are adapted together or not at all."""
        missing = [part for part in self.parts if part not in targets]
        return missing if self.name not in targets and len(missing) < len(self.parts) else []


@dataclass(frozen=True)
class AttentionLayers:
    """Decoder layers whose attention costs the same."""

    count: int
    width: int  # total width of the query heads; for linear attention, of the value heads
    is_windowed: bool = False
    state: int = 0  # for linear attention, the width of a head's keys; 0 for softmax attention


NO_CAUSAL_CLASS = 9
"""Exit code of the program that counts parameters if transformers has no causal language model of a family."""
UNKNOWN_FAMILY = 10  # its exit code if transformers does not have the family
MULTIMODAL = 12  # its exit code if a family has a text model of another family, which it prints


@dataclass(frozen=True)
class ModelCounts:
    """Parameters of a model, before adapters."""

    source: CountSource
    """By the formula of a known family; on the model class, without weights; from config.json; or from the family's
    usual values."""
    layers: int  # parameters of all decoder layers
    largest_layer: int
    around: int  # parameters outside the decoder layers; shared ones count once
    active: int
    """Weights of the decoder layers' matrices that are active per token; of experts, those that it is routed to."""
    feed_forward: int  # total width of the feed-forward layers that are active per token in a decoder layer
    experts_per_token: int  # 0 without experts
    linears: tuple[Linear, ...]  # those in the decoder layers, without experts that are stacked in one tensor
    attention: tuple[AttentionLayers, ...] = ()  # the attention of all decoder layers; empty: derived from the shape
    expert_matrices: tuple[ExpertMatrix, ...] = ()  # those of routed experts that can get adapters

    @property
    def total(self) -> int:
        return self.layers + self.around

    @property
    def is_exact(self) -> bool:
        return self.source in {"formula", "model"}


class ArchitecturePlan(ArchitectureSpec):
    """A shape with its parameters counted."""

    counts: ModelCounts | None = None
    """Parameter counts; they follow from the other fields if null."""
    vision: VisionPlan | None = None
    """The vision part, if the run has pictures."""


class TokenizerSpec(Spec):
    """Source of the tokenizer."""

    source: HubIdOrFolder = "model"
    """`model`: the one of the weights. `trained`: a byte-level BPE trained on the training split. Otherwise a folder or
    a hub id."""
    vocab_size: Annotated[int, Field(ge=300, le=LARGEST_COUNT), WHOLE_NUMBER] | None = None
    """Size of a trained tokenizer's vocabulary, special tokens included."""

    @model_validator(mode="after")
    def _size_goes_with_training(self) -> Self:
        if (self.source == "trained") != (self.vocab_size is not None):
            raise ValueError("vocab_size is required with source 'trained', and has no effect with any other")
        return self


AddedToken = Annotated[str, Field(pattern=r"^\S{2,}$")]  # a special token that a recipe adds


class ModelSpec(Spec):
    """The model to fine-tune. `model: WEIGHTS` is short for `model: {weights: WEIGHTS}`."""

    weights: Weights
    """A hub id such as `allenai/Olmo-3-1025-7B`, a folder (`/data/model`; `./model` in the recipe's folder),
    `run:NAME` for the result of an earlier run (its export, or its adapters on their base model), `run:NAME@STEP`
    for one of its checkpoints (a step, `best`, or `last`), or `random` for an untrained model. A folder of peft's LoRA
    adapters selects their base model with these adapters."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    architecture: ArchitectureFields = ArchitectureFields.model_construct()
    """The shape of `random` weights: the name of a shipped one (`olmo3-7b`), or the fields themselves. Pretrained
    weights have their shape in config.json: fields set here must agree with it, apart from `rope_scaling` and the
    `max_position_embeddings` that it allows."""
    tokenizer: TokenizerSpec = TokenizerSpec.model_construct()
    """Source of the tokenizer."""
    added_tokens: tuple[AddedToken, ...] = ()
    """Special tokens to add to the tokenizer, such as `<|tool|>`. The embedding (and an untied output projection) grows
    by the tokens that don't fit into existing rows; new rows are initialized to the mean of the others. New tokens need
    `training.method: full`: adapters leave the embedding frozen."""

    @field_validator("architecture", mode="after")
    @classmethod
    def _complete_if_possible(cls, fields: ArchitectureFields) -> ArchitectureFields:
        if isinstance(fields, ArchitectureSpec) or _missing(fields):
            return fields
        given = {name: value for name in fields.model_fields_set if (value := getattr(fields, name)) is not None}
        return ArchitectureSpec.model_validate(given)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if twice := sorted({token for token in self.added_tokens if self.added_tokens.count(token) > 1}):
            raise ValueError(f"added_tokens lists {', '.join(twice)} twice")
        is_random = self.weights == "random"
        if self.revision is not None and (is_random or self.weights.startswith(RUN)):
            raise ValueError(f"revision has no effect with weights '{self.weights}'")
        if not is_random:
            return self
        if self.tokenizer.source == "model":
            raise ValueError("weights 'random' have no tokenizer: set tokenizer.source")
        if missing := _missing(self.architecture):
            raise ValueError(f"weights 'random' need the complete architecture: {', '.join(missing)} not given")
        return self

    @property
    def architecture_of_weights(self) -> ArchitectureFields:
        """The shape in the weights' files, as far as the recipe sets it."""
        return self.architecture


def _missing(fields: ArchitectureFields) -> list[str]:
    required = (name for name, field in ArchitectureSpec.model_fields.items() if field.is_required())
    return [name for name in required if getattr(fields, name) is None]


class TrainedWeights(Spec):
    """The result of an earlier run from which training continues."""

    run: str
    """The run's id."""
    step: NonNegativeInt
    """Number of training steps."""
    sha256: str
    """Digest of the file that lists the digests of all weights: the export's record, or the checkpoint's marker."""
    folder: str
    """Folder of the export. A checkpoint is exported when the data is prepared."""


class ModelPlan(ModelSpec):
    """The model with its complete shape and its parameter counts."""

    architecture: ArchitecturePlan
    vision: VisionPlan | None = None
    """The vision part of the multimodal model whose text model the shape is of; null if there is none."""
    adapter: str | None = None
    """Folder of the adapters from which training continues."""
    source: str | None = None
    """The recipe's `weights`, if these are an earlier run or adapters."""
    trained: TrainedWeights | None = None
    """Run and step of the weights."""
    requested_revision: str | None = None
    """The recipe's revision, if it is resolved to a commit."""
    new_tokens: tuple[str, ...] = ()
    """The added tokens that the tokenizer lacks."""
    count_error: str | None = None
    """Why the parameters could not be counted on the model's class, so that they are estimated."""
    vocab_size_of_weights: PositiveInt | None = None
    """Rows of the embedding in the weights' files, if added tokens need more."""

    @property
    def architecture_of_weights(self) -> "ArchitecturePlan":
        rows = self.vocab_size_of_weights
        return self.architecture if rows is None else self.architecture.model_copy(update={"vocab_size": rows})
