from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.model import ArchitecturePlan, ArchitectureSpec, ModelSpec
from ftkit.config.recipe import RecipePlan
from ftkit.launch import param_count
from ftkit.launch.param_count import count_on_this_machine
from ftkit.planning.engine_choice import keeps_weights, least_memory
from ftkit.planning.estimates.flops import token_flops
from ftkit.planning.estimates.gpus import GPUS
from ftkit.planning.estimates.memory import GIB, predict_memory
from ftkit.planning.estimates.parameters import count_by_config, count_model, method_counts, read_experts
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import plan_for_counts, plan_from_json, plan_to_json
from ftkit.process import ProgramOutput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.config.training import TrainingPlan
    from ftkit.planning.plan import RunPlan

    Specs = Callable[..., TrainingPlan]


def shape_of(family: str, vocabulary: int, hidden: int, wide: int, layers: int, heads: tuple[int, int, int]) -> Any:
    queries, keys, width = heads
    return ArchitectureSpec(
        family=family, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=queries, num_key_value_heads=keys, head_dim=width, max_position_embeddings=32768,
    )  # fmt: skip


MIXTRAL = shape_of("mixtral", 32000, 4096, 14336, 32, (32, 8, 128))
MIXTRAL_CONFIG = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}
QWEN3 = shape_of("qwen3_moe", 151936, 2048, 6144, 48, (32, 4, 128))
QWEN3_CONFIG = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
OLMOE = shape_of("olmoe", 50304, 2048, 1024, 16, (16, 16, 128))
OLMOE_CONFIG = {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 1024}
DEEPSEEK = shape_of("deepseek_v3", 129280, 7168, 18432, 61, (128, 128, 128))
DEEPSEEK_CONFIG = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "num_hidden_layers": 61,
}  # fmt: skip
GPT_OSS = shape_of("gpt_oss", 201088, 2880, 2880, 24, (64, 8, 64))
GPT_OSS_CONFIG = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880}
QWEN2_CONFIG = {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
JAMBA_CONFIG = {
    "num_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 9, "num_hidden_layers": 32,
    "expert_layer_period": 2,
}  # fmt: skip
ERNIE_CONFIG = {"moe_num_experts": 8, "moe_topk": 2, "moe_intermediate_size": [9, 5], "intermediate_size": 7}
PUBLISHED = [
    # Parameters of the weights on the hub, and those of a token, in billions.
    (MIXTRAL, MIXTRAL_CONFIG, 46_702_792_704, 12.9),
    (QWEN3, QWEN3_CONFIG, 30_532_122_624, 3.3),
    (OLMOE, OLMOE_CONFIG, 6_919_161_856, 1.3),
]


@pytest.mark.parametrize(
    ("shape", "config", "total", "active"), PUBLISHED, ids=lambda value: getattr(value, "family", "")
)
def test_mixtures_of_experts_have_the_parameters_of_their_weights(
    shape: ArchitectureSpec, config: dict[str, Any], total: int, active: float
) -> None:
    counts = count_by_config(shape, config)
    assert counts.is_exact
    assert counts.total == total
    assert (counts.active + counts.around) / 1e9 == pytest.approx(active, abs=0.1)


@pytest.mark.parametrize(
    ("shape", "config", "total"),
    [(DEEPSEEK, DEEPSEEK_CONFIG, 671.0e9), (GPT_OSS, GPT_OSS_CONFIG, 20.9e9), *(each[:3] for each in PUBLISHED)],
    ids=lambda value: getattr(value, "family", ""),
)
def test_an_estimate_errs_on_the_side_of_more(shape: ArchitectureSpec, config: dict[str, Any], total: float) -> None:
    by_config, unread = count_by_config(shape, config), count_model(shape)
    assert total * 0.999 <= by_config.total <= 1.05 * total
    assert not unread.is_exact
    assert unread.total >= total * 0.999


def test_a_family_that_is_called_a_mixture_has_many_experts_until_its_configuration_is_read() -> None:
    shape = MIXTRAL.model_copy(update={"family": "newmoe"})
    dense = MIXTRAL.model_copy(update={"family": "mistral"})
    assert count_model(shape).total > 50 * count_model(dense).total
    assert count_by_config(shape, {"num_experts": 1}).total == count_by_config(dense, {}).total


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"num_experts": None}, None),
        ({"num_experts": 64, "enable_moe_block": False}, None),
        (MIXTRAL_CONFIG, (8, 2, 14336, 0, 0)),
        (DEEPSEEK_CONFIG, (256, 8, 2048, 2048, 3)),
        (QWEN2_CONFIG, (60, 60, 1408, 5632, 0)),
        (JAMBA_CONFIG, (16, 2, 9, 0, 16)),
        (ERNIE_CONFIG, (8, 2, 7, 0, 0)),
    ],
)  # fmt: skip
def test_experts_are_read_under_whichever_keys(config: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    found = read_experts(config)
    assert (None if found is None else tuple(vars(found).values())) == expected


def test_memory_holds_all_experts_and_a_token_goes_through_its_own(training: Specs) -> None:
    shape = ArchitecturePlan.of(MIXTRAL, count_by_config(MIXTRAL, MIXTRAL_CONFIG))
    memory = predict_memory(shape, training(sequence_length=64, global_batch_size=64), 32)
    assert (memory.parameters + memory.gradients + memory.optimizer) * GIB * 32 == pytest.approx(16 * 46_702_792_704)
    flops = token_flops(shape, training(), 0, 0)
    assert flops.matrices == pytest.approx(6 * 12.8e9, rel=0.02)


def test_experts_in_one_tensor_have_no_adapters_and_no_4_bit_weights(training: Specs) -> None:
    shape = ArchitecturePlan.of(MIXTRAL, count_by_config(MIXTRAL, MIXTRAL_CONFIG))
    counts = method_counts(shape, training(method="qlora", lora={"targets": ["q_proj", "o_proj"]}))
    assert counts.quantized == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert counts.trained == 32 * 2 * 16 * (4096 + 4096)
    memory = predict_memory(shape, training(method="qlora", lora={"targets": ["q_proj"]}), 1)
    assert memory.parameters > 80  # GiB: 45 B of the 46.7 B parameters are experts, in bf16


def test_by_an_estimate_no_gathered_weights_are_kept(training: Specs) -> None:
    shape = OLMOE.model_copy(update={"num_hidden_layers": 2})
    exact = ArchitecturePlan.of(shape, count_by_config(shape, OLMOE_CONFIG))
    estimated = ArchitecturePlan.of(shape, replace(exact.counts, source="config"))
    assert keeps_weights(exact, training(), 8, "fsdp2", GPUS["h200"])
    assert not keeps_weights(estimated, training(), 8, "fsdp2", GPUS["h200"])


def test_the_run_decides_anew_by_the_real_model(demo_plan: RunPlan) -> None:
    assert plan_for_counts(demo_plan, count_model(MIXTRAL)) is demo_plan
    recipe = demo_plan.recipe.model_copy(
        update={"model": demo_plan.recipe.model.model_copy(update={"architecture": OLMOE})}
    )
    cluster = demo_plan.cluster.model_copy(update={"gpu": "h200", "device": "cuda"})
    placement = replace(demo_plan.placement, device="cuda")
    planned = replace(
        demo_plan, recipe=RecipePlan.of(recipe, least_memory(recipe.training)), cluster=cluster, placement=placement
    )
    counts = replace(count_by_config(OLMOE, OLMOE_CONFIG), source="model")
    found = plan_for_counts(planned, counts)
    assert not planned.engine.keeps_weights
    assert found.engine.keeps_weights
    assert found.num_parameters == 6_919_161_856
    assert found.memory.total > planned.memory.total
    assert plan_from_json(plan_to_json(found), "plan.json") == found


# --- Counting at planning ------------------------------------------------------------------------


class Program:
    """Stands for the counting program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.output = ProgramOutput(1, "", "no such architecture")
        monkeypatch.setattr(param_count, "find_spec", lambda _: True)
        monkeypatch.setattr(param_count.process, "run", self.run)

    def run(self, *_: Any, **__: Any) -> ProgramOutput:
        self.calls += 1
        return self.output


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def model_in(folder: Path, shape: ArchitectureSpec, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({"model_type": shape.family, **config}))
    return ModelSpec(weights=str(folder), architecture=shape)


def test_known_families_and_known_mixtures_start_no_program(tmp_path: Path, program: Program) -> None:
    known = ModelSpec(weights="x/y", architecture=MIXTRAL.model_copy(update={"family": "llama"}))
    assert count_on_this_machine(known, {}, Workspace(tmp_path)) is None
    counts = count_on_this_machine(model_in(tmp_path, MIXTRAL, MIXTRAL_CONFIG), {}, Workspace(tmp_path))
    assert counts is not None
    assert counts.total == 46_702_792_704
    assert program.calls == 0


def test_others_are_counted_by_the_program_and_estimated_where_it_fails(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, workspace = model_in(tmp_path, GPT_OSS, GPT_OSS_CONFIG), Workspace(tmp_path)
    estimated = count_on_this_machine(model, {}, workspace)
    assert estimated is not None
    assert (program.calls, estimated.source) == (1, "config")
    real = replace(estimated, source="model")
    program.output = ProgramOutput(0, "a warning\n" + json.dumps(asdict(real)) + "\n", "")
    assert count_on_this_machine(model, {}, workspace) == real
    program.output = ProgramOutput(0, "nonsense", "")
    assert count_on_this_machine(model, {}, workspace) == estimated
    monkeypatch.setattr(param_count, "find_spec", lambda _: None)
    assert count_on_this_machine(model, {}, workspace) == estimated
    assert program.calls == 3


def test_a_configuration_in_the_hubs_cache_is_read(tmp_path: Path, program: Program) -> None:
    snapshot = tmp_path / "hub" / "models--x--y" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    model_in(snapshot, MIXTRAL, MIXTRAL_CONFIG)
    model = ModelSpec(weights="x/y", architecture=MIXTRAL)
    counts = count_on_this_machine(model, {"HF_HOME": str(tmp_path)}, Workspace(tmp_path / "none"))
    assert counts is not None
    assert counts.source == "formula"
    assert count_on_this_machine(model, {}, Workspace(tmp_path / "none")) is None
    assert program.calls == 0
