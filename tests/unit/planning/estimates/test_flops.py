from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.planning.estimates.flops import attention_layers, mean_visible_keys, token_flops
from ftkit.planning.estimates.parameters import count_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.model import ArchitectureSpec
    from ftkit.config.training import TrainingPlan

    Shapes = Callable[[str], ArchitectureSpec]
    Specs = Callable[..., TrainingPlan]


@given(length=st.integers(1, 300), window=st.one_of(st.none(), st.integers(1, 300)))
def test_visible_keys_are_those_that_one_counts(length: int, window: int | None) -> None:
    counted = sum(min(place + 1, window or length) for place in range(length)) / length
    assert mean_visible_keys(length, window) == pytest.approx(counted)


def test_full_training_takes_six_operations_a_weight_and_token(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    flops = token_flops(shape, training(), keys=0, keys_in_window=0)
    embedding = shape.vocab_size * shape.hidden_size
    assert flops.total == pytest.approx(6 * (count_parameters(shape) - embedding), rel=1e-3)


def test_the_published_mfu_of_a_known_speed_comes_out(architecture: Shapes, training: Specs) -> None:
    # Llama 3 8B at 8,192: 9,558 tokens a second are 49.7 % of 989 TFLOP/s.
    shape = architecture("llama3-8b")
    flops = token_flops(shape, training(), mean_visible_keys(8192, None), 0)
    assert 9558 * flops.total / 989e12 == pytest.approx(0.497, rel=0.005)


def test_frozen_weights_have_no_gradients_to_compute(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    full, lora = (token_flops(shape, training(method=method), 0, 0).matrices for method in ("full", "lora"))
    assert lora == pytest.approx(full * 2 / 3, rel=0.02)


def test_a_window_is_counted_where_a_layer_has_one(architecture: Shapes, training: Specs) -> None:
    shape = architecture("olmo3-7b")
    assert [(layers.count, layers.is_windowed) for layers in attention_layers(shape)] == [(24, True), (8, False)]
    windowed = token_flops(shape, training(), 4096, 1024).attention
    assert windowed == pytest.approx(12 * 4096 * (8 * 4096 + 24 * 1024))
    assert [layers.count for layers in attention_layers(architecture("llama3-8b"))] == [32]


def test_tokens_without_targets_leave_the_output_projection_out(architecture: Shapes, training: Specs) -> None:
    shape = architecture("gemma3-1b")
    all_of, none = (token_flops(shape, training(), 0, 0, target_ratio=ratio).matrices for ratio in (1.0, 0.0))
    assert all_of - none == pytest.approx(6 * shape.vocab_size * shape.hidden_size)
