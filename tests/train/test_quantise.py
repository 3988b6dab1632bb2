"""Weights of 4 bits: dequantised as bitsandbytes does."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional as bitsandbytes

from ftkit.train.quantise import Nf4Layout, Nf4Linear, quantise_linears


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 128), (300, 257), (7, 13)])
def test_a_flat_nf4_matrix_is_bitsandbytes_own(size: tuple[int, int], storage: torch.dtype) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    packed, state = bitsandbytes.quantize_4bit(weight.to(storage), compress_statistics=True, quant_type="nf4")
    layout = Nf4Layout(*size, storage)
    expected = bitsandbytes.dequantize_4bit(packed, state)
    flat = layout.pack(weight)
    assert torch.equal(layout.unpack(flat), expected)
    amid_others = torch.cat([flat[:3], flat])[3:]
    assert torch.equal(layout.unpack(amid_others), expected)


def test_blocks_that_hold_several_rows_are_dequantised_with_their_own_scales() -> None:
    flat = Nf4Layout(32, 64, torch.float32).pack(torch.randn(32, 64))
    in_half_blocks = Nf4Layout(64, 32, torch.float32).unpack(flat)
    assert torch.equal(in_half_blocks.flatten(), Nf4Layout(32, 64, torch.float32).unpack(flat).flatten())


def test_the_gradient_through_a_4_bit_layer_is_that_of_its_matrix() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False))
    quantise_linears([model], torch.float32)
    (layer,) = model
    assert isinstance(layer, Nf4Linear)
    inputs = torch.randn(3, 32, requires_grad=True)
    model(inputs).square().sum().backward()
    through_layer, inputs.grad = inputs.grad, None
    torch.nn.functional.linear(inputs, layer.weight).square().sum().backward()
    assert torch.equal(through_layer, inputs.grad)
    assert layer.packed.grad is None
