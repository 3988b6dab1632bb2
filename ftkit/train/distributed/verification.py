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
from numpy.typing import NDArray
from torch.nn import functional

from ftkit.data.packing import IGNORED, row_width
from ftkit.errors import TrainingError, one_line
from ftkit.train.causal_lm import CausalLM, MicroBatch, model_inputs
from ftkit.train.components.batches import PaddedRows, to_micro_batch, to_padded_micro_batch
from ftkit.train.model.hf_model import accepted_inputs, find_decoder, find_decoder_layers, why_not_packed
from ftkit.train.objectives import Pairs

if TYPE_CHECKING:
    from torch import nn
    from transformers.modeling_outputs import BaseModelOutput

    from ftkit.config.data import Packing
    from ftkit.config.execution import ParameterCounts
    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.planning.plan import BatchPlan
    from ftkit.runs.records import Checks
    from ftkit.train.engine import Engine, ShardingStats
    from ftkit.train.world import World

GRADIENT_TOLERANCE = 1e-3  # of a neighbor's tokens, relative to the mean at a document's own tokens
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest change of a token's hidden state, relative to its norm, that a different order of summation explains: 0.05
was measured after 32 layers in bf16. Attention that ignores documents changes it by 0.3 or more."""
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative difference of the first loss of pairs from its constant."""
LOGITS_TOLERANCE = 2e-2  # of a token's logits, relative to their norm: what rounding in bf16 explains


