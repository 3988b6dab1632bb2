"""Staging of weights on local disks: copied once, verified, and skipped if there is no space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftkit.data.staging import MAX_COPYING_NODES, stage_weights
from ftkit.models.architecture import ModelSpec


@dataclass
class Node:
    """A node with a local disk and a log."""

    plan: Any
    cache: Path
    log: list[str] = field(default_factory=list)

    def stage(self) -> Path | None:
        return stage_weights(self.plan, self.cache, self.log.append)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "config.json").write_text("{}")
    (shared / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    cluster = SimpleNamespace(stage="local")
    recipe = SimpleNamespace(model=ModelSpec(weights=str(shared)))
    plan = SimpleNamespace(cluster=cluster, recipe=recipe, workspace=tmp_path, placement=SimpleNamespace(num_nodes=2))
    return Node(plan, tmp_path / "disk")


def test_a_second_start_reuses_the_copy_and_replaces_a_damaged_one(node: Node) -> None:
    folder = node.stage()
    assert folder is not None
    weights = folder / "model.safetensors"
    assert weights.read_bytes() == bytes(range(256)) * 100
    assert node.stage() == folder
    with weights.open("r+b") as file:
        file.write(b"\xff")
    assert node.stage() == folder
    assert weights.read_bytes() == bytes(range(256)) * 100
    said = [line.partition(": ")[2].split(" in ")[0].split(" to ")[0] for line in node.log]
    assert said == [
        "copied 0.0 GiB of weights", "weights are", "the copy of the weights", "copied 0.0 GiB of weights",
    ]  # fmt: skip
    assert "model.safetensors" in node.log[2]


def test_vocabularies_are_copied_and_weights_in_other_layouts_are_not(node: Node) -> None:
    shared = cast("Any", node.plan).workspace / "shared"
    for name in ("merges.txt", "own.tiktoken", "consolidated.safetensors"):
        (shared / name).write_bytes(b"")
    folder = node.stage()
    assert folder is not None
    copied = {path.name for path in folder.glob("*.*")} - {"ftkit-staged.json"}
    assert copied == {"config.json", "model.safetensors", "merges.txt", "own.tiktoken"}


def test_changed_weights_get_a_separate_copy(node: Node) -> None:
    first = node.stage()
    (cast("Any", node.plan).workspace / "shared" / "model.safetensors").write_bytes(b"other")
    second = node.stage()
    assert first != second
    assert second is not None
    assert (second / "model.safetensors").read_bytes() == b"other"


def test_weights_are_read_from_the_shared_file_system_if_the_disk_is_full(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert node.stage() is None
    assert "ranks read" in node.log[0]
    assert list((node.cache / "weights").iterdir()) == []


def test_many_nodes_do_not_copy_weights_but_use_a_copy_that_is_there(node: Node) -> None:
    node.plan.placement.num_nodes = MAX_COPYING_NODES + 1
    assert node.stage() is None
    assert "ranks read" in node.log[0]
    node.plan.placement.num_nodes = MAX_COPYING_NODES
    folder = node.stage()
    assert folder is not None
    node.plan.placement.num_nodes = 1024
    assert node.stage() == folder


def test_nothing_is_staged_unless_the_profile_enables_it(node: Node) -> None:
    node.plan.cluster.stage = "shared"
    assert node.stage() is None
    assert not node.cache.exists()
