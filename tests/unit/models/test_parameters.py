from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.execution import GIB, method_counts
from ftkit.models.architecture import ArchitecturePlan, ArchitectureSpec, ModelPlan
from ftkit.models.config_json import read_shape
from ftkit.models.parameters import count_by_config, count_model, read_experts
from ftkit.planning.choices import with_sharding
from ftkit.planning.fit import Fit
from ftkit.planning.flops import token_flops
from ftkit.planning.plan import parse_plan, plan_to_json
from ftkit.planning.planner import plan_for_counts
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.training import TrainingPlan
    from ftkit.planning.plan import RunPlan

    Specs = Callable[..., TrainingPlan]


def config_of(kind: str, vocabulary: int, hidden: int, wide: int, layers: int, heads: tuple[int, int, int]) -> Any:
    queries, keys, width = heads
    return {
        "model_type": kind, "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": width,
        "max_position_embeddings": 32768,
    }  # fmt: skip


MIXTRAL = config_of("mixtral", 32000, 4096, 14336, 32, (32, 8, 128)) | {
    "num_local_experts": 8, "num_experts_per_tok": 2
}  # fmt: skip
QWEN3 = config_of("qwen3_moe", 151936, 2048, 6144, 48, (32, 4, 128)) | {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1
}  # fmt: skip
OLMOE = config_of("olmoe", 50304, 2048, 1024, 16, (16, 16, 128)) | {"num_experts": 64, "num_experts_per_tok": 8}
GPT_OSS = config_of("gpt_oss", 201088, 2880, 2880, 24, (64, 8, 64)) | {
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128
}  # fmt: skip
DEEPSEEK = config_of("deepseek_v3", 129280, 7168, 18432, 61, (128, 128, 128)) | {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}  # fmt: skip
QWEN2_CONFIG = {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
JAMBA_CONFIG = {
    "num_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 9, "num_hidden_layers": 32,
    "expert_layer_period": 2,
}  # fmt: skip
ERNIE_CONFIG = {"moe_num_experts": 8, "moe_topk": 2, "moe_intermediate_size": [9, 5], "intermediate_size": 7}
PUBLISHED = [
    # Parameters of the weights on the hub, and active ones per token, in billions.
    (MIXTRAL, 46_702_792_704, 12.9),
    (QWEN3, 30_532_122_624, 3.3),
    (OLMOE, 6_919_161_856, 1.3),
    (GPT_OSS, 20_914_757_184, 3.6),
]


def shape_of(config: dict[str, Any]) -> ArchitectureSpec:
    return read_shape(config, "x/y")


@pytest.mark.parametrize(("config", "total", "active"), PUBLISHED, ids=lambda value: str(value)[:32])
def test_param_counts_of_moe_models_match_their_weights(config: dict[str, Any], total: int, active: float) -> None:
    counts = count_by_config(config)
    assert counts.is_exact
    assert counts.total == total
    embedding = config["vocab_size"] * config["hidden_size"]
    assert (counts.active + counts.around - embedding * (config is GPT_OSS)) / 1e9 == pytest.approx(active, abs=0.1)


@pytest.mark.parametrize(
    ("config", "total"), [(DEEPSEEK, 671.0e9), *(each[:2] for each in PUBLISHED)], ids=lambda value: str(value)[:32]
)
def test_an_estimate_is_not_too_low(config: dict[str, Any], total: float) -> None:
    by_config, unread = count_by_config(config), count_model(shape_of(config))
    assert total * 0.999 <= by_config.total <= 1.05 * total
    assert not unread.is_exact
    assert unread.total >= total * 0.999


def test_a_moe_family_is_estimated_with_many_experts_until_its_configuration_is_read() -> None:
    shape = shape_of(MIXTRAL).model_copy(update={"family": "newmoe", "num_experts": None})
    dense = shape.model_copy(update={"family": "newdense"})
    assert count_model(shape).total > 50 * count_model(dense).total
    alone = {key: value for key, value in MIXTRAL.items() if "experts" not in key}
    one = count_by_config(alone | {"model_type": "newmoe", "num_experts": 1})
    assert one.total == count_by_config(alone | {"model_type": "newdense"}).total


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"num_experts": None}, None),
        ({"num_experts": 64, "enable_moe_block": False}, None),
        (MIXTRAL, (8, 2, 14336, 0, 0)),
        (DEEPSEEK, (256, 8, 2048, 2048, 3)),
        (QWEN2_CONFIG, (60, 60, 1408, 5632, 0)),
        (JAMBA_CONFIG, (16, 2, 9, 0, 16)),
        (ERNIE_CONFIG, (8, 2, 7, 0, 0)),
    ],
    ids=lambda value: str(value)[:32],
)
def test_experts_are_read_from_all_known_keys(config: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    found = read_experts(config)
    assert (None if found is None else tuple(vars(found).values())) == expected


def test_memory_counts_all_experts_and_flops_only_active_ones(training: Specs) -> None:
    shape = ArchitecturePlan.extend(shape_of(MIXTRAL), counts=count_by_config(MIXTRAL))
    memory = Fit(Setup(shape, training(sequence_length=64, global_batch_size=64), 32)).memory
    assert (memory.parameters + memory.gradients + memory.optimizer) * GIB * 32 == pytest.approx(16 * 46_702_792_704)
    flops = token_flops(shape, training(), 0, 0)
    assert flops.matrices == pytest.approx(6 * 12.8e9, rel=0.02)


def test_experts_that_are_no_targets_get_4_bit_weights_and_no_adapters(training: Specs) -> None:
    shape = ArchitecturePlan.extend(shape_of(MIXTRAL), counts=count_by_config(MIXTRAL))
    counts = method_counts(shape, training(method="qlora", lora={"targets": ["q_proj", "o_proj"]}))
    assert counts.quantized == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    assert counts.trained == 32 * 2 * 16 * (4096 + 4096)
    memory = Fit(Setup(shape, training(method="qlora", lora={"targets": ["q_proj"]}))).memory
    assert 22 < memory.parameters < 24  # GiB: 46.4 B of the 46.7 B parameters take 4 bits and their scales


def test_layers_do_not_stay_unsharded_based_on_an_estimate(training: Specs) -> None:
    config = OLMOE | {"num_hidden_layers": 2}
    exact = ArchitecturePlan.extend(shape_of(config), counts=count_by_config(config))
    estimated = ArchitecturePlan.extend(exact, counts=replace(exact.counts, source="config"))
    exact_setup, estimated_setup = (
        with_sharding(Setup(shape, training(), 8, gpu=GPUS["h200"])) for shape in (exact, estimated)
    )
    assert exact_setup.keeps_weights
    assert not estimated_setup.keeps_weights


def test_the_run_decides_again_from_the_actual_model(demo_plan: RunPlan) -> None:
    assert plan_for_counts(demo_plan, count_by_config(MIXTRAL)) is demo_plan
    estimated = replace(count_by_config(OLMOE), source="config")
    recipe = demo_plan.recipe.model_copy(
        update={
            "model": ModelPlan.extend(
                demo_plan.recipe.model,
                architecture=ArchitecturePlan.extend(shape_of(OLMOE), counts=estimated),
                source="run:earlier",
            )
        }
    )
    planned = replace(
        demo_plan, recipe=recipe,
        cluster=demo_plan.cluster.model_copy(update={"gpu": "h200", "device": "cuda", "gpus_per_node": 2}),
        placement=replace(demo_plan.placement, device="cuda"),
    )  # fmt: skip
    found = plan_for_counts(planned, replace(estimated, source="model"))
    assert not planned.engine.keeps_weights
    assert found.engine.keeps_weights
    assert found.num_parameters == 6_919_161_856
    assert found.memory.total > planned.memory.total
    assert found.recipe.model.source == "run:earlier"
    assert parse_plan(plan_to_json(found), "plan.json") == found
