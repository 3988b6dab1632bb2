from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.planning.fit import Fit
from ftkit.planning.flops import EFFICIENCY, count_operations, delta_rule_seconds
from ftkit.planning.step_time import predict_step_time
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec

    Shapes = Callable[[str], ArchitectureSpec]
    Specs = Callable[..., TrainingPlan]

H200 = GPUS["h200"]
LORA = {"method": "lora", "sequence_length": 8192, "global_batch_size": 1}


def test_the_measured_run_without_a_kernel_is_predicted(architecture: Shapes, training: Specs) -> None:
    spec = training(**LORA, activation_checkpointing="full")
    setup = Setup(architecture("qwen3.5-9b"), spec, gpu=H200, has_linear_kernel=False)
    assert predict_step_time(setup, H200).tokens_per_second == pytest.approx(4476, rel=0.1)
    assert Fit(setup).memory.total == pytest.approx(24.7, abs=0.5)


def test_a_measured_layer_is_predicted() -> None:
    flops, backward_flops, numbers, backward_numbers = count_operations(128)
    elements = 8192 * 4096
    forward, backward = (
        elements * (each / H200.fp32_flops + 4 * moved / H200.memory_bandwidth) / EFFICIENCY
        for each, moved in ((flops, numbers), (backward_flops, backward_numbers))
    )
    assert forward == pytest.approx(10.4e-3, rel=0.1)
    assert backward == pytest.approx(17.5e-3, rel=0.1)


@pytest.mark.parametrize(
    ("mode", "factor"), [("none", 1), ("selective", 1), ("full", 1.26), ("except_attention", 1.26)]
)
def test_checkpointing_computes_the_forward_pass_again(
    architecture: Shapes, training: Specs, mode: str, factor: float
) -> None:
    shape, spec = architecture("qwen3.5-9b"), training(**LORA, activation_checkpointing=mode)
    seconds, without = (
        delta_rule_seconds(Setup(shape, each, has_linear_kernel=False), H200)
        for each in (spec, training(**LORA, activation_checkpointing="none"))
    )
    assert seconds / without == pytest.approx(factor, abs=0.02)
    assert delta_rule_seconds(Setup(shape, spec), H200) == 0
    assert delta_rule_seconds(Setup(architecture("olmo3-7b"), spec, has_linear_kernel=False), H200) == 0
