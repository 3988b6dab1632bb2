"""Records of anomalous steps."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ftkit.errors import TrainingError
from ftkit.train.components.batches import StepBatch
from ftkit.train.loop import StepResult, StepTiming
from ftkit.train.observers.step_metrics import AnomalyWatch

if TYPE_CHECKING:
    from ftkit.config.training import OnNonfinite
    from ftkit.runs.records import Record

NAN = float("nan")


class Recorder:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def watch(policy: OnNonfinite, recorder: Recorder) -> AnomalyWatch:
    return AnomalyWatch("demo-1", policy, recorder, lambda step: list(range(10 * step, 10 * step + 10)))  # type: ignore[arg-type]


def step(number: int, loss: float = 1.0, norm: float = 0.5) -> StepResult:
    batch = StepBatch([], 0, *[np.empty(0, np.int64)] * 2)
    return StepResult(number, batch, loss, {}, norm, 1e-3, stop_requested=False, timing=StepTiming(1.0, 1.0, 0.0))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (float("inf"), NAN), (1.0, float("inf"))])
def test_a_non_finite_step_stops_the_run_and_reports_its_packs(loss: float, norm: float) -> None:
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"^step 3: loss ") as caught:
        watch("stop", recorder).report(step(3, loss, norm))
    assert "--packs 20,21,22,23,24,25,26,27 demo-1" in caught.value.fix
    assert "ftkit resume demo-1 training.on_nonfinite=skip" in caught.value.fix
    assert [(record.kind, record.step, record.packs) for record in recorder.records] == [
        ("nonfinite", 3, tuple(range(20, 30)))
    ]


def test_non_finite_steps_are_skipped_until_ten_in_a_row() -> None:
    recorder = Recorder()
    looks = watch("skip", recorder)
    for number in range(1, 10):
        looks.report(step(number, NAN, NAN))
    looks.report(step(10))
    for number in range(11, 20):
        looks.report(step(number, NAN, NAN))
    with pytest.raises(TrainingError, match="the 9 before"):
        looks.report(step(20, NAN, NAN))
    assert len(recorder.records) == 19


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_spike_is_recorded_once_typical_values_are_known(what: str) -> None:
    recorder = Recorder()
    looks = watch("stop", recorder)
    looks.report(step(1, **{what: 9.0}))  # nothing to compare with
    for number in range(2, 200):
        looks.report(step(number, loss=1 + 0.01 * (number % 7), norm=0.5 + 0.01 * (number % 5)))
    looks.report(step(200, **{what: 2.0}))
    assert [(record.kind, record.step) for record in recorder.records] == [("spike", 200)]


@pytest.mark.parametrize(("loss", "norm"), [(0.0066, 0.08), (0.003, 0.64), (0.0, 0.0)])
def test_a_multiple_of_values_near_zero_that_vary_as_much_is_no_spike(loss: float, norm: float) -> None:
    recorder, random = Recorder(), Random(1)
    looks = watch("stop", recorder)
    for number in range(1, 200):
        looks.report(
            step(number, loss=0.003 * random.lognormvariate(0, 0.3), norm=0.06 * random.lognormvariate(0, 0.6))
        )
    looks.report(step(200, loss=loss, norm=norm))
    assert recorder.records == []
    looks.report(step(201, loss=2.0))
    assert [record.step for record in recorder.records] == [201]


@pytest.mark.parametrize("loss", [2e-7, 0.7])
def test_rounding_of_a_loss_that_hardly_changes_is_no_spike(loss: float) -> None:
    recorder = Recorder()
    looks = watch("stop", recorder)
    for number in range(1, 400):
        looks.report(step(number, loss=loss * (1 + 1e-7 * (number % 3)), norm=1e-5))
    looks.report(step(400, loss=loss * 1.05, norm=1e-5))
    assert recorder.records == []
