"""The shape in a recipe compared with the configuration of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ftkit.errors import ConfigError
from ftkit.models.architecture import ArchitectureFields
from ftkit.models.config_json import (
    check_loadable,
    find_contradictions,
    read_shape,
    text_part,
    unquantized_fix,
    why_not_dequantizable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.models.architecture import ArchitectureSpec

# As published, with the key names of the transformers version that saved them.
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
}  # fmt: skip
OLMO3 = {
    "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 65536,
    "sliding_window": 4096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "tie_word_embeddings": False, "rope_theta": 500000, "rms_norm_eps": 1e-06,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "rope_theta": 1000000,
    "rms_norm_eps": 1e-06,
}  # fmt: skip
GEMMA3_WRAPPED = {
    "model_type": "gemma3", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
PUBLISHED = {"llama3-8b": LLAMA, "olmo3-7b": OLMO3, "qwen3-8b": QWEN3, "gemma3-4b": GEMMA3_WRAPPED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_match_the_published_configurations(
    name: str, architecture: Callable[[str], ArchitectureSpec]
) -> None:
    assert find_contradictions(architecture(name), text_part(PUBLISHED[name])) == {}


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"rope_theta": 10_000.0}, "rope_theta", "10000.0 in the recipe, 500000.0 in the weights"),
        ({"num_key_value_heads": 32}, "num_key_value_heads", "32 in the recipe, 8 in the weights"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "true in the recipe, false in the weights"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps", "1e-06 in the recipe, 1e-05 in the weights"),
        ({"vocab_size": 128000}, "vocab_size", "128000 in the recipe, 128256 in the weights"),
        ({"head_dim": 64}, "head_dim", "64 in the recipe, 128 in the weights"),
        (
            {"max_position_embeddings": 131072},
            "max_position_embeddings",
            "131072 in the recipe, 8192 in the weights (more need rope_scaling)",
        ),
        ({"family": "qwen3"}, "family", "qwen3 in the recipe, llama in the weights"),
        ({"initializer_range": 0.01}, "initializer_range", "0.01 has no effect on pretrained weights"),
        ({"sliding_window": 4096}, "sliding_window", "4096 in the recipe, null in the weights"),
    ],
)
def test_each_field_that_contradicts_the_weights_is_reported_with_both_values(
    changes: dict[str, Any], field: str, message: str, architecture: Callable[[str], ArchitectureSpec]
) -> None:
    shape = architecture("llama3-8b").model_copy(update=changes)
    assert find_contradictions(shape, LLAMA)[field] == message


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"full_attention_every": 2}, {"full_attention_every"}),
        ({"full_attention_every": 1}, {"full_attention_every"}),
        ({"sliding_window": 1024}, {"sliding_window"}),
        ({"sliding_window": None}, {"sliding_window"}),
    ],
)
def test_windows_are_compared_layer_by_layer(
    changes: dict[str, Any], found: set[str], architecture: Callable[[str], ArchitectureSpec]
) -> None:
    shape = architecture("olmo3-7b").model_copy(update=changes)
    assert find_contradictions(shape, OLMO3).keys() == found


def test_fewer_positions_than_the_weights_have_limit_the_sequence_length(
    architecture: Callable[[str], ArchitectureSpec],
) -> None:
    shape = architecture("olmo3-7b").model_copy(update={"max_position_embeddings": 4096})
    assert find_contradictions(shape, OLMO3) == {}


def test_both_key_names_of_the_rotary_base_are_read(architecture: Callable[[str], ArchitectureSpec]) -> None:
    shape = architecture("olmo3-7b")
    rest = {key: value for key, value in OLMO3.items() if key != "rope_theta"}
    for rope in (
        {"rope_theta": 1e6, "rope_type": "default"},
        {"sliding_attention": {"rope_theta": 5e5}, "full_attention": {"rope_theta": 1e6}},
    ):
        assert find_contradictions(shape, rest | {"rope_parameters": rope}).keys() == {"rope_theta"}
    assert find_contradictions(shape, rest | {"rope_parameters": {"rope_theta": 500000}}) == {}


def test_missing_configuration_keys_get_the_defaults_of_the_class(
    architecture: Callable[[str], ArchitectureSpec],
) -> None:
    shape = architecture("gemma3-4b")
    other = shape.model_copy(update={"rope_theta": 10_000.0, "tie_word_embeddings": False})
    assert find_contradictions(other, GEMMA3_WRAPPED).keys() == {"rope_theta", "tie_word_embeddings"}
    untied = GEMMA3_WRAPPED | {"tie_word_embeddings": False}
    assert find_contradictions(shape, untied).keys() == {"tie_word_embeddings"}
    newer = {"model_type": "newer", "num_hidden_layers": 34}
    assert find_contradictions(other.model_copy(update={"family": "newer"}), newer) == {}


def test_fields_missing_from_a_recipe_are_not_compared() -> None:
    assert find_contradictions(ArchitectureFields(num_hidden_layers=32), LLAMA) == {}
    assert find_contradictions(ArchitectureFields(), LLAMA) == {}


def test_published_configurations_yield_the_shipped_shapes(architecture: Callable[[str], ArchitectureSpec]) -> None:
    for name, config in PUBLISHED.items():
        assert read_shape(config, name) == architecture(name).model_copy(update={"initializer_range": 0.02})


@pytest.mark.parametrize("value", ["wide", [], {}, -1, None, True])
@pytest.mark.parametrize("key", ["hidden_size", "layer_types", "rope_parameters", "num_attention_heads"])
def test_unusual_values_in_a_configuration_do_not_raise(
    key: str, value: object, architecture: Callable[[str], ArchitectureSpec]
) -> None:
    assert isinstance(find_contradictions(architecture("olmo3-7b"), OLMO3 | {key: value}), dict)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "'fp8' without blocks"),
        ({"load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
    ],
)
def test_weights_that_would_stay_quantized_are_rejected(quantization: dict[str, object], named: str | None) -> None:
    for config in ({"quantization_config": quantization}, {"text_config": {"quantization_config": quantization}}):
        problem = why_not_dequantizable(config)
        assert (problem is None) == (named is None)
        assert named is None or named in str(problem)


@pytest.mark.parametrize(
    "name", ["o/M-7B-AWQ", "o/M-7B-GPTQ-Int4", "o/M-7B-FP8", "o/M-7B-unsloth-bnb-4bit", "o/M-7B-w4a16", "o/M-7B-4bit"]
)
def test_the_unquantized_model_is_suggested(name: str) -> None:
    assert "most likely o/M-7B;" in unquantized_fix(name)
    assert "most likely" not in unquantized_fix("/data/M-7B-AWQ")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("dtype", "bf16", "bfloat16"), ("torch_dtype", "torch.float16", "float16"), ("dtype", "FP32", "float32"),
        ("dtype", "auto", "bfloat16"),
    ],
)  # fmt: skip
def test_a_dtype_that_torch_lacks_is_rejected_with_its_name(key: str, value: str, fix: str) -> None:
    for config in ({key: value}, {"text_config": {key: value}}):
        with pytest.raises(ConfigError, match=f'"{key}": "{value}".* "{key}": "{fix}"'):
            check_loadable(config, "org/model")


def test_the_dtypes_of_published_models_pass() -> None:
    for value in ("bfloat16", "float16", "float32", None, {"": "float32"}):
        check_loadable({"torch_dtype": value, "vision_config": {"dtype": "float32"}}, "org/model")
