"""Memory records and out-of-memory errors of a run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.modules.module import register_module_forward_pre_hook

from ftkit.cli.page.run_report import read_report
from ftkit.errors import MemoryExhaustedError, TrainingError
from ftkit.planning.fit import HostMemoryPlan
from ftkit.planning.layout import RunLayout
from ftkit.runs.history import read_history
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import EndRecord, FirstStepRecord, MemoryRecord, StepRecord
from ftkit.train import trainer as session
from ftkit.train.components.recorder import Recorder
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.memory import usage
from ftkit.train.memory.usage import MemoryTrace, check_free_host_memory, is_out_of_memory, pin
from ftkit.train.trainer import run_training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.planning.plan import RunPlan
    from ftkit.train.world import World

EXHAUSTED = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def plan(make_run: Callable[..., Any], request: pytest.FixtureRequest) -> RunPlan:
    overrides = ("training.micro_batch_size=4", "training.max_steps=3", "evaluation.generation=null")
    plan: RunPlan = make_run(f"memory-{request.node.name}"[:60], *overrides, processes=1).plan
    plan.layout.root.mkdir(parents=True)
    return plan


def exhaust(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(EXHAUSTED)


def message(plan: RunPlan, world: World) -> str:
    with pytest.raises(MemoryExhaustedError) as caught:
        run_training(plan, world)
    return str(caught.value)


def test_memory_is_recorded_for_each_stage_of_a_run_in_order(finished_run: Any) -> None:
    records = finished_run.records(MemoryRecord)
    assert finished_run.memory_stages() == [
        "building the model",
        "initializing the weights",
        "creating the optimizer",
        "verifying sharding and document isolation",
        "loading the newest checkpoint",
        "evaluating on the validation split, before training",
        "first forward",
        "first backward",
        "first step",
        "training",
        "evaluating on the validation split, after training",
        "exporting the model",
    ]
    for record in records:
        assert 0 < record.allocated_gib == record.reserved_gib <= record.largest_allocated_gib
        assert record.allocated_gib <= record.peak_gib <= record.largest_peak_gib
    assert isinstance([*read_records(finished_run.layout.metrics)][-1], EndRecord)
    assert "memory after first backward: " in finished_run.layout.rank_log(1).read_text()


def test_planned_and_measured_memory_of_a_run_on_cpus_count_the_same(finished_run: Any) -> None:
    """Forked ranks have the modules of the tests too, so they take a little more."""
    report = read_report(finished_run.layout, "completed")
    (ratio,) = [ratio for title, *_, ratio in report["comparisons"] if title == "Peak memory per process"]
    assert ratio is not None
    assert 0.7 < ratio < 2
    steps = finished_run.records(StepRecord)
    peaks = [record.peak_gib for record in finished_run.records(MemoryRecord) if record.time <= steps[-1].time]
    assert max(peaks) * 0.99 <= steps[-1].memory_gib <= read_history(finished_run.layout).peak_gib


def test_the_first_step_records_the_seconds_of_each_stage_before_it(finished_run: Any) -> None:
    (record,) = finished_run.records(FirstStepRecord)
    stages = finished_run.memory_stages()
    assert [*record.phases] == [
        "starting the ranks", "importing libraries", "joining the process group", *stages[: stages.index("training")]
    ]  # fmt: skip
    assert record.seconds == pytest.approx(sum(record.phases.values()), abs=0.1)
    assert all(record.phases[stage] for stage in ("importing libraries", "building the model", "first forward"))


class Counters:
    """A fake allocator's counters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        patch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated)
        patch.setattr(torch.cuda, "memory_reserved", lambda _: self.peak)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, _: torch.device) -> None:
        self.peak = self.allocated

    def use(self, peak: int, then: int) -> None:
        self.allocated, self.peak = then, max(self.peak, peak)


