"""Checks before step 1, on every rank: sharding, logits of the model's own class, isolation; packs or padded rows.

A check that fails ends the run in seconds instead of wasting a night.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import transformers
from torch.nn import functional

from ftkit.errors import TrainingError, one_line
from ftkit.train.causal_lm import PIXELS, CausalLM, SourceLosses
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.probe import ProbeResult, run_probe
from ftkit.train.model.hf_model import accepted_inputs, find_decoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ftkit.config.data import Packing
    from ftkit.config.execution import ParameterCounts
    from ftkit.config.recipe import RecipePlan
    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.data.prepared_data import PackStore
    from ftkit.runs.records import Checks
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.components.pictures import PictureFeed
    from ftkit.train.engine import Engine, ShardingStats
    from ftkit.train.world import World

GRADIENT_TOLERANCE = 1e-3  # of a neighbor's tokens, relative to the mean at a document's own tokens
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest change of a token's hidden state, relative to its norm, that a different order of summation explains: 0.05
was measured after 32 layers in bf16. Attention that ignores documents changes it by 0.3 or more."""
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of the first loss of pairs from its constant."""
KL_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
"""Largest mean divergence of a model from its stored distributions, in nats per token."""
PIXEL_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""Largest change of the loss of a token, in nats, by the pixels of another document's picture."""
LOGITS_TOLERANCE = 2e-2  # of a token's logits, relative to their norm: what rounding in bf16 explains


