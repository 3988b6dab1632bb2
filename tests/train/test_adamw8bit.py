"""AdamW with states of 8 bits trains as AdamW does, and its checkpoints are AdamW's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ftkit.errors import PrerequisiteError
from ftkit.records import StartRecord
from ftkit.train import quantise
from ftkit.train.adamw8bit import AdamW8bit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

SMALL = "training.optimizer=adamw8bit"
NO_QUESTIONS = "evaluation.sql_execution=null"


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (300,), (0, 30))]


def groups(values: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": values[:1], "weight_decay": 0.1}, {"params": values[1:], "weight_decay": 0.0}]


def descend(optimizer: torch.optim.Optimizer, values: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for value in values:
            value.grad = value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        optimizer.step()


def test_twenty_steps_end_where_adamws_do(world: World) -> None:
    small, whole = parameters(), parameters()
    descend(AdamW8bit(groups(small), lr=1e-2, betas=(0.9, 0.95), host_mesh=world.host_mesh), small, 20)
    descend(torch.optim.AdamW(groups(whole), lr=1e-2, betas=(0.9, 0.95)), whole, 20)
    for one, other, start in zip(small, whole, parameters(), strict=True):
        assert (one - other).norm() <= 0.03 * (other - start).norm()


def test_a_state_takes_a_byte_and_its_part_of_a_scale(world: World) -> None:
    values = parameters()
    optimizer = AdamW8bit(values, lr=1e-2, betas=(0.9, 0.95), host_mesh=world.host_mesh)
    descend(optimizer, values, 1)
    state = optimizer.state[values[0]]
    stored = sum(tensor.nbytes for name, tensor in state.items() if name != "step")
    assert stored == 2 * (1200 + 4 * 5)


def test_a_state_dict_is_adamws_and_what_is_read_back_goes_on_alike(world: World) -> None:
    values = parameters()
    optimizer = AdamW8bit(groups(values), lr=1e-2, betas=(0.9, 0.95), host_mesh=world.host_mesh)
    descend(optimizer, values, 5)
    saved = optimizer.state_dict()
    assert {name: tensor.dtype for name, tensor in saved["state"][0].items()} == {
        "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32,
    }  # fmt: skip
    copies = [nn.Parameter(value.detach().clone()) for value in values]
    resumed = AdamW8bit(groups(copies), lr=1e-2, betas=(0.9, 0.95), host_mesh=world.host_mesh)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["weight_decay"] == 0.1
    before = [value.detach().clone() for value in values]
    descend(optimizer, values, 3)
    descend(resumed, copies, 3)
    # Nearly: states are rounded once more on the way.
    for one, other, start in zip(values, copies, before, strict=True):
        assert (one - other).norm() <= 0.05 * (one - start).norm()


def test_a_missing_package_is_named_with_its_extra(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise.import_bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PrerequisiteError, match="adamw8bit") as caught:
        AdamW8bit(parameters(), lr=1e-2, betas=(0.9, 0.95), host_mesh=world.host_mesh)
    assert "ftkit[qlora]" in str(caught.value.fix)


def test_a_run_loses_little_and_goes_on_with_fewer_processes_and_with_more(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    expected = {step: loss for step, (loss, _) in finished_run.losses().items()}
    pair = make_run("pair", SMALL, NO_QUESTIONS)
    pair.train()
    assert {step: loss for step, (loss, _) in pair.losses().items()} == pytest.approx(expected, rel=0.01)
    pair.copy_to("pair-alone").forget_after(10)
    alone = make_run("pair-alone", SMALL, NO_QUESTIONS, processes=1)
    alone.train()
    alone.copy_to("pair-again").forget_after(10)
    again = make_run("pair-again", SMALL, NO_QUESTIONS)
    again.train()
    for run in (alone, again):
        assert [record.resumed_from for record in run.records(StartRecord)] == [10]
        assert {step: loss for step, (loss, _) in run.losses().items()} == pytest.approx(
            {step: loss for step, loss in expected.items() if step > 10}, rel=0.01
        )