@pytest.fixture
def counters(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    device = world.device
    object.__setattr__(world, "device", torch.device("cuda", 0))
    yield Counters(monkeypatch)
    object.__setattr__(world, "device", device)


def test_each_stage_has_its_own_peak_and_the_run_keeps_the_highest(
    counters: Counters, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "GIB", 1)
    trace = MemoryTrace(world, Recorder(RunLayout(tmp_path), world, lambda _: None).write)
    counters.use(peak=9, then=1)  # before the first stage
    trace.begin("one")
    counters.use(peak=7, then=2)
    trace.begin("two")
    counters.use(peak=5, then=3)
    assert trace.peak_gib() == 9
    counters.use(peak=11, then=3)
    assert trace.peak_gib() == 11
    trace.begin("")
    found = [
        (record.stage, record.allocated_gib, record.peak_gib) for record in read_records(tmp_path / "metrics.jsonl")
    ]
    assert found == [("one", 2, 7), ("two", 3, 11)]
    assert trace.peak_gib() == 11


def test_stages_of_the_first_step_are_recorded_once(world: World, tmp_path: Path) -> None:
    trace = MemoryTrace(world, Recorder(RunLayout(tmp_path), world, lambda _: None).write)
    for stage in 2 * ("first forward", "first backward", "training"):
        trace.begin_once(stage)
    stages = [record.stage for record in read_records(tmp_path / "metrics.jsonl")]
    assert [*stages, trace.stage] == ["first forward", "first backward", "training"]


def test_an_out_of_memory_error_lists_memory_by_part_and_changes_that_would_fit(plan: RunPlan, world: World) -> None:
    calls = []

    def exhaust_in_step_2(module: torch.nn.Module, _: Any) -> None:
        if "DecoderLayer" in type(module).__name__ and torch.is_grad_enabled():
            calls.append(module)
            if len(calls) > 8:  # two layers: of the probe, and of two micro-batches in step 1
                exhaust()

    hook = register_module_forward_pre_hook(exhaust_in_step_2)
    try:
        text = message(plan, world)
    finally:
        hook.remove()
    what, held, predicted, *fix = text.splitlines()
    assert what.startswith("out of memory in stage 'training', in step 2: ")
    assert EXHAUSTED in what
    assert held.startswith("held: parameters 0.0, gradients 0.0, optimizer 0.0, activations, gathered weights and")
    assert predicted.startswith("predicted: parameters 0.0, gradients 0.0,")
    assert fix[1].startswith("  training.activation_checkpointing=")
    assert fix[2].startswith("  training.micro_batch_size=")


def test_an_out_of_memory_error_reports_the_stage(plan: RunPlan, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fsdp2Engine, "step", exhaust)
    assert "'first step', in step 1:" in message(plan, world)
    monkeypatch.setattr(torch.autograd, "backward", exhaust)
    assert "'first backward', in step 1:" in message(plan, world)
    monkeypatch.setattr(session, "begin_weights", exhaust)
    text = message(plan, world)
    assert "'initializing the weights':" in text
    assert "held: not attributed yet" in text


def test_a_run_that_offloads_more_than_is_free_is_warned_of_before_its_model_is_built(
    plan: RunPlan, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HostMemoryPlan(parameters=0, gradients=0, optimizer=30.0, activations=0, processes=10.0)
    monkeypatch.setattr(usage, "available_bytes", lambda: 20 * 2**30)
    check_free_host_memory(plan, world)
    assert not caplog.text
    check_free_host_memory(replace(plan, host_memory=memory), world)
    assert "need about 40 GiB of host memory per node, this node has 30 GiB" in caplog.text
    with pytest.raises(MemoryExhaustedError, match="about 100 GiB"):
        check_free_host_memory(replace(plan, host_memory=replace(memory, optimizer=90.0)), world)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(EXHAUSTED),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
        CheckpointException("loading", {0: (RuntimeError("CUDA out of memory"), None)}),  # type: ignore[dict-item]
    ],
)
def test_allocator_messages_are_recognized(error: BaseException) -> None:
    assert is_out_of_memory(error)
    caused = TrainingError("a checkpoint can't be loaded")
    caused.__cause__ = error
    assert is_out_of_memory(caused)


def test_other_errors_are_unchanged() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(TrainingError("out of memory of an elephant"))


def test_host_memory_stays_pinned_until_its_last_view_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def record(name: str) -> Callable[..., int]:
        return lambda address, *_: (calls.append((name, address)), 0)[1]

    runtime = SimpleNamespace(cudaHostRegister=record("pin"), cudaHostUnregister=record("unpin"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    memory = pin(np.empty(64, np.uint8))
    address = memory.ctypes.data
    view = torch.from_numpy(memory).view(torch.bfloat16)[8:]
    del memory
    assert calls == [("pin", address)]
    assert view.shape == (24,)
    del view
    assert calls == [("pin", address), ("unpin", address)]
