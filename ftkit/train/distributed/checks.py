"""Checks before step 1, on every rank: the model is sharded as planned, and equals its own class; packs or padded rows.

A check that fails ends the run in seconds instead of wasting a night.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftkit.errors import TrainingError, one_line
from ftkit.train.distributed.probe import ProbeResult, run_probe
from ftkit.train.model.hf_model import why_not_packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.config.data import Packing
    from ftkit.config.execution import ParameterCounts
    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.planning.plan import BatchPlan
    from ftkit.runs.records import Checks
    from ftkit.train.engine import Engine, ShardingStats
    from ftkit.train.world import World

GRADIENT_TOLERANCE = 1e-3
"""Largest gradient at a neighbor's tokens, relative to the mean at a document's own tokens."""
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest change of a token's hidden state, relative to its norm, that a different order of summation explains: 0.05
was measured after 32 layers in bf16. Attention that ignores documents changes it by 0.3 or more."""
LOGITS_TOLERANCE = 2e-2
"""Largest change of a token's logits, relative to their norm, that rounding in bf16 explains."""


def verify_sharding(
    stats: ShardingStats, training: TrainingPlan, expected: ParameterCounts, engine: EngineName = "fsdp2"
) -> Checks:
    """Verify that the model is sharded, and its layers are checkpointed and offloaded, as planned, on this rank.

    Returns:
        The checks, with the numbers found.

    Raises:
        TrainingError: with both numbers of each failed comparison.
    """
    modes = Counter(training.checkpointing_of_layers(stats.num_layers, engine))
    offloaded = training.offloaded_of_layers(stats.num_layers, engine)
    units, layers = (0, 0) if stats.is_unsharded else (stats.num_layers + 1, stats.num_layers)
    comparisons = {
        "units": (stats.num_units, units, "decoder layers + 1 for the rest"),
        "sharded layers": (stats.num_sharded_layers, layers, "decoder layers"),
        **{
            f"layers with checkpointing '{mode}'": (
                stats.checkpointed_layers.get(mode, 0),
                modes[mode],
                "decoder layers",
            )
            for mode in dict.fromkeys([*modes, *stats.checkpointed_layers])
        },
        "offloaded layers": (stats.offloaded_layers, sum(offloaded), "decoder layers, by activation_offload"),
        "parameters": (stats.total_elements, expected.total, "as planned"),
        "trainable parameters": (stats.trainable_elements, expected.trained, f"for method '{training.method}'"),
        "quantized parameters": (stats.quantized_elements, expected.quantized, f"for method '{training.method}'"),
    }
    wrong = [
        f"{name}: found {found:,}, expected {wanted:,} ({why})"
        for name, (found, wanted, why) in comparisons.items()
        if found != wanted
    ]
    if stats.local_elements > stats.max_local_elements:
        wrong.append(
            f"parameters on this rank: found {stats.local_elements:,}, expected at most "
            f"{stats.max_local_elements:,} (an even share of {stats.total_elements:,})"
        )
    if wrong:
        raise TrainingError(
            "the model is not sharded as planned: " + "; ".join(wrong),
            meaning="training would run out of memory, or would not train what the recipe sets",
            fix="this is a bug of the model's class or of ftkit, not of the data: please report it with this message",
        )
    found: Checks = {name: found for name, (found, _, _) in comparisons.items()}
    return found | {"parameters on this rank": f"{stats.local_elements:,} of {stats.total_elements:,}"}


def verify_targets(num_targets: NDArray[np.int64]) -> Checks:
    """Verify that each pack has labels.

    Args:
        num_targets: target tokens of each pack.

    Raises:
        TrainingError: some packs have none.
    """
    without = np.flatnonzero(num_targets == 0)
    if len(without):
        raise TrainingError(
            f"no target token in {len(without):,} of {len(num_targets):,} packs, the first is number {without[0]:,}",
            meaning="the chat template marks no assistant turns, or data.train_on leaves nothing to train on",
            fix="check data.train_on, data.format and data.chat_template in the recipe",
        )
    return {"fewest targets in a pack": int(num_targets.min())}


