"""Asynchronous checkpoints: training continues while they are written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from waiting import PATIENCE_SECONDS

from ftkit.errors import TrainingError
from ftkit.runs.checkpoints import TrainState
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import CheckpointRecord
from ftkit.train.checkpoint import saving
from ftkit.train.checkpoint.loading import load_newest, read_state
from ftkit.train.checkpoint.saving import Checkpointer, HostSnapshot
from ftkit.train.components.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.planning.plan import RunPlan
    from ftkit.train.world import World


class OneWeight:
    """An engine with one weight."""

    def __init__(self, world: World) -> None:
        self.weight = torch.distributed.tensor.distribute_tensor(torch.zeros(6), world.mesh)

    def state(self) -> dict[str, Any]:
        return {"model": {"weight": self.weight}, "steps": [torch.ones(())]}

    def load(self, folder: Path) -> None:
        read_state(self.state(), folder)


class Gate:
    """Blocks every write until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        self.error: Exception | None = None
        patch.setattr(saving, "state_dict_saver", self)

    def open(self) -> None:
        self._opened.set()

    def save(self, *args: Any, **options: Any) -> None:
        assert self._opened.wait(PATIENCE_SECONDS)
        if self.error:
            raise self.error
        state_dict_saver.save(*args, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def plan(make_run: Callable[..., Any], request: pytest.FixtureRequest) -> RunPlan:
    tolerance = f"training.max_failed_checkpoints={getattr(request, 'param', 0)}"
    plan: RunPlan = make_run(
        f"saving-{request.node.name}"[:60], tolerance, "training.keep_every_steps=4", processes=1
    ).plan
    plan.layout.root.mkdir(parents=True)
    return plan


@pytest.fixture
def engine(world: World) -> Any:
    return OneWeight(world)


@pytest.fixture
def saver(plan: RunPlan, world: World) -> Checkpointer:
    return Checkpointer(plan, world, Recorder(plan.layout, world, lambda _: None).write)


def steps_on_disk(plan: RunPlan) -> list[str]:
    return [folder.name for _, folder in plan.layout.list_checkpoints()]


def test_training_continues_while_a_snapshot_is_written(
    plan: RunPlan, engine: Any, saver: Checkpointer, world: World, gate: Gate
) -> None:
    with saver:
        engine.weight.to_local().fill_(3)
        saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
        saver.report_ended()
        assert steps_on_disk(plan) == []
        assert not [*read_records(plan.layout.metrics)]
        engine.weight.to_local().fill_(4)  # what the next step does
        gate.open()
    assert load_newest(engine, plan.layout, world, plan.fingerprint) == (TrainState(1, plan.fingerprint), ())
    assert engine.weight.to_local().tolist() == [3.0] * 6
    (record,) = read_records(plan.layout.metrics)
    assert isinstance(record, CheckpointRecord)
    assert (record.step, record.path) == (1, str(plan.layout.checkpoint(1)))
    assert 0 < record.stalled_seconds < record.seconds


def test_the_checkpointer_first_removes_partial_checkpoints_of_a_killed_job(plan: RunPlan, saver: Checkpointer) -> None:
    for name in (".step-000010.17.deleted", ".step-000300.partial"):
        (plan.layout.checkpoints / name).mkdir(parents=True)
    with saver:
        assert list(plan.layout.checkpoints.iterdir()) == []


def test_a_checkpoint_waits_for_the_previous_one_and_reuses_its_buffers(
    plan: RunPlan, engine: Any, saver: Checkpointer, world: World, gate: Gate
) -> None:
    with saver:
        saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
        engine.weight.to_local().fill_(4)
        threading.Timer(0.2, gate.open).start()
        saver.save(engine, TrainState(2, plan.fingerprint), in_background=True)
        assert "step-000001" in steps_on_disk(plan)
    assert steps_on_disk(plan) == ["step-000001", "step-000002"]
    load_newest(engine, plan.layout, world, plan.fingerprint)
    assert engine.weight.to_local().tolist() == [4.0] * 6


def test_training_waits_for_the_write_if_host_memory_is_too_small_for_a_snapshot(
    plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "available_bytes", lambda: 30)  # 6 weights and a count are 28 bytes
    gate.open()
    with saver:
        saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
        assert steps_on_disk(plan) == ["step-000001"]
    (record,) = read_records(plan.layout.metrics)
    assert isinstance(record, CheckpointRecord)
    assert record.stalled_seconds == record.seconds


@pytest.mark.parametrize("plan", [1], indirect=True)
def test_failed_checkpoints_are_skipped_until_too_many_fail_in_a_row(
    plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def save(step: int, error: Exception | None, *, in_background: bool = True) -> None:
        gate.error = error
        saver.save(engine, TrainState(step, plan.fingerprint), in_background=in_background)
        saver.wait()

    gate.open()
    full = OSError(28, "No space left on device")
    save(1, full)
    save(2, None)
    save(3, full)
    with pytest.raises(TrainingError, match=r"step 4 .*Errno 28"):
        save(4, full)
    assert steps_on_disk(plan) == ["step-000002"]
    assert list(plan.layout.checkpoints.glob(".*")) == []
    assert "[Errno 28]" in caplog.text
    events = [(record.event, record.step) for record in read_records(plan.layout.metrics)]  # type: ignore[union-attr]
    assert events == [("failed_checkpoint", 1), ("checkpoint", 2), ("failed_checkpoint", 3)]
    save(5, None)
    with pytest.raises(TrainingError, match="of step 6 "):  # a run's last one
        save(6, full, in_background=False)


def test_the_newest_checkpoints_and_every_nth_step_are_kept(
    plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate
) -> None:
    gate.open()
    with saver:
        for step in range(1, 10):
            saver.save(engine, TrainState(step, plan.fingerprint), in_background=True)
    assert steps_on_disk(plan) == [f"step-00000{step}" for step in (4, 8, 9)]


@pytest.mark.parametrize("notice", ["report_ended", "wait", "__exit__"])
def test_an_error_of_a_background_write_fails_the_run(
    notice: str, plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate
) -> None:
    gate.open()
    saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
    saver.wait()
    gate.error = OSError(28, "No space left on device")
    saver.save(engine, TrainState(2, plan.fingerprint), in_background=True)
    assert saver._save is not None
    saver._save.ended.exception()
    with pytest.raises(TrainingError, match=r"step 2 .*Errno 28[^\0]*ftkit resume saving-test_an"):
        getattr(saver, notice)(*([None] * 3 if notice == "__exit__" else []))
    assert steps_on_disk(plan) == ["step-000001"]


def test_a_failing_run_still_completes_the_checkpoint_in_progress(
    plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate
) -> None:
    def fail() -> None:
        with saver:
            saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
            gate.open()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps_on_disk(plan) == ["step-000001"]
    assert [record.event for record in read_records(plan.layout.metrics)] == ["checkpoint"]


def test_the_first_of_two_errors_is_reported(
    plan: RunPlan, engine: Any, saver: Checkpointer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with saver:
            saver.save(engine, TrainState(1, plan.fingerprint), in_background=True)
            gate.error = OSError(28, "No space left on device")
            gate.open()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "of step 1 " in caplog.text


def test_a_run_records_how_long_checkpoints_took_and_blocked_training(finished_run: Any) -> None:
    in_background, last = finished_run.records(CheckpointRecord)
    assert (in_background.step, last.step) == (10, 20)
    assert in_background.stalled_seconds < in_background.seconds
    assert last.stalled_seconds == last.seconds


def test_a_snapshot_of_as_many_tensors_with_other_shapes_gets_other_buffers(world: World) -> None:
    snapshot = HostSnapshot(world)
    snapshot.take({"weight": torch.zeros(6), "moment": torch.zeros(2, 3)})
    second = snapshot.take({"weight": torch.ones(3), "moment": torch.ones(1, dtype=torch.int64)})
    assert torch.equal(second["weight"], torch.ones(3))
    assert second["moment"].dtype == torch.int64
    again = snapshot.take({"weight": torch.zeros(3), "moment": torch.zeros(1, dtype=torch.int64)})
    assert again["weight"].data_ptr() == second["weight"].data_ptr()
