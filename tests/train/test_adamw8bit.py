"""AdamW with 8-bit states trains like AdamW and writes the same checkpoints."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ftkit.errors import PrerequisiteError
from ftkit.runs.records import StartRecord
from ftkit.train.components.optimizer import AdamW8bit, _code
from ftkit.train.private_apis.libraries import import_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = "training.optimizer=adamw8bit"
NO_QUESTIONS = "evaluation.generation=null"


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((140, 30), (4100,), (300,), (0, 30))]


def groups(values: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": values[:1], "weight_decay": 0.1}, {"params": values[1:], "weight_decay": 0.0}]


def descend(optimizer: torch.optim.Optimizer, values: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for value in values:
            value.grad = value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        optimizer.step()


def test_twenty_steps_match_adamw() -> None:
    small, whole = parameters(), parameters()
    descend(AdamW8bit(groups(small), lr=1e-2, betas=(0.9, 0.95)), small, 20)
    descend(torch.optim.AdamW(groups(whole), lr=1e-2, betas=(0.9, 0.95)), whole, 20)
    for one, other, start in zip(small, whole, parameters(), strict=True):
        assert (one - other).norm() <= 0.03 * (other - start).norm()


def test_a_state_takes_one_byte_plus_its_share_of_a_scale() -> None:
    values = parameters()
    optimizer = AdamW8bit(values, lr=1e-2, betas=(0.9, 0.95))
    descend(optimizer, values, 1)
    state = optimizer.state[values[0]]
    stored = sum(tensor.nbytes for name, tensor in state.items() if name != "step")
    assert stored == 2 * (4200 + 4 * 17)


def test_a_skipped_step_changes_nothing() -> None:
    values = [torch.nn.Parameter(torch.ones(64, 64))]
    optimizer = AdamW8bit(values, lr=1e-2, betas=(0.9, 0.95))
    values[0].grad = torch.full((64, 64), torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(values[0], torch.ones(64, 64))
    assert not any(tensor.any() for tensor in optimizer.state[values[0]].values())


def test_states_of_small_parameters_are_those_of_adamw() -> None:
    small, whole = parameters()[2:], parameters()[2:]
    optimizer = AdamW8bit(small, lr=1e-2, betas=(0.9, 0.95))
    descend(optimizer, small, 5)
    descend(torch.optim.AdamW(whole, lr=1e-2, betas=(0.9, 0.95), fused=True), whole, 5)
    assert torch.equal(small[0], whole[0])
    assert optimizer.state[small[0]]["exp_avg"].dtype == torch.float32
    assert [int(optimizer.state[value]["step"]) for value in small] == [5, 5]


def test_optimizer_states_resume_bit_for_bit_any_number_of_times() -> None:
    values = parameters()
    optimizer = AdamW8bit(groups(values), lr=1e-2, betas=(0.9, 0.95))
    descend(optimizer, values, 5)
    copies = [nn.Parameter(value.detach().clone()) for value in values]
    resumed = AdamW8bit(groups(copies), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(20):
        resumed.load_state_dict(deepcopy((resumed if resumed.state else optimizer).state_dict()))
    assert resumed.param_groups[0]["weight_decay"] == 0.1
    descend(optimizer, values, 3)
    descend(resumed, copies, 3)
    for one, other in zip(values, copies, strict=True):
        assert torch.equal(one, other)


def dequantized(optimizer: AdamW8bit, value: nn.Parameter, name: str) -> torch.Tensor:
    state, code = optimizer.state[value], _code(name, value.device)
    scales = state[f"{name}_absmax"].repeat_interleave(256)[: value.numel()]
    return code[state[f"{name}_8bit"].flatten().long()] * scales


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("width", [30, 256])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_resharded_states_keep_their_values(name: str, width: int, factor: float) -> None:
    """As saved by ranks with other parts of the rows: scales within a block differ if `factor` is not 1."""
    value = nn.Parameter(torch.randn(140, width, generator=torch.Generator().manual_seed(2)))
    optimizer = AdamW8bit([value], lr=1e-2, betas=(0.9, 0.95))
    descend(optimizer, [value], 5)
    state = optimizer.state_dict()
    given = state["state"][0]
    scales = given[f"{name}_absmax"].clone()
    assert scales.shape == (140, {30: 30, 256: 16}[width])
    scales[:, ::2] *= factor
    given[f"{name}_absmax"] = scales
    stored = _code(name, value.device)[given[f"{name}_8bit"].long()] * scales.repeat_interleave(
        width // scales.shape[1], dim=1
    )
    optimizer.load_state_dict(state)
    after = dequantized(optimizer, value, name)
    assert (after - stored.flatten()).abs().max() <= (0 if factor == 1 else 0.02 * stored.abs().max())


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import_bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PrerequisiteError, match="adamw8bit") as caught:
        AdamW8bit(parameters(), lr=1e-2, betas=(0.9, 0.95))
    assert "ftkit[qlora]" in str(caught.value.fix)


def test_loss_is_close_to_adamw_and_a_run_resumes_bit_for_bit_on_fewer_and_more_processes(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    expected = {step: loss for step, (loss, _) in finished_run.losses().items()}
    pair = make_run("pair", SMALL, NO_QUESTIONS)
    pair.train()
    assert {step: loss for step, (loss, _) in pair.losses().items()} == pytest.approx(expected, rel=0.01)
    pair.copy_to("pair-resumed").forget_after(10)
    resumed = make_run("pair-resumed", SMALL, NO_QUESTIONS)
    resumed.train()
    assert resumed.losses() == {step: loss for step, loss in pair.losses().items() if step > 10}
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
