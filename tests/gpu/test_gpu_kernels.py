"""Triton kernels compute what torch's operators compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ftkit.train import gpu_kernels
from ftkit.train.components.optimizer import FusedAdamW
from ftkit.train.fused_loss import LogitTransform, losses_and_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton")
    assert gpu_kernels.triton is not None


@pytest.mark.parametrize("shape", [(16, 16), (100, 130), (4096, 14336)])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_a_matrix_and_its_transpose_are_rounded_as_torch_rounds(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 1e-4
    largest = torch.finfo(dtype).max
    scale = matrix.abs().amax().float() / largest
    rounded, transposed = gpu_kernels.round_and_transpose(matrix, scale, dtype)
    expected = (matrix.float() / scale).clamp(-largest, largest).to(dtype)
    different = (rounded.float() - expected.float()).abs() > 0
    assert int(different.sum()) <= 1e-5 * matrix.numel()  # ties, if the kernel's division is off by one bit
    assert torch.equal(rounded.view(torch.uint8).t(), transposed.view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 16), (100, 130), (4096, 14336)])
def test_a_matrix_of_bytes_is_transposed(shape: tuple[int, int]) -> None:
    matrix = torch.randint(256, shape, device="cuda", dtype=torch.uint8)
    assert torch.equal(gpu_kernels.transpose(matrix), matrix.t())


@pytest.mark.parametrize("averaged_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5), (3, 5000), (8, 1 << 20)])
def test_rows_are_averaged_as_torch_averages(shape: tuple[int, int], averaged_in: torch.dtype) -> None:
    rows = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    averages = torch.full(shape[1:], torch.nan, device="cuda", dtype=averaged_in)
    gpu_kernels.average_rows(rows, averages)
    torch.testing.assert_close(averages, torch.mean(rows, dim=0, dtype=averaged_in))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25, 3.0)])
@pytest.mark.parametrize(("vocabulary", "num_columns"), [(1000, 1024), (100_278, 100_288), (5, 64)])
def test_the_loss_of_logits_and_its_gradient_match_torch(
    vocabulary: int, num_columns: int, transform: LogitTransform, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    products = (8 * torch.randn(70, num_columns, device="cuda")).to(dtype)
    targets = torch.randint(vocabulary, (70,), device="cuda")
    expected, gradient = losses_and_gradient(products, targets, vocabulary, transform)
    losses = gpu_kernels.cross_entropy(products, targets, vocabulary, transform.scale, transform.cap)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(products, gradient, rtol=8e-3 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_has_no_finite_gradient() -> None:
    products = torch.randn(3, 1000, device="cuda", dtype=torch.bfloat16)
    products[0, 7], products[1, 7] = torch.nan, torch.inf
    losses = gpu_kernels.cross_entropy(products, torch.tensor([7, 8, 9], device="cuda"), 1000, 1.0, None)
    assert losses.isfinite().tolist() == [False, False, True]
    assert products.isfinite().all(dim=1).tolist() == [False, False, True]


def test_updates_of_large_parameters_match_torch() -> None:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((2000, 1053), (1 << 21,), (64, 64), (64,))]
    expected = [nn.Parameter(parameter.detach().clone()) for parameter in found]
    assert [gpu_kernels.can_update(parameter) for parameter in found] == [True, True, False, False]
    ours, theirs = (
        kind(parameters, lr=1e-2, betas=(0.9, 0.999))
        for kind, parameters in ((FusedAdamW, found), (torch.optim.AdamW, expected))
    )
    for step in range(4):
        is_skipped = step == 2
        ours.found_inf = torch.tensor(float(is_skipped), device="cuda")
        ours.grad_scale = torch.tensor(4.0, device="cuda")
        for parameter, other in zip(found, expected, strict=True):
            own = torch.randn_like(other).bfloat16()
            other.grad = own.float()
            ours.gradients[parameter] = own * (torch.nan if is_skipped else 4.0)
        ours.step()
        if not is_skipped:
            theirs.step()
        for parameter, other in zip(found, expected, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-6)
            for name, value in theirs.state[other].items():
                assert torch.allclose(ours.state[parameter][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-7), name


def test_adapters_are_updated_in_few_kernels() -> None:
    adapters = [nn.Parameter(torch.randn(16, 15_360, device="cuda")) for _ in range(100)]
    for adapter in adapters:
        adapter.grad = torch.randn_like(adapter)
    optimizer = FusedAdamW(adapters, lr=1e-2, betas=(0.9, 0.999))
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    assert 0 < sum(event.count for event in profile.key_averages()) < len(adapters) / 2


@pytest.mark.parametrize("is_dynamic", [None, False, True])
@pytest.mark.parametrize("width", [24, 1003, 5000])
@pytest.mark.parametrize("first", [0, 1003])
def test_dropout_keeps_the_same_elements_as_on_a_cpu(first: int, width: int, is_dynamic: bool | None) -> None:
    inputs, keys = torch.randn(2, 500, width), random_keys(1000)
    found = dropout(is_dynamic)(inputs.cuda(), *(each.cuda() for each in keys), 0.1, first)
    torch.testing.assert_close(found.cpu(), gpu_kernels.drop(inputs, *keys, 0.1, first))


@pytest.mark.parametrize("is_dynamic", [None, False])
def test_dropout_of_more_than_2_to_the_31_elements_keeps_the_same_as_on_a_cpu(is_dynamic: bool | None) -> None:
    rows, width, probability = 150_000, 14_336, 0.05
    inputs, (keys, key) = torch.ones(1, rows, width, dtype=torch.bfloat16, device="cuda"), random_keys(rows)
    found = dropout(is_dynamic)(inputs, keys.cuda(), key.cuda(), probability, 0)
    assert abs(int((found == 0).sum()) / found.numel() - probability) < 1e-4
    for row in (0, rows // 2, rows - 1):
        expected = gpu_kernels.drop(inputs[0, row : row + 1].cpu(), keys[row : row + 1], key, probability, 0)
        torch.testing.assert_close(found[0, row : row + 1].cpu(), expected)


def random_keys(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys of rows and of an adapter."""
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows + 1,))
    return keys[1:], keys[0]


