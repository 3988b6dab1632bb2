from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.execution import GIB
from ftkit.config.training import ActivationCheckpointing
from ftkit.models.parameters import count_model
from ftkit.planning.fit import CPU_LIBRARIES_GIB, Fit
from ftkit.planning.training_setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec

    Shapes = Callable[[str], ArchitectureSpec]
    Specs = Callable[..., TrainingPlan]

PUBLISHED = {
    "gemma3-12b": 11_766_034_176,  # without the vision tower
    "gemma3-1b": 999_885_952,
    "llama3-8b": 8_030_261_248,
    "llama3.3-70b": 70_553_706_496,
    "olmo3-32b": 32_233_522_176,
    "olmo3-7b": 7_298_011_136,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_param_counts_match_the_model_card_or_the_weights(name: str, architecture: Shapes) -> None:
    assert count_model(architecture(name)).total == pytest.approx(PUBLISHED[name], rel=1e-4)


def test_states_take_sixteen_bytes_per_parameter_divided_by_the_shards(architecture: Shapes, training: Specs) -> None:
    shape = architecture("olmo3-32b")
    plan = Fit(Setup(shape, training(sequence_length=64, global_batch_size=32), 16)).memory
    states = plan.parameters + plan.gradients + plan.optimizer
    assert states * GIB == pytest.approx(16 * count_model(shape).total / 16)


def test_activation_checkpointing_takes_less_memory_and_longer_sequences_more(
    architecture: Shapes, training: Specs
) -> None:
    shape = architecture("llama3-8b")
    none, selective, except_attention, full = (
        Fit(Setup(shape, training(activation_checkpointing=mode), 8)).memory.total
        for mode in get_args(ActivationCheckpointing)
    )
    assert none > selective > except_attention > full
    output = 2 * 8192 * shape.num_attention_heads * (shape.head_dim + 2)  # bf16, and a log-sum-exp in fp32
    assert (except_attention - full) * GIB == pytest.approx(32 * output, rel=0.1)
    most, few = (
        Fit(Setup(shape, training(activation_checkpointing="full", checkpointed_layers=num), 8)).memory.total
        for num in (31, 1)
    )
    assert full < most < few < selective
    offloaded = training(activation_checkpointing="full", activation_offload=True)
    assert Fit(Setup(shape, offloaded, 8)).memory.total < full
    longer = Fit(Setup(shape, training(sequence_length=16384), 8)).memory
    assert longer.activations == pytest.approx(2 * Fit(Setup(shape, training(), 8)).memory.activations)


def test_accumulated_gradients_count_while_the_loss_is_computed(architecture: Shapes, training: Specs) -> None:
    shape = architecture("gemma3-1b")
    at_once, in_two = (Fit(Setup(shape, training(global_batch_size=size), 16)).memory for size in (16, 32))
    assert in_two.total > at_once.total
    assert in_two.gradients * GIB == pytest.approx(4 * count_model(shape).total / 16)


def test_adapters_on_one_gpu_do_not_shard_the_weights(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    plan = Fit(Setup(shape, training(method="lora", global_batch_size=1), 1)).memory
    assert plan.parameters * GIB > 2 * count_model(shape).total
    assert plan.communication < 0.2


@given(shards=st.sampled_from([1, 2, 8, 64]), length=st.integers(64, 65536), method=st.sampled_from(["full", "lora"]))
def test_no_part_is_negative_and_more_shards_never_increase_persistent_memory(
    shards: int, length: int, method: str, architecture: Shapes, training: Specs
) -> None:
    shape = architecture("olmo3-7b")
    one, more = (
        Fit(Setup(shape, training(sequence_length=length, method=method), n)).memory for n in (shards, 2 * shards)
    )
    assert all(part >= 0 for part in one.parts.values())
    assert more.parameters + more.optimizer < one.parameters + one.optimizer


def test_8_bit_states_take_a_quarter_plus_their_scales(architecture: Shapes, training: Specs) -> None:
    whole, small = (
        Fit(Setup(architecture("llama3-8b"), training(optimizer=name), 8)).memory for name in ("adamw", "adamw8bit")
    )
    assert small.optimizer == pytest.approx(whole.optimizer * (1 + 1 / 64) / 4)


SELECTIVE = {"activation_checkpointing": "selective"}
SAVING, SMALL_STATES = {"activation_checkpointing": "full"}, {"optimizer": "adamw8bit"}
LONG = {"sequence_length": 65536}
GATHERED_IN_BF16 = {"precision": "fp8", "fp8_all_gather": False}
HALVED = {"context_parallel": 2, "global_batch_size": 1}
OFFLOADED = {"activation_offload": True, "sequence_length": 2**18}
ON_ATTENTION = {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
MOVED = {"method": "lora", "activation_offload": True, "activation_checkpointing": "selective"}
MEASURED = [
    # docs/reference/benchmarks.md: architecture, layers (all if None), number of H200 GPUs, training overrides, GiB.
    (("olmo3-7b", 8, 1, {}), 44.60),
    (("olmo3-7b", 8, 1, {"activation_checkpointing": "selective"}), 42.55),
    (("olmo3-7b", 8, 1, SAVING), 39.49),
    (("olmo3-7b", 8, 1, SAVING | {"activation_offload": True, "sequence_length": 32768}), 41.59),
    (("llama3-8b", None, 1, {"method": "lora"}), 40.2),
    (("qwen3-8b", None, 1, SAVING | {"method": "lora"}), 20.13),
    (("gemma3-12b", None, 1, {"method": "qlora", "sequence_length": 512} | SAVING), 9.34),
    (("gemma3-1b", None, 1, {"sequence_length": 4096, "micro_batch_size": 2, "global_batch_size": 2}), 28.07),
    (("llama3-8b", None, 4, {"reshard_after_forward": "never"}), 76.1),
    (("llama3-8b", None, 4, {"reshard_after_forward": "always"}), 63.1),
    (("llama3-8b", None, 4, {"reshard_after_forward": "never", "reduce_precision": "bf16"}), 76.1),
    (("llama3-8b", None, 4, {"engine": "zero3"}), 96.2),
    (("olmo3-7b", 8, 1, {"precision": "fp8"}), 42.8),
    (("llama3-8b", None, 2, {"precision": "fp8", "reshard_after_forward": "never"}), 79.9),
    (("llama3-8b", None, 2, GATHERED_IN_BF16 | {"reshard_after_forward": "never"}), 86.6),
    (("llama3-8b", None, 4, GATHERED_IN_BF16 | {"reshard_after_forward": "never"}), 64.2),
    (("llama3-8b", None, 2, {"reshard_after_forward": "never"}), 97.6),
    (("llama3.3-70b", None, 2, SAVING | {"method": "lora"}), 88.3),
    (("llama3.3-70b", None, 2, SAVING | {"method": "lora", "checkpointed_layers": 58}), 115.1),
    (("llama3.3-70b", None, 2, MOVED | {"checkpointed_layers": 18, "offloaded_layers": 40} | SAVING), 114.3),
    (("llama3.3-70b", None, 2, MOVED | {"base_precision": "fp8", "offloaded_layers": 32}), 114.6),
    (("llama3.3-70b", None, 2, SAVING | {"method": "lora", "base_precision": "fp8"}), 55.3),
    (("llama3.3-70b", None, 2, SAVING | {"method": "lora", "base_precision": "fp8", "checkpointed_layers": 32}), 117.2),
    (("gemma3-12b", None, 1, {"method": "lora", "sequence_length": 2048}), 35.0),
    (("gemma3-12b", None, 1, {"method": "qlora", "sequence_length": 2048}), 21.0),
    (("gemma3-12b", None, 1, SELECTIVE | {"method": "lora", "sequence_length": 2048}), 33.9),
    (("gemma3-12b", None, 1, SELECTIVE | {"method": "qlora", "sequence_length": 2048}), 19.1),
    (("qwen3-30b-a3b", None, 1, {"method": "lora", "lora": ON_ATTENTION}), 92.6),
    (("qwen3-30b-a3b", None, 1, {"method": "lora", "lora": ON_ATTENTION, "base_precision": "fp8"}), 65.0),
    (("qwen3-30b-a3b", None, 2, {"method": "lora", "lora": ON_ATTENTION}), 68.6),
    (("qwen3-30b-a3b", None, 2, {"method": "lora", "lora": {}}), 92.9),
    (("olmo3-32b", 52, 4, SMALL_STATES | {"activation_checkpointing": "selective"}), 111.6),
    (("olmo3-32b", None, 4, SAVING), 128.3),
    (("olmo3-32b", None, 4, SAVING | SMALL_STATES), 83.1),
    (("olmo3-32b", None, 4, SAVING | SMALL_STATES | LONG), 112.5),
    (("olmo3-32b", None, 4, SAVING | SMALL_STATES | LONG | {"activation_offload": True}), 100.2),
    (("olmo3-7b", None, 2, SAVING | HALVED | {"sequence_length": 2**18}), 99.8),
    (("qwen3-8b", 2, 2, SAVING | HALVED | SMALL_STATES | {"activation_offload": True, "sequence_length": 2**20}), 99.2),
    (("qwen3-8b", 2, 2, HALVED | SMALL_STATES | OFFLOADED | {"activation_checkpointing": "full"}), 32.8),
    (("qwen3-8b", 2, 2, HALVED | SMALL_STATES | OFFLOADED | {"activation_checkpointing": "except_attention"}), 37.0),
]


@pytest.mark.parametrize(("run", "gib"), MEASURED)
def test_a_prediction_is_within_ten_percent_of_the_measurement(
    run: tuple[str, int | None, int, dict[str, Any]], gib: float, architecture: Shapes, training: Specs
) -> None:
    name, layers, num_gpus, changes = run
    shape = architecture(name)
    if layers is not None:
        shape = shape.model_copy(update={"num_hidden_layers": layers})
    spec = training(**({"global_batch_size": num_gpus} | changes))
    engine = "zero3" if spec.engine == "zero3" else "fsdp2"
    plan = Fit(Setup(shape, spec, num_gpus, engine, keeps_weights=spec.reshard_after_forward == "never")).memory
    assert plan.total == pytest.approx(gib, rel=0.1)


def test_with_offloaded_inputs_the_peak_is_at_complete_gradients(architecture: Shapes, training: Specs) -> None:
    shape = architecture("olmo3-32b")
    here, away = (
        Fit(Setup(shape, training(**SAVING, **LONG, activation_offload=offload, global_batch_size=4), 4)).memory
        for offload in (False, True)
    )
    assert away.moment == here.moment == "backward"
    assert away.activations < here.activations
    assert away.gradients > 30 * here.gradients


def test_unsharded_layers_hold_their_full_weights(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    given_back, kept = (Fit(Setup(shape, training(), 4, keeps_weights=keeps)).memory.total for keeps in (False, True))
    layers = 2 * (count_model(shape).total - 2 * shape.vocab_size * shape.hidden_size) / GIB
    assert kept - given_back == pytest.approx(layers, rel=0.1)


def test_gradients_reduced_in_bf16_need_smaller_buffers(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    exact, rounded = (
        Fit(Setup(shape, training(reduce_precision=width, global_batch_size=4, **SAVING), 4)).memory
        for width in ("fp32", "bf16")
    )
    assert rounded.communication < exact.communication
    assert rounded.total < exact.total


def test_frozen_fp8_weights_take_half_of_bf16_weights(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3.3-70b")
    bf16, fp8 = (Fit(Setup(shape, training(method="lora", base_precision=each))).memory for each in ("auto", "fp8"))
    linears = sum(linear.count * linear.size for linear in count_model(shape).linears)
    assert bf16.parameters - fp8.parameters == pytest.approx(linears / GIB, rel=0.01)


def test_a_process_on_a_cpu_takes_memory_for_its_libraries_too(architecture: Shapes, training: Specs) -> None:
    """The recipe `demo` took 0.45 to 0.51 GiB a process, of which its tensors are a tenth."""
    shape = architecture("llama3-8b")
    gpu, cpu = (Fit(Setup(shape, training(attention="sdpa"), 8, device=each)).memory for each in ("cuda", "cpu"))
    assert (gpu.libraries, cpu.libraries) == (0.0, CPU_LIBRARIES_GIB)
    assert cpu.total == pytest.approx(sum(cpu.parts.values()))
    assert cpu.parts["libraries"] == CPU_LIBRARIES_GIB
