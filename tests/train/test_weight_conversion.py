"""Experts, which are stored one by one in files and as one tensor in transformers 5."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import TrainingError
from ftkit.models.architecture import ArchitectureSpec
from ftkit.planning.choices import least_memory
from ftkit.planning.layout import RunLayout
from ftkit.planning.planner import plan_model
from ftkit.train.components.exporter import ExportedParts, export
from ftkit.train.components.generation import Generation
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.hf_model import TextConfig, make_config
from ftkit.train.model.pretrained import LoadTarget, load_weights
from ftkit.train.model.weight_conversion import (
    Fp8Tensor,
    JoinedPieces,
    WeightConversions,
    dequantized,
    map_tensors,
    split_as_stored,
)
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.train.world import World

TOKENIZER = learn_tokenizer(["SELECT name FROM table"], 300, "chatml")

needs_conversions = pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 stores experts as files do")


def build(family: str) -> Any:
    shape = ArchitectureSpec.model_validate({
        "family": family, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    })  # fmt: skip
    config = make_config(shape, TOKENIZER)
    for field in ("num_experts", "num_local_experts"):
        if hasattr(config, field):
            setattr(config, field, 12)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_experts_that_are_stored_one_by_one_are_loaded_from_any_number_of_files(family: str, tmp_path: Path) -> None:
    model = build(family)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert re.search(r"\.experts\.1\.", (tmp_path / "model.safetensors.index.json").read_text())
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    load_weights(model, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_files_of_a_model_without_its_output_projection_are_loaded(tmp_path: Path) -> None:
    model = build("llama")
    model.base_model.save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    expected = {name: value.clone() for name, value in model.base_model.state_dict().items()}
    with pytest.raises(TrainingError, match=r"^1 .*: lm_head\.weight"):
        load_weights(model, tmp_path)
    model.lm_head.weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    load_weights(model, tmp_path)
    for name, value in model.base_model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_an_index_left_beside_one_file_is_not_read(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    with torch.no_grad():
        model.lm_head.weight.fill_(3.0)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = build("llama")
    load_weights(again, tmp_path)
    assert (again.lm_head.weight == 3.0).all()


def test_only_the_local_rows_of_per_expert_weights_are_read() -> None:
    tensors = {f"{expert}.{part}": torch.randn(2, 3) for expert in range(4) for part in ("gate", "up")}
    asked: list[str] = []

    def read(name: str) -> Tensor:
        asked.append(name)
        return Tensor(tensors[name])

    joined = JoinedPieces([(f"{expert}.gate", f"{expert}.up") for expert in range(4)], read)
    assert joined.get_shape() == [4, 4, 3]
    asked.clear()
    assert torch.equal(joined[2:3], torch.cat([tensors["2.gate"], tensors["2.up"]])[None])
    assert asked == ["2.gate", "2.up"]


def test_experts_that_other_ranks_read_are_not_reported_as_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(LoadTarget, "load", lambda _, source, __: source[:1])  # this rank has the first expert
    load_weights(model, tmp_path)
    assert caplog.messages == []


@needs_conversions
def test_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match=r"'model\.layers\.1\.mlp\.experts\.gate_up_proj' .* \d+"):
        load_weights(model, tmp_path)


@needs_conversions
def test_conversions_other_than_row_concatenation_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("qwen3_moe")
    (converter,) = (one for one in WeightConversions.of(model).converters if "down_proj" in one.target_patterns[0])
    from transformers.core_model_loading import Transpose

    converter.operations.append(Transpose(1, 2))
    monkeypatch.setattr(WeightConversions, "of", lambda _: WeightConversions([], [converter]))
    files = {f"model.layers.0.mlp.experts.{number}.down_proj.weight": torch.randn(2, 3) for number in range(12)}
    name = "model.layers.0.mlp.experts.down_proj"
    source = map_tensors(model, files, [name], lambda stored: Tensor(files[stored]))[name].source
    assert source.get_shape() == [12, 3, 2]
    assert torch.equal(source[4:6], torch.stack([*files.values()])[4:6].transpose(1, 2))


@needs_conversions
def test_mxfp4_experts_are_dequantized_as_by_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (4, 6, 2), dtype=torch.uint8, generator=generator)
    files = {
        "model.layers.0.mlp.experts.down_proj_blocks": blocks,
        "model.layers.0.mlp.experts.down_proj_scales": scales,
    }
    name = "model.layers.0.mlp.experts.down_proj"
    source = map_tensors(build("gpt_oss"), files, [name], lambda stored: Tensor(files[stored]))[name].source
    assert source.get_shape() == [4, 64, 6]
    assert torch.equal(source[1:3], convert_moe_packed_tensors(blocks, scales)[1:3])


class Tensor:
    """A slice of a safetensors file."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.values[rows]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_weights_are_split_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    split = split_as_stored(model, model.state_dict())
    assert split.keys() == saved.keys()
    save_file({name: tensor.contiguous() for name, tensor in split.items()}, tmp_path / "again.safetensors")
    for name, tensor in load_file(tmp_path / "again.safetensors").items():
        assert torch.equal(tensor, saved[name]), name


def test_transformers_and_ftkit_load_an_export(world: World, tmp_path: Path) -> None:
    model = build("qwen3_moe")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    ctx = Context(tmp_path, tmp_path, {})
    spec = load_recipe("demo", ctx, ["training.precision=fp32", "evaluation.generation=null"])
    recipe = RecipePlan.extend(spec, model=plan_model(spec.model, None), training=least_memory(spec.training))
    parts = ExportedParts(recipe, TextConfig(model.config), TOKENIZER, Generation((2,), {}), None)
    export(Fsdp2Engine(model, recipe.training, world), parts, RunLayout(tmp_path), 0, world)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    again = build("qwen3_moe")
    nn.init.constant_(again.lm_head.weight, 7.0)
    load_weights(again, tmp_path / "export")
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name
        assert torch.equal(again.state_dict()[name], value), name


def test_fp8_blocks_dequantized_by_rows_match_the_full_matrix() -> None:
    """Compare with the definition on a matrix whose sides are not multiples of the block size."""
    torch.manual_seed(0)
    values = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    expected = values.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    stored = {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": torch.ones(2, 2)}

    def read(name: str) -> Any:
        return TensorSlice(stored[name])

    names, dequantizing = dequantized({*stored}, read)
    assert names == {"a.weight", "b.weight"}
    whole = dequantizing("a.weight")[:]
    assert torch.equal(whole, expected.to(torch.bfloat16))
    for first, last in [(0, 1), (100, 150), (255, 257), (299, 300)]:
        assert torch.equal(dequantizing("a.weight")[first:last], whole[first:last])
    assert torch.equal(dequantizing("b.weight")[:], stored["b.weight"])
    with pytest.raises(TrainingError, match="no square blocks"):
        Fp8Tensor(TensorSlice(values), TensorSlice(torch.rand(3, 1)))[:]


class TensorSlice:
    """A tensor with the interface of a slice of a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return self.tensor[rows]
