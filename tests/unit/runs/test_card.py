from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe, shipped_config
from ftkit.config.objectives import DpoSpec
from ftkit.config.recipe import RecipePlan
from ftkit.config.training import TrainingPlan
from ftkit.planning.planner import plan_model
from ftkit.runs.model_card import loss_curve, write_card
from ftkit.runs.records import EvaluationRecord

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker

SECTIONS = {"name", "model", "data", "training", "evaluation"}


def resolved(name: str, ctx: Context) -> RecipePlan:
    spec = load_recipe(name, ctx)
    shape = None if spec.model.weights == "random" else shipped_config(spec.model.weights)
    training = TrainingPlan.extend(spec.training, micro_batch_size=2, activation_checkpointing="none")
    return RecipePlan.extend(spec, model=plan_model(spec.model, shape), training=training)


@pytest.mark.parametrize("name", ["demo", "olmo3-7b-full", "gemma3-12b-sql-qlora"])
def test_the_recipe_next_to_a_card_is_the_trained_recipe(name: str, make_run: RunMaker, tmp_path: Path) -> None:
    ctx = Context(tmp_path, tmp_path, {})
    plan = resolved(name, ctx)
    write_card(tmp_path, make_run().layout, plan, 10, "model")
    again = resolved(str(tmp_path / "recipe.yaml"), ctx)
    assert again.model_dump(include=SECTIONS) == plan.model_dump(include=SECTIONS)


def test_a_card_contains_the_license_the_losses_and_their_curve(
    make_run: RunMaker, records: Any, tmp_path: Path
) -> None:
    run = make_run()
    evaluations = [EvaluationRecord(1.0, at, when, loss, 9.0, ()) for at, when, loss in ((0, "before", 6.0),)]
    evaluations.append(EvaluationRecord(1.0, 20, "after", 1.25, 3.5, (), scores={"sql": 0.9}))
    records.write(run, *evaluations, *(records.step(number, 6 / number) for number in range(1, 31)))
    plan = resolved("demo", Context(tmp_path, tmp_path, {}))
    write_card(tmp_path, run.layout, plan, 20, "model", "mit")
    card = (tmp_path / "README.md").read_text()
    assert 'license: "mit"' in card
    assert "| before training | 6.0000 | 9.00 |  |" in card
    assert "| after 20 steps | 1.2500 | 3.50 | 90.0% |" in card
    assert "![Loss by step](loss.svg)" in card
    picture = ET.fromstring((tmp_path / "loss.svg").read_text())  # noqa: S314 - written by ftkit
    assert picture.attrib["aria-label"] == "training loss 6 to 0.3"  # nothing after step 20
    assert len(picture.findall("{*}circle")) == 2


def test_a_card_names_the_objective_and_the_changes_of_resumes(
    make_run: RunMaker, records: Any, tmp_path: Path
) -> None:
    run = make_run()
    scores = {"accuracy": 0.75, "length_chosen": 7.0, "log_prob_chosen": -38.29, "kl_per_token": 0.492}
    records.write(run, EvaluationRecord(1.0, 20, "after", 0.5, 2.0, (), scores=scores))
    change = {"training.learning_rate": {"before": 0.005, "after": 0.001}}
    run.layout.manifest.write_text(json.dumps({"submissions": [{"changes": {}}, {"from_step": 10, "changes": change}]}))
    plan = resolved("demo", Context(tmp_path, tmp_path, {}))
    training = plan.training.model_copy(update={"objective": "dpo", "dpo": DpoSpec(beta=0.2)})
    write_card(tmp_path, run.layout, plan.model_copy(update={"training": training}), 20, "model")
    card = (tmp_path / "README.md").read_text()
    assert "* Objective: dpo, reference auto, beta 0.2, " in card
    assert "| 75.0% | 0.492 | 7 | -38.29 |" in card
    assert "* From step 10: training.learning_rate = 0.001 (before: 0.005)" in card
    write_card(tmp_path, make_run("other").layout, plan, 20, "model")
    card = (tmp_path / "README.md").read_text()
    assert "Objective" not in card
    assert "resumed" not in card


def test_a_card_has_the_scores_of_its_own_weights(make_run: RunMaker, records: Any, tmp_path: Path) -> None:
    run = make_run()
    records.write(
        run,
        *(
            EvaluationRecord(1.0, step, "during", 2.0 - step / 100, 9.0, (), scores={"exact_match": step / 100})
            for step in (10, 20)
        ),
        EvaluationRecord(2.0, 20, "after", 1.5, 9.0, (), scores={"exact_match": 0.25}),
    )
    plan = resolved("demo", Context(tmp_path, tmp_path, {}))
    cards = {}
    for step in (10, 15, 20):
        write_card(tmp_path, run.layout, plan, step, "model")
        cards[step] = (tmp_path / "README.md").read_text()
    assert "|  | loss | perplexity | exact match |" in cards[10]
    assert "| after 10 steps | 1.9000 | 9.00 | 10.0% |" in cards[10]
    assert "| after 20 steps | 1.5000 | 9.00 | 25.0% |" in cards[20]
    assert "| loss |" not in cards[15]


def test_the_curve_needs_two_steps_and_has_a_limited_number_of_points(make_run: RunMaker, records: Any) -> None:
    run = make_run()
    records.write(run, records.step(1), records.step(1))
    assert loss_curve(run.layout.metrics, 10) is None
    records.write(run, *(records.step(number, float("nan") if number == 7 else 2.0) for number in range(2, 2000)))
    curve = loss_curve(run.layout.metrics, 10**6)
    assert curve is not None
    assert curve.count("L") < 500
    assert "nan" not in curve


def test_a_card_says_what_happened_with_documents_longer_than_a_pack(make_run: RunMaker, tmp_path: Path) -> None:
    run, plan = make_run(), resolved("demo", Context(tmp_path, tmp_path, {}))
    starts = ({"split": 3, "error": 0}, {"split": 0})
    cards = []
    for too_long in starts:
        manifest = json.loads(run.layout.manifest.read_text()) if run.layout.manifest.exists() else {}
        run.layout.manifest.write_text(json.dumps({**manifest, "starts": [{"too_long": too_long}]}))
        write_card(tmp_path, run.layout, plan, 10, "model")
        cards.append((tmp_path / "README.md").read_text())
    assert "* Documents longer than a pack: 3 split\n" in cards[0]
    assert "longer than a pack" not in cards[1]
