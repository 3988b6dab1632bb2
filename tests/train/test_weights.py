"""Weights that are read or initialized a few rows at a time match the full matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ftkit.models.architecture import ArchitectureSpec
from ftkit.train.model import local_shard
from ftkit.train.model.linears import Nf4Layout
from ftkit.train.model.local_shard import LocalShard
from ftkit.train.model.pretrained import LoadTarget, init_weights

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("bounds", [(0, 60), (0, 0), (7, 41), (12, 24), (59, 60)])
def test_a_shard_is_read_a_few_rows_at_a_time(bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_shard, "_ELEMENTS_PER_READ", 12)  # three rows of four
    begin, end = bounds
    whole = torch.arange(60.0).view(15, 4)
    part = LocalShard(whole.shape, torch.full((end - begin,), -1.0), begin)
    read: list[int] = []

    def rows(first: int, last: int) -> torch.Tensor:
        read.append(last - first)
        return whole[first:last]

    part.copy_rows(rows)
    assert torch.equal(part.values, whole.flatten()[begin:end])
    assert max(read, default=0) <= 3


def test_random_weights_do_not_depend_on_the_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ArchitectureSpec(
        family="llama", vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8,
    )  # fmt: skip
    monkeypatch.setattr(local_shard, "_ELEMENTS_PER_READ", 64)  # eight rows

    def drawn(begin: int, end: int) -> torch.Tensor:
        model = nn.ModuleDict({"table": nn.Embedding(64, 8)})
        model["table"].weight = nn.Parameter(torch.zeros(end - begin))  # type: ignore[union-attr]
        part: Callable[..., LocalShard] = lambda parameter: LocalShard(torch.Size((64, 8)), parameter.detach(), begin)  # noqa: E731
        monkeypatch.setattr("ftkit.train.model.pretrained.local_shard", part)
        init_weights(model, shape, 3)
        return model["table"].weight.detach()  # type: ignore[union-attr, return-value]

    whole = drawn(0, 512)
    assert torch.equal(torch.cat([drawn(0, 200), drawn(200, 512), drawn(512, 512)]), whole)
    assert whole.std() == pytest.approx(shape.initializer_range, rel=0.2)


def test_adapter_magnitudes_need_only_the_rows_of_their_shard() -> None:
    matrix, asked = torch.arange(24.0).reshape(6, 4), []

    class Source:
        def get_shape(self) -> list[int]:
            return [6, 4]

        def __getitem__(self, rows: slice) -> torch.Tensor:
            asked.append((rows.start, rows.stop))
            return matrix[rows]

    shard = LocalShard(matrix.shape, torch.zeros(8), begin=8)
    magnitude = LocalShard(torch.Size([6]), torch.zeros(2), begin=2)
    LoadTarget(shard, None, magnitude, is_transposed=False).load(Source(), "up_proj.weight")
    assert set(asked) == {(2, 4)}
    assert torch.equal(shard.values, matrix[2:4].flatten())
    assert torch.allclose(magnitude.values, matrix[2:4].norm(dim=1))


def test_experts_in_4_bits_are_read_as_few_at_a_time_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_shard, "_ELEMENTS_PER_READ", 2 * 64 * 32)
    experts, read = torch.randn(5, 64, 32), []
    layout = Nf4Layout(64, 32, torch.bfloat16)

    class Source:
        def get_shape(self) -> list[int]:
            return [5, 64, 32]

        def __getitem__(self, rows: slice) -> torch.Tensor:
            read.append(rows.stop - rows.start)
            return experts[rows]

    stored = torch.zeros(5, layout.num_stored, dtype=torch.bfloat16)
    LoadTarget(LocalShard(stored.shape, stored.view(-1), begin=0), layout).load(Source(), "experts.up_proj")
    assert read == [2, 2, 1]
    assert layout.dequantize(stored).equal(layout.dequantize(layout.quantize(experts)))
