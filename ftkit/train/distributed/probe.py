"""Run a model on random documents before step 1, as in training, for the checks of packs and logits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ftkit.data.packing import IGNORED, document_begins, row_width
from ftkit.errors import TrainingError
from ftkit.train.causal_lm import CausalLM, MicroBatch, model_inputs
from ftkit.train.components.batches import PaddedRows, to_micro_batch, to_padded_micro_batch, with_shared_prompts
from ftkit.train.model.hf_model import accepted_inputs, find_decoder, find_decoder_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers.modeling_outputs import BaseModelOutput

    from ftkit.train.components.pictures import PictureFeed
    from ftkit.train.engine import Engine
    from ftkit.train.world import World


@dataclass(frozen=True)
class ProbeResult:
    """Outputs of a model for two micro-batches of N tokens that share the kept tokens.

    With context parallelism, the N tokens are this rank's part of the packs. Gradients are those of the second
    micro-batch's kept hidden states with respect to the first layer's output at each token. Logits are those of the
    last tokens of each row of the first micro-batch.
    """

    is_kept: torch.Tensor  # bool [N], tokens that are the same in both: the first part of every other document
    is_later: torch.Tensor  # bool [N], later tokens of these documents; all others are in neighboring documents
    kept_states: tuple[torch.Tensor, torch.Tensor]  # hidden states of the kept tokens, [K, H], in host memory
    gradient_norms: torch.Tensor  # fp32 [N]
    kept_norm: torch.Tensor  # mean of the norms over the kept tokens, on all ranks with tokens of the same packs
    own_logits: torch.Tensor  # [M, V], from the model's own class
    expected_logits: torch.Tensor  # [M, V], from which ftkit computes the loss


_LARGE_LOGIT = 64.0
"""Larger than all families' soft caps of logits, which are 15 to 30."""


def run_probe(  # noqa: PLR0913 - of each training
    engine: Engine,
    world: World,
    vocab_size: int,
    micro_batch_size: int,
    sequence_length: int,
    *,
    layout: Literal["packs", "pairs", "rows"] = "packs",
    pictures: PictureFeed | None = None,
) -> ProbeResult:
    """Run a model on two micro-batches as in training: same shapes, same kernels, compiled, with gradients.

    Packs are filled with documents of uneven lengths, longer and shorter than most windows; padded rows have half the
    length of a pack. They have no tokens of `pictures`. In packs of pairs, kept documents share prompts only in the
    second micro-batch, so the states show whether sharing changes them. Weights don't change.
    """
    plain = (_padded_layout if layout == "rows" else _packed_layout)(micro_batch_size, sequence_length)
    layouts = [_pairs_layout(plain, is_shared=flag) if layout == "pairs" else plain for flag in (False, True)]
    first, second = (
        _probe_batch(each, vocab_size, seed, world, pictures, shares_prompts=layout == "pairs")
        for seed, each in enumerate(layouts, start=1)
    )
    part = world.context.part(plain.is_kept.shape[1])
    is_kept_first, is_kept, is_later = (
        torch.from_numpy(of[:, part].reshape(-1)).to(world.device)
        for of in (layouts[0].is_kept, layouts[1].is_kept, layouts[1].is_later)
    )
    num_logits = min(32, part.stop - part.start)
    with torch.random.fork_rng(devices=[] if world.device.type == "cpu" else [world.device]):
        torch.manual_seed(0)  # for dropout of the model's own class
        with engine.probe() as model:
            states, own_logits, expected_logits = model(compute=_class_logits, batch=first, num_logits=num_logits)
        kept_states = _kept_states(states, is_kept_first)
        del states
        torch.manual_seed(0)
        with engine.probe() as model:
            other_states, gradients = _states_and_gradients(model, second, is_kept)
    _require_tokens(gradients, len(is_kept))
    both = (kept_states, _kept_states(other_states, is_kept))
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float32)
    kept_norm = world.context_sum(norms[is_kept].sum()) / world.context_sum(is_kept.sum())
    return ProbeResult(is_kept, is_later, both, norms, kept_norm, own_logits, expected_logits)


def _require_tokens(computed: torch.Tensor, num_tokens: int) -> None:
    if len(computed) != num_tokens:
        raise TrainingError(
            f"the model's class computes hidden states of other tokens too: {len(computed):,} for {num_tokens:,} "
            "tokens",
            meaning="it adds special tokens that ftkit does not know",
            fix="choose another model",
        )


