from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ftkit import assets
from ftkit.config.context import Context
from ftkit.config.execution import GIB, method_counts, nf4_parts
from ftkit.config.load import load_recipe, read_shipped
from ftkit.config.training import TrainingPlan
from ftkit.errors import ConfigError
from ftkit.models.adapters import ALL_PROJECTIONS, LoraSpec, count_active_adapter_parameters, count_adapter_parameters
from ftkit.models.config_json import read_shape
from ftkit.models.parameters import count_model
from ftkit.planning.choices import choose_engine, least_memory, with_sharding
from ftkit.planning.fit import Fit
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from ftkit.config.cluster import GpuModel
    from ftkit.config.recipe import RecipeSpec
    from ftkit.models.architecture import ArchitectureSpec
    from ftkit.planning.choices import EnginePlan
    from ftkit.planning.training_setup import Gpu


def architecture(name: str) -> ArchitectureSpec:
    return read_shape(read_shipped(assets.ARCHITECTURES / f"{name}.yaml")[0], name)


def training(**changes: object) -> TrainingPlan:
    fields: dict[str, Any] = {
        "sequence_length": 2048, "global_batch_size": 16, "max_steps": 1, "learning_rate": 1e-5,
    }  # fmt: skip
    return TrainingPlan.model_validate(fields | changes)


def test_adapter_params_match_peft() -> None:
    # As printed by peft for Llama 3 8B, rank 16, all seven projections.
    every = LoraSpec(rank=16, targets=ALL_PROJECTIONS)
    assert count_adapter_parameters(architecture("llama3-8b"), every) == 41_943_040
    assert (
        count_adapter_parameters(architecture("llama3-8b"), LoraSpec(rank=8, targets=("q_proj", "v_proj"))) == 3_407_872
    )


def test_adapters_of_experts_are_counted_for_each_expert_and_those_of_a_token_for_its_flops() -> None:
    """The first number is that of the trainer's check on H200s."""
    shape, lora = architecture("qwen3-30b-a3b"), LoraSpec(rank=16, targets=ALL_PROJECTIONS)
    attention = count_adapter_parameters(shape, LoraSpec(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    assert count_adapter_parameters(shape, lora) == 994_836_480
    assert count_active_adapter_parameters(shape, lora) == attention + (994_836_480 - attention) * 8 / 128
    joined = LoraSpec(rank=32, targets=("gate_up_proj",))
    parts = LoraSpec(rank=16, targets=("gate_proj", "up_proj"))
    assert count_adapter_parameters(shape, joined) == count_adapter_parameters(shape, parts) > 0


def test_an_nf4_matrix_takes_about_half_a_byte_per_weight() -> None:
    assert sum(nf4_parts(4096 * 4096)) / 4096**2 == pytest.approx(0.5 + 1 / 64 + 4 / (64 * 256), rel=1e-4)


def test_frozen_weights_take_two_bytes_per_parameter_and_4_bit_ones_a_quarter() -> None:
    shape = architecture("llama3.3-70b")
    lora, qlora = (Fit(Setup(shape, training(method=method), 8)).memory for method in ("lora", "qlora"))
    adapters = method_counts(shape, training(method="lora")).trained
    assert lora.parameters * GIB * 8 == pytest.approx(2 * count_model(shape).total + 4 * adapters)
    assert lora.optimizer * GIB * 8 == pytest.approx(8 * adapters)
    assert 0.25 < qlora.parameters / lora.parameters < 0.3


def test_each_gpu_that_divides_a_layer_has_one_matrix_of_its_adapters() -> None:
    shape = architecture("llama3-8b")
    one, two = (Fit(Setup(shape, training(method="lora", tensor_parallel=size), 8)).memory for size in (1, 2))
    hidden_sizes = 32 * 7 * 16 * 4096  # each of seven projections has the hidden size at one side
    assert (two.parameters - one.parameters) * GIB * 8 == pytest.approx(4 * hidden_sizes)
    assert (two.optimizer - one.optimizer) * GIB * 8 == pytest.approx(8 * hidden_sizes)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_offloaded_states_are_not_on_the_gpu(engine: Any) -> None:
    shape = architecture("olmo3-7b")
    none, optimizer, everything = (
        Fit(Setup(shape, training(offload=offload), 8, engine)).memory for offload in ("none", "optimizer", "all")
    )
    assert none.optimizer > 0
    assert optimizer.optimizer == everything.optimizer == everything.parameters == everything.gradients == 0
    assert optimizer.total < none.total


def test_invalid_lora_settings_are_rejected() -> None:
    here = Context(assets.RECIPES, assets.RECIPES, {})
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", here, ("training.lora.rank=4",))
    assert "lora has no effect" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", here, ("training.method=lora", "training.lora.targets=[q_proj, q_proj]"))
    assert "q_proj, q_proj" in str(caught.value)
    assert training(method="qlora").adapters == LoraSpec(targets=ALL_PROJECTIONS)
    assert training().adapters is None


def choose(recipe: RecipeSpec, world_size: int, gpu: GpuModel | None) -> EnginePlan:
    return choose_engine(recipe.model.architecture, recipe.training, world_size, gpu)


def test_auto_selects_zero3_with_a_reason_if_only_zero3_fits() -> None:
    recipe = load_recipe(
        "llama3.3-70b-full",
        Context(assets.RECIPES, assets.RECIPES, {}),
        ("training.optimizer=adamw", "training.offload=optimizer"),
    )
    chosen = choose(recipe, 8, "h100-80gb")
    assert chosen.name == "zero3"
    assert "with fsdp2" in chosen.reason
    assert choose(recipe, 32, "h100-80gb").name == "fsdp2"
    assert choose(recipe, 8, None).name == "fsdp2"
    asked = recipe.model_copy(update={"training": recipe.training.model_copy(update={"engine": "zero3"})})
    assert choose(asked, 32, "h200").name == "zero3"


def test_layers_stay_unsharded_if_a_gpu_has_enough_memory() -> None:
    here = Context(assets.RECIPES, assets.RECIPES, {})
    small, large = (load_recipe(name, here) for name in ("qwen3-8b-tools-full", "llama3.3-70b-full"))

    def keeps(recipe: RecipeSpec, world_size: int, gpu: Gpu | None = GPUS["h200"], **changes: object) -> bool:
        setup = Setup(recipe.model.architecture, least_memory(recipe.training), world_size, gpu=gpu)
        return with_sharding(setup.with_training(**changes)).keeps_weights

    assert keeps(small, 8)
    assert not keeps(large, 8)
    assert not keeps(small, 8, None)  # its memory is unknown
    assert not keeps(small, 8, reshard_after_forward="always")
    assert keeps(large, 8, None, reshard_after_forward="never")
    assert not keeps(large, 1, None, reshard_after_forward="never")


def test_fp32_gradients_are_not_reduced_in_bf16() -> None:
    here = Context(assets.RECIPES, assets.RECIPES, {})
    with pytest.raises(ConfigError, match="reduce_precision 'bf16'"):
        load_recipe("demo", here, ("training.precision=fp32", "training.reduce_precision=bf16"))
