"""Checks before step 1, on every rank: the model is sharded as planned, and equals its own class.

A check that fails ends the run in seconds instead of wasting a night.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ftkit.data.encoding import IGNORED
from ftkit.data.packing import row_width
from ftkit.errors import TrainingError
from ftkit.train.causal_lm import CausalLM, MicroBatch, model_inputs
from ftkit.train.components.batches import to_micro_batch, to_padded_micro_batch
from ftkit.train.components.padding import PaddedRows
from ftkit.train.model.build import accepted_inputs, find_decoder, find_decoder_layers

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.execution import ParameterCounts
    from ftkit.config.training import TrainingPlan
    from ftkit.train.engine import Engine, ShardingStats
    from ftkit.train.world import World

GRADIENT_TOLERANCE = 1e-3
"""Largest gradient at a neighbor's tokens, relative to the mean at a document's own tokens."""
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest change of a token's hidden state, relative to its norm, that a different order of summation explains: 0.05
was measured after 32 layers in bf16. Attention that ignores documents changes it by 0.3 or more."""
LOGITS_TOLERANCE = 2e-2
"""Largest change of a token's logits, relative to their norm, that rounding in bf16 explains."""


def verify_sharding(stats: ShardingStats, training: TrainingPlan, expected: ParameterCounts) -> dict[str, str]:
    """Verify that the model is sharded as planned, on this rank.

    Returns:
        The checks, with the numbers found.

    Raises:
        TrainingError: with both numbers of each failed comparison.
    """
    checkpointing = training.activation_checkpointing
    units, layers = (0, 0) if stats.is_unsharded else (stats.num_layers + 1, stats.num_layers)
    comparisons = {
        "units": (stats.num_units, units, "decoder layers + 1 for the rest"),
        "sharded layers": (stats.num_sharded_layers, layers, "decoder layers"),
        f"layers with checkpointing '{checkpointing}'": (
            stats.checkpointed_layers.get(checkpointing, 0),
            stats.num_layers,
            "decoder layers",
        ),
        "parameters": (stats.total_elements, expected.total, "as planned"),
        "trainable parameters": (stats.trainable_elements, expected.trained, f"for method '{training.method}'"),
        "4-bit parameters": (stats.quantized_elements, expected.quantized, f"for method '{training.method}'"),
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
    found = {name: f"{found:,}" for name, (found, _, _) in comparisons.items()}
    return found | {"parameters on this rank": f"{stats.local_elements:,} of {stats.total_elements:,}"}


def verify_targets(num_targets: NDArray[np.int64]) -> dict[str, str]:
    """Verify that each pack has labels.

    Args:
        num_targets: target tokens of each pack.

    Raises:
        TrainingError: some packs have none.
    """
    without = np.flatnonzero(num_targets == 0)
    if len(without):
        raise TrainingError(
            f"{len(without):,} of {len(num_targets):,} packs have no target token, the first is number {without[0]:,}",
            meaning="the chat template marks no assistant turns, or data.train_on leaves nothing to train on",
            fix="check data.train_on, data.format and data.chat_template in the recipe",
        )
    return {"fewest targets in a pack": f"{int(num_targets.min()):,}"}


@dataclass(frozen=True)
class ProbeResult:
    """Outputs of a model for two micro-batches of N tokens, some of which are the same in both.

    With context parallelism, these are the N tokens of this rank's part of the packs.

    Attributes:
        is_kept: bool [N], tokens that both micro-batches share: the first part of every other document.
        is_later: bool [N], the tokens after them in the same document. All others belong to neighboring documents.
        states: hidden states of each micro-batch, [N, H].
        gradient_norms: fp32 [N], for each token of the second micro-batch: the norm of the gradient of its kept hidden
            states with respect to the first layer's output at that token.
        kept_norm: the mean of these over the kept tokens, on all ranks with tokens of the same packs.
        own_logits: logits of the model's own class for the last tokens of each row of the first micro-batch, [M, V].
        expected_logits: logits that ftkit computes the loss from, for the same tokens, [M, V].
    """

    is_kept: torch.Tensor
    is_later: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]
    gradient_norms: torch.Tensor
    kept_norm: torch.Tensor
    own_logits: torch.Tensor
    expected_logits: torch.Tensor


