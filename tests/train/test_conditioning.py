"""Rounding of families whose gradients are ill-conditioned: linear attention and state spaces.

Equal formulas in another order of operations round differently. For most families, the norms of gradients still agree
in six digits after ten steps. Here they may not, even between two runs of transformers, so these tests tell rounding
from errors: ftkit may differ from transformers by no more than the weights' last digits make transformers differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from family_matrix import TRAINING, tiny_config
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ftkit.train.causal_lm import MicroBatch, model_inputs
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.token_mixers import choose_token_mixers, chunk_gated_delta_rule
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

pytestmark = pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 has no functions with kernels")
DOCUMENTS = (5, 30, 33, 20, 40, 70)
NO_LABELS = torch.zeros(0, dtype=torch.int64)


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the gated delta rule of one document, token by token: S' = exp(g) S + beta k (v - exp(g) S k)."""
    query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    shared = value.shape[2] // key.shape[2]
    query, key = (one.repeat_interleave(shared, dim=2) for one in (query, key))
    state = torch.zeros(1, value.shape[2], key.shape[-1], value.shape[-1], dtype=value.dtype)
    outputs = []
    for token in range(value.shape[1]):
        state = state * g[:, token].exp()[..., None, None]
        error = value[:, token] - (state * key[:, token, :, :, None]).sum(-2)
        state = state + key[:, token, :, :, None] * (beta[:, token, :, None] * error)[..., None, :]
        outputs.append((state * query[:, token, :, :, None]).sum(-2) * key.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("decay", [0.02, 1.0, 10.0])
def test_each_gradient_of_the_delta_rule_is_within_fp32_rounding_of_a_recurrence_in_fp64(decay: float) -> None:
    torch.manual_seed(0)
    length = sum(DOCUMENTS)
    inputs = [torch.randn(1, length, 2, 16), torch.randn(1, length, 2, 16), torch.randn(1, length, 4, 24)]
    inputs += [-decay * torch.rand(1, length, 4), torch.rand(1, length, 4)]
    direction = torch.randn(1, length, 4, 24)
    ends = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0)], dtype=torch.int32)

    def packed_rule(tensors: list[torch.Tensor]) -> torch.Tensor:
        query, key, value, g, beta = tensors
        return chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]

    def results(compute: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [one.to(dtype).requires_grad_() for one in inputs]
        output = compute(tensors)
        return [output.detach(), *torch.autograd.grad((output * direction.to(dtype)).sum(), tensors)]

    def by_document(tensors: list[torch.Tensor]) -> torch.Tensor:
        parts = zip(*(torch.split(one, list(DOCUMENTS), dim=1) for one in tensors), strict=True)
        return torch.cat([recurrence(*part) for part in parts], dim=1)

    expected = results(by_document, torch.float64)
    found = results(packed_rule, torch.float32)
    for name, one, other in zip(("output", "q", "k", "v", "g", "beta"), found, expected, strict=True):
        error = float((one - other).norm() / other.norm())
        assert error < 1e-6, f"{name}: {error:.1e}"


def documents_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randint(3, 300, (1, length), generator=generator) for length in DOCUMENTS]


def summed_loss(logits: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[: document.shape[1] - 1].float(), document[0, 1:], reduction="sum")


def one_by_one(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    losses = [summed_loss(model(input_ids=one, use_cache=False).logits[0], one) for one in documents]
    return torch.stack(losses).sum()


def packed(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    ends = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0)], dtype=torch.int32)
    batch = MicroBatch(torch.cat(documents, 1), positions, NO_LABELS, NO_LABELS, ends, max(DOCUMENTS))
    logits = model(**model_inputs(model, batch)).logits[0].split(list(DOCUMENTS))
    return torch.stack([summed_loss(*pair) for pair in zip(logits, documents, strict=True)]).sum()


def padded(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    width = max(DOCUMENTS)
    rows = torch.full((len(documents), width), 7)
    is_token = torch.arange(width) < torch.tensor(DOCUMENTS)[:, None]
    rows[is_token] = torch.cat(documents, 1)[0]
    positions = torch.arange(width).repeat(len(documents), 1)
    ends = torch.arange(0, rows.numel() + 1, width, dtype=torch.int32)
    batch = MicroBatch(rows, positions, NO_LABELS, NO_LABELS, ends, width, is_token, is_token.long())
    logits = model(**model_inputs(model, batch)).logits
    return torch.stack([summed_loss(*pair) for pair in zip(logits, documents, strict=True)]).sum()


def norms(model: Any, loss: Callable[[Any, list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """Train for ten steps; return the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for step in range(10):
        optimizer.zero_grad()
        torch.autograd.backward(loss(model, documents_of(step)) / sum(DOCUMENTS))
        gradients = [one.grad.double() for one in model.parameters() if one.grad is not None]
        found.append(torch.stack([one.square().sum() for one in gradients]).sum().sqrt())
        optimizer.step()
    return torch.stack(found)


def build(family: str, attention: str = "eager") -> Any:
    torch.manual_seed(3)
    config = tiny_config(family)
    config.initializer_range = 0.1  # with the usual 0.02, ten steps of so small a model round alike
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def moved_by_one_ulp(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    infinity = torch.tensor(torch.inf)
    with torch.no_grad():
        for one in model.parameters():
            goes_up = torch.randint(0, 2, one.shape, generator=generator).bool()
            one.copy_(torch.where(goes_up, one.nextafter(infinity), one.nextafter(-infinity)))
    return model


@pytest.mark.parametrize(("family", "rows"), [
    ("qwen3_5_text", packed), ("qwen3_next", packed), ("granitemoehybrid", padded),
])  # fmt: skip
def test_ten_steps_differ_from_transformers_no_more_than_weights_moved_by_one_ulp(
    family: str, rows: Callable[[Any, list[torch.Tensor]], torch.Tensor], world: World
) -> None:
    reference = norms(build(family), one_by_one)
    drifts = [(norms(moved_by_one_ulp(build(family), seed), one_by_one) / reference - 1).abs() for seed in range(3)]
    kernel, _ = choose_kernel(TRAINING, tiny_config(family), world)
    model = build(family, register_kernel(kernel))
    choose_token_mixers(model, world)
    drift = (norms(model, rows) / reference - 1).abs()
    assert drift[0] < 1e-4
    # The differences grow from step to step and jump, so their order of magnitude is compared.
    assert drift.median() < 10 * torch.stack(drifts).median(dim=1).values.max(), (drift, drifts)
