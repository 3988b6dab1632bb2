"""Safetensors files written while their tensors are computed, and tensors computed on access."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ftkit.errors import TrainingError
from ftkit.models.adapters import LoraSpec
from ftkit.train.components.exporter import write_weights
from ftkit.train.model.lora import merge_adapters, with_adapters
from ftkit.train.model.weight_conversion import LazyTensors

if TYPE_CHECKING:
    from pathlib import Path

BY_SIZE = (torch.int64, torch.float32, torch.bfloat16, torch.bool)


def declare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


DRAWN = st.tuples(st.sampled_from(BY_SIZE), st.lists(st.integers(0, 4), max_size=3))


@settings(max_examples=25)
@given(
    drawn=st.lists(DRAWN, min_size=1, max_size=9),
    shard_bytes=st.integers(1, 300),
)
def test_safetensors_reads_the_tensors_and_their_files_have_the_returned_digests(
    drawn: list[tuple[torch.dtype, list[int]]], shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    drawn.sort(key=lambda each: BY_SIZE.index(each[0]))
    tensors = {f"é.{number}": (9 * torch.rand(shape)).to(dtype) for number, (dtype, shape) in enumerate(drawn)}
    # As all-gathered weights are: views of larger tensors, which are not contiguous.
    views = ((name, torch.stack([each, each], dim=-1)[..., 0]) for name, each in tensors.items())
    saved = write_weights(declare(tensors), views, folder, shard_bytes=shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in files] == sorted(saved)
    read = {name: each for path in files for name, each in load_file(path).items()}
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == each.dtype and torch.equal(read[name], each) for name, each in tensors.items())
    for path in files:
        content = path.read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (saved[path.name].size, saved[path.name].sha256)
        assert len(load_file(path)) == 1 or sum(each.nbytes for each in load_file(path).values()) <= shard_bytes
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())


@pytest.mark.parametrize("given", [torch.ones(3, 2), torch.ones(2, 3).bfloat16()], ids=["shape", "dtype"])
def test_a_tensor_of_another_model_is_refused(given: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"'a' .* float32 \[2, 3\]"):
        write_weights({"a": torch.ones(2, 3, device="meta")}, [("a", given)], tmp_path)


def test_iterating_and_looking_for_names_computes_no_tensor() -> None:
    def compute(name: str) -> torch.Tensor:
        raise AssertionError(name)

    base = LazyTensors(["x.weight", "y.weight"], compute)
    adapters = LazyTensors(["x.lora_A.default.weight"], compute)
    merged = merge_adapters(base, adapters, LoraSpec(rank=1))
    assert not {"x.weight", "y.weight"} - merged.keys()
    assert len(merged) == len(list(merged)) == 2
    assert "x.lora_A.default.weight" in with_adapters(base, adapters)
