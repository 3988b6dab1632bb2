"""Recipe section for rotary positions beyond those of the weights."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ftkit.config.strict import NUMBER, PositiveFloat, PositiveInt, Spec


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
        fields = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("low_freq_factor", "high_freq_factor")}
        for owner, names in fields.items():
            for name in names:
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
