"""What is proven of the model before step 1, on every rank. A proof that fails ends the run in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ftkit.errors import TrainingError

if TYPE_CHECKING:
    from ftkit.specs.training import Precision, TrainingSpec
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

ISOLATION_TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "bf16": 5e-2}
"""Largest difference of hidden states, relative to their norm, that rounding explains."""


@dataclass(frozen=True)
class ShardingFacts:
    """What is true of the sharded model on one rank; elements are numbers of parameters."""

    num_layers: int
    num_units: int
    num_sharded_layers: int
    num_checkpointed_layers: int
    total_elements: int
    local_elements: int
    largest_local_elements: int
    trainable_elements: int


def prove_sharding(facts: ShardingFacts, training: TrainingSpec, expected_parameters: int) -> dict[str, str]:
    """Compare the facts of a rank with what the plan asks for.

    Returns:
        What was checked, with the numbers found.

    Raises:
        TrainingError: naming both numbers of each comparison that failed.
    """
    wanted_checkpointed = facts.num_layers if training.activation_checkpointing else 0
    comparisons = {
        "units": (facts.num_units, facts.num_layers + 1, "decoder layers + 1 for the rest"),
        "sharded layers": (facts.num_sharded_layers, facts.num_layers, "decoder layers"),
        "checkpointed layers": (facts.num_checkpointed_layers, wanted_checkpointed, "as the recipe asks"),
        "parameters": (facts.total_elements, expected_parameters, "as planned"),
        "trainable parameters": (facts.trainable_elements, facts.total_elements, "all, for method 'full'"),
    }
    wrong = [
        f"{name}: found {found:,}, expected {expected:,} ({why})"
        for name, (found, expected, why) in comparisons.items()
        if found != expected
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


def prove_isolation(
    engine: Engine, world: World, precision: Precision, vocab_size: int, length: int = 48
) -> dict[str, str]:
    """Prove that documents in one pack do not see each other.

    Two documents of random tokens are run packed together, and the second one alone: its hidden states must
    be the same.

    Raises:
        TrainingError: they are not.
    """
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(0, vocab_size, (2, length), generator=generator).to(world.device)
    positions = torch.arange(length, device=world.device)

    def last_half(model: nn.Module, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=tokens[None], position_ids=places[None], use_cache=False, output_hidden_states=True)
        states: torch.Tensor = output.hidden_states[-1][0, -length:]
        return states.float()

    with engine.inference() as model:
        packed = last_half(model, documents.flatten(), positions.repeat(2))
        alone = last_half(model, documents[1], positions)
    difference = float((packed - alone).norm() / alone.norm())  # host sync: once, before step 1
    tolerance = ISOLATION_TOLERANCE[precision]
    if not difference <= tolerance:
        raise TrainingError(
            f"documents in one pack see each other: hidden states differ by {difference:.1e}, "
            f"rounding explains {tolerance:.0e}",
            meaning="this model's attention ignores the borders of packed documents",
            fix="update transformers, or choose a model of a family that ftkit knows",
        )
    return {"documents isolated": f"difference {difference:.0e}"}
