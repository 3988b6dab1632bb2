"""The decoder of one process as two CUDA graphs: recorded operators on a CPU, which see stale inputs as a GPU does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from captured_training import engine_of, train
from lone_world import lone_world
from recorded_graphs import use_recorded_graphs

from ftkit.train.model.hf_model import find_decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World


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
        ("llama", 3, {"method": "lora", "lora": {"dropout": 0.1}}),
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
    assert np.array(captured) == pytest.approx(np.array(launched), rel=2e-3 if family == "gemma3_text" else 1e-5)


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
