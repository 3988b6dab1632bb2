from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ftkit.cli.terminal.plan_view import plan_facts
from ftkit.config.context import Context
from ftkit.config.image_reference import ImageFile
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.errors import MemoryExhaustedError
from ftkit.planning.plan import RunPlan, parse_plan, plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.planning.suggestions import check_host_memory, suggest_changes

NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
CLUSTER = load_cluster("a3-ultragpu-8g", NOWHERE)
REQUEST = RunRequest(
    None, None, None, None, False, Path("/shared/me"), "/venv/bin/python", datetime(2026, 1, 2, tzinfo=UTC), "ab12"
)
LONG = ("training.sequence_length=65536", "training.micro_batch_size=1", "training.activation_checkpointing=full")


def plan(*overrides: str, node_gib: float | None = None) -> RunPlan:
    cluster = CLUSTER.model_copy(update={"memory_per_node_gib": node_gib})
    request = replace(REQUEST, image=ImageFile(Path("/images/olmo3.sqsh")))
    recipe = load_recipe("olmo3-32b-malware-full", NOWHERE, (*LONG, *overrides))
    return plan_run(recipe, cluster, None, request)


def total(made: RunPlan) -> float:
    assert made.host_memory is not None
    return made.host_memory.total


def text(made: RunPlan) -> str:
    return str(dict(plan_facts(made)).get("host memory", ""))


def test_the_plan_shows_host_memory_only_if_something_is_offloaded() -> None:
    assert text(plan()) == ""
    assert json.loads(plan_to_json(plan()))["host_memory"] is None
    made = plan("training.activation_offload=true")
    assert text(made) == (
        "about 352.0 GiB per node: activations 320.0 GiB + processes 32.0 GiB; the profile sets no "
        "memory_per_node_gib to compare it with"
    )
    assert text(plan("training.activation_offload=true", node_gib=400)).endswith("processes 32.0 GiB")
    assert parse_plan(plan_to_json(made), "plan.json").host_memory == made.host_memory


def test_a_node_with_too_little_host_memory_is_a_warning_then_an_error() -> None:
    made = plan("training.activation_offload=true", "training.offload=all")
    assert check_host_memory(made, None, "a node") == check_host_memory(made, total(made), "a node") == []
    (warning,) = check_host_memory(made, total(made) - 1, "of ours")
    assert "training.activation_offload=false" in warning
    assert "training.offload=none" in warning
    assert "of ours" in warning
    with pytest.raises(MemoryExhaustedError):
        check_host_memory(made, total(made) / 2.1, "a node")


def test_suggestions_for_gpu_memory_do_not_offload_more_than_a_node_has() -> None:
    made = plan()
    lightest = replace(made.setup, gpu=None)
    gib = plan("training.activation_offload=true").memory.total + 1
    free, limited = (
        " ".join(map(str, suggest_changes(lightest, CLUSTER.model_copy(update={"memory_per_node_gib": each}), gib)))
        for each in (None, 100.0)
    )
    assert "offload" in free
    assert "activation_offload" not in limited


def test_a_plan_without_a_gpu_model_asks_for_it() -> None:
    request = replace(REQUEST, image=ImageFile(Path("/images/olmo3.sqsh")))
    recipe = load_recipe("olmo3-32b-malware-full", NOWHERE)
    unknown, known = (
        plan_run(recipe, load_cluster(name, NOWHERE), None, request) for name in ("soperator", "a3-ultragpu-8g")
    )
    assert [note for note in unknown.notes if "has no 'gpu'" in note]
    assert not [note for note in known.notes if "has no 'gpu'" in note]
