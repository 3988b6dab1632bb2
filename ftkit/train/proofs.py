"""What is proven of the model before step 1, on every rank. A proof that fails ends the run in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftkit.data.encoding import IGNORED, Document
from ftkit.data.packing import build_pack
from ftkit.errors import TrainingError
from ftkit.specs.training import ActivationCheckpointing
from ftkit.train.batches import to_micro_batch
from ftkit.train.objective import loss_of_own_logits, packed_hidden_states, summed_loss

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from ftkit.methods import ParameterCounts
    from ftkit.specs.training import TrainingPlan
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

ISOLATION_TOLERANCE = 1e-3
"""Largest change of hidden states, relative to their norm, that kernels without a fixed order of sums explain."""
LOSS_TOLERANCE = 1e-2
"""Largest difference of the loss, relative to it, that rounding explains."""


@dataclass(frozen=True)
class ShardingFacts:
    """What is true of the sharded model on one rank; elements are numbers of parameters.

    Attributes:
        is_undivided: nothing is sharded; right on one process alone, where this rank's even share is all.
    """

    num_layers: int
    num_units: int
    num_sharded_layers: int
    checkpointed_layers: Mapping[ActivationCheckpointing, int]
    total_elements: int
    local_elements: int
    largest_local_elements: int
    trainable_elements: int
    quantised_elements: int = 0
    is_undivided: bool = False


def prove_sharding(facts: ShardingFacts, training: TrainingPlan, expected: ParameterCounts) -> dict[str, str]:
    """Compare the facts of a rank with what the plan asks for.

    Returns:
        What was checked, with the numbers found.

    Raises:
        TrainingError: naming both numbers of each comparison that failed.
    """
    checkpointing = training.activation_checkpointing
    units, layers = (0, 0) if facts.is_undivided else (facts.num_layers + 1, facts.num_layers)
    comparisons = {
        "units": (facts.num_units, units, "decoder layers + 1 for the rest"),
        "sharded layers": (facts.num_sharded_layers, layers, "decoder layers"),
        f"layers with checkpointing '{checkpointing}'": (
            facts.checkpointed_layers.get(checkpointing, 0),
            facts.num_layers,
            "decoder layers",
        ),
        "parameters": (facts.total_elements, expected.total, "as planned"),
        "trainable parameters": (facts.trainable_elements, expected.trained, f"for method '{training.method}'"),
        "4-bit parameters": (facts.quantised_elements, expected.quantised, f"for method '{training.method}'"),
    }
    wrong = [
        f"{name}: found {found:,}, expected {wanted:,} ({why})"
        for name, (found, wanted, why) in comparisons.items()
        if found != wanted
    ]
    if facts.local_elements > facts.largest_local_elements:
        wrong.append(
            f"parameters on this rank: found {facts.local_elements:,}, expected at most "
            f"{facts.largest_local_elements:,} (an even share of {facts.total_elements:,})"
        )
    if wrong:
        raise TrainingError(
            "the model is not sharded as planned: " + "; ".join(wrong),
            meaning="training would run out of memory, or train something else than the recipe says",
            fix="this is the model's or ftkit's fault, not the data's: please report it with this message",
        )
    found = {name: f"{found:,}" for name, (found, _, _) in comparisons.items()}
    return found | {"parameters on this rank": f"{facts.local_elements:,} of {facts.total_elements:,}"}


def prove_targets(num_targets: NDArray[np.int64]) -> dict[str, str]:
    """Prove that each pack has something to learn from.

    Args:
        num_targets: target tokens of each pack.

    Raises:
        TrainingError: some have none.
    """
    without = np.flatnonzero(num_targets == 0)
    if len(without):
        raise TrainingError(
            f"{len(without):,} of {len(num_targets):,} packs have no target token, the first is number {without[0]:,}",
            meaning="the chat template marks no answers as such, or data.train_on leaves nothing to train on",
            fix="look at data.train_on, data.format and data.chat_template of the recipe",
        )
    return {"fewest targets in a pack": f"{int(num_targets.min()):,}"}


def prove_isolation(engine: Engine, world: World, vocab_size: int, length: int = 48) -> dict[str, str]:
    """Prove that documents in one pack do not see each other.

    The same document stands twice behind another one, each time a different one: its hidden states must be the
    same. Both packs have the same shape and go through the same kernels, so rounding explains next to nothing.

    Raises:
        TrainingError: they are not.
    """
    one, other, probe = _random_documents(3, vocab_size, length)

    def states_behind(model: nn.Module, neighbour: Document) -> torch.Tensor:
        pack = build_pack([neighbour, probe], 2 * length, pad=0)
        return packed_hidden_states(model, to_micro_batch(pack[None], world.device))[-length:].float()

    with engine.inference() as model:
        behind_one, behind_other = states_behind(model, one), states_behind(model, other)
    difference = float((behind_one - behind_other).norm() / behind_one.norm())  # host sync: once, before step 1
    if not difference <= ISOLATION_TOLERANCE:
        raise TrainingError(
            f"documents in one pack see each other: hidden states change by {difference:.1e} with the neighbour, "
            f"rounding explains {ISOLATION_TOLERANCE:.0e}",
            meaning="this model's attention ignores the borders of packed documents",
            fix="update transformers, or choose a model of a family that ftkit knows",
        )
    return {"documents isolated": f"difference {difference:.0e}"}


def prove_loss(engine: Engine, world: World, vocab_size: int, length: int = 48) -> dict[str, str]:
    """Prove that the loss, which needs no whole logits, is that of the logits of the model's own class.

    Raises:
        TrainingError: it is not.
    """
    pack = build_pack(_random_documents(2, vocab_size, length), 2 * length, pad=0)
    batch = to_micro_batch(pack[None], world.device)
    with engine.inference() as model:
        found, expected = float(summed_loss(model, batch)), float(loss_of_own_logits(model, batch))
    difference = abs(found - expected) / expected
    if not difference <= LOSS_TOLERANCE:
        raise TrainingError(
            f"the loss is not that of the model's own logits: found {found:.4g}, expected {expected:.4g}",
            meaning="this model scales or caps its logits, which ftkit does not",
            fix="choose another model",
        )
    return {"loss of own logits": f"difference {difference:.0e}"}


def _random_documents(count: int, vocab_size: int, length: int) -> list[Document]:
    tokens = np.random.default_rng(0).integers(0, vocab_size, (count, length)).astype(np.int32)
    return [Document(row, np.append(row[1:], IGNORED).astype(np.int32)) for row in tokens]
