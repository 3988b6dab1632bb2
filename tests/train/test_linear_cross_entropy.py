from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ftkit.config import execution
from ftkit.train.fused_loss import LogitTransform, linear_cross_entropy


@pytest.mark.parametrize("vocabulary", [64, 77])
@pytest.mark.parametrize("chunk_logits", [1, 300, 2**28])
@pytest.mark.parametrize("is_trained", [True, False])
def test_loss_and_gradients_match_those_of_unchunked_logits(
    vocabulary: int, chunk_logits: int, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "CHUNK_LOGITS", chunk_logits)
    monkeypatch.setattr(execution, "LEAST_CHUNK_ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator, dtype=torch.float64).float().requires_grad_(is_trained)
    targets = torch.randint(0, vocabulary, (23,), generator=generator)
    loss, losses = linear_cross_entropy(hidden, weight, targets)
    (3 * loss).backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = functional.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="none")
    expected = exact.sum()
    (3 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, exact.detach().float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden.grad, exact_hidden.grad.float(), rtol=1e-4, atol=1e-5)
    if is_trained:
        torch.testing.assert_close(weight.grad, exact_weight.grad.float(), rtol=1e-4, atol=1e-5)
    else:
        assert weight.grad is None


def test_a_batch_without_targets_has_zero_loss_and_gradients() -> None:
    hidden = torch.empty(0, 8, requires_grad=True)
    weight = torch.randn(10, 8, requires_grad=True)
    loss, losses = linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert losses.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_frozen_projection_gets_no_gradient_but_hidden_states_do() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(10, 8)
    targets = torch.arange(5)
    linear_cross_entropy(hidden, weight, targets)[0].backward()
    exact = hidden.detach().clone().requires_grad_()
    functional.cross_entropy(exact @ weight.T, targets, reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25), LogitTransform(2.0, 3.0)])
def test_loss_and_gradients_of_scaled_and_capped_logits_match_autograd(transform: LogitTransform) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (20, 70))
    targets = torch.randint(0, 70, (20,), generator=generator)
    expected = functional.cross_entropy(transform.apply(hidden @ weight.T), targets, reduction="sum")
    gradients = torch.autograd.grad(expected, (hidden, weight))
    loss, _ = linear_cross_entropy(hidden, weight, targets, transform)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for found, wanted in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
