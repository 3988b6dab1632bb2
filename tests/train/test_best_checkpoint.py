"""`evaluation.best` and early stopping: the best checkpoint is kept, exported, and found by all commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftkit.cli.main import main
from ftkit.config.recipe import BestSpec
from ftkit.errors import DataError
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.source import find_target
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.layout import Workspace
from ftkit.runs.checkpoints import BestEvaluation, TrainState, find_best, read_marker
from ftkit.runs.records import EndRecord, EvaluationRecord, StepRecord
from ftkit.train.loop import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

BEST = (
    "evaluation.every_steps=2", "evaluation.generation=null", "evaluation.best={metric: repetition, mode: max}",
    "evaluation.generation={metrics: [repetition, exact_match], num_rows: 4, num_rows_during: 2, max_new_tokens: 12}",
    "evaluation.early_stopping_patience=2", "training.keep_checkpoints=1", "training.log_every_steps=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run]) -> Run:
    """A run on two ranks with a metric that soon stops improving: the repetition of completions."""
    run = make_run("best-20261121T090000Z-1b2c", *BEST)
    run.train()
    return run


def test_training_stops_early_and_the_best_checkpoint_is_kept_and_exported(run: Run) -> None:
    during = {each.step: each for each in run.records(EvaluationRecord) if each.when == "during"}
    (end,) = run.records(EndRecord)
    best = max(during, key=lambda step: (during[step].scores["repetition"], -step))
    assert (end.outcome, end.early_stopping_patience, end.best_step) == ("completed", 2, best)
    assert list(during) == list(range(2, best + 2 * 2 + 1, 2))
    assert end.step == max(during) < 20
    assert run.records(StepRecord)[-1].step == end.step
    assert [step for step, _ in run.layout.list_checkpoints()] == [best, end.step]
    (after,) = (each for each in run.records(EvaluationRecord) if each.when == "after")
    assert (after.step, after.loss) == (best, pytest.approx(during[best].loss))
    assert set(after.scores) == {"repetition", "exact_match"}
    assert len(after.samples) == 4
    exported, checkpoint = (
        load_model(find_target(f"best{at}", Workspace(run.plan.workspace)).source, torch.device("cpu"))
        for at in ("", "@best")
    )
    assert checkpoint.label.endswith(f"@{best}")
    for (name, left), right in zip(exported.hf_model.named_parameters(), checkpoint.hf_model.parameters(), strict=True):
        torch.testing.assert_close(left, right, msg=name)


def test_a_run_resumed_from_its_best_checkpoint_ends_as_an_uninterrupted_run(run: Run) -> None:
    (end,) = run.records(EndRecord)
    progress = read_marker(run.layout.checkpoint(end.step), end.step).progress
    assert progress.evaluations_without_improvement == 2
    assert progress.best == find_best(run.layout)
    resumed = run.copy_to("best-20261121T090000Z-3d4e")
    resumed.forget_after(end.best_step)
    resumed.train()
    (again,) = resumed.records(EndRecord)
    assert (again.step, again.best_step, again.early_stopping_patience) == (end.step, end.best_step, 2)


def test_a_run_that_continues_without_comparing_evaluations_exports_its_last_step(run: Run) -> None:
    (end,) = run.records(EndRecord)
    longer = run.copy_to("best-20261121T090000Z-5e6f")
    recipe = longer.plan.recipe
    evaluation = recipe.evaluation.model_copy(update={"best": None, "early_stopping_patience": None})
    training = recipe.training.model_copy(update={"max_steps": end.step + 1})
    changed = recipe.model_copy(update={"evaluation": evaluation, "training": training})
    longer.plan = replace(longer.plan, recipe=changed)
    longer.train()
    last = longer.records(EndRecord)[-1]
    assert (last.step, last.best_step) == (end.step + 1, None)
    assert json.loads((longer.layout.export / EXPORT_RECORD).read_text())["step"] == end.step + 1


def test_a_run_that_took_all_its_steps_was_not_stopped_early(run: Run) -> None:
    (end,) = run.records(EndRecord)
    complete = run.copy_to("best-20261121T090000Z-7a8b")
    recipe = complete.plan.recipe
    training = recipe.training.model_copy(update={"max_steps": end.step})
    complete.plan = replace(complete.plan, recipe=recipe.model_copy(update={"training": training}))
    complete.train()
    last = complete.records(EndRecord)[-1]
    assert (last.step, last.outcome, last.early_stopping_patience) == (end.step, "completed", None)


def test_commands_show_the_best_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    assert main(["runs", "checkpoints", run.plan.id, "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [each["best"] is not None for each in listed] == [True, False]
    assert main(["runs", "checkpoints", run.plan.id]) == 0
    assert "best (repetition" in capfd.readouterr().out


def record(step: int, loss: float) -> EvaluationRecord:
    return EvaluationRecord(0.0, step, "during", loss, math.nan, ())


def progress_with(state: TrainState, threshold: float = 0.0, criterion: BestSpec | None = None) -> Progress:
    evaluation = SimpleNamespace(early_stopping_threshold=threshold, selection=criterion or BestSpec())
    recipe = SimpleNamespace(evaluation=evaluation, training=SimpleNamespace(max_steps=99))
    plan: Any = SimpleNamespace(recipe=recipe)
    no_batches: Any = None
    return Progress.resume(plan, no_batches, state)


@given(st.lists(st.floats(width=16), max_size=30), st.floats(0, 2))
def test_the_best_evaluation_is_the_first_minimum_and_only_larger_gains_reset_patience(
    losses: list[float], threshold: float
) -> None:
    progress = progress_with(TrainState(0, "data"), threshold)
    waited = 0
    for step, loss in enumerate(losses, start=1):
        before = min((each for each in losses[: step - 1] if math.isfinite(each)), default=math.inf)
        waited = 0 if math.isfinite(loss) and before - loss > threshold else waited + 1
        progress.add_evaluation(record(step, loss), BestSpec())
        assert progress.is_best == (progress.state.best is not None and progress.state.best.step == step)
    state, finite = progress.state, [each for each in losses if math.isfinite(each)]
    assert (state.best.value if state.best else None) == min(finite, default=None)
    assert state.best is None or losses.index(state.best.value) + 1 == state.best.step
    assert state.evaluations_without_improvement == waited


def test_a_best_metric_that_no_row_has_a_score_of_ends_the_run() -> None:
    measured, progress = replace(record(1, 2.0), scores={"exact_match": 0.5}), progress_with(TrainState(1, "data"))
    with pytest.raises(DataError, match=r"'calls'") as caught:
        progress.add_evaluation(measured, BestSpec(metric="calls"))
    assert caught.value.fix.endswith("loss, perplexity, exact_match")
    progress.add_evaluation(record(1, math.nan), BestSpec())  # measured, though not finite


def test_a_changed_metric_resets_the_best_evaluation() -> None:
    state = TrainState(1, "data", BestEvaluation(1, "loss", 2.0), evaluations_without_improvement=3)
    assert progress_with(state).state == state
    changed = progress_with(state, criterion=BestSpec(metric="perplexity")).state
    assert (changed.best, changed.evaluations_without_improvement) == (None, 0)