def run_probe(
    engine: Engine,
    world: World,
    vocab_size: int,
    *,
    micro_batch_size: int,
    sequence_length: int,
    is_packed: bool = True,
) -> ProbeResult:
    """Run a model on two micro-batches as in training: same shapes, same kernels, compiled, with gradients.

    Packs are filled with documents of uneven lengths, longer and shorter than most windows; padded rows have half the
    length of a pack. Weights don't change. Costs one backward pass and two forward passes of a micro-batch.
    """
    layout = (_packed_layout if is_packed else _padded_layout)(micro_batch_size, sequence_length)
    first, second = (_probe_batch(layout, vocab_size, seed, world) for seed in (1, 2))
    part = world.context.part(layout.is_kept.shape[1])
    is_kept, is_later = (
        torch.from_numpy(of[:, part].reshape(-1)).to(world.device) for of in (layout.is_kept, layout.is_later)
    )
    with torch.random.fork_rng(devices=[] if world.device.type == "cpu" else [world.device]):
        torch.manual_seed(0)  # for dropout
        with engine.probe() as model:
            states, own_logits, expected_logits = model(
                compute=_class_logits, batch=first, num_logits=min(32, part.stop - part.start)
            )
        _check_num_states(len(states), is_kept.numel())
        torch.manual_seed(0)
        with engine.probe() as model:
            other_states, gradients = _states_and_gradients(model, second, is_kept)
        _check_num_states(len(gradients), is_kept.numel())
    if not (states.isfinite().all() and other_states.isfinite().all()):  # host sync: before step 1
        raise TrainingError(
            "the model computes hidden states that are not finite, before any training",
            meaning="its weights hold NaN or infinite numbers, or numbers too large for training.precision",
            fix="copy or download the weights again; or set training.precision=fp32",
        )
    norms = gradients.float().norm(dim=1)
    kept_norm = world.context_sum(norms[is_kept].sum()) / world.context_sum(is_kept.sum())
    return ProbeResult(is_kept, is_later, (states, other_states), norms, kept_norm, own_logits, expected_logits)


def _check_num_states(found: int, num_tokens: int) -> None:
    if found != num_tokens:
        raise TrainingError(
            f"the model's class computes hidden states of other tokens too: {found:,} for {num_tokens:,} tokens",
            meaning="it adds special tokens that ftkit does not know",
            fix="choose another model",
        )


