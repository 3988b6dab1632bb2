"""Choose packs or padded rows: packs if the model isolates packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.errors import TrainingError, one_line
from ftkit.train.distributed.checks import verify_isolation
from ftkit.train.distributed.probe import ProbeResult, run_probe
from ftkit.train.model.build import why_not_packed

if TYPE_CHECKING:
    from ftkit.config.data import Packing
    from ftkit.config.training import TrainingPlan
    from ftkit.planning.plan import BatchPlan
    from ftkit.train.engine import Engine
    from ftkit.train.world import World


@dataclass(frozen=True)
class PackingChoice:
    """Packs or padded rows, the reason, and the probe that was run with them.

    Attributes:
        reason: why not packs; None for packs.
    """

    is_packed: bool
    reason: str | None
    probe: ProbeResult


def choose_packing(
    engine: Engine, world: World, wanted: Packing, vocab_size: int, batch: BatchPlan, training: TrainingPlan
) -> PackingChoice:
    """Choose packs if the model isolates packed documents, else padded rows. Collective: every rank must call it.

    Raises:
        TrainingError: the model can't be trained on packs, but context or tensor parallelism needs them.
    """

    def probe(*, is_packed: bool) -> ProbeResult:
        return run_probe(
            engine,
            world,
            vocab_size,
            micro_batch_size=batch.micro_batch_size,
            sequence_length=training.sequence_length,
            is_packed=is_packed,
        )

    reason: str | None = "the recipe asks for it"
    if wanted == "auto":
        packed, reason = None, why_not_packed(engine.model.hf_model)
        if reason is None:
            try:
                packed = probe(is_packed=True)
                verify_isolation(packed, shares_scales=training.precision == "fp8")
            except TrainingError as error:
                reason = error.what
            except (ValueError, NotImplementedError) as error:  # a kernel for packs is missing: transformers says which
                reason = one_line(error)
        reason = next((one for one in world.gather_objects(reason) if one is not None), None)
        if packed is not None and reason is None:
            return PackingChoice(is_packed=True, reason=None, probe=packed)
    if world.context.size > 1:
        size = world.tensor_parallel if world.tensor_parallel > 1 else world.exchange.size
        key = "tensor_parallel" if world.tensor_parallel > 1 else "context_parallel"
        raise TrainingError(
            f"training.{key}={size} needs packs, but this model is trained on padded rows: {reason}",
            fix=f"leave training.{key} out, or choose another model",
        )
    return PackingChoice(is_packed=False, reason=reason, probe=probe(is_packed=False))