def dropout(is_dynamic: bool | None) -> Callable[..., torch.Tensor]:
    """Return `gpu_kernels.drop`: not compiled if None, and else with symbolic sizes or not."""
    torch.compiler.reset()
    return (
        gpu_kernels.drop if is_dynamic is None else torch.compile(gpu_kernels.drop, fullgraph=True, dynamic=is_dynamic)
    )


@pytest.mark.parametrize("numel", [16, 5000, 4096 * 14336])
def test_a_shard_is_rounded_as_a_matrix_of_a_single_process(numel: int) -> None:
    values = torch.randn(numel, device="cuda") * 1e-2
    scale = values.bfloat16().abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
    rounded = torch.empty(numel, device="cuda", dtype=torch.float8_e4m3fn)
    gpu_kernels.round_shard(values, scale, rounded)
    expected = (values.bfloat16().float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    different = (rounded.float() - expected.float()).abs() > 0
    assert int(different.sum()) <= 1e-5 * numel  # ties, if the kernel's division is off by one bit


@pytest.mark.parametrize("numel", [256, 5000, 4096 * 1100])
def test_updates_with_8_bit_states_match_those_of_bitsandbytes(numel: int) -> None:
    library = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    found = torch.randn(numel, device="cuda")
    expected, num_steps, divisor = found.clone(), torch.zeros((), device="cuda"), torch.full((), 4.0, device="cuda")
    codes = [library.create_dynamic_map(signed=signed).cuda() for signed in (True, False)]
    zeros = torch.zeros(numel, dtype=torch.uint8, device="cuda")
    ours, theirs = (
        [(zeros.clone(), torch.zeros(-(-numel // 256), device="cuda"), code) for code in codes] for _ in range(2)
    )
    for step in range(1, 9):
        gradient = torch.randn(numel, device="cuda")
        for is_skipped in torch.tensor([1.0, 0.0], device="cuda"):  # a skipped update changes nothing
            num_steps += 1 - is_skipped
            gpu_kernels.update_adamw8bit(
                found, 4 * gradient, *ours, num_steps, group=group, divisor=divisor, is_skipped=is_skipped
            )
        (average, scale1, code1), (square, scale2, code2) = theirs
        library.optimizer_update_8bit_blockwise(
            "adam", gradient, expected, average, square, 0.9, 0.95, 0.0, 0.0, 1e-8, step, 1e-3,
            code1, code2, scale1, scale2,
        )  # fmt: skip
    # bitsandbytes never rounds a negative average to zero: these few are updated by more.
    assert ((found - expected).abs() > 4e-5).float().mean() < 0.01
    for (one, scale, _), (other, expected_scale, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(scale, expected_scale, rtol=1e-2, atol=0)
        assert ((one.int() - other.int()).abs() > 1).float().mean() < 0.01
