"""Captured decoders train as those whose kernels the host launches one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from captured_training import batch_of, engine_of, train

from ftkit.train import gpu_kernels
from ftkit.train.model.hf_model import find_decoder_layers

if TYPE_CHECKING:
    from ftkit.train.world import World

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3_text", {"optimizer": "adamw8bit"}),
        ("qwen3", {"activation_checkpointing": "selective"}),
        ("llama", {"method": "lora", "lora": {"dropout": 0.1}}),
        ("llama", {"method": "qlora"}),
        ("llama", {"method": "lora", "base_precision": "fp8"}),
        ("llama", {"attention": "flex"}),
        ("llama", {"attention": "sdpa", "precision": "fp32"}),
        ("llama", {"precision": "fp8"}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}),
        ("qwen3_moe", {"method": "lora", "lora": {"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}}),
        ("qwen3_moe", {"method": "qlora", "activation_checkpointing": "full"}),
        ("llama", {"activation_checkpointing": "full"}),
    ],
)
def test_a_captured_decoder_has_the_losses_and_gradients_of_launched_kernels(
    family: str, changes: dict[str, Any], num_micro_batches: int, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = []
    for is_captured in (False, True):
        engine = engine_of(world, family, is_captured=is_captured, **changes)
        found.append(train(engine, world, num_micro_batches))
        has_graphs = engine._graphs is not None and engine._graphs._captured is not None
        assert has_graphs == is_captured, [each.message for each in caplog.records]
    launched, captured = found
    assert np.array(captured) == pytest.approx(np.array(launched), rel=1e-2)


def test_a_decoder_that_waits_for_the_device_trains_without_graphs(world: World) -> None:
    found = []
    for is_captured in (False, True):
        engine = engine_of(world, "llama", is_captured=is_captured)
        layer = find_decoder_layers(engine.model.hf_model)[1]
        layer.register_forward_pre_hook(lambda _, inputs: float(inputs[0].float().sum()) * 0 or None)
        found.append(train(engine, world, 1))
        assert engine._graphs is None or engine._graphs._is_impossible
    torch.cuda.empty_cache()  # fails if torch did not end the capture
    launched, captured = found
    assert np.array(captured) == pytest.approx(np.array(launched), rel=2e-3)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"optimizer": "adamw8bit"}),
        ("llama", {"precision": "fp8"}),
        ("llama", {"method": "lora", "lora": {"dropout": 0.1}}),
        ("llama", {"method": "qlora", "activation_checkpointing": "full"}),
        ("qwen3_moe", {"method": "qlora", "lora": {"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}}),
    ],
)
def test_no_step_waits_for_the_device(
    family: str, changes: dict[str, Any], is_captured: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "_SMALLEST_UPDATE", 1)
    engine = engine_of(world, family, is_captured=is_captured, **changes)
    batches = [batch_of(world, number) for number in range(6)]
    for number, batch in enumerate(batches):
        if number == 4:  # layers are compiled, and captured
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(engine.forward(batch), len(batch.labels), is_last=True)
            engine.step(1e-3, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