def verify_sharding(
    stats: ShardingStats, training: TrainingPlan, expected: ParameterCounts, engine: EngineName = "fsdp2"
) -> Checks:
    """Verify that the model is sharded, and its layers are checkpointed and offloaded, as planned, on this rank."""
    modes = Counter(training.checkpointing_of_layers(stats.num_layers, engine))
    offloaded = sum(training.offloaded_of_layers(stats.num_layers, engine))
    units, layers = (
        (stats.num_layers + stats.num_vision_layers + 1, stats.num_layers) if not stats.is_unsharded else (0, 0)
    )
    comparisons = {
        "units": (stats.num_units, units, "layers + 1 for the rest"),
        "sharded layers": (stats.num_sharded_layers, layers, "decoder layers"),
        **{
            f"layers with checkpointing '{mode}'": (stats.checkpointed_layers.get(mode, 0), modes[mode], "as planned")
            for mode in dict.fromkeys([*modes, *stats.checkpointed_layers])
        },
        "offloaded layers": (stats.offloaded_layers, offloaded, "by activation_offload"),
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
    without = np.flatnonzero(num_targets == 0)
    if len(without):
        raise TrainingError(
            f"no target token in {len(without):,} of {len(num_targets):,} packs, the first is number {without[0]:,}",
            meaning="the chat template marks no assistant turns, or data.train_on leaves nothing to train on",
            fix="check data.train_on, data.format and data.chat_template in the recipe",
        )
    return {"fewest targets in a pack": int(num_targets.min())}


def verify_causality(probe: ProbeResult) -> Checks:
    """Verify that hidden states have no gradient to later tokens: the model would see the tokens that it predicts."""
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

    Hidden states of a document must not change with its neighbors, except by rounding that grows from layer to layer.
    Their gradients to the neighbors must be zero: the stricter check.

    With `shares_scales` (precision fp8), a neighbor's largest value changes the rounding of all, by 0.56 of a hidden
    state after the 32 random layers of a Llama 3 8B, so only the gradient is checked.
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


def verify_pictures(
    engine: Engine, world: World, store: PackStore, pictures: PictureFeed, training: TrainingPlan
) -> Checks:
    """Verify that a document's loss depends on its own picture and not on those of its neighbors. Collective.

    In the first pack with pictures, those of one document are inverted. Of two documents with pictures in the pack, it
    is the second: its features would be put at the tokens of the first, if the model mixed them up.
    """
    chosen = next(pack for pack in range(len(store)) if store.pictures([pack]))
    numbers = [chosen] * training.micro_batch_size
    packs, own = store.read(numbers), store.pictures(numbers)
    changed = [*own]
    index = min(1, len(own) - 1)
    changed[index] = own[index] | {PIXELS: 255 - own[index][PIXELS]}
    batch = to_micro_batch(packs, torch.device("cpu"))
    losses = []
    with engine.inference() as model:
        for each in (own, changed):
            log_probs = model(compute=CausalLM.log_probs, batch=pictures.add(batch, packs, each).on(world.device))
            losses.append(log_probs.float().cpu())  # host sync: before step 1
    is_own, is_behind = (mask[batch.label_index] for mask in pictures.affected(packs, index))
    difference = (losses[0] - losses[1]).abs()
    leak, effect = (float(difference[kept].max()) if kept.any() else 0.0 for kept in (~is_own, is_behind))
    tolerance = math.inf if training.precision == "fp8" else PIXEL_TOLERANCE[training.compute_precision]
    if not leak <= tolerance or (is_behind.any() and not effect > leak):
        raise TrainingError(
            f"other pixels in one document change its own loss by {effect:.1e}, and the losses of other documents "
            f"by {leak:.1e}; rounding explains {tolerance:.0e}",
            meaning="this model puts pictures into other documents of a pack, or does not see them",
            fix="try another training.attention, choose another model, or set data.pictures=false to train on text",
        )
    return {"pixels of other documents": f"difference {leak:.0g}", "pixels of the own": f"difference {effect:.0g}"}


def _leak(probe: ProbeResult, to: torch.Tensor) -> float:
    return _largest_ratio(probe.gradient_norms[to], probe.kept_norm)


def choose_packing(  # noqa: PLR0913 - what decides it
    engine: Engine,
    world: World,
    wanted: Packing,
    vocab_size: int,
    training: TrainingPlan,
    *,
    shares_prompts: bool = False,
    pictures: PictureFeed | None = None,
) -> tuple[ProbeResult, str | None]:
    """Choose packs if the model isolates packed documents, else padded rows; return why, and the probe. Collective."""
    sizes = training.micro_batch_size, training.sequence_length
    reason: str | None = "the recipe asks for it"
    if wanted == "auto":
        packed, reason, decoder = None, None, find_decoder(engine.model.hf_model)
        if not accepted_inputs(decoder, {"position_ids": None}):
            reason = f"{type(decoder).__name__} does not accept the positions of packed documents"
        else:
            try:
                layout: Literal["pairs", "packs"] = "pairs" if shares_prompts else "packs"
                packed = run_probe(engine, world, vocab_size, *sizes, layout=layout, pictures=pictures)
                verify_isolation(packed, shares_scales=training.precision == "fp8")
            except TrainingError as error:
                reason = error.what
            except (ValueError, NotImplementedError) as error:  # a kernel for packs is missing: transformers says which
                reason = one_line(error)
        reason = next((one for one in world.gather_objects(reason) if one is not None), None)
        if packed is not None and reason is None:
            return packed, None
    if training.documents_per_sample > 1 or training.stores_reference or training.distillation is not None:
        raise TrainingError(
            f"objective '{training.objective}' needs packs, but this model is trained on padded rows: {reason}",
            meaning="one document per row would split pairs, and would not match what is stored for each pack",
            fix=("set data.share_prompts=false, " if shares_prompts else "")
            + "choose another model, or try another training.attention",
        )
    if pictures is not None:
        raise TrainingError(
            f"pictures need packs, but this model is trained on padded rows: {reason}",
            fix="set data.pictures=false to train on text, try another training.attention, or choose another model",
        )
    if world.context.size > 1:
        key = "tensor_parallel" if world.tensor_parallel > 1 else "context_parallel"
        raise TrainingError(
            f"training.{key}={getattr(training, key)} needs packs, but this model is trained on padded rows: {reason}",
            fix=f"leave training.{key} out, or choose another model",
        )
    return run_probe(engine, world, vocab_size, *sizes, layout="rows"), reason


_MIXED_DTYPES = re.compile(
    r"[^'\"\n]*(same dtype|scalar type|dtypes (?:match|must)|dtype to be equal|and weight type|mixed dtype)[^'\"\n]*"
)
"""What torch's operations say of inputs with several dtypes; in an error of its compiler, the operation's own words."""
_NOT_DETERMINISTIC = re.compile(r"([^'\"\n]+) does not have a deterministic implementation")


@contextmanager
def operations_explained(training: TrainingPlan) -> Iterator[None]:
    """Convert two errors of operations to ones that say what to do: several dtypes in bf16, and results that vary."""
    try:
        yield
    except RuntimeError as error:
        if training.deterministic and (varying := _NOT_DETERMINISTIC.search(str(error))):
            raise TrainingError(
                f"training.deterministic: {varying[1]} has no implementation in torch {torch.__version__} that repeats",
                fix="leave training.deterministic out; or choose another model or device",
            ) from error
        found = _MIXED_DTYPES.search(str(error))
        if found is None or training.compute_precision == "fp32":
            raise
        raise TrainingError(
            f"the model can't compute in bf16: {found[0].strip()}",
            meaning=f"its class in transformers {transformers.__version__} mixes bf16 with other dtypes",
            fix="set training.precision=fp32, or choose another model",
        ) from error


def verify_logits(probe: ProbeResult) -> Checks:
    """Verify that the logits behind the loss are those of the model's own class: a loss hardly shows a wrong scale."""
    own, expected = probe.own_logits.float(), probe.expected_logits.float()
    is_alike = own.shape == expected.shape
    difference = _largest_ratio((own - expected).norm(dim=1), own.norm(dim=1)) if is_alike else math.inf
    if not difference <= LOGITS_TOLERANCE:
        raise TrainingError(
            f"the logits of ftkit's loss are not those of the model's own class: they differ by {difference:.1e} "
            f"({[*own.shape]} and {[*expected.shape]} numbers), rounding explains {LOGITS_TOLERANCE:.0e}",
            meaning="this model changes its logits, or what they are computed from, in a way that ftkit does not know",
            fix="choose another model, or please report this one",
        )
    return {"logits of the model's own class": f"difference {difference:.0g}"}


def verify_pairs(engine: Engine, batch: MicroBatch, precision: Literal["fp32", "bf16"]) -> Checks:
    """Verify an objective on preferences before training: its first loss, and that its gradient is right.

    While the model equals its reference, the loss is a constant. A step along the gradient of the last hidden states
    must raise the margin. `precision` is that of operations.
    """
    batch = replace(batch, kl_bits=torch.zeros((), dtype=torch.int32, device=batch.labels.device))
    with engine.inference() as model:
        found, expected, margins = model(compute=_step_on_pairs, batch=batch)
    checks: dict[str, int | str] = {}
    if expected is not None:
        tolerance = LOSS_TOLERANCE[precision]
        if not abs(found - expected) <= tolerance * expected:
            raise TrainingError(
                f"the model is not its own reference before step 1: the loss is {found:.6g}, and should be "
                f"{expected:.6g}; rounding explains {tolerance:.0e} of it",
                meaning="the adapters change the model before they are trained, or the model is not deterministic",
                fix="start from merged weights (ftkit export RUN --merge), or please report this model",
            )
        checks["first loss of pairs"] = f"{found:.6g}"
    before, after = margins.mean(dim=1).tolist()
    if not after > before:
        raise TrainingError(
            f"a step along the gradient does not raise the margin: {before:.4g}, then {after:.4g}",
            meaning="the gradient of the loss is wrong for this model, or not finite",
            fix="set training.precision=fp32 to see whether it is rounding, or please report this model",
        )
    return checks | {"margin of pairs": f"{after - before:.2g}"}


def verify_teacher(engine: Engine, batch: MicroBatch, recipe: RecipePlan) -> Checks:
    """Verify the stored distributions of a teacher that is the model itself: the divergence is 0 before training."""
    model, teacher, training = recipe.model, recipe.teacher, recipe.training
    is_same = teacher is not None and (teacher.weights, teacher.revision) == (model.weights, model.revision)
    if not is_same or model.adapter is not None or training.quantization != "none" or training.trains_in_fp8:
        return {}
    sums = SourceLosses(0, batch.labels.device, len(training.metric_names))
    with engine.inference() as student:
        student(batch=batch, source_losses=sums)
    divergence, tolerance = float(sums.metrics[0]) / len(batch.labels), KL_TOLERANCE[training.compute_precision]
    if not divergence <= tolerance:
        raise TrainingError(
            f"the model is its own teacher, but diverges by {divergence:.2g}; rounding explains {tolerance:.0e}",
            fix="delete the folder 'teachers' next to the prepared data, and run again",
        )
    return {"divergence from itself": f"{divergence:.1g}"}


def _step_on_pairs(model: CausalLM, batch: MicroBatch) -> tuple[float, float | None, torch.Tensor]:
    """Return the mean loss, what it should be, and the margins before and after a step on the hidden states, [2, S].

    Within `CausalLM.forward`, without dropout. The step changes each state by a tenth of its norm.
    """
    objective = model.objective
    if objective is None:
        raise TypeError("there are no pairs")
    reference = model.reference_log_probs(batch, objective)
    states = model.label_states(batch).detach()
    with torch.enable_grad():
        pairs = model.pairs(batch, reference, states.requires_grad_())
        losses, before = objective.losses(pairs)
        (gradient,) = torch.autograd.grad(losses.sum(), states)
    step = 0.1 * states.norm(dim=1, keepdim=True) * functional.normalize(gradient.float(), dim=1)
    stepped = (states - step).detach().to(states.dtype)
    _, after = objective.losses(model.pairs(batch, reference, stepped))
    margins = torch.stack([pairs.margins(before.detach()), pairs.margins(after)])
    return float(losses.detach().mean()), objective.initial_loss(pairs), margins


def _largest_ratio(values: torch.Tensor, reference: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    return float((values / reference.clamp_min(torch.finfo(torch.float32).tiny)).max())  # host sync: before step 1
