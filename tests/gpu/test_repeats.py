"""With `training.deterministic`, training on a GPU repeats bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_training import engine_of, train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Let torch use only algorithms that repeat; `conftest.py` sets cuBLAS's variable before its first use."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("attention", ["flash4", "flex", "sdpa"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma3_text", {"optimizer": "adamw8bit"}),
        ("qwen3", {"method": "lora", "lora": {"dropout": 0.1}}),
        ("llama", {"method": "qlora", "activation_checkpointing": "full"}),
        ("llama", {"method": "lora", "base_precision": "fp8"}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}),
        ("qwen3_moe", {"method": "qlora", "lora": {"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}}),
    ],
)
def test_losses_and_gradient_norms_repeat_bit_for_bit(
    family: str, attention: str, changes: dict[str, Any], world: World
) -> None:
    if attention == "flash4":
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    first, second = (
        train(engine_of(world, family, is_captured=False, attention=attention, deterministic=True, **changes), world, 2)
        for _ in range(2)
    )
    assert first == second