def verify_causality(probe: ProbeResult) -> Checks:
    """Verify that no token attends to later ones: hidden states have no gradient to them.

    Raises:
        TrainingError: they have one. The loss would fall because the model sees the tokens that it predicts.
    """
    leak = _leak(probe, probe.is_later)
    if not leak <= GRADIENT_TOLERANCE:
        raise TrainingError(
            f"tokens attend to later ones: {leak:.1e} of the gradient of hidden states goes to later tokens; "
            f"rounding explains {GRADIENT_TOLERANCE:.0e}",
            meaning="this model's attention is not causal: it would learn to copy the tokens that it should predict",
            fix="choose a causal language model, or try another training.attention",
        )
    return {"later tokens unseen": f"gradient {leak:.0g}"}


def verify_isolation(probe: ProbeResult, *, shares_scales: bool = False) -> Checks:
    """Verify that documents of a micro-batch do not attend to each other, neither forward nor backward.

    Hidden states of a document must not change with its neighbors, and their gradients to the neighbors must be zero.
    The gradient is the stricter check: it is exactly zero unless documents attend to each other. Hidden states are
    equal if each kernel sums in a fixed order; otherwise rounding errors grow from layer to layer.

    Args:
        probe: outputs of the model.
        shares_scales: tokens of different documents are rounded with one scale, as with precision fp8. A neighbor's
            largest value then changes the rounding of all, by 0.56 of a hidden state after the 32 random layers of a
            Llama 3 8B, so only the gradient is checked.

    Raises:
        TrainingError: they do.
    """
    one, other = (states.float() for states in probe.kept_states)
    change = _largest_ratio((one - other).norm(dim=1), one.norm(dim=1))
    leak = _leak(probe, ~(probe.is_kept | probe.is_later))
    tolerance = math.inf if shares_scales else STATE_TOLERANCE[probe.kept_states[0].dtype]
    if not (change <= tolerance and leak <= GRADIENT_TOLERANCE):  # NaN fails too
        raise TrainingError(
            f"packed documents attend to each other: with other neighbors, hidden states change by {change:.1e}, and "
            f"{leak:.1e} of their gradient goes to the neighbors; rounding explains {tolerance:.0e} and "
            f"{GRADIENT_TOLERANCE:.0e}",
            meaning="this model's attention, or another of its layers, ignores where documents end",
            fix="set data.packing=auto, try another training.attention, or choose another model",
        )
    difference = "" if shares_scales else f"difference {change:.0g}, "
    return {"documents isolated": f"{difference}gradient {leak:.0g}"}


def _leak(probe: ProbeResult, to: torch.Tensor) -> float:
    """Return the largest gradient at some tokens, relative to the mean at the kept ones."""
    return _largest_ratio(probe.gradient_norms[to], probe.kept_norm)


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


def verify_logits(probe: ProbeResult) -> Checks:
    """Verify that the logits behind the loss are those of the model's own class.

    Logits are compared, not losses: a wrong scale of the logits hardly changes the loss of an untrained model.

    Raises:
        TrainingError: they are not.
    """
    own, expected = probe.own_logits.float(), probe.expected_logits.float()
    if own.shape != expected.shape:
        raise TrainingError(
            f"the model's class computes logits of {own.shape[1]:,} tokens, its output projection of "
            f"{expected.shape[1]:,}",
            meaning="it omits some tokens, which ftkit's loss would not",
            fix="choose another model, or please report this one",
        )
    difference = _largest_ratio((own - expected).norm(dim=1), own.norm(dim=1))
    if not difference <= LOGITS_TOLERANCE:
        raise TrainingError(
            f"the logits of ftkit's loss are not those of the model's own class: they differ by {difference:.1e}, "
            f"rounding explains {LOGITS_TOLERANCE:.0e}",
            meaning="this model changes its logits, or what they are computed from, in a way that ftkit does not know",
            fix="choose another model, or please report this one",
        )
    return {"logits of the model's own class": f"difference {difference:.0g}"}


def _largest_ratio(values: torch.Tensor, reference: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    return float((values / reference.clamp_min(torch.finfo(torch.float32).tiny)).max())  # host sync: before step 1
