"""The tensors of weight files against config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy

from ftkit.errors import NotFoundError
from ftkit.hub.readiness import check_weights
from ftkit.models.architecture import ModelSpec
from ftkit.models.parameters import count_by_config
from ftkit.models.weight_files import check_tensors
from ftkit.planning.planner import plan_model

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def check(folder: Path, prefix: str = "model.", missing: str = "", **edits: Any) -> str | None:
    """Check files of three layers against an edited config.json; one tensor may be missing."""
    tensors = {f"{prefix}embed_tokens.weight": (20, 8), "lm_head.weight": (20, 8)}
    for number in range(3):
        layer = f"{prefix}layers.{number}."
        tensors |= {f"{layer}self_attn.k_proj.weight": (4, 8), f"{layer}mlp.down_proj.weight": (8, 12)}
        tensors[f"{layer}mlp.experts.0.down_proj.weight"] = (3, 3)
    arrays = {name: np.zeros(shape, np.float16) for name, shape in tensors.items() if name != missing}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    config = CONFIG | edits
    shape = plan_model(ModelSpec(weights="org/model"), config).architecture
    return check_tensors(shape, config, folder)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_files_with_more_layers_than_the_configuration_are_a_warning(prefix: str, tmp_path: Path) -> None:
    assert check(tmp_path, prefix) is None
    warning = check(tmp_path, prefix, num_hidden_layers=2)
    for fact in ("3 decoder layers", "2 (num_hidden_layers)"):
        assert fact in str(warning)


def test_layers_that_predict_further_tokens_are_no_surplus(tmp_path: Path) -> None:
    assert check(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1) is None


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"vocab_size": 24}, r"'lm_head\.weight' has shape \[20, 8\] in the files, and \[24, 8\] by config\.json"),
        ({"intermediate_size": 16}, r"down_proj\.weight' has shape \[8, 12\] in the files, and \[8, 16\] by"),
        ({"num_key_value_heads": 2}, r"layers\.0\.self_attn\.k_proj\.weight' has shape \[4, 8\] .* \[8, 8\] by"),
        ({"hidden_size": 16}, "and 5 more"),
        ({"num_hidden_layers": 4}, r"3 decoder layers, config\.json says 4"),
    ],
)
def test_files_of_other_shapes_than_the_configuration_are_rejected(
    edits: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match=message):
        check(tmp_path, **edits)


def test_files_that_lack_a_matrix_of_one_layer_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="2 of 3 'down_proj'"):
        check(tmp_path, missing="model.layers.1.mlp.down_proj.weight")


def test_files_that_do_not_fit_are_rejected_before_the_job(tmp_path: Path) -> None:
    check(tmp_path)
    for num_layers in (3, 4):
        config = CONFIG | {"num_hidden_layers": num_layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = plan_model(ModelSpec(weights=str(tmp_path)), config)
        if num_layers == 3:
            assert check_weights(model, {}, tmp_path) is None
            continue
        with pytest.raises(NotFoundError, match="num_hidden_layers"):
            check_weights(model, {}, tmp_path)


def test_families_without_a_formula_get_warnings_if_their_parameters_are_counted(tmp_path: Path) -> None:
    other = {"model_type": "starcoder2", "head_dim": 4}
    assert check(tmp_path, **other, hidden_size=16) is None
    assert "3 decoder layers" in str(check(tmp_path, **other, num_hidden_layers=2))
    counts = replace(count_by_config(CONFIG), source="model")
    shape = plan_model(ModelSpec(weights="org/model"), CONFIG | other, counts).architecture
    assert check_tensors(shape, {}, tmp_path) is None
    for key, value in (("vocab_size", 24), ("num_hidden_layers", 4)):
        warning = check_tensors(shape.model_copy(update={key: value}), {}, tmp_path)
        assert "config.json contradicts" in str(warning)


def test_damaged_files_are_left_to_the_check_of_the_folder(tmp_path: Path) -> None:
    shape = plan_model(ModelSpec(weights="org/model"), CONFIG).architecture
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0half")
    assert check_tensors(shape, CONFIG, tmp_path) is None
