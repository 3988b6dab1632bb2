"""Parameter counts without weights, and their use in a run."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from family_matrix import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from ftkit import assets
from ftkit.config.execution import method_counts
from ftkit.config.load import read_shipped
from ftkit.config.training import TrainingPlan
from ftkit.errors import ConfigError, NotFoundError
from ftkit.files import parse_json
from ftkit.launch.model import CountedModel, resolve_model
from ftkit.models.adapters import LoraSpec, adapter_size
from ftkit.models.architecture import (
    MULTIMODAL,
    NO_CAUSAL_CLASS,
    UNKNOWN_FAMILY,
    ArchitecturePlan,
    ArchitectureSpec,
    ModelSpec,
)
from ftkit.models.config_json import CONFIG_KEYS, fill_config
from ftkit.models.families import FAMILIES, MEASURED
from ftkit.models.folder import read_model_config
from ftkit.models.parameters import count_by_config, count_model
from ftkit.models.weight_files import check_tensors
from ftkit.planning.layout import Workspace
from ftkit.planning.planner import plan_model
from ftkit.runs.records import StartRecord, VerificationRecord
from ftkit.train.model.hf_model import read_config
from ftkit.train.param_count import count_method, count_modules, print_counts
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRANSFORMERS_5 = not version("transformers").startswith("4.")
_IN_OLDEST = {"llama", "qwen3", "olmo3", "gemma3_text", "mixtral", "olmoe", "qwen3_moe"}
WITH_FORMULA = sorted(name for name, family in FAMILIES.items() if family.has_formula)
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "global_head_dim": 32}
NO_PER_LAYER = {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "attention_k_eq_v": True}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}],
    "mixtral": [{"num_local_experts": 4}],
    "olmoe": [{"num_experts": 4, "num_experts_per_tok": 2}],
    "qwen3_moe": [FEW_EXPERTS, FEW_EXPERTS | {"mlp_only_layers": [1]}, FEW_EXPERTS | {"decoder_sparse_step": 2}],
    "gpt_oss": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
    "qwen3_5_text": [DELTA_NET, DELTA_NET | {"layer_types": ["full_attention", "linear_attention"] * 3}],
    "qwen3_5_moe_text": [DELTA_NET | FEW_EXPERTS | {"shared_expert_intermediate_size": 40}],
    "gemma4_text": [
        PER_LAYER | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
        PER_LAYER | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
                     "use_double_wide_mlp": True},
        NO_PER_LAYER | {"num_global_key_value_heads": 1},
        NO_PER_LAYER | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    ],
}  # fmt: skip
CASES = [
    pytest.param(name, variant, id=f"{name}-{number}", marks=[pytest.mark.oldest] * (name in _IN_OLDEST))
    for name in WITH_FORMULA
    for number, variant in enumerate(VARIANTS.get(name, [{}]))
]


def shape_of(family: str) -> ArchitectureSpec:
    return ArchitectureSpec(
        family=family, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip


def config_of(shape: ArchitectureSpec, more: dict[str, Any]) -> dict[str, Any]:
    names = set(ArchitectureSpec.model_fields) - {"family", "full_attention_every", "sliding_window", "rope_scaling"}
    return {"model_type": shape.family} | shape.model_dump(include=names) | more


def build(config: dict[str, Any], device: str = "meta") -> Any:
    kind = config["model_type"]
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_formula_matches_the_model_class(family: str, variant: dict[str, Any]) -> None:
    config = {"model_type": family} | SMALL | variant
    planned, counted = count_by_config(config), count_modules(build(config), 96)
    assert planned.is_exact
    for name in ("layers", "largest_layer", "around", "active", "experts_per_token"):
        assert getattr(planned, name) == getattr(counted, name), name
    if TRANSFORMERS_5:  # in transformers 4, experts were modules
        assert sorted(map(str, planned.linears)) == sorted(map(str, counted.linears))
        assert planned.attention == counted.attention
        assert sorted(map(str, planned.expert_matrices)) == sorted(map(str, counted.expert_matrices))


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_files_that_transformers_writes_have_the_planned_shapes(
    family: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    config = {"model_type": family} | SMALL | variant
    build(config, "cpu").save_pretrained(tmp_path)
    raw = read_model_config(tmp_path)
    shape = resolve_model(ModelSpec(weights=str(tmp_path)), {}, Workspace(tmp_path)).architecture
    assert check_tensors(shape, raw, tmp_path) is None
    wrong = shape.model_copy(update={"counts": count_by_config(raw | {"hidden_size": 32})})
    with pytest.raises(NotFoundError, match="contradicts the weight files"):
        check_tensors(wrong, raw, tmp_path)


@pytest.mark.parametrize("family", WITH_FORMULA)
def test_missing_configuration_keys_get_transformers_defaults(family: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8}
    real = AutoConfig.for_model(family, **sizes)
    filled = fill_config({"model_type": family, **sizes})
    told = fill_config(real.to_dict() | {"model_type": family})
    for key in CONFIG_KEYS:
        if key in filled and key not in {"rope_parameters", "use_sliding_window"}:
            assert filled[key] == told.get(key), key


@pytest.mark.parametrize("path", sorted(assets.ARCHITECTURES.glob("*.yaml")), ids=lambda path: path.stem)
def test_param_counts_of_shipped_configurations_match_their_classes(path: Path) -> None:
    config, _ = read_shipped(path)
    real, planned = count_modules(build(config), 0), count_by_config(config)
    assert (planned.total, planned.active, planned.largest_layer) == (real.total, real.active, real.largest_layer)


@pytest.mark.parametrize("family", MEASURED)
def test_param_counts_of_each_method_follow_from_those_of_the_model(family: str) -> None:
    shape = shape_of(family)
    model = build(config_of(shape, {"sliding_window": 64} if family in {"gemma3_text", "olmo3"} else {}))
    counts = count_modules(model, shape.intermediate_size)
    assert (counts.total, counts.active) == (count_model(shape).total, count_model(shape).active)
    for method in ("full", "lora", "qlora"):
        training = TrainingPlan(method=method, sequence_length=8, global_batch_size=1, max_steps=1, learning_rate=1e-3)
        assert method_counts(ArchitecturePlan.extend(shape, counts=counts), training) == count_method(model, training)


def test_a_model_without_a_formula_is_counted_in_a_subprocess(tmp_path: Path) -> None:
    config = {"model_type": "starcoder2"} | {key: SMALL[key] for key in SMALL if key != "head_dim"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shape = resolve_model(ModelSpec(weights=str(tmp_path)), environment, Workspace(tmp_path)).architecture
    counts = shape.counts
    assert counts is not None
    assert counts.source == "model"
    assert shape.head_dim == 16  # the class's default: the file has no such key
    real = build(config)
    assert counts.total == sum(parameter.numel() for parameter in real.parameters())
    (linear,) = (each for each in counts.linears if each.name == "q_proj")
    assert adapter_size(LoraSpec(rank=1), linear.inputs, linear.outputs) == 64 + 64
    assert [layers.count for layers in counts.attention] == [6]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "clip", "text_config": SMALL, "vision_config": {}}, "no causal language model for 'clip'"),
        (SMALL | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "'own'.*auto_map"),
    ],
)
def test_the_plan_rejects_a_family_that_transformers_cannot_train(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=message):
        resolve_model(ModelSpec(weights=str(tmp_path)), environment, Workspace(tmp_path))


@pytest.mark.parametrize(
    ("family", "code"), [("llamma", UNKNOWN_FAMILY), ("clip", NO_CAUSAL_CLASS), ("gemma3", MULTIMODAL)]
)
def test_random_weights_of_a_family_that_transformers_lacks_are_not_counted(family: str, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        print_counts(json.dumps({"architecture": {"family": family} | SMALL}))
    assert ended.value.code == code


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="families of transformers 5")
@pytest.mark.parametrize(
    ("family", "positions"),
    [
        ("bloom", 1 << 20),  # no limit of positions
        ("gemma3n_text", 512),  # a width for each layer
        ("longcat_flash", 512),  # a computed number of layers
        ("mamba2", 1 << 20),  # no heads, and a float that JSON lacks
    ],
)
def test_a_configuration_without_the_usual_keys_is_planned_and_trained(
    family: str, positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    print_counts(json.dumps({"config": config}))
    counted = parse_json(capsys.readouterr().out, CountedModel)
    shape = plan_model(ModelSpec(weights=str(tmp_path)), counted.config, counted.counts).architecture
    assert shape.max_position_embeddings == positions
    read_config(tmp_path, shape)  # the trainer compares the plan's shape with the file


def test_a_run_uses_the_param_count_of_the_model_class(make_run: Callable[..., Any]) -> None:
    family = "model.architecture.family=starcoder2"  # the estimate ignores its biases
    run = make_run("counted", family, "training.max_steps=1", "evaluation.generation=null")
    printed = run.train()
    (start,), (proof,) = run.records(StartRecord), run.records(VerificationRecord)
    assert proof.checks["parameters"] == start.num_parameters
    estimate = f"(the plan's estimate was {run.plan.num_parameters:,})"
    assert f"the model has {start.num_parameters:,} parameters {estimate}" in printed
