"""The plan as it is printed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ftkit.cli.terminal.console import Styled
from ftkit.cli.terminal.format import count, duration
from ftkit.cli.terminal.plan_view import plan_facts
from ftkit.config.context import Context
from ftkit.config.image_reference import ImageFile
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.models.vision import VisionPlan
from ftkit.planning.planner import plan_model, plan_run

NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "full fine-tuning in bf16: all parameters trained"),
        (("training.precision=fp8",), "full fine-tuning in fp8: all parameters trained"),
        (
            ("training.method=lora", "training.base_precision=fp8"),
            "lora fine-tuning in bf16 on a base in fp8, rank 16 on 7 kinds of projections: 39,976,960 parameters",
        ),
    ],
)
def test_the_method_is_printed_with_the_precision_of_trained_and_frozen_weights(
    overrides: tuple[str, ...], expected: str
) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    request = RunRequest(None, None, None, None, False, Path("/shared/me"), "/venv/bin/python", now, "ab12")
    request = replace(request, image=ImageFile(Path("/images/olmo3.sqsh")))
    recipe = load_recipe("olmo3-7b-full", NOWHERE, overrides)
    made = plan_run(recipe, load_cluster("a3-ultragpu-8g", NOWHERE), None, request)
    assert str(dict(plan_facts(made))["method"]).startswith(expected)


@pytest.mark.parametrize(
    ("tokens", "fitting"), [(4096, "at least 2 per pack"), (8193, "the largest does not fit a pack")]
)
def test_pictures_are_printed_with_how_many_fit_a_pack(tokens: int, fitting: str) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    recipe = load_recipe("olmo3-7b-full", NOWHERE, ("data.pictures=true", "training.sequence_length=8192"))
    model = plan_model(recipe.model, None)
    vision = VisionPlan("olmo3", 1, 1, layers=1, hidden=8, intermediate=8, patch=14, patches=tokens, tokens=tokens)
    shape = model.architecture.model_copy(update={"vision": vision})
    model = model.model_copy(update={"vision": vision, "architecture": shape})
    request = RunRequest(None, None, None, None, False, Path("/shared/me"), "/venv/bin/python", now, "ab12")
    request = replace(request, image=ImageFile(Path("/images/olmo3.sqsh")), model=model)
    made = plan_run(recipe, load_cluster("a3-ultragpu-8g", NOWHERE), None, request)
    assert f"each, {fitting}; " in str(dict(plan_facts(made))["pictures"])


@pytest.mark.parametrize(
    ("family", "method", "factor"),
    [("llama", "qlora", 1), ("mistral", "full", 1.35), ("qwen3_moe", "qlora", 1.35)],
)
def test_speeds_that_were_not_measured_are_printed_as_an_interval(family: str, method: str, factor: float) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    changes = (f"model.architecture.family={family}", f"training.method={method}", "training.learning_rate=1e-4")
    recipe = load_recipe("olmo3-7b-full", NOWHERE, ("training.activation_checkpointing=none", *changes))
    request = RunRequest(None, None, None, None, False, Path("/shared/me"), "/venv/bin/python", now, "ab12")
    made = plan_run(
        recipe, load_cluster("a3-ultragpu-8g", NOWHERE), None, replace(request, image=ImageFile(Path("/a")))
    )
    shown, speed = str(dict(plan_facts(made))["speed"]), made.speed
    assert speed is not None
    rate = speed.tokens_per_second / made.placement.world_size
    if factor == 1:
        assert shown.startswith("about ")
        assert f", {count(rate)} tokens/s per GPU" in shown
    else:
        assert shown.startswith(f"{duration(speed.step_seconds)} to {duration(factor * speed.step_seconds)} per step")
        assert f", {count(rate / factor)} to {count(rate)} tokens/s per GPU" in shown


@pytest.mark.parametrize(("nodes", "fits"), [(2, False), (4, True)])
def test_the_memory_bar_shows_each_part_by_its_letter_and_the_limit_without_colors(nodes: int, fits: bool) -> None:
    request = RunRequest(None, nodes, None, None, False, Path("/shared/me"), "/venv/bin/python",
                         datetime(2026, 1, 2, tzinfo=UTC), "ab12")  # fmt: skip
    request = replace(request, image=ImageFile(Path("/images/llama3.sqsh")))
    recipe = load_recipe("llama3.3-70b-full", NOWHERE, ("training.optimizer=adamw",))
    made = plan_run(recipe, load_cluster("a3-megagpu-8g", NOWHERE), None, request)
    facts = plan_facts(made)
    at = [name for name, _ in facts].index("memory")
    bar, legend = ("".join(each.text for each in facts[at + line][1] if isinstance(each, Styled)) for line in (1, 2))
    most = max(made.memory.total, 0.95 * 79.6)
    for name, amount in made.memory.parts.items():
        if amount:
            letter = legend[legend.index(f" {name} ") - 1]
            assert abs(bar.count(letter) - 60 * amount / most) <= 1
    assert (bar.rstrip("·|")[-1].isalpha(), bar.endswith("|")) == (True, fits)
    assert len(bar) == 61
