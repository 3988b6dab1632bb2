"""Comparison of runs from their run folders."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.cli.terminal.comparison_view import compare_runs
from ftkit.planning.plan import plan_to_json, read_plan
from ftkit.runs.compare import (
    ComparedRun,
    LossPoint,
    RunResults,
    align_losses,
    compare_curves,
    differing_objectives,
    find_best,
    find_differences,
    have_same_documents,
    read_run,
)
from ftkit.runs.records import EvaluationRecord, MemoryRecord, StartRecord

if TYPE_CHECKING:
    from conftest import RunMaker

UNKNOWN = RunResults()


def start(time: float, resumed_from: int, world_size: int = 2, torch: str = "2.7") -> StartRecord:
    return StartRecord(time, 400, resumed_from, world_size, "fsdp2", "cpu", 1000, {"torch": torch})


def with_curve(name: str, *points: tuple[int, float]) -> ComparedRun:
    return ComparedRun(name, {}, UNKNOWN, tuple(LossPoint(step, *point) for step, point in enumerate(points)))


def test_results_of_an_interrupted_run_exclude_lost_steps(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    memory = MemoryRecord(5.0, "training", *[1.0] * 3, 1.0, 2.5, 3.0)
    records.write(
        run,
        start(10.0, 0),
        records.step(10, 3.0, tokens_per_second=1.0, mfu=0.1),  # the first step compiles
        records.step(20, 2.0, tokens_per_second=200.0, mfu=0.4),
        records.step(30, 9.0, tokens_per_second=200.0, mfu=0.4),  # lost
        memory,
        start(100.0, 20, world_size=1),
        records.step(30, 1.0, time=130.0, tokens_per_second=1.0, mfu=0.1),
        records.step(40, 0.5, time=140.0, tokens_per_second=55.0, mfu=0.4),
    )
    run.layout.manifest.write_text(json.dumps({"starts": [{"time": 10.0}, {"time": 100.0}]}))
    found = read_run(run.layout)
    assert [(point.step, point.loss) for point in found.curve] == [(10, 3.0), (20, 2.0), (30, 1.0), (40, 0.5)]
    results = found.results
    assert (results.step, results.tokens, results.loss) == (40, 40 * 8192, 0.5)
    assert (results.tokens_per_second_per_process, results.mfu) == (100.0, 0.4)
    assert (results.measured_gib, results.predicted_gib) == (2.5, read_plan(run.layout).memory.total)
    assert (results.training_seconds, results.num_restarts) == (30.0 + 40.0, 1)


def test_metrics_of_preferences_are_those_of_the_last_evaluation_or_else_of_the_last_step(
    make_run: RunMaker, records: Any
) -> None:
    run, steps = make_run(), {"accuracy": 0.5, "margin": 1.5, "kl_per_token": 0.1, "reward_chosen": 2.0}
    records.write(run, start(10.0, 0), replace(records.step(10, 3.0), scores=steps))
    results = read_run(run.layout).results
    assert (results.accuracy, results.margin, results.kl_per_token) == (0.5, 1.5, 0.1)
    evaluation = EvaluationRecord(20.0, 10, "during", 2.0, 7.0, (), {}, {"accuracy": 0.75, "kl_per_token": 0.2})
    records.write(run, start(10.0, 0), replace(records.step(10, 3.0), scores=steps), evaluation)
    results = read_run(run.layout).results
    assert (results.accuracy, results.margin, results.kl_per_token) == (0.75, None, 0.2)  # of one kind of completions
    rows = dict(compare_runs([read_run(run.layout)] * 2).results)
    assert (rows["accuracy"], rows["log-ratio per token"], "margin" in rows) == (["75.0%"] * 2, ["0.2"] * 2, False)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({"train": "1", "documents": "3"}, {"train": "2", "documents": "3"}, True),
        ({"train": "1", "documents": "3"}, {"train": "2", "documents": "4"}, False),
        ({"train": "1"}, {"train": "1", "documents": "3"}, True),
        ({"train": "1"}, {"train": "2"}, None),
        ({"train": "1", "number": 500}, {"train": "2", "number": 170}, False),
        ({"documents": "3", "tokenizer": "a"}, {"documents": "4", "tokenizer": "b"}, None),
        ({"number": 500, "tokenizer": "a"}, {"number": 170, "tokenizer": "b"}, False),
        ({}, {}, None),
    ],
)
def test_runs_are_compared_by_the_documents_that_they_trained_on(
    one: dict[str, Any], two: dict[str, Any], expected: bool | None, make_run: RunMaker
) -> None:
    found = []
    for name, values in (("a", one), ("b", two)):
        digests = {"tokenizer": "t"} | {key: value for key, value in values.items() if key != "number"}
        numbers = {"training documents": values["number"]} if "number" in values else {}
        layout = make_run(name).layout
        layout.manifest.write_text(json.dumps({"starts": [{"data": digests, "documents": numbers}]}))
        found.append(read_run(layout))
    assert have_same_documents(*found) is expected
    assert have_same_documents(*reversed(found)) is expected


def test_differences_are_found_in_each_section_and_nowhere_else(make_run: RunMaker, records: Any) -> None:
    first, second = make_run("a"), make_run("b")
    plan = read_plan(second.layout)
    training = plan.recipe.training.model_copy(update={"learning_rate": 0.5})
    recipe = plan.recipe.model_copy(update={"training": training})
    changed = replace(plan, recipe=recipe, fingerprint="other", cluster=plan.cluster.model_copy(update={"qos": "high"}))
    second.layout.plan.write_text(plan_to_json(changed))
    records.write(first, start(1.0, 0))
    records.write(second, start(1.0, 0, torch="2.8"))
    for run, digest in ((first, "1"), (second, "2")):
        run.layout.manifest.write_text(json.dumps({"image_sha256": digest}))
    found = find_differences([read_run(first.layout), read_run(second.layout)])
    assert [(each.section, each.key) for each in found] == [
        ("recipe", "training.learning_rate"),
        ("data", "fingerprint"),
        ("image", "image_sha256"),
        ("versions", "torch"),
        ("cluster", "qos"),
    ]
    assert found[0].values == (plan.recipe.training.learning_rate, 0.5)


def test_values_that_follow_from_others_are_no_differences() -> None:
    derived = ("model.architecture.counts.linears", "teacher.source", "teacher.trained.folder", "teacher.added_tokens")
    stated = ("model.architecture.hidden_size", "training.distill.teacher", "teacher.weights", "teacher.trained.sha256")
    one = with_recipe(trial("a", 1.0), **dict.fromkeys((*derived, *stated), "a" * 64))
    two = with_recipe(trial("a", 1.0), **dict.fromkeys((*derived, *stated)))
    assert [each.key for each in find_differences([one, two])] == list(stated)
    digests = dict(compare_runs([one, two]).differences)["teacher.trained.sha256"]
    assert digests == ["a" * 12, "-"]


def test_the_training_time_is_that_of_the_trainer(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    end = replace(records.end(), time=150.0, training_seconds=20.0)  # the rest is an evaluation and the export
    records.write(run, start(10.0, 0), records.step(10, 3.0), start(100.0, 10), records.step(20, 2.0, time=130.0), end)
    assert read_run(run.layout).results.training_seconds == 10.0 + 20.0


def test_results_have_the_step_that_was_validated(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    best = EvaluationRecord(50.0, 6, "after", 1.0, 7.0, ())
    records.write(run, start(10.0, 0), records.step(12, 3.0), replace(best, step=12, when="during"), best)
    results = read_run(run.layout).results
    assert (results.step, results.validated_step, results.validation_loss) == (12, 6, 1.0)


def test_an_empty_folder_compares_as_unknown(make_run: RunMaker) -> None:
    layout = make_run().layout
    layout.plan.write_text("{")
    assert read_run(layout).results == UNKNOWN
    layout.plan.write_text('{"recipe": 3, "memory": [], "cluster": null, "placement": {"device": "cuda"}}')
    assert read_run(layout).results == UNKNOWN


def test_only_recorded_losses_are_compared() -> None:
    fine = with_curve("fine", (5, 4.0), (10, 3.0), (20, 2.0), (30, 1.0))
    coarse = with_curve("coarse", (10, 5.0), (25, 3.0), (30, 1.5), (40, 1.0))
    found = align_losses([fine, coarse])
    assert (found.by, found.points) == ("tokens", [(10, (3.0, 5.0)), (30, (1.0, 1.5))])
    assert compare_curves(fine, coarse).first_difference == 10
    assert align_losses([fine, with_curve("none")]).points == []


def test_runs_on_other_tokens_are_compared_at_the_same_steps() -> None:
    one = with_curve("one", (11, 4.0), (19, 3.0), (32, 2.0))
    other_order = with_curve("other", (9, 4.5), (21, 2.5), (32, 2.0))  # an epoch has the same tokens in any order
    assert align_losses([one, other_order]).points == [(0, (4.0, 4.5)), (1, (3.0, 2.5)), (2, (2.0, 2.0))]
    found = compare_curves(one, other_order)
    assert (found.by, found.num_common, found.first_difference, found.largest_difference) == ("step", 3, 0, 0.5)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_each_compared_loss_is_one_that_a_run_recorded(
    one: list[tuple[int, float]], two: list[tuple[int, float]], num_points: int
) -> None:
    runs = []
    for name, steps in (("one", one), ("two", two), ("self", one)):
        tokens, points = 0, []
        for more, loss in steps:
            tokens += more
            points.append((tokens, loss))
        runs.append(with_curve(name, *points))
    found = align_losses(runs)
    assert len(found.some(num_points)) <= min(num_points, len(found.points))
    for place, losses in found.some(num_points):
        for run, loss in zip(runs, losses, strict=True):
            assert (place, loss) in [(getattr(point, found.by), point.loss) for point in run.curve]
    itself = align_losses([runs[0], runs[2]])
    assert itself.some(len(one)) == itself.points
    assert [loss for _, (loss, _) in itself.points] == [loss for _, loss in one]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (((10, 3.0), (20, 2.0)), (2, 0.0, None)),
        (((10, 3.0), (20, 2.5)), (2, 0.5, 20)),
        (((15, 3.0),), (1, 0.0, None)),  # at the same step
        (((10, 3.0), (30, float("nan"))), (2, 0.0, None)),
    ],
)
def test_curves_are_equal_only_bit_for_bit(other: tuple[tuple[int, float], ...], expected: tuple[Any, ...]) -> None:
    first = with_curve("first", (10, 3.0), (20, 2.0), (30, float("nan")))
    found = compare_curves(first, with_curve("other", *other))
    assert (found.num_common, found.largest_difference, found.first_difference) == expected


def trial(name: str, loss: float | None, *, lr: float = 1e-3, seed: int = 0, data: str = "v") -> ComparedRun:
    recipe = {"training.learning_rate": lr, "training.seed": seed}
    sections = {"recipe": recipe, "data": {"validation sha256": data, "fingerprint": name}}
    inputs = {section: sections.get(section, {}) for section in ("recipe", "data", "image", "versions", "cluster")}
    return ComparedRun(name, inputs, RunResults(loss=9.0, validation_loss=loss), ())


def test_the_best_run_has_the_lowest_validation_loss() -> None:
    best = find_best([trial("a", 2.0, lr=1), trial("b", None, lr=2), trial("c", 1.5, lr=3), trial("d", math.nan, lr=4)])
    assert best is not None
    assert (best.run, best.metric, best.value, best.seed_std) == ("c", "validation_loss", 1.5, None)
    assert (best.settings, best.means) == ((("c",), ("a",)), (1.5, 2.0))


def test_without_validation_the_best_run_has_the_lowest_training_loss() -> None:
    best = find_best([trial("a", None), trial("b", None, lr=2)])
    assert best is not None
    assert (best.metric, best.value) == ("loss", 9.0)


def test_losses_on_different_data_have_no_best() -> None:
    assert find_best([trial("a", 2.0), trial("b", 1.0, data="w")]) is None


def with_recipe(run: ComparedRun, selected: float | None = None, **values: object) -> ComparedRun:
    """Return a run with more values of its recipe, whose keys have `__` for dots, and of its selection metric."""
    recipe = run.inputs["recipe"] | {key.replace("__", "."): value for key, value in values.items()}
    return replace(run, inputs=run.inputs | {"recipe": recipe}, results=replace(run.results, selected=selected))


@pytest.mark.parametrize(
    ("objective", "one", "two"),
    [
        ("dpo", {}, {"training__objective": "simpo"}),
        ("dpo", {"training__dpo": None}, {"training__dpo__beta": 0.2}),
        ("dpo", {}, {"training__dpo__loss_weight_sft": 0.5}),
        ("dpo", {"model__weights": "a"}, {"model__weights": "b"}),  # the reference
        ("distill", {"training__distill__alpha": 0.5}, {"training__distill__alpha": 1.0}),
        ("distill", {"teacher__weights": "a"}, {"teacher__weights": "b"}),
        ("next_token", {}, {"training__objective": "distill"}),
    ],
)
def test_losses_of_different_objectives_have_no_best_and_no_difference(
    objective: str, one: dict[str, object], two: dict[str, object]
) -> None:
    first, second = (
        replace(
            with_recipe(trial(name, loss), **{"training__objective": objective} | values),
            curve=(LossPoint(1, 10, loss), LossPoint(2, 20, loss)),
        )
        for name, loss, values in (("a", 2.0, one), ("b", 1.0, two))
    )
    reason = differing_objectives([first, second])
    assert find_best([first, second]) is None
    assert compare_curves(first, second).largest_difference is None
    assert reason
    assert reason in compare_runs([first, second]).best


@pytest.mark.parametrize(
    ("metric", "key", "has_best"),
    [
        ("loss", "evaluation.max_packs", False),
        ("loss", "evaluation.generation.num_rows", True),
        ("repetition", "evaluation.generation.num_rows", False),
        ("repetition", "evaluation.generation.max_new_tokens", False),
        ("repetition", "evaluation.max_packs", True),
        ("repetition", "evaluation.generation.metrics", True),
    ],
)
def test_evaluations_of_different_rows_have_no_best(metric: str, key: str, has_best: bool) -> None:
    first, second = (
        with_recipe(trial(name, value), value, **{"evaluation.best.metric": metric, key: number})
        for name, value, number in (("a", 2.0, 1), ("b", 1.0, 64))
    )
    assert (find_best([first, second]) is not None) == has_best
    assert (key in compare_runs([first, second]).best) != has_best


@pytest.mark.parametrize(
    ("objective", "one", "two"),
    [
        ("dpo", {"training__dpo": None}, {"training__dpo__beta": 0.1}),  # its default
        ("dpo", {"training__dpo__reference": "stored"}, {"training__dpo__reference": "auto"}),
        ("next_token", {"model__weights": "a"}, {"model__weights": "b"}),
        ("simpo", {"model__weights": "a"}, {"model__weights": "b"}),
    ],
)
def test_losses_of_the_same_objective_are_compared(
    objective: str, one: dict[str, object], two: dict[str, object]
) -> None:
    common: dict[str, object] = {"training__objective": objective}
    runs = with_recipe(trial("a", 2.0), **common | one), with_recipe(trial("b", 1.0), **common | two)
    assert differing_objectives(runs) == ""
    best = find_best(runs)
    assert best is not None
    assert best.run == "b"


def test_the_best_run_is_the_best_by_the_metric_of_the_recipes() -> None:
    common: dict[str, object] = {"evaluation__best__metric": "accuracy", "evaluation__best__mode": "auto"}
    low, high = trial("low", 1.0, lr=1), trial("high", 2.0, lr=2)
    by_accuracy = [with_recipe(low, 0.5, **common), with_recipe(high, 0.75, **common)]
    best = find_best(by_accuracy)
    assert best is not None
    assert (best.run, best.metric, best.value, best.means) == ("high", "accuracy", 0.75, (0.75, 0.5))
    assert compare_runs(by_accuracy).best == "B is best: accuracy 0.7500, 0.2500 (50.0%) above A"
    others = [by_accuracy[0], with_recipe(high, 0.75, **common | {"evaluation__best__metric": "perplexity"})]
    for runs in (others, [replace(run, results=replace(run.results, selected=None)) for run in by_accuracy]):
        found = find_best(runs)  # the metrics differ, or were not measured
        assert found is not None
        assert (found.run, found.metric) == ("low", "validation_loss")


def test_a_metric_that_does_not_depend_on_the_objective_compares_objectives() -> None:
    for metric, expected in (("perplexity", "b"), ("exact_match", "a"), ("accuracy", None), ("loss/web", None)):
        runs = [
            with_recipe(trial(name, 1.0), value, evaluation__best__metric=metric, training__objective=objective)
            for name, value, objective in (("a", 9.0, "dpo"), ("b", 8.0, "simpo"))
        ]
        best = find_best(runs)
        assert (best and best.run) == expected


def test_results_have_the_metric_that_the_recipe_selects_by(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    plan = json.loads(run.layout.plan.read_text())
    plan["recipe"]["evaluation"]["best"] = {"metric": "kl", "mode": "auto"}
    run.layout.plan.write_text(json.dumps(plan))
    scores = {"kl": 0.5, "agreement": 0.75, "next_token_loss": 2.0}
    records.write(run, start(10.0, 0), EvaluationRecord(20.0, 10, "during", 2.0, 7.0, (), {}, scores))
    results = read_run(run.layout).results
    assert (results.selected, results.kl, results.agreement) == (0.5, 0.5, 0.75)


def test_scores_of_completions_are_compared(make_run: RunMaker, records: Any) -> None:
    runs = [make_run(), make_run()]
    for run, scores in zip(runs, ({"exact_match": 0.5, "length_chosen": 4.0}, {"sql": 0.25}), strict=True):
        records.write(run, EvaluationRecord(20.0, 10, "during", 2.0, 7.0, (), {}, scores))
    rows = dict(compare_runs([read_run(run.layout) for run in runs]).results)
    assert (rows["exact match"], rows["sql"], "length chosen" in rows) == (["50.0%", "-"], ["-", "25.0%"], False)


def test_a_difference_within_the_noise_between_seeds_is_not_clear() -> None:
    one, two = (2.0, 2.2, 1.95), (2.1, 2.3, 1.9)
    runs = [trial(f"one-{seed}", loss, lr=1, seed=seed) for seed, loss in enumerate(one)]
    others = [trial(f"two-{seed}", loss, lr=2, seed=seed) for seed, loss in enumerate(two)]
    best = find_best([*runs, *others])
    assert best is not None
    assert best.run == "two-2"
    assert best.settings[0] == tuple(run.id for run in runs)
    pooled = math.sqrt((statistics.variance(one) + statistics.variance(two)) / 2)
    assert best.seed_std == pytest.approx(pooled)
    assert not best.is_clear
    far = find_best([*runs, *(replace(run, results=replace(run.results, validation_loss=9.0)) for run in others)])
    assert far is not None
    assert far.is_clear
