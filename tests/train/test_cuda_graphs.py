"""The decoder of one process as two CUDA graphs: recorded operators on a CPU, which see stale inputs as a GPU does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import captured_training
import numpy as np
import pytest
import torch
from lone_world import lone_world
from recorded_graphs import use_recorded_graphs

from ftkit.train.model.hf_model import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.distributed.fsdp2 import Fsdp2Engine
    from ftkit.train.world import World


LENGTH = 64  # of packs: CPUs without bf16 instructions multiply slowly


def engine_of(world: World, family: str, **changes: Any) -> Fsdp2Engine:
    return captured_training.engine_of(world, family, sequence_length=LENGTH, **changes)


def train(engine: Fsdp2Engine, world: World, num_micro_batches: int) -> list[tuple[float, ...]]:
    return captured_training.train(engine, world, num_micro_batches, LENGTH)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with lone_world("cpu") as world:
        yield world


@pytest.mark.parametrize(
    ("family", "num_micro_batches", "changes"),
    [
        ("qwen3", 1, {}),
        ("gemma3_text", 3, {}),
        ("llama", 1, {"precision": "fp32"}),
        ("llama", 3, {"method": "lora", "lora": {"dropout": 0.1}, "precision": "fp32"}),
        ("llama", 1, {"activation_checkpointing": "full"}),
        ("mixtral", 3, {"router_aux_loss_coef": 0.1, "precision": "fp32"}),
    ],
)
def test_replayed_micro_batches_give_the_same_losses_and_gradients(
    family: str, num_micro_batches: int, changes: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_recorded_graphs(monkeypatch)
    launched = train(engine_of(world, family, is_captured=False, **changes), world, num_micro_batches)
    engine = engine_of(world, family, is_captured=True, **changes)
    captured = train(engine, world, num_micro_batches)
    assert engine._graphs is not None
    assert engine._graphs._captured is not None
    # Both gradients of a tied embedding are summed in bf16 by autograd, in fp32 over micro-batches here.
    # 1.2% apart on one CPU, less than 1% on others.
    assert np.array(captured) == pytest.approx(np.array(launched), rel=3e-2 if family == "gemma3_text" else 1e-5)


def test_graphs_that_leave_no_memory_for_the_loss_are_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    use_recorded_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**40))
    launched, captured = (train(engine_of(world, "llama", is_captured=each), world, 1) for each in (False, True))
    assert captured == launched
    assert "only 1.0 GiB" in caplog.text


def test_a_decoder_that_fails_in_a_capture_trains_without_graphs(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    use_recorded_graphs(monkeypatch)
    engine = engine_of(world, "llama", is_captured=True)
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:  # the third step's own pass, after the one that builds kernels
            raise RuntimeError("a stream that is captured can't be waited for")

    find_decoder_layers(engine.model.hf_model)[1].register_forward_pre_hook(fail)
    launched = train(engine_of(world, "llama", is_captured=False), world, 1)
    assert train(engine, world, 1) == launched
    assert "without CUDA graphs" in caplog.text


def test_recomputed_layers_that_draw_random_numbers_are_not_captured(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    use_recorded_graphs(monkeypatch)
    engine = engine_of(world, "llama", is_captured=True, activation_checkpointing="full")
    layer = find_decoder_layers(engine.model.hf_model)[1]
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + torch.rand_like(inputs[0]),))
    train(engine, world, 1)
    assert engine._graphs is not None
    assert engine._graphs._is_impossible
    assert "random numbers" in caplog.text
