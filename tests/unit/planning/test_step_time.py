from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.models.adapters import ALL_PROJECTIONS
from ftkit.models.parameters import count_model
from ftkit.planning.fit import Fit
from ftkit.planning.flops import attention_layers, document_flops, mean_visible_keys, token_flops
from ftkit.planning.step_time import FORWARD_SHARE, _offload_seconds, predict_step_time, replays_graphs
from ftkit.planning.training_setup import GPUS, Setup, gpu_of_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec

    Shapes = Callable[[str], ArchitectureSpec]
    Specs = Callable[..., TrainingPlan]


@given(length=st.integers(1, 300), window=st.one_of(st.none(), st.integers(1, 300)))
def test_visible_keys_match_a_direct_count(length: int, window: int | None) -> None:
    counted = sum(min(place + 1, window or length) for place in range(length)) / length
    assert mean_visible_keys(length, window) == pytest.approx(counted)


def test_full_training_takes_six_flops_per_weight_and_token(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    flops = token_flops(shape, training(), keys=0, keys_in_window=0)
    embedding = shape.vocab_size * shape.hidden_size
    assert flops.total == pytest.approx(6 * (count_model(shape).total - embedding), rel=1e-3)


def test_mfu_matches_a_published_value(architecture: Shapes, training: Specs) -> None:
    # Llama 3 8B at 8,192: 9,558 tokens a second are 49.7% of 989 TFLOP/s.
    shape = architecture("llama3-8b")
    flops = token_flops(shape, training(), mean_visible_keys(8192, None), 0)
    assert 9558 * flops.total / 989e12 == pytest.approx(0.497, rel=0.005)


def test_frozen_weights_have_no_gradients_to_compute(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    full, lora = (token_flops(shape, training(method=method), 0, 0).matrices for method in ("full", "lora"))
    assert lora == pytest.approx(full * 2 / 3, rel=0.02)


def test_sliding_windows_are_counted_per_layer(architecture: Shapes, training: Specs) -> None:
    shape = architecture("olmo3-7b")
    assert [(layers.count, layers.is_windowed) for layers in attention_layers(shape)] == [(24, True), (8, False)]
    windowed = token_flops(shape, training(), 4096, 1024).attention
    assert windowed == pytest.approx(12 * 4096 * (8 * 4096 + 24 * 1024))
    assert [layers.count for layers in attention_layers(architecture("llama3-8b"))] == [32]


def test_tokens_without_targets_skip_the_output_projection(architecture: Shapes, training: Specs) -> None:
    shape = architecture("gemma3-1b")
    all_of, none = (token_flops(shape, training(), 0, 0, target_ratio=ratio).matrices for ratio in (1.0, 0.0))
    assert all_of - none == pytest.approx(6 * shape.vocab_size * shape.hidden_size)
    rows, pairs = (document_flops(shape, training(objective=each), 512).matrices for each in ("next_token", "dpo"))
    assert rows - pairs == pytest.approx(6 * shape.vocab_size * shape.hidden_size / 2)


H200 = GPUS["h200"]


def test_the_speed_of_eight_olmo_layers_on_one_gpu_is_close_to_the_measurement(
    architecture: Shapes, training: Specs
) -> None:
    shape = architecture("olmo3-7b").model_copy(update={"num_hidden_layers": 8})
    speed = predict_step_time(Setup(shape, training(global_batch_size=1)), H200)
    assert speed.tokens_per_second == pytest.approx(34_000, rel=0.15)
    assert speed.bound == "gpu"


def test_zero3_waits_for_its_collectives(architecture: Shapes, training: Specs) -> None:
    shape, spec = architecture("llama3-8b"), training(global_batch_size=4)
    here = Setup(shape, spec, 4, "zero3")
    near, far = (predict_step_time(each, H200) for each in (here, replace(here, num_nodes=4, node_bandwidth=25e9)))
    assert near.tokens_per_second / 4 == pytest.approx(7_901, rel=0.1)  # docs/reference/benchmarks.md
    assert (near.bound, far.bound) == ("gpu", "network")


def test_only_a_slow_network_slows_large_models_down(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3.3-70b")
    slow, fast = (
        predict_step_time(Setup(shape, training(), 16, num_nodes=2, node_bandwidth=bandwidth), H200)
        for bandwidth in (25e9, 400e9)
    )
    assert (slow.bound, fast.bound) == ("network", "gpu")
    assert slow.step_seconds > fast.step_seconds


def test_the_host_limits_small_micro_batches_unless_it_launches_graphs(architecture: Shapes, training: Specs) -> None:
    spec = training(sequence_length=512, global_batch_size=1)
    launched, captured = (
        Setup(architecture("gemma3-1b"), spec.model_copy(update={"cuda_graphs": each})) for each in (False, True)
    )
    assert [predict_step_time(setup, H200).bound for setup in (launched, captured)] == ["host", "gpu"]


def test_graphs_are_for_micro_batches_that_the_host_may_limit(architecture: Shapes, training: Specs) -> None:
    specs = (training(method="lora", sequence_length=length, global_batch_size=1) for length in (2048, 16_384))
    setups = [Setup(architecture("llama3-8b"), spec, gpu=H200) for spec in specs]
    assert [(each.can_replay_graphs, replays_graphs(each)) for each in setups] == [(True, True), (True, False)]
    assert not replays_graphs(replace(setups[0], has_packs=False))
    assert not replays_graphs(setups[0].with_training(deterministic=True))


def test_graphs_that_do_not_fit_take_no_planned_memory_because_the_run_gives_them_up(
    architecture: Shapes, training: Specs
) -> None:
    spec = training(sequence_length=2048, micro_batch_size=4, global_batch_size=4)
    setup = Setup(architecture("gemma3-1b"), spec, gpu=H200)
    captured, launched = (Fit(each).memory.total for each in (setup, setup.with_training(cuda_graphs=False)))
    assert captured > launched
    for usable, planned in ((captured + 0.1, captured), (captured - 0.1, launched)):
        small = replace(H200, memory_gib=usable * H200.memory_gib / H200.usable_gib)
        assert Fit(replace(setup, gpu=small)).memory.total == pytest.approx(planned)


def test_graphs_save_little_host_time_where_the_compiler_traces_recomputation(
    architecture: Shapes, training: Specs
) -> None:
    specs = (
        training(method="qlora", activation_checkpointing="full", sequence_length=2048, global_batch_size=1, **changes)
        for changes in ({}, {"cuda_graphs": False})
    )
    captured, launched = (predict_step_time(Setup(architecture("qwen3-8b"), each, gpu=H200), H200) for each in specs)
    assert 1.0 < launched.step_seconds / captured.step_seconds < 1.12  # measured: 1.05


@pytest.mark.parametrize(
    ("model", "num_shards", "changes"),
    [
        ("gemma3-1b", 2, {}),
        ("qwen3.5-9b", 1, {}),
        ("gemma3-1b", 1, {"compile": "none"}),
        ("gemma3-1b", 1, {"offload": "all"}),
        ("gemma3-1b", 1, {"method": "lora", "objective": "dpo"}),
        ("gemma3-1b", 1, {"objective": "kto"}),
        ("gemma3-1b", 1, {"cuda_graphs": False}),
    ],
)
def test_kernels_that_can_not_be_captured_are_launched_one_by_one(
    model: str, num_shards: int, changes: dict[str, object], architecture: Shapes, training: Specs
) -> None:
    assert not Setup(architecture(model), training(**changes), num_shards).can_replay_graphs
    assert Setup(architecture("gemma3-1b"), training(objective="dpo")).can_replay_graphs  # its reference is stored


def test_a_slow_host_slows_only_steps_that_are_short_for_their_layers(architecture: Shapes, training: Specs) -> None:
    small = training(sequence_length=2048, micro_batch_size=4, global_batch_size=4, cuda_graphs=False)
    speed = predict_step_time(Setup(architecture("gemma3-1b"), small), GPUS["h100-80gb"])
    slow = 4 * 2048 / speed.slow_host_seconds
    assert slow < 43_426 < speed.tokens_per_second  # measured beside a slow host: docs/reference/benchmarks.md
    large = predict_step_time(Setup(architecture("llama3-8b"), training(global_batch_size=1)), H200)
    assert large.slow_host_seconds == large.step_seconds


def test_the_host_needs_longer_for_frozen_weights_in_fp8(architecture: Shapes, training: Specs) -> None:
    spec = training(method="lora", base_precision="fp8", sequence_length=2048, global_batch_size=1, cuda_graphs=False)
    speed = predict_step_time(Setup(architecture("gemma3-12b"), spec), H200)
    assert speed.bound == "host"
    assert speed.tokens_per_second == pytest.approx(8_651, rel=0.05)  # measured on one H200


@pytest.mark.parametrize(
    ("model", "layers", "changes", "measured"),  # docs/reference/benchmarks.md
    [("llama3-8b", 32, {"method": "lora"}, 13_601), ("olmo3-7b", 8, {"precision": "fp8"}, 40_638)],
)
def test_the_speed_on_an_h100_is_close_to_the_measurement(
    model: str, layers: int, changes: dict[str, str], measured: float, architecture: Shapes, training: Specs
) -> None:
    shape = architecture(model).model_copy(update={"num_hidden_layers": layers})
    speed = predict_step_time(Setup(shape, training(global_batch_size=1, **changes)), GPUS["h100-80gb"])
    assert speed.tokens_per_second == pytest.approx(measured, rel=0.05)


def test_experts_with_few_rows_are_slower(architecture: Shapes, training: Specs) -> None:
    spec = training(
        method="lora", lora={"targets": [*ALL_PROJECTIONS]}, sequence_length=2048, global_batch_size=1, cuda_graphs=True
    )
    shape = architecture("qwen3-30b-a3b").model_copy(update={"num_hidden_layers": 16})
    speed = predict_step_time(Setup(shape, spec), H200)
    assert speed.tokens_per_second == pytest.approx(34_672, rel=0.08)  # docs/reference/benchmarks.md


def test_recomputing_layers_costs_a_quarter_to_a_third(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    none, full = (
        predict_step_time(Setup(shape, training(activation_checkpointing=mode), 16), H200).step_seconds
        for mode in ("none", "full")
    )
    assert 1.2 < full / none < 1.4


@pytest.mark.parametrize(("length", "least", "most"), [(2048, 1.0, 1.05), (2**20, 1.25, 1.34)])
def test_recomputing_attention_costs_the_more_the_longer_the_sequence(
    length: int, least: float, most: float, architecture: Shapes, training: Specs
) -> None:
    shape = architecture("qwen3-8b")
    without, full = (
        predict_step_time(Setup(shape, training(activation_checkpointing=mode, sequence_length=length), 8), H200)
        for mode in ("except_attention", "full")
    )
    assert least < full.step_seconds / without.step_seconds < most


def test_outputs_of_attention_and_matmuls_are_moved_to_host_memory_too(architecture: Shapes, training: Specs) -> None:
    offload = {"activation_offload": True, "sequence_length": 512}
    full, attention, matmuls = (
        _offload_seconds(Setup(architecture("qwen3-8b"), training(activation_checkpointing=mode, **offload), 8), 1.0)
        for mode in ("full", "except_attention", "selective")
    )
    assert attention == pytest.approx(2 * full, rel=0.02)  # and a log-sum-exp for each head
    assert matmuls > 5 * attention


def test_the_forward_pass_waits_for_copies_that_take_longer(architecture: Shapes, training: Specs) -> None:
    spec = training(activation_checkpointing="selective", activation_offload=True)
    setup = Setup(architecture("qwen3-8b"), spec, 8)
    copies = _offload_seconds(setup, 1e9) / 2
    forward = copies / 2
    gpu_seconds = forward / FORWARD_SHARE[False]
    assert _offload_seconds(setup, gpu_seconds) == pytest.approx(copies + max(copies, gpu_seconds - forward))
    half = setup.with_training(offloaded_layers=setup.shape.num_hidden_layers // 2)
    assert _offload_seconds(half, gpu_seconds) == pytest.approx(copies)


def test_selective_checkpointing_with_adapters_costs_what_was_measured(architecture: Shapes, training: Specs) -> None:
    spec = training(method="lora", sequence_length=2048, global_batch_size=1)
    both = (spec, spec.model_copy(update={"activation_checkpointing": "selective"}))
    none, selective = (predict_step_time(Setup(architecture("gemma3-12b"), each), H200).step_seconds for each in both)
    assert none / selective == pytest.approx(8_379 / 9_292, rel=0.05)


def test_step_time_is_proportional_to_accumulation(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    one, four = (
        predict_step_time(Setup(shape, training(global_batch_size=size), 8), H200).step_seconds for size in (8, 32)
    )
    assert four / one == pytest.approx(4, rel=0.1)


def test_fp32_uses_the_fp32_peak(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")
    half, single = (predict_step_time(Setup(shape, training(precision=p), 8), H200) for p in ("bf16", "fp32"))
    assert single.tokens_per_second < half.tokens_per_second / 8
    assert 0.3 < single.mfu < 0.9
    for gpu in GPUS.values():
        assert gpu.peak_flops("fp32") < gpu.peak_flops("bf16") / 3


def test_the_step_time_of_an_unknown_gpu_is_unknown() -> None:
    assert gpu_of_device("NVIDIA H200") is H200
    assert gpu_of_device("NVIDIA H100 PCIe") is None


def test_unsharded_layers_and_bf16_gradients_halve_communication(architecture: Shapes, training: Specs) -> None:
    slow = Setup(architecture("llama3-8b"), training(), 16, num_nodes=2, node_bandwidth=5e9)

    def seconds(**changes: str) -> float:
        kept = changes["reshard_after_forward"] == "never"
        return predict_step_time(replace(slow, training=training(**changes), keeps_weights=kept), H200).step_seconds

    # Of 2 + 2 + 4 bytes per parameter, and the optimizer step.
    assert seconds(reshard_after_forward="never") < 0.8 * seconds(reshard_after_forward="always")
    lightest = seconds(reshard_after_forward="never", reduce_precision="bf16")
    assert lightest == pytest.approx(0.5 * seconds(reshard_after_forward="always"), rel=0.05)


def test_fp8_makes_linear_layers_faster_and_nothing_slower(architecture: Shapes, training: Specs) -> None:
    shape = architecture("llama3-8b")

    def seconds(**settings: str) -> float:
        return predict_step_time(Setup(shape, training(**settings), 4), H200).step_seconds

    assert 1.1 < seconds() / seconds(precision="fp8") < 1.45
    assert 1.1 < seconds(method="lora") / seconds(method="lora", base_precision="fp8") < 1.95


@pytest.mark.parametrize(
    ("targets", "measured"),  # docs/reference/benchmarks.md
    [(["q_proj", "k_proj", "v_proj", "o_proj"], 13_473), ([*ALL_PROJECTIONS], 11_376)],
)
def test_frozen_experts_are_slower_than_dense_layers_of_their_size_and_their_adapters_cost_more(
    targets: list[str], measured: float, architecture: Shapes, training: Specs
) -> None:
    spec = training(method="lora", lora={"targets": targets}, global_batch_size=2)
    speed = predict_step_time(Setup(architecture("qwen3-30b-a3b"), spec, 2), H200)
    assert speed.tokens_per_second / 2 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "measured"),  # measured on two H200
    [
        ({"activation_checkpointing": "selective", "offloaded_layers": 32, "base_precision": "fp8"}, 2_323),
        ({"activation_checkpointing": "full", "checkpointed_layers": 18, "offloaded_layers": 40}, 1_503),
        ({"activation_checkpointing": "full", "checkpointed_layers": 16, "offloaded_layers": 40}, 1_509),
        (
            {
                "activation_checkpointing": "except_attention",
                "checkpointed_layers": 7,
                "offloaded_layers": 25,
                "base_precision": "fp8",
            },
            2_396,
        ),
    ],
)
def test_offloaded_outputs_of_matmuls_cost_what_was_measured(
    changes: dict[str, Any], measured: float, architecture: Shapes, training: Specs
) -> None:
    spec = training(method="lora", global_batch_size=2, activation_offload=True, **changes)
    speed = predict_step_time(Setup(architecture("llama3.3-70b"), spec, 2), H200)
    assert speed.tokens_per_second / 2 == pytest.approx(measured, rel=0.06)  # with a recomputed last matmul


def test_gradients_that_are_reduced_once_a_step_save_time_in_each_micro_batch(
    architecture: Shapes, training: Specs
) -> None:
    shape = architecture("olmo3-7b").model_copy(update={"num_hidden_layers": 8})
    spec = training(global_batch_size=16, collectives="nccl", attention="flex")
    each = Setup(shape, spec, 2, keeps_weights=True)
    every, once = (predict_step_time(setup, H200) for setup in (each, replace(each, defers_sync=True)))
    assert 1.04 < once.tokens_per_second / every.tokens_per_second < 1.10  # measured: 1.10


def test_frozen_weights_in_8_bits_halve_what_is_gathered(architecture: Shapes, training: Specs) -> None:
    shape, far = architecture("llama3.3-70b"), {"num_nodes": 2, "node_bandwidth": 5e9}
    bf16, fp8 = (
        predict_step_time(Setup(shape, training(method="lora", base_precision=each), 16, **far), H200)
        for each in ("auto", "fp8")
    )
    assert bf16.bound == fp8.bound == "network"
    assert fp8.step_seconds == pytest.approx(0.5 * bf16.step_seconds, rel=0.1)
