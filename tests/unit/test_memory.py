from __future__ import annotations

import pytest

from ftkit import assets
from ftkit.memory import GIB, count_parameters, predict_memory
from ftkit.specs.layers import read_yaml
from ftkit.specs.model import ArchitectureSpec
from ftkit.specs.training import TrainingSpec

PUBLISHED = {
    "gemma3-1b": 999_885_952,
    "llama3-8b": 8_030_261_248,
    "llama3.3-70b": 70_553_706_496,
    "olmo3-32b": 32_233_522_176,
    "olmo3-7b": 7_298_011_136,
    "qwen3-8b": 8_190_735_360,
}


def architecture(name: str) -> ArchitectureSpec:
    return ArchitectureSpec.model_validate(read_yaml(assets.ARCHITECTURES / f"{name}.yaml").values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_model_card_or_the_weights_have(name: str) -> None:
    assert count_parameters(architecture(name)) == pytest.approx(PUBLISHED[name], rel=1e-4)


def training(**changes: object) -> TrainingSpec:
    fields = {"sequence_length": 8192, "global_batch_size": 16, "max_steps": 1, "learning_rate": 1e-5}
    return TrainingSpec.model_validate(fields | changes)


def test_states_take_sixteen_bytes_a_parameter_divided_by_the_shards() -> None:
    shape = architecture("olmo3-32b")
    plan = predict_memory(shape, training(), 16)
    states = plan.parameters + plan.gradients + plan.optimizer
    assert states * GIB == pytest.approx(16 * count_parameters(shape) / 16)


def test_checkpointing_takes_less_and_longer_sequences_take_more() -> None:
    shape = architecture("llama3-8b")
    full = predict_memory(shape, training(), 8).activations
    selective = predict_memory(shape, training(activation_checkpointing="selective"), 8).activations
    assert selective < 0.6 * full
    assert predict_memory(shape, training(activation_checkpointing="full"), 8).activations < selective / 4
    assert predict_memory(shape, training(sequence_length=16384), 8).activations == pytest.approx(2 * full)
