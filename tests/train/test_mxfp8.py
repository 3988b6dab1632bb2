"""Matmuls in MXFP8, emulated on CPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ftkit.config.execution import MXFP8_BLOCK
from ftkit.errors import PrerequisiteError
from ftkit.train.model.mxfp8 import (
    Blocks,
    check_mxfp8,
    convert_linears_to_mxfp8,
    dequantize,
    in_tiles,
    round_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MATRICES = st.builds(
    lambda seed, rows, blocks, spread: (
        torch.randn(rows, MXFP8_BLOCK * blocks, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(-spread, spread, MXFP8_BLOCK * blocks)
    ),
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 15),
)


@given(MATRICES)
def test_a_block_is_rounded_as_the_specification_says(matrix: torch.Tensor) -> None:
    blocks = round_blocks(matrix)
    for row, numbers, exponents in zip(matrix.tolist(), blocks.numbers, blocks.exponents.tolist(), strict=True):
        for index, exponent in enumerate(exponents):
            part = slice(MXFP8_BLOCK * index, MXFP8_BLOCK * (index + 1))
            scale = math.floor(math.log2(max(abs(number) for number in row[part]))) - 8
            assert exponent == max(0, scale + 127)
            scaled = torch.tensor([number / 2.0 ** (exponent - 127) for number in row[part]], dtype=torch.float64)
            expected = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(numbers[part].float(), expected.float())


@given(MATRICES)
def test_dequantized_numbers_are_off_by_half_a_unit_or_saturated(matrix: torch.Tensor) -> None:
    largest = matrix.unflatten(1, (-1, MXFP8_BLOCK)).abs().amax(dim=2).repeat_interleave(MXFP8_BLOCK, dim=1)
    error = (dequantize(round_blocks(matrix)) - matrix).abs()
    # Numbers from 448 to 512 in units of the scale become 448; subnormal ones have a spacing of 2^-9.
    assert bool((error <= torch.maximum(matrix.abs() / 8, largest * 2**-17)).all())
    saturated = matrix.abs() > largest.log2().floor().exp2() * 1.75
    assert bool((error <= torch.maximum(matrix.abs() / 16, largest * 2**-17))[~saturated].all())


def test_blocks_of_zeros_and_of_numbers_that_are_not_finite() -> None:
    matrix = torch.zeros(3, MXFP8_BLOCK)
    matrix[1, 4], matrix[2, 5] = torch.inf, torch.nan
    zeros, infinite, nan = dequantize(round_blocks(matrix))
    assert not zeros.any()
    assert infinite.isnan().all()
    assert nan.isnan().all()


def test_scales_are_in_tiles_as_cublas_reads_them() -> None:
    rows, columns = 200, 6
    exponents = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    tiles = in_tiles(exponents).view(torch.uint8)
    assert tiles.numel() == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * 2 + column // 4
            place = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert tiles[place] == exponents[row, column]


@given(st.integers(0, 2**31), st.integers(1, 70), st.booleans())
def test_gradients_are_products_of_factors_with_blocks_along_the_inner_dimension(
    seed: int, num_tokens: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.ModuleDict(
        {"up_proj": nn.Linear(32, 64, bias=has_bias), "gate": nn.Linear(32, 32), "odd": nn.Linear(48, 32)}
    )
    convert_linears_to_mxfp8([layer])
    assert [type(module) is nn.Linear for module in layer.values()] == [False, True, True]
    inputs = torch.randn(1, num_tokens, 32, generator=generator).requires_grad_()
    direction = torch.randn(1, num_tokens, 64, generator=generator)
    weight: Any = layer["up_proj"].weight
    layer["up_proj"](inputs).backward(direction)

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(matrix, (0, -matrix.shape[1] % MXFP8_BLOCK))
        return dequantize(Blocks(*round_blocks(padded.detach())))[:, : matrix.shape[1]]

    of_inputs = rounded(direction[0]) @ rounded(weight.t()).t()
    of_weight = rounded(direction[0].t()) @ rounded(inputs[0].t()).t()
    for found, expected in ((inputs.grad, of_inputs[None]), (weight.grad, of_weight)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_older_gpus_and_an_older_torch_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_mxfp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if capability == (10, 0):
            check_mxfp8(torch.device("cuda"))
            monkeypatch.delattr(nn.functional, "scaled_mm")
        with pytest.raises(PrerequisiteError, match="MXFP8"):
            check_mxfp8(torch.device("cuda"))


def test_a_run_in_mxfp8_learns_and_isolates_documents(make_run: Callable[..., Any]) -> None:
    run = make_run("mxfp8", "training.precision=mxfp8", "training.max_steps=4", "evaluation.sql_execution=null")
    assert "all-gathered" not in run.train()
    losses = [loss for loss, _ in run.losses().values()]
    assert losses[-1] < losses[0] - 0.2
