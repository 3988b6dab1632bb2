"""Pinned host memory on a GPU."""

from __future__ import annotations

import pytest
import torch

from ftkit.train.memory.usage import empty_pinned_like

pytestmark = pytest.mark.gpu


def test_addresses_of_freed_pinned_memory_can_be_copied_to() -> None:
    whole = torch.randn(1 << 24, device="cuda")
    for part in (whole[: 1 << 22], whole[: 1 << 23], whole.view(4096, 4096).t().bfloat16()):
        pinned = empty_pinned_like(part)
        assert pinned.is_pinned()
        assert pinned.stride() == part.stride()
        assert torch.equal(pinned.copy_(part), part.cpu())
        del pinned
        assert torch.equal(whole.cpu(), torch.empty_like(whole, device="cpu").copy_(whole))