def _class_logits(
    model: CausalLM, batch: MicroBatch, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the model's own class. Within `CausalLM.forward` only.

    Returns:
        Its last hidden states, [N, H]; its logits for the last `num_logits` tokens of each row, [M, V]; and those that
        `CausalLM.loss` would compute its loss from, [M, V]: those of the class, if it has layers in between.
    """
    states: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    def watch_decoder(_: nn.Module, __: Any, output: Any) -> None:
        states.append(output.last_hidden_state.detach())

    def watch_projection(module: Any, __: Any, ___: Any) -> None:
        # In a hook, because ZeRO-3 gathers the weight only for this call.
        hidden = states[0][:, -num_logits:].to(module.weight.dtype)
        products = functional.linear(hidden, module.weight, module.bias)
        expected.append(model.logit_transform.apply(products.detach().float()))

    hf_model: Any = model.hf_model
    with (
        find_decoder(hf_model).register_forward_hook(watch_decoder),
        hf_model.get_output_embeddings().register_forward_hook(watch_projection),
    ):
        kept = torch.arange(-num_logits, 0, device=batch.input_ids.device)  # with a number, Gemma 4 skips other tokens
        inputs = model_inputs(hf_model, batch) | accepted_inputs(hf_model, {"logits_to_keep": kept})
        logits = hf_model(**inputs).logits[:, -num_logits:].detach()
    return (
        states[0].flatten(0, 1),
        logits.flatten(0, 1),
        (logits if model.has_head_layers else expected[0]).flatten(0, 1),
    )


def _states_and_gradients(
    model: CausalLM, batch: MicroBatch, is_kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states, and gradients of the kept ones with respect to the first layer's output.

    Not with respect to the embeddings: a frozen table has no gradient in training, and adding one would recompile the
    first layer.

    Args:
        model: the model that is trained.
        batch: N tokens.
        is_kept: bool [N]; the gradient is of these tokens' hidden states, projected on a random direction.

    Returns:
        Both with N rows.
    """
    outputs: list[torch.Tensor] = []

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with find_decoder_layers(model.hf_model)[0].register_forward_hook(watch):
        # Flattened outside: FSDP2 warns of outputs that are views.
        states = model(compute=CausalLM.hidden_states, batch=batch).flatten(0, 1)
    direction = torch.randn(states.shape, dtype=states.dtype, device=states.device) * is_kept[:, None]
    (gradients,) = torch.autograd.grad(states, outputs[:1], direction)
    return states.detach(), _by_token(gradients, batch.input_ids.shape)


def _by_token(values: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """Flatten a layer's output for B rows of T tokens to [N, …]; some models have S streams: [S, B, T, H]."""
    if values.shape[:2] == batch:
        return values.flatten(0, 1)
    axis = next((axis for axis in range(1, values.ndim - 1) if values.shape[axis : axis + 2] == batch), 0)
    return values.movedim((axis, axis + 1), (0, 1)).flatten(0, 1).flatten(1)


def verify_causality(probe: ProbeResult) -> dict[str, str]:
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


def verify_isolation(probe: ProbeResult, *, shares_scales: bool = False) -> dict[str, str]:
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
    kept = probe.is_kept
    one, other = (states[kept].float() for states in probe.states)
    change = _largest_ratio((one - other).norm(dim=1), one.norm(dim=1))
    leak = _leak(probe, ~(kept | probe.is_later))
    tolerance = math.inf if shares_scales else STATE_TOLERANCE[probe.states[0].dtype]
    if not (change <= tolerance and leak <= GRADIENT_TOLERANCE):  # NaN fails too
        raise TrainingError(
            f"packed documents attend to each other: with other neighbors, hidden states change by {change:.1e}, and "
            f"{leak:.1e} of their gradient goes to the neighbors; rounding explains {tolerance:.0e} and "
            f"{GRADIENT_TOLERANCE:.0e}",
            meaning="this model's attention, or another of its layers, ignores where documents end",
            fix="set data.packing=auto, try another training.attention, or choose another model",
        )
    return {"documents isolated": f"difference {change:.0g}, gradient {leak:.0g}"}


def _leak(probe: ProbeResult, to: torch.Tensor) -> float:
    """Return the largest gradient at some tokens, relative to the mean at the kept ones."""
    return _largest_ratio(probe.gradient_norms[to], probe.kept_norm)


def verify_logits(probe: ProbeResult) -> dict[str, str]:
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


_DOCUMENT_SHARES = (0.05, 0.62, 0.03, 0.11)
"""Fractions of a pack for its documents; a fifth document fills the rest."""
_ROW_SHARES = (0.93, 0.61)
"""Fractions of padded rows for their documents, in turn; the rest is padding."""
_KEPT_SHARE = 0.75
"""Fraction of a document that is kept. Its rest differs: no kept token may attend to it."""


@dataclass(frozen=True)
class _Layout:
    """Layout of documents in a probe's micro-batch.

    Attributes:
        is_kept, is_later: as in `ProbeResult`, bool [B, T].
        positions: int32 [B, T], within documents.
        lengths: int64 [B], tokens of each row's document; None for packs.
    """

    is_kept: NDArray[np.bool_]
    is_later: NDArray[np.bool_]
    positions: NDArray[np.int32]
    lengths: NDArray[np.int64] | None


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
    every_row = np.broadcast_to(positions.astype(np.int32), is_chosen.shape)
    return _Layout(is_chosen & is_first_part, is_chosen & ~is_first_part, every_row, None)


def _padded_layout(micro_batch_size: int, length: int) -> _Layout:
    """Lay out padded rows, of which every other one is kept."""
    width = row_width(-(-length // 2), length)
    num_rows = micro_batch_size * length // width
    rows, places = np.arange(num_rows)[:, None], np.arange(width)
    lengths = np.maximum(1, np.resize(_ROW_SHARES, num_rows) * width).astype(np.int64)
    is_chosen = (rows % 2 == 0) & (places < lengths[:, None])
    is_first_part = places < np.ceil(_KEPT_SHARE * lengths)[:, None]
    every_row = np.broadcast_to(places.astype(np.int32), is_chosen.shape)
    return _Layout(is_chosen & is_first_part, is_chosen & ~is_first_part, every_row, lengths)


def _probe_batch(layout: _Layout, vocab_size: int, seed: int, world: World) -> MicroBatch:
    """Return random documents; their kept tokens are the same with every seed."""
    kept = layout.is_kept
    same, other = (np.random.default_rng(number).integers(0, vocab_size, kept.shape) for number in (0, seed))
    tokens = np.where(kept, same, other).astype(np.int32)
    values = np.stack([tokens, np.full_like(tokens, IGNORED), layout.positions], axis=1)
    if layout.lengths is None:
        return to_micro_batch(values, world.device, context=world.context)
    return to_padded_micro_batch(PaddedRows(values, layout.lengths), world.device)
