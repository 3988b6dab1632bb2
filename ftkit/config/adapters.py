"""Settings of low-rank adapters."""

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from ftkit.config.strict import NUMBER, PositiveInt, Spec

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
    """Linear layers of each decoder layer that get an adapter, and matrices of its routed experts (`gate_proj`,
    `up_proj`, `down_proj`). If empty: those of attention and feed-forward layers; in a mixture of experts, those of
    attention only."""
    use_rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023)."""
    use_dora: bool = False
    """Train the magnitude of each output's weights separately from their direction (Liu et al. 2024)."""

    @property
    def scaling(self) -> float:
        """The factor of the adapters' output."""
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
