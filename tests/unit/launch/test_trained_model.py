"""Foreign adapters as a model: supported ones are loaded on their base, others are rejected with the field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy

from ftkit.errors import ConfigError, NotFoundError
from ftkit.launch.trained_model import check_adapter, continue_adapters
from ftkit.models.adapters import LoraSpec
from ftkit.models.architecture import ModelSpec
from ftkit.models.folder import ADAPTER_CONFIG, ADAPTER_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.plan import RunPlan

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base", "revision": "v2", "r": 8,
    "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none", "target_modules": ["q_proj"], "init_lora_weights": True,
    "rank_pattern": {}, "modules_to_save": None, "megatron_core": "megatron.core", "qalora_group_size": 16,
}  # fmt: skip
"""As peft saves it."""


def write(folder: Path, **changes: Any) -> ModelSpec:
    (folder / ADAPTER_CONFIG).write_text(json.dumps(PLAIN | changes))
    return ModelSpec(weights=str(folder))


def test_a_folder_of_adapters_is_the_model_that_they_belong_to(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    continued = continue_adapters(write(tmp_path))
    assert (continued.model.weights, continued.model.revision) == ("org/base", "v2")
    assert (continued.adapter, continued.model.tokenizer.source) == (str(tmp_path), str(tmp_path))


def test_a_relative_folder_of_the_base_model_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    continued = continue_adapters(write(tmp_path, base_model_name_or_path="./base"))
    assert continued.model.weights == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("bias", "all"),
        ("trainable_token_indices", [3]),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("target_modules", r".*layers\.0\..*(q|v)_proj"),
        ("peft_type", "IA3"),
        ("an_option_of_tomorrow", 1),
    ],
)
def test_fields_that_would_be_dropped_are_rejected_by_name(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        continue_adapters(write(tmp_path, **{key: value}))


def test_adapters_of_experts_may_have_a_multiple_of_the_rank_with_the_same_scale(tmp_path: Path) -> None:
    joined = {"target_parameters": ["gate_up_proj", "down_proj"], "rank_pattern": {r".*\.gate_up_proj": 16}}
    same = write(tmp_path, **joined, alpha_pattern={r".*\.gate_up_proj": 32})
    assert continue_adapters(same).adapter == str(tmp_path)
    for alphas in ({}, {r".*\.gate_up_proj": 16}):
        with pytest.raises(ConfigError, match="rank_pattern"):
            continue_adapters(write(tmp_path, **joined, alpha_pattern=alphas))


def test_adapters_without_a_base_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_model_name_or_path"):
        continue_adapters(write(tmp_path, base_model_name_or_path=None))
    (tmp_path / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(NotFoundError, match="can't read"):
        continue_adapters(ModelSpec(weights=str(tmp_path)))


def test_target_modules_that_peft_found_nowhere_are_not_adapted(plan: RunPlan, tmp_path: Path) -> None:
    write(tmp_path, target_modules=["q_proj", "gate_up_proj"], target_parameters=["down_proj"])
    names = ("layers.0.self_attn.q_proj", "layers.0.mlp.experts")
    tensors = {f"base_model.model.model.{name}.lora_A.weight": np.zeros(1) for name in names}
    safetensors.numpy.save_file(tensors, tmp_path / ADAPTER_FILE)
    model = plan.recipe.model.model_copy(update={"adapter": str(tmp_path)})

    def check(*targets: str) -> None:
        lora = LoraSpec(rank=8, alpha=16, targets=targets)
        training = plan.recipe.training.model_copy(update={"method": "lora", "lora": lora})
        check_adapter(plan.recipe.model_copy(update={"model": model, "training": training}))

    check("q_proj", "down_proj")
    with pytest.raises(ConfigError, match="list gate_up_proj too"):
        check("q_proj", "gate_up_proj", "down_proj")

    (tmp_path / ADAPTER_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(NotFoundError, match=r"adapter_model\.bin"):
        check("q_proj", "down_proj")
