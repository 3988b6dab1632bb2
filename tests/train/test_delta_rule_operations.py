"""The operations of the gated delta rule in PyTorch, as the plan counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ftkit.planning.flops import CHUNK, count_operations
from ftkit.train.model import packed_mixers
from ftkit.train.model.packed_mixers import chunk_gated_delta_rule

LENGTH, HEADS = 8192, 4


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views have none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in str(func) for name in ("empty", "_unsafe_view")):
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            written = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            self.total += sum(map(_distinct_bytes, read + written))
        return result


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, without repeats of expanded dimensions."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_plan_counts_the_operations_of_the_gated_delta_rule(width: int) -> None:
    assert packed_mixers.CHUNK == CHUNK
    query, key, value = (
        torch.empty(1, LENGTH, heads, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS // 2, HEADS // 2, HEADS)
    )
    rates = [torch.empty(1, LENGTH, HEADS, device="meta", requires_grad=True) for _ in range(2)]
    inputs = [query, key, value, *rates]
    offsets = torch.empty(4, device="meta", dtype=torch.int32)
    with FlopCounterMode(display=False) as flops, MovedBytes() as moved:
        output, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)
    with FlopCounterMode(display=False) as backward_flops, MovedBytes() as backward_moved:
        torch.autograd.grad(output, inputs, torch.empty_like(output))
    found = [flops.get_total_flops(), backward_flops.get_total_flops(), moved.total / 4, backward_moved.total / 4]
    assert [each / value.numel() for each in found] == pytest.approx(count_operations(width), rel=0.1)
