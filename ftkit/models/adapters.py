"""Low-rank adapters: their settings and their parameters."""

import math
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from ftkit.models.architecture import ArchitectureSpec, ExpertMatrix
from ftkit.models.families import WITHOUT_OUT_PROJ_ADAPTERS
from ftkit.models.parameters import count_model
from ftkit.spec import NUMBER, PositiveInt, Spec

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
ProjectionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of a linear layer within a decoder layer; some families have other names than these seven."""


class LoraSpec(Spec):
    """Low-rank adapters (Hu et al. 2021), as peft makes them."""

    rank: PositiveInt = 16
    """Width of an adapter."""
    alpha: PositiveInt = 16
    """The adapters' output is scaled by alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    dropout: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.0
    """Dropout probability of an adapter's inputs during training."""
    targets: tuple[ProjectionName, ...] = ()
    """Linear layers of each decoder layer that get an adapter, and matrices of its routed experts (the names that files
    have). If empty: those of attention and feed-forward layers; in a mixture of experts, of attention only."""
    use_rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023)."""
    use_dora: bool = False
    """Train the magnitude of each output's weights separately from their direction (Liu et al. 2024)."""

    @field_validator("targets", mode="before")
    @classmethod
    def _all_is_the_default(cls, value: object) -> object:
        if value in ("all-linear", ["all-linear"]):
            raise ValueError("all linear layers are the default: leave targets out")
        return value

    @property
    def scaling(self) -> float:
        return self.scaling_of(1)

    def scaling_of(self, num_ranks: int) -> float:
        """Return the factor of an adapter with `num_ranks` times the rank and alpha."""
        rank = num_ranks * self.rank
        return num_ranks * self.alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @model_validator(mode="after")
    def _each_target_once(self) -> Self:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets lists a projection twice: {', '.join(self.targets)}")
        return self


def adapter_size(lora: LoraSpec, num_inputs: int, num_outputs: int) -> int:
    """Count the parameters of the adapter of one projection."""
    return lora.rank * (num_inputs + num_outputs) + (num_outputs if lora.use_dora else 0)


def expert_adapter_size(lora: LoraSpec, matrix: ExpertMatrix) -> int:
    """Count the parameters of the adapters of one matrix of all experts of a layer; 0 if it is no target."""
    rank = matrix.num_ranks(lora.targets) * lora.rank
    return matrix.experts * rank * (matrix.inputs + matrix.outputs)


ROWWISE: Final = frozenset({"o_proj", "down_proj"})
"""Linear layers whose inputs tensor parallelism divides; of the others it divides the outputs."""


def whole_adapter_size(lora: LoraSpec, name: str, num_inputs: int, num_outputs: int) -> int:
    """Count the parameters of the adapter of one projection that tensor parallelism leaves whole on each GPU."""
    if name in ROWWISE:
        return num_outputs * (lora.rank + lora.use_dora)
    return lora.rank * num_inputs


_EXPERT_NAMES = frozenset([
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "shared_expert_gate", "gate", "router",
    "proj",
])  # fmt: skip
"""Names of routers, and of linear layers that experts may also have: peft matches targets by name."""


def default_targets(shape: ArchitectureSpec) -> tuple[str, ...]:
    """Return the linear layers of a model that get an adapter if the recipe sets no targets."""
    counts = count_model(shape)
    names = tuple(dict.fromkeys(linear.name for linear in counts.linears))
    if shape.family in WITHOUT_OUT_PROJ_ADAPTERS:
        names = tuple(name for name in names if name != "out_proj")
    if counts.experts_per_token:
        return tuple(name for name in names if name not in _EXPERT_NAMES)
    if not counts.is_exact or {*ALL_PROJECTIONS} <= {*names}:
        return ALL_PROJECTIONS
    return names


def count_adapter_parameters(shape: ArchitectureSpec, lora: LoraSpec) -> int:
    """Count the parameters of all adapters, of which each expert has its own."""
    counts = count_model(shape)
    targets = [linear for linear in counts.linears if linear.name in lora.targets]
    adapters = sum(each.count * adapter_size(lora, each.inputs, each.outputs) for each in targets)
    adapters += sum(matrix.count * expert_adapter_size(lora, matrix) for matrix in counts.expert_matrices)
    # For families with other projections, an estimate.
    known = {linear.name for linear in counts.linears}
    known |= {name for matrix in counts.expert_matrices for name in (matrix.name, *matrix.parts)}
    unknown = set() if counts.is_exact else set(lora.targets) - known
    return adapters + len(unknown) * shape.num_hidden_layers * adapter_size(lora, shape.hidden_size, shape.hidden_size)


def count_active_adapter_parameters(shape: ArchitectureSpec, lora: LoraSpec) -> int:
    """Count the parameters of the adapters that a token goes through: of experts, those that it is routed to."""
    counts = count_model(shape)
    idle = (
        matrix.count * expert_adapter_size(lora, matrix) // matrix.experts * (matrix.experts - counts.experts_per_token)
        for matrix in counts.expert_matrices
    )
    return count_adapter_parameters(shape, lora) - sum(idle)