def _kept_states(states: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    _require_tokens(states, len(is_kept))
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

    Returns its last hidden states, [N, H]; its logits for the last `num_logits` tokens of each row, [M, V]; and the
    logits of `CausalLM.loss`, [M, V], which are the class's own if the model `has_head_layers`.
    """
    states: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    def watch_decoder(_: nn.Module, __: object, output: BaseModelOutput) -> None:
        states.append(output.last_hidden_state.detach())

    def watch_projection(module: nn.Linear, __: object, output: torch.Tensor) -> torch.Tensor:
        # In a hook, because ZeRO-3 all-gathers the weight only for this call.
        hidden = states[0][:, -num_logits:].to(module.weight.dtype)
        products = functional.linear(hidden, module.weight, module.bias).detach().float()
        # Small products would hide a soft cap. A power of two is exact in all dtypes.
        largest = float(products.abs().max())  # host sync: before step 1
        factor = 2.0 ** ceil(log2(_LARGE_LOGIT / largest)) if 0 < largest < _LARGE_LOGIT else 1.0
        expected.append(model.logit_transform.apply(factor * products))
        return factor * output

    hf_model = model.hf_model
    with (
        find_decoder(hf_model).register_forward_hook(watch_decoder),
        hf_model.get_output_embeddings().register_forward_hook(watch_projection),
    ):
        kept = torch.arange(-num_logits, 0, device=batch.input_ids.device)  # with an int, Gemma 4 skips other tokens
        inputs = model_inputs(hf_model, batch) | accepted_inputs(hf_model, {"logits_to_keep": kept})
        logits = hf_model(**inputs).logits[:, -num_logits:].detach()
    expected_logits = logits if model.has_head_layers else expected[0]
    return states[0].flatten(0, 1), logits.flatten(0, 1), expected_logits.flatten(0, 1)


def _states_and_gradients(
    model: CausalLM, batch: MicroBatch, is_kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states, and gradients of the kept ones with respect to the first layer's output, [N, …].

    The gradients are of the kept hidden states projected on a random direction. They are not with respect to the
    embeddings: a frozen embedding has no gradient in training, and adding one would recompile the first layer.
    """
    outputs: list[torch.Tensor] = []

    def watch(_: nn.Module, __: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with find_decoder_layers(model.hf_model)[0].register_forward_hook(watch):
        # Flatten outside of the module, because FSDP2 warns of outputs that are views.
        states = model(compute=CausalLM.hidden_states, batch=batch).flatten(0, 1)
    direction = torch.randn(states.shape, dtype=states.dtype, device=states.device).mul_(is_kept[:, None])
    (gradients,) = torch.autograd.grad(states, outputs[:1], direction)
    # Reshape to one row per token, N = B * T; some models have S streams: [S, B, T, H].
    rows = batch.input_ids.shape
    axis = next((axis for axis in range(gradients.ndim - 1) if gradients.shape[axis : axis + 2] == rows), 0)
    return states.detach(), gradients.movedim((axis, axis + 1), (0, 1)).flatten(0, 1).flatten(1)


_DOCUMENT_SHARES = (0.05, 0.62, 0.03, 0.11)  # fractions of a pack for its documents; a fifth document fills the rest
_ROW_SHARES = (0.93, 0.61)  # alternating fractions of padded rows for their documents; the rest is padding
_KEPT_SHARE = 0.75  # fraction of a document that is kept; the rest differs, and no kept token may attend to it


@dataclass(frozen=True)
class _Layout:
    """Documents in a probe's micro-batch, [B, T]."""

    is_kept: NDArray[np.bool_]
    is_later: NDArray[np.bool_]
    positions: NDArray[np.int64]  # within documents
    lengths: NDArray[np.int64] | None  # [B], tokens of each row's document; None for packs


def _packed_layout(micro_batch_size: int, length: int) -> _Layout:
    """Lay out packs and keep every other document: odd documents in even rows, even documents in odd rows."""
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


def _pairs_layout(plain: _Layout, *, is_shared: bool) -> _Layout:
    """Divide each kept document of packs into a prompt and two completions, the second with a kept part.

    If the prompt is not shared, only the second completion follows it, and the first one is a document after it.
    """
    changed: tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]
    changed = plain.is_kept.copy(), plain.is_later.copy(), plain.positions.copy()
    for row, begins in enumerate(document_begins(plain.positions)):
        bounds = pairwise([*np.flatnonzero(begins).tolist(), len(begins)])
        for begin, end in ((begin, end) for begin, end in bounds if end - begin > 2 and plain.is_kept[row, begin]):  # noqa: PLR2004
            num_prompt, num_other = (end - begin) // 2, max(1, (end - begin) // 6)
            places = np.arange(end - begin - num_prompt - num_other)
            is_first_part = places < np.ceil(_KEPT_SHARE * len(places))
            prompt = np.ones(num_prompt, bool), np.zeros(num_prompt, bool), np.arange(num_prompt)
            own = is_first_part, ~is_first_part, num_prompt + places
            other = *[np.zeros(num_other, bool)] * 2, np.arange(num_other) + num_prompt * is_shared
            parts = (prompt, other, own) if is_shared else (prompt, own, other)
            for number, values in enumerate(changed):
                values[row, begin:end] = np.concatenate([part[number] for part in parts])
    return _Layout(*changed, None)


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


def _probe_batch(
    layout: _Layout, vocab_size: int, seed: int, world: World, pictures: PictureFeed | None, *, shares_prompts: bool
) -> MicroBatch:
    """Return random documents; the kept tokens are the same for every seed."""
    known = np.setdiff1d(np.arange(vocab_size), pictures.inputs.token_ids if pictures else ())
    tokens = np.random.default_rng(seed).choice(known, layout.is_kept.shape)
    tokens[layout.is_kept] = np.random.default_rng(0).choice(known, int(layout.is_kept.sum()))
    values = np.stack([tokens, np.full_like(tokens, IGNORED), layout.positions], axis=1).astype(np.int32)
    if layout.lengths is None:
        batch = to_micro_batch(values, world.device, context=world.context)
        batch = batch if pictures is None else pictures.add(batch, values).on(world.device)
        return with_shared_prompts(batch, values) if shares_prompts else batch
    offsets = np.arange(len(values)) * values.shape[2]
    return to_padded_micro_batch(PaddedRows(values, layout.lengths, offsets), world.device)
