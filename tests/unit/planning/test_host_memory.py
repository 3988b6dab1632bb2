from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.config.execution import GIB
from ftkit.models.parameters import count_model
from ftkit.planning.fit import PROCESS_GIB, Fit, Tensors
from ftkit.planning.training_setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec

    Shapes = Callable[[str], ArchitectureSpec]
    Specs = Callable[..., TrainingPlan]


def test_nothing_is_predicted_without_offload_or_without_a_gpu(architecture: Shapes, training: Specs) -> None:
    shape = architecture("qwen3-8b")
    assert Fit(Setup(shape, training(), 8)).host_memory is None
    assert Fit(Setup(shape, training(offload="optimizer"), 8, device="cpu")).host_memory is None


@pytest.mark.parametrize(("mode", "gib"), [("full", 288), ("except_attention", 576 + 4.5)])
def test_layers_wait_in_host_memory_with_their_inputs_and_outputs_of_attention(
    architecture: Shapes, training: Specs, mode: str, gib: float
) -> None:
    length = 2**20
    spec = training(activation_checkpointing=mode, activation_offload=True, sequence_length=length, global_batch_size=8)
    memory = Fit(Setup(architecture("qwen3-8b"), spec)).host_memory
    assert memory is not None
    assert memory.activations == pytest.approx(gib)
    assert memory.total == pytest.approx(gib + PROCESS_GIB)
    divided = spec.model_copy(update={"context_parallel": 2})
    on_two = Fit(Setup(architecture("qwen3-8b"), divided, 2)).host_memory
    assert on_two is not None
    assert on_two.activations == pytest.approx(memory.activations)


@pytest.mark.parametrize(
    ("engine", "offload", "width"), [("fsdp2", "optimizer", 8), ("zero3", "optimizer", 16), ("zero3", "all", 18)]
)
def test_offloaded_state_is_divided_among_nodes(
    architecture: Shapes, training: Specs, engine: EngineName, offload: str, width: int
) -> None:
    shape = architecture("olmo3-32b")
    setup = Setup(shape, training(offload=offload, global_batch_size=32, engine=engine), 16, engine, num_nodes=2)
    memory = Fit(setup).host_memory
    assert memory is not None
    state = (memory.total - memory.processes) * GIB
    assert state == pytest.approx(width * count_model(shape).total / 2)


def test_only_one_process_that_keeps_all_state_has_gradients_in_bf16(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    one = Setup(shape, training(global_batch_size=1))
    whole = 4 * count_model(shape).total / GIB
    others = [replace(one, engine="zero3"), one.with_training(global_batch_size=2)]
    found = [Tensors(each).gradients / GIB for each in (one, *others)]
    assert found == pytest.approx([whole / 2, whole, whole], rel=0.05)
    offloaded = Fit(one.with_training(offload="all")).host_memory
    assert offloaded is not None
    assert offloaded.gradients >= whole


def test_parameters_and_gradients_of_fsdp2_are_pinned_in_powers_of_two(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    setup = Setup(shape, training(offload="all"), 8)
    memory = Fit(setup).host_memory
    assert memory is not None
    assert memory.optimizer * GIB == pytest.approx(8 * count_model(shape).total)
    assert 1.05 < memory.parameters * GIB / (4 * count_model(shape).total) < 1.4
    assert memory.gradients == memory.parameters
    frozen = Fit(replace(setup, training=training(offload="all", method="lora"))).host_memory
    assert frozen is not None
    assert frozen.gradients < 1 < frozen.parameters < memory.parameters
