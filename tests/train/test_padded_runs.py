"""Whole runs on padded rows train on the same documents in the same order as runs on packs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ftkit.runs.records import EvaluationRecord, VerificationRecord

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def padded(make_run: Callable[..., Any]) -> Any:
    """The finished run on padded rows, and on another number of processes. Tests copy it instead of changing it."""
    run = make_run("padded", "data.packing=off", "evaluation.generation=null", processes=1)
    run.train()
    return run


def test_padded_rows_train_as_packs_do_on_any_number_of_processes(padded: Any, finished_run: Any) -> None:
    assert padded.records(VerificationRecord)[0].checks["documents are"] == "padded rows"
    assert finished_run.records(VerificationRecord)[0].checks["documents are"] == "packed"
    assert padded.plan.data.root == finished_run.plan.data.root
    packed = finished_run.losses()
    for step, (loss, grad_norm) in padded.losses().items():
        assert (loss, grad_norm) == pytest.approx(packed[step], rel=2e-3), step
    ends = [run.records(EvaluationRecord)[-1].loss for run in (padded, finished_run)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)


def test_a_run_on_padded_rows_is_resumed_exactly(padded: Any) -> None:
    resumed = padded.copy_to("padded-resumed")
    resumed.forget_after(10)
    resumed.train()
    straight = padded.losses()
    assert resumed.losses() == {step: straight[step] for step in range(11, 21)}
