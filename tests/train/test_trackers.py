"""Records in trackers, read back with each tracker's library."""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.main import main
from ftkit.config.recipe import TrackingSpec
from ftkit.errors import PrerequisiteError
from ftkit.runs.records import EndRecord, EvaluationRecord, StageRecord, StartRecord, StepRecord
from ftkit.train.components import recorder as trackers
from ftkit.train.components.recorder import Recorder, open_trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.planning.plan import RunPlan
    from ftkit.runs.records import Record
    from ftkit.train.world import World


def start(resumed_from: int = 0) -> StartRecord:
    return StartRecord(1.0, 4, resumed_from, 1, "fsdp2", "cpu", 1000, {"torch": "2"})


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(1.0, number, 4, 0.5, loss, 1e-3, 0.7, 100, 60, 50.0, 2.0, 0.1, 0.01, None, None)


def evaluation(number: int, accuracy: float | None) -> EvaluationRecord:
    return EvaluationRecord(1.0, number, "after", 2.0, 7.4, (), scores={} if accuracy is None else {"sql": accuracy})


def end(outcome: Any, number: int) -> EndRecord:
    return EndRecord(1.0, outcome, number, 1.0, None)


BEGINNING: list[Record] = [
    StageRecord(0.0, "x"),
    start(),
    evaluation(0, None),
    step(1, 4.0),
    step(2, 3.0),
    step(3, 9.0),
]
REST: list[Record] = [start(resumed_from=2), step(3, 2.0), step(4, 1.0), evaluation(4, 0.5), end("completed", 4)]


@pytest.fixture
def plan_with(make_run: Callable[..., Any], tmp_path: Path) -> Callable[..., RunPlan]:
    def make(*sinks: str, **keys: str) -> RunPlan:
        plan: RunPlan = make_run("tracked").plan
        tracking = TrackingSpec.model_validate({"sinks": sinks, **keys})
        plan = replace(plan, workspace=tmp_path, recipe=plan.recipe.model_copy(update={"tracking": tracking}))
        plan.layout.root.mkdir(parents=True)
        return plan

    return make


def send(plan: RunPlan, world: World, records: list[Record]) -> None:
    with open_trackers(plan, world) as pass_on:
        recorder = Recorder(plan.layout, world, pass_on)
        for record in records:
            recorder.write(record)


def test_tensorboard_shows_a_resumed_run_without_duplicate_steps(
    plan_with: Callable[..., RunPlan], world: World
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = plan_with("tensorboard")
    send(plan, world, BEGINNING)
    send(plan, world, REST)
    events = EventAccumulator(str(plan.layout.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4), (2, 3), (3, 2), (4, 1)]
    assert [event.value for event in events.Scalars("eval/sql")] == [0.5]
    assert {
        "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "train/data_wait_ratio",
        "eval/loss", "eval/perplexity",
    } <= set(events.Tags()["scalars"])  # fmt: skip
    (text, *_) = events.Tensors("config/text_summary")
    assert b'"max_steps": 20' in text.tensor_proto.string_val[0]


def test_mlflow_resumes_the_same_run(
    plan_with: Callable[..., RunPlan], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = (tmp_path / "mlflow").as_uri()
    plan = plan_with("mlflow", mlflow_uri=address, project="ours")
    client = MlflowClient(address)

    send(plan, world, BEGINNING)
    experiment: Any = client.get_experiment_by_name("ours")
    (failed,) = client.search_runs([experiment.experiment_id])
    assert failed.info.status == "FAILED", "no end record: the trainer died"

    send(plan, world, REST)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (plan.id, "FINISHED")
    assert run.data.params["recipe.training.max_steps"] == "20"
    assert run.data.params["versions.torch"] == "2"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 4), (2, 3), (3, 9), (3, 2), (4, 1)]
    assert run.data.metrics["eval/sql"] == 0.5


