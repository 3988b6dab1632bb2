"""Training settings with all `auto` values resolved, and what they mean for each decoder layer."""

from functools import lru_cache

from ftkit.config.training import RECOMPUTES_LAYERS, ActivationCheckpointing, EngineName, TrainingSpec
from ftkit.errors import plural
from ftkit.spec import PositiveInt


class TrainingPlan(TrainingSpec):
    """Optimization settings with all `auto` values resolved."""

    micro_batch_size: PositiveInt = 1
    """Packs per micro-batch of a process."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that the backward pass recomputes."""

    @classmethod
    def of(
        cls, spec: TrainingSpec, micro_batch_size: int, activation_checkpointing: ActivationCheckpointing
    ) -> "TrainingPlan":
        """Combine the recipe's settings with the resolved values."""
        resolved = {"micro_batch_size": micro_batch_size, "activation_checkpointing": activation_checkpointing}
        return cls.model_construct(**{name: getattr(spec, name) for name in TrainingSpec.model_fields} | resolved)

    def checkpointing_of_layers(self, num_layers: int, engine: EngineName) -> list[ActivationCheckpointing]:
        """Return the activation checkpointing of each decoder layer."""
        mode, others = self.activation_checkpointing, self.lighter_checkpointing(engine)
        num = num_layers if self.checkpointed_layers is None else min(self.checkpointed_layers, num_layers)
        if self.activation_offload:
            return [mode if is_chosen else others for is_chosen in _spread(num, num_layers)]
        return [mode] * num + [others] * (num_layers - num)

    def offloaded_of_layers(self, num_layers: int, engine: EngineName) -> list[bool]:
        """Return for each decoder layer whether what it saves is in host memory until the backward pass."""
        modes = self.checkpointing_of_layers(num_layers, engine)
        if not self.activation_offload:
            return [False] * num_layers
        num = modes.count("selective")
        selective = iter(_spread(num if self.offloaded_layers is None else min(self.offloaded_layers, num), num))
        return [next(selective) if mode == "selective" else mode != "none" for mode in modes]

    def lighter_checkpointing(self, engine: EngineName) -> ActivationCheckpointing:
        """Return the activation checkpointing of the layers that `checkpointed_layers` leaves out."""
        recomputes_layers = self.activation_checkpointing in RECOMPUTES_LAYERS
        return "selective" if recomputes_layers and engine == "fsdp2" else "none"

    def checkpointing_label(self, num_layers: int, engine: EngineName) -> str:
        """Return the activation checkpointing in words."""
        modes = self.checkpointing_of_layers(num_layers, engine)
        counts = {mode: modes.count(mode) for mode in dict.fromkeys([self.activation_checkpointing, *modes])}
        parts = [f"'{mode}'" + (f" in {number} of {num_layers} layers" if number < num_layers else "")
                 for mode, number in counts.items() if mode != "none" or number == num_layers]  # fmt: skip
        if num_offloaded := sum(self.offloaded_of_layers(num_layers, engine)):
            parts.append(f"{plural(num_offloaded, 'layer')} offloaded")
        return ", ".join(parts)


@lru_cache
def _spread(num: int, total: int) -> tuple[bool, ...]:
    """Choose `num` of `total` items, spread evenly."""
    return tuple(index * num % total < num for index in range(total))