def verify_sharding(
    stats: ShardingStats, training: TrainingPlan, expected: ParameterCounts, engine: EngineName = "fsdp2"
) -> Checks:
    """Verify that the model is sharded, and its layers are checkpointed and offloaded, as planned, on this rank."""
    modes = Counter(training.checkpointing_of_layers(stats.num_layers, engine))
    offloaded = sum(training.offloaded_of_layers(stats.num_layers, engine))
    units, layers = (0, 0) if stats.is_unsharded else (stats.num_layers + 1, stats.num_layers)
    comparisons = {
        "units": (stats.num_units, units, "decoder layers + 1 for the rest"),
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


def _leak(probe: ProbeResult, to: torch.Tensor) -> float:
    return _largest_ratio(probe.gradient_norms[to], probe.kept_norm)


def choose_packing(
    engine: Engine, world: World, wanted: Packing, vocab_size: int, batch: BatchPlan, training: TrainingPlan
) -> tuple[ProbeResult, str | None]:
    """Choose packs if the model isolates packed documents, else padded rows; return why, and the probe. Collective."""
    sizes = batch.micro_batch_size, training.sequence_length

    def probe(*, is_packed: bool) -> ProbeResult:
        return run_probe(engine, world, vocab_size, *sizes, is_packed=is_packed)

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
            return packed, None
    if training.documents_per_sample > 1:
        raise TrainingError(
            f"objective '{training.objective}' needs packs, but this model is trained on padded rows: {reason}",
            meaning="rows of one document each would separate the completions of a pair",
            fix="choose another model, or try another training.attention",
        )
    if world.context.size > 1:
        key = "tensor_parallel" if world.tensor_parallel > 1 else "context_parallel"
        raise TrainingError(
            f"training.{key}={getattr(training, key)} needs packs, but this model is trained on padded rows: {reason}",
            fix=f"leave training.{key} out, or choose another model",
        )
    return probe(is_packed=False), reason


def verify_logits(probe: ProbeResult) -> Checks:
    """Verify that the logits behind the loss are those of the model's own class: a loss hardly shows a wrong scale."""
    own, expected = probe.own_logits.float(), probe.expected_logits.float()
    difference = math.inf
    if own.shape == expected.shape:
        difference = _largest_ratio((own - expected).norm(dim=1), own.norm(dim=1))
    if not difference <= LOGITS_TOLERANCE:
        raise TrainingError(
            f"the logits of ftkit's loss are not those of the model's own class: they differ by {difference:.1e} "
            f"({[*own.shape]} and {[*expected.shape]} numbers), rounding explains {LOGITS_TOLERANCE:.0e}",
            meaning="this model changes its logits, or what they are computed from, in a way that ftkit does not know",
            fix="choose another model, or please report this one",
        )
    return {"logits of the model's own class": f"difference {difference:.0g}"}


def verify_pairs(engine: Engine, batch: MicroBatch) -> Checks:
    """Verify an objective on preferences on pairs, before training: its first loss, and that its gradient is right.

    While the model equals its reference, the loss is a constant. A step along the gradient of the last hidden states
    must raise the margin.
    """
    with engine.inference() as model:
        objective = model.objective
        if objective is None:
            return {}
        losses, margins = model(compute=_step_on_pairs, batch=batch)
    found, expected, checks = float(losses.mean()), objective.initial_loss, dict[str, int | str]()
    if expected is not None:
        tolerance = LOSS_TOLERANCE[model.hf_model.dtype]
        if not abs(found - expected) <= tolerance * expected:
            raise TrainingError(
                f"the model is not its own reference before step 1: the loss of pairs is {found:.6g}, and should be "
                f"{expected:.6g}; rounding explains {tolerance:.0e} of it",
                meaning="the adapters change the model before they are trained, or the model is not deterministic",
                fix="start from merged weights (ftkit export RUN --merge), or please report this model",
            )
        checks["first loss of pairs"] = f"{found:.6g}"
    before, after = margins.mean(dim=1).tolist()
    if not after > before:
        raise TrainingError(
            f"a step along the gradient does not raise the margin of pairs: {before:.4g}, then {after:.4g}",
            meaning="the gradient of the loss is wrong for this model, or not finite",
            fix="set training.precision=fp32 to see whether it is rounding, or please report this model",
        )
    return checks | {"margin of pairs": f"{after - before:.2g}"}


def _step_on_pairs(model: CausalLM, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of pairs, [S], and their margins before and after a step on the hidden states, [2, S].

    Within `CausalLM.forward`, without dropout. The step changes each state by a tenth of its norm.
    """
    objective = model.objective
    if objective is None or batch.completion_lengths is None:
        raise TypeError("there are no pairs")
    reference = model.reference_log_probs(batch) if objective.has_reference else None
    states = model.label_states(batch).detach()
    with torch.enable_grad():
        pairs = Pairs.of(model.log_probs(batch, states.requires_grad_()), reference, batch.completion_lengths)
        losses, (chosen, rejected) = objective.losses(pairs)
        (gradient,) = torch.autograd.grad(losses.sum(), states)
    step = 0.1 * states.norm(dim=1, keepdim=True) * functional.normalize(gradient.float(), dim=1)
    stepped = (states - step).detach().to(states.dtype)
    pairs = Pairs.of(model.log_probs(batch, stepped), reference, batch.completion_lengths)
    _, (chosen_after, rejected_after) = objective.losses(pairs)
    return losses.detach(), torch.stack([(chosen - rejected).detach(), chosen_after - rejected_after])


def _largest_ratio(values: torch.Tensor, reference: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    return float((values / reference.clamp_min(torch.finfo(torch.float32).tiny)).max())  # host sync: before step 1


@dataclass(frozen=True)
class ProbeResult:
    """Outputs of a model for two micro-batches of N tokens, some of which are the same in both.

    With context parallelism, these are the N tokens of this rank's part of the packs. A gradient is that of the second
    micro-batch's kept hidden states with respect to the first layer's output at a token. Logits are those of the last
    tokens of each row of the first micro-batch.
    """

    is_kept: torch.Tensor  # bool [N], tokens that both micro-batches share: the first part of every other document
    is_later: torch.Tensor  # bool [N], after them in the same document; all others are in neighboring documents
    kept_states: tuple[torch.Tensor, torch.Tensor]  # hidden states of the kept tokens, [K, H], in host memory
    gradient_norms: torch.Tensor  # fp32 [N]
    kept_norm: torch.Tensor  # their mean over the kept tokens, on all ranks with tokens of the same packs
    own_logits: torch.Tensor  # [M, V], of the model's own class
    expected_logits: torch.Tensor  # [M, V], that ftkit computes the loss from


def run_probe(
    engine: Engine,
    world: World,
    vocab_size: int,
    micro_batch_size: int,
    sequence_length: int,
    *,
    is_packed: bool = True,
) -> ProbeResult:
    """Run a model on two micro-batches as in training: same shapes, same kernels, compiled, with gradients.

    Packs are filled with documents of uneven lengths, longer and shorter than most windows; padded rows have half the
    length of a pack. Weights don't change.
    """
    layout = (_packed_layout if is_packed else _padded_layout)(micro_batch_size, sequence_length)
    first, second = (_probe_batch(layout, vocab_size, seed, world) for seed in (1, 2))
    part = world.context.part(layout.is_kept.shape[1])
    is_kept, is_later = (
        torch.from_numpy(of[:, part].reshape(-1)).to(world.device) for of in (layout.is_kept, layout.is_later)
    )
    num_logits = min(32, part.stop - part.start)
    with torch.random.fork_rng(devices=[] if world.device.type == "cpu" else [world.device]):
        torch.manual_seed(0)  # for dropout of the model's own class
        with engine.probe() as model:
            states, own_logits, expected_logits = model(compute=_class_logits, batch=first, num_logits=num_logits)
        kept_states = _kept_states(states, is_kept)
        del states
        torch.manual_seed(0)
        with engine.probe() as model:
            other_states, gradients = _states_and_gradients(model, second, is_kept)
    both = (kept_states, _kept_states(other_states, is_kept))
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float32)
    kept_norm = world.context_sum(norms[is_kept].sum()) / world.context_sum(is_kept.sum())
    return ProbeResult(is_kept, is_later, both, norms, kept_norm, own_logits, expected_logits)


def _kept_states(states: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    if len(states) != len(is_kept):
        raise TrainingError(
            f"the model's class computes hidden states of other tokens too: {len(states):,} for {len(is_kept):,} "
            "tokens",
            meaning="it adds special tokens that ftkit does not know",
            fix="choose another model",
        )
    if not states.isfinite().all():  # host sync: before step 1
        raise TrainingError(
            "the model computes hidden states that are not finite, before any training",
            meaning="its weights hold NaN or infinite numbers, or numbers too large for training.precision",
            fix="copy or download the weights again; or set training.precision=fp32",
        )
    return states[is_kept].cpu()


def _class_logits(
    model: CausalLM, batch: MicroBatch, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the model's own class, within `CausalLM.forward`.

    Returns its last hidden states, [N, H]; its logits for the last `num_logits` tokens of each row, [M, V]; and those
    that `CausalLM.loss` would compute its loss from, [M, V]: those of the class, if it has layers in between.
    """
    states: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    def watch_decoder(_: nn.Module, __: object, output: BaseModelOutput) -> None:
        states.append(output.last_hidden_state.detach())

    def watch_projection(module: nn.Linear, __: object, ___: object) -> None:
        # In a hook, because ZeRO-3 gathers the weight only for this call.
        hidden = states[0][:, -num_logits:].to(module.weight.dtype)
        products = functional.linear(hidden, module.weight, module.bias)
        expected.append(model.logit_transform.apply(products.detach().float()))

    hf_model = model.hf_model
    with (
        find_decoder(hf_model).register_forward_hook(watch_decoder),
        hf_model.get_output_embeddings().register_forward_hook(watch_projection),
    ):
        kept = torch.arange(-num_logits, 0, device=batch.input_ids.device)  # with a number, Gemma 4 skips other tokens
        inputs = model_inputs(hf_model, batch) | accepted_inputs(hf_model, {"logits_to_keep": kept})
        logits = hf_model(**inputs).logits[:, -num_logits:].detach()
    expected_logits = logits if model.has_head_layers else expected[0]
    return states[0].flatten(0, 1), logits.flatten(0, 1), expected_logits.flatten(0, 1)


def _states_and_gradients(
    model: CausalLM, batch: MicroBatch, is_kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states, and gradients of the kept ones with respect to the first layer's output, [N, …].

    The hidden states of the kept tokens are projected on a random direction. Gradients are not with respect to the
    embeddings: a frozen table has no gradient in training, and adding one would recompile the first layer.
    """
    outputs: list[torch.Tensor] = []

    def watch(_: nn.Module, __: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with find_decoder_layers(model.hf_model)[0].register_forward_hook(watch):
        # Flattened outside: FSDP2 warns of outputs that are views.
        states = model(compute=CausalLM.hidden_states, batch=batch).flatten(0, 1)
    direction = torch.randn(states.shape, dtype=states.dtype, device=states.device).mul_(is_kept[:, None])
    (gradients,) = torch.autograd.grad(states, outputs[:1], direction)
    # To one row for each of the N = B * T tokens; some models have S streams: [S, B, T, H].
    rows = batch.input_ids.shape
    axis = next((axis for axis in range(gradients.ndim - 1) if gradients.shape[axis : axis + 2] == rows), 0)
    by_token = gradients.movedim((axis, axis + 1), (0, 1)).flatten(0, 1).flatten(1)
    return states.detach(), by_token


_DOCUMENT_SHARES = (0.05, 0.62, 0.03, 0.11)  # fractions of a pack for its documents; a fifth document fills the rest
_ROW_SHARES = (0.93, 0.61)  # fractions of padded rows for their documents, in turn; the rest is padding
_KEPT_SHARE = 0.75
"""Fraction of a document that is kept. Its rest differs: no kept token may attend to it."""


@dataclass(frozen=True)
class _Layout:
    """Documents in a probe's micro-batch, [B, T]."""

    is_kept: NDArray[np.bool_]
    is_later: NDArray[np.bool_]
    positions: NDArray[np.int64]  # within documents
    lengths: NDArray[np.int64] | None  # [B], tokens of each row's document; None for packs


def _packed_layout(micro_batch_size: int, length: int) -> _Layout:
    """Lay out packs. Every other document is kept: the odd ones in even rows, the even ones in odd rows."""
    ends = np.cumsum(_DOCUMENT_SHARES) * length
    begins = np.unique(np.concatenate([[0], ends.astype(np.int64) | 1]))  # odd lengths, unlike a kernel's tiles
    begins = begins[begins < length]
    document = np.searchsorted(begins, np.arange(length), side="right") - 1
    lengths = np.diff(np.append(begins, length))
    positions = np.arange(length) - begins[document]
    is_chosen = (document + np.arange(micro_batch_size)[:, None]) % 2 == 1
    is_first_part = positions < np.ceil(_KEPT_SHARE * lengths[document])
    return _Layout(
        is_chosen & is_first_part, is_chosen & ~is_first_part, np.broadcast_to(positions, is_chosen.shape), None
    )


def _padded_layout(micro_batch_size: int, length: int) -> _Layout:
    width = row_width(-(-length // 2), length)
    num_rows = micro_batch_size * length // width
    rows, places = np.arange(num_rows)[:, None], np.arange(width)
    lengths = np.maximum(1, np.resize(_ROW_SHARES, num_rows) * width).astype(np.int64)
    is_chosen = (rows % 2 == 0) & (places < lengths[:, None])
    is_first_part = places < np.ceil(_KEPT_SHARE * lengths)[:, None]
    return _Layout(
        is_chosen & is_first_part, is_chosen & ~is_first_part, np.broadcast_to(places, is_chosen.shape), lengths
    )


def _probe_batch(layout: _Layout, vocab_size: int, seed: int, world: World) -> MicroBatch:
    """Return random documents; their kept tokens are the same with every seed."""
    kept = layout.is_kept
    same, other = (np.random.default_rng(number).integers(0, vocab_size, kept.shape) for number in (0, seed))
    tokens = np.where(kept, same, other)
    values = np.stack([tokens, np.full_like(tokens, IGNORED), layout.positions], axis=1).astype(np.int32)
    if layout.lengths is None:
        return to_micro_batch(values, world.device, context=world.context)
    offsets = np.arange(len(values)) * values.shape[2]
    return to_padded_micro_batch(PaddedRows(values, layout.lengths, offsets), world.device)