def test_wandb_offline_writes_to_the_run_folder(
    plan_with: Callable[..., RunPlan], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    plan = plan_with("wandb", project="ours")
    send(plan, world, [*BEGINNING[:-1], end("stopped", 2)])
    send(plan, world, REST)
    files = sorted((plan.layout.root / "wandb").glob(f"offline-run-*/run-{plan.id}.wandb"))
    assert len(files) == 2, "offline, each start leaves a folder; 'wandb sync' makes one run of them"
    shown = {}
    for record in (record for file in files for record in _wandb_records(file)):
        if record.HasField("run"):
            assert (record.run.run_id, record.run.project) == (plan.id, "ours")
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            shown[record.history.step.num] = items.get("train/loss")
    assert shown == {0: None, 1: "4", 2: "3", 3: "2", 4: "1"}


def _wandb_records(file: Path) -> Iterator[Any]:
    """Read W&B's file: a header of 7 bytes, then a LevelDB log, whose records are divided at blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32_768 - position % 32_768 < 7:  # too small for the header of a part
            position += 32_768 - position % 32_768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        position += 7
        parts += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield WandbRecord.FromString(parts)
            parts = b""


def test_a_failing_tracker_warns_once_without_secrets(
    plan_with: Callable[..., RunPlan],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[Any] = []

    class Unreliable:
        def log(self, scalars: dict[str, float], step: int) -> None:
            if step < 4:
                raise ConnectionError("no answer from https://me:hunter2@tracker")
            taken.append(scalars)

        def close(self, outcome: str) -> None:
            taken.append(outcome)

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *_: Unreliable())
    with caplog.at_level(logging.WARNING):
        send(plan_with("tensorboard"), world, [start(), step(1, 4.0), step(2, 3.0), *REST])
    (warning,) = [record for record in caplog.records if record.name == trackers.__name__]
    assert "training continues: ConnectionError" in warning.message
    assert "hunter2" not in warning.message
    train, held_out, outcome = taken
    assert (train["train/loss"], held_out["eval/loss"], outcome) == (1.0, 2.0, "completed")


def test_a_hanging_tracker_does_not_delay_the_run(
    plan_with: Callable[..., RunPlan],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = threading.Event()

    class Hanging:
        def log(self, *_: Any) -> None:
            answer.wait()

        def close(self, outcome: str) -> None:
            """Nothing to close."""

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *_: Hanging())
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    send(plan_with("tensorboard"), world, BEGINNING + REST)
    assert "in time" in caplog.text
    answer.set()


def test_only_rank_0_opens_trackers(plan_with: Callable[..., RunPlan], world: World) -> None:
    plan = plan_with("tensorboard")
    send(plan, replace(world, rank=1), BEGINNING)
    assert list(plan.layout.root.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_tracker_package_is_reported_with_its_extra(
    name: Any, plan_with: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with(name)
    monkeypatch.setattr("ftkit.config.recipe.find_spec", lambda package: None if package == name else object())
    with pytest.raises(PrerequisiteError) as caught, open_trackers(plan):
        pass
    assert f"ftkit[{name}]" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "wanted", "enough"),
    [
        ("wandb", "WANDB_API_KEY", {"WANDB_API_KEY": "any"}),
        ("wandb", "WANDB_MODE", {"WANDB_MODE": "offline"}),
        ("mlflow", "MLFLOW_TRACKING_URI", {"MLFLOW_TRACKING_URI": "http://mlflow"}),
    ],
)
def test_a_trackers_environment_is_checked_before_the_model_is_built(
    name: Any, wanted: str, enough: dict[str, str], plan_with: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    plan = plan_with(name)
    other_rank: Any = SimpleNamespace(is_first=False)
    with pytest.raises(PrerequisiteError) as caught, open_trackers(plan, other_rank):
        pass
    assert wanted in caught.value.fix
    for variable, value in enough.items():
        monkeypatch.setenv(variable, value)
    with open_trackers(plan, other_rank):
        pass


def test_a_run_without_trackers_imports_none() -> None:
    code = (
        "import sys, ftkit.train.components.recorder; "
        "sys.exit(bool({'wandb', 'mlflow', 'tensorboard'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_sends_its_records_to_trackers(make_run: Callable[..., Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(
        "whole-run-tracked",
        "tracking.sinks=[tensorboard]", "training.max_steps=3", "evaluation.generation=null", processes=1,
    )  # fmt: skip
    run.train()
    events = EventAccumulator(str(run.layout.tensorboard))
    events.Reload()
    sent = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sent == pytest.approx({number: loss for number, (loss, _) in run.losses().items()})
    assert [event.step for event in events.Scalars("eval/perplexity")] == [0, 3]
    assert main(["eval", str(run.layout.root), "--limit", "3", "--metrics", "loss", "--no-before"]) == 0
    events.Reload()
    assert [event.step for event in events.Scalars("job_eval/loss")] == [3]
    assert len(events.Scalars("train/loss")) == len(sent)
