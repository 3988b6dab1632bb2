"""The history of a run and its time per activity, from its records."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.cli.page.run_report import read_report
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import plan_to_json, read_plan
from ftkit.runs import metrics_file
from ftkit.runs.compare import read_run
from ftkit.runs.history import History, read_history, read_summary
from ftkit.runs.metrics_file import append_record, scan_records
from ftkit.runs.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MemoryRecord,
    StageRecord,
    StartRecord,
    StepRecord,
    to_line,
)
from ftkit.runs.spans import Span, merge_spans

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker

    from ftkit.runs.records import Record


def start(time: float, resumed_from: int = 0) -> StartRecord:
    return StartRecord(time, 400, resumed_from, 2, "fsdp2", "cpu", 1000, {})


def evaluation(time: float) -> EvaluationRecord:
    return EvaluationRecord(time, 0, "during", 1.0, 2.0, ())


def test_time_is_divided_by_activity(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    run.layout.manifest.write_text(json.dumps({"starts": [{"time": 100.0}, {"time": 200.0}]}))
    records.write(
        run,
        StageRecord(102.0, "building the model"),
        start(110.0),
        records.step(10, time=120.0, step_seconds=1.0, overhead_ratio=0.2, data_wait_ratio=0.1),
        CheckpointRecord(121.0, 10, "x", 5.0, 2.0),
        records.step(20, time=132.0, step_seconds=1.0, overhead_ratio=0.0),
        # killed, then down until the second start
        StageRecord(205.0, "building the model"),
        start(210.0, resumed_from=10),
        StageRecord(215.0, "evaluating on the validation split, during training"),
        evaluation(219.0),
        records.step(20, time=229.0, step_seconds=1.0, overhead_ratio=0.0),
        StageRecord(229.0, "exporting the model"),
        EndRecord(230.0, "completed", 20, 1.0, None),
    )
    found = read_history(run.layout)
    assert found.time_use == pytest.approx(
        {
            "start-up": 10.0 + 10.0,
            "training": 8.0 + 10.0,
            "data wait": 1.0,
            "other": 1.0 + 5.0 + 1.0,  # within steps; before the evaluation; the export
            "checkpoint": 2.0,
            "repeated": 10.0,
            "down": 200.0 - 132.0,
            "evaluation": 4.0,
        }
    )
    assert found.held_seconds == pytest.approx(130.0 - 68.0)
    assert len(found.speeds) == 1  # the first record of each start is skipped


@pytest.mark.parametrize("is_recorded", [True, False], ids=["with the manifest", "without"])
def test_the_time_of_each_start_counts_its_own_processes(
    make_run: RunMaker, records: Any, *, is_recorded: bool
) -> None:
    run = make_run()
    if is_recorded:
        run.layout.manifest.write_text(json.dumps({"starts": [{"time": 100.0}, {"time": 200.0}]}))
    on_two = [StageRecord(100.0, "building the model"), start(110.0), records.step(10, time=120.0, step_seconds=1.0)]
    on_eight = [
        StageRecord(200.0, "building the model"), replace(start(210.0, 10), world_size=8),
        records.step(20, time=220.0, step_seconds=1.0), EndRecord(230.0, "completed", 20, 1.0, None),
    ]  # fmt: skip
    records.write(run, *on_two, *on_eight)
    found = read_history(run.layout)
    if is_recorded:
        assert found.held_seconds == 20 + 30
        assert found.process_seconds == 20 * 2 + 30 * 8
    else:  # when the second start began is unknown
        assert found.process_seconds == (20 + 90) * 2 + 20 * 8


@pytest.mark.usefixtures("undrawn")
def test_the_cost_of_report_and_comparison_is_that_of_the_gpus_held(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    plan = read_plan(run.layout)
    cluster = plan.cluster.model_copy(
        update={"price_per_gpu_hour": 3600.0, "device": "cuda", "gpus_per_node": 2, "gpu": "h200"}
    )
    priced = replace(plan, cluster=cluster, placement=replace(plan.placement, device="cuda"))
    run.layout.plan.write_text(plan_to_json(priced))
    run.layout.manifest.write_text(json.dumps({"starts": [{"time": 100.0}, {"time": 900.0}]}))
    records.write(run, start(110.0), records.step(10, time=120.0), start(910.0, 10), records.step(20, time=920.0))
    assert read_run(run.layout).results.cost == 2 * (20 + 20)  # not the 780 seconds in the queue
    assert [value for title, value, _ in read_report(run.layout, "running")["tiles"] if title == "Cost"] == ["80.00"]
    on_cpus = replace(priced, placement=replace(plan.placement, device="cpu"))
    assert on_cpus.cost_of(1.0) is None


def test_an_evaluation_is_drawn_between_the_records_before_and_after_it(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    records.write(run, records.step(1, tokens=90), records.step(11, tokens=1090), records.step(21, tokens=1990))
    found = read_history(run.layout)
    assert [found.tokens_at(step) for step in (0, 1, 6, 11, 16, 21, 30)] == [0, 90, 590, 1090, 1540, 1990, 1990]
    assert History().tokens_at(3) == 0


def test_the_highest_peak_of_a_stage_is_kept(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    for peak in (2.0, 3.0, 1.0):
        records.write(run, MemoryRecord(5.0, "training", *[1.0] * 3, 1.0, peak, 3.0))
    assert read_history(run.layout).peak_gib == 3.0


def test_a_folder_without_records_has_no_history(tmp_path: Path) -> None:
    assert read_history(RunLayout(tmp_path)) == History()


def test_damaged_records_are_counted(make_run: RunMaker, records: Any) -> None:
    layout = make_run().layout
    layout.metrics.write_text("damaged\n" + to_line(records.step(1)) + "\n\n{half")
    found = read_history(layout)
    assert found.problem == scan_records(layout.metrics) == "metrics.jsonl has 1 damaged line"
    assert list(found.steps) == [1]


def test_without_the_steps_between_the_first_and_the_last_the_rest_is_the_same(
    make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    steps = [records.step(each, time=each * 10.0) for each in range(11, 31)]
    kinds = ("starts", "first_step", "last_step", "last_evaluation", "checkpoint", "evaluations", "problem")
    for more in ([start(100.0)], [*steps, CheckpointRecord(301.0, 20, "x", 1.0, 1.0)], [start(400.0, 20)],
                 [records.step(each, time=each * 30.0) for each in range(21, 25)], [evaluation(900.0)],
                 [start(1000.0, 0)], [records.step(1, time=1100.0), records.step(2, time=1200.0)]):  # fmt: skip
        records.write(run, *more)
        full, brief = read_history(run.layout), read_summary(run.layout)
        assert [getattr(full, kind) for kind in kinds] == [getattr(brief, kind) for kind in kinds]
    with run.layout.metrics.open("a") as file:
        file.write('{"event": "step", "ti\n')
    assert read_summary(run.layout).problem == scan_records(run.layout.metrics) != ""


kinds = st.sampled_from(["stage", "start", "step", "evaluation", "checkpoint", "end"])


@given(st.lists(st.tuples(kinds, st.floats(0, 50), st.integers(0, 30)), max_size=30), st.lists(st.floats(0, 500)))
def test_spans_are_contiguous_for_any_records(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, float, int]], starts: list[float]
) -> None:
    layout = RunLayout(tmp_path_factory.mktemp("run"))
    layout.manifest.write_text(json.dumps({"starts": [{"time": 1000 + each} for each in starts]}))
    now, lines = 1000.0, []
    for kind, pause, number in events:
        now += pause
        record: Record = {
            "stage": StageRecord(now, "x"),
            "start": start(now, number),
            "step": StepRecord(now, number, 30, 0.0, 1.0, 1.0, 1.0, 1, 1, 1.0, pause / 2, 0.1, 0.1, None, None),
            "evaluation": evaluation(now),
            "checkpoint": CheckpointRecord(now, number, "x", 1.0, pause),
            "end": EndRecord(now, "stopped", number, 1.0, None),
        }[kind]  # type: ignore[assignment]
        lines.append(to_line(record) + "\n")
    layout.metrics.write_text("".join(lines))
    found = read_history(layout)
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert before.end == pytest.approx(after.begin)
        assert before.seconds >= 0
    if found.spans:
        whole = found.spans[-1].end - found.spans[0].begin
        assert sum(found.time_use.values()) == pytest.approx(whole)
        assert whole <= now - 1000.0 + 500.0


def test_short_spans_are_merged_and_have_the_kind_that_takes_most_of_their_time() -> None:
    spans = [Span("training", 0, 10), Span("other", 10, 10.1), Span("training", 10.1, 20), Span("down", 20, 30)]
    assert merge_spans(spans, 1.0) == [Span("training", 0, 20), Span("down", 20, 30)]
    steps = [
        Span(kind, n / 4, (n + 1) / 4) for n in range(40) for kind in (("other",) if n % 4 == 0 else ("training",))
    ]
    alone = [Span("start-up", -20, 0), *steps, Span("down", 10, 30)]
    assert merge_spans(alone, 1.0) == [Span("start-up", -20, 0), Span("training", 0, 10), Span("down", 10, 30)]


@pytest.fixture(scope="module")
def written_run(tmp_path_factory: pytest.TempPathFactory, records: Any) -> Path:
    """A folder with 3,000 steps in two starts, of which the second repeats some; with an evaluation every 100 steps."""
    layout, begin = RunLayout(tmp_path_factory.mktemp("long")), 1000.0
    for first, last in ((0, 1777), (1700, 3000)):
        append_record(layout.metrics, StageRecord(begin + first - 2.0, "loading weights"))
        append_record(layout.metrics, replace(start(begin + first - 1.0, resumed_from=first), num_steps=3000))
        for step in range(first + 1, last + 1):
            append_record(layout.metrics, records.step(step, time=begin + step, num_steps=3000, loss=3.0 - step / 3000))
            if step % 100 == 0:
                append_record(layout.metrics, replace(evaluation(begin + step + 0.5), step=step))
        begin += 500.0
    return layout.root


@pytest.fixture
def long_run(written_run: Path, tmp_path: Path) -> RunLayout:
    """A copy of the written run."""
    return RunLayout(shutil.copytree(written_run, tmp_path / "long"))


def test_a_thinned_history_agrees_with_the_complete_one(long_run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = long_run
    complete, complete_summary = read_history(layout), read_summary(layout)
    monkeypatch.setattr(metrics_file, "LARGE_BYTES", 2**10)
    thinned, summary = read_history(layout), read_summary(layout)
    assert summary == complete_summary
    assert len(thinned.records) < len(complete.records) / 2
    assert len({(each.event, each.time) for each in thinned.records}) == len(thinned.records)
    for name in ("first_step", "last_step", "evaluations", "starts", "training_seconds"):
        assert getattr(thinned, name) == getattr(complete, name), name
    assert thinned.steps.items() <= complete.steps.items()
    assert set(range(20, 3001, 20)) <= set(thinned.steps), "the same steps in each run of this length"
    assert thinned.time_use == pytest.approx(complete.time_use, rel=0.02)


@pytest.mark.parametrize("index", [None, "", "7\n", "0\n3\n", "x\n"])
def test_a_large_file_without_its_own_index_is_read_completely(
    index: str | None, long_run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = long_run
    complete = read_history(layout)
    monkeypatch.setattr(metrics_file, "LARGE_BYTES", 2**10)
    path = layout.metrics.with_suffix(".index")
    path.unlink() if index is None else path.write_text(index)
    assert read_history(layout) == complete


def test_a_step_that_is_being_written_does_not_hide_the_others(
    long_run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = long_run
    monkeypatch.setattr(metrics_file, "LARGE_BYTES", 2**10)
    with layout.metrics.open("a") as file:
        file.write('{"event": "step", "ti')
    last = read_history(layout).last_step
    assert last is not None
    assert last.step == 3000
