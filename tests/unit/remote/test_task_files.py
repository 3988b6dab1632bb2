"""A task and a teacher are sent to the login node like the data of their recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruamel.yaml import YAML

from ftkit.config.context import Context
from ftkit.remote.sending import pack_run
from ftkit.remote.ssh import Login

if TYPE_CHECKING:
    from pathlib import Path


def test_the_file_of_a_task_is_sent_and_the_recipe_names_its_place_there(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    own = tmp_path / "recipes/own.py"
    own.write_text("def generate(seed, num_train, num_heldout):\n    return [{}] * num_train, [{}] * num_heldout\n")
    (tmp_path / "recipes/mine.yaml").write_text(
        "extends: demo\nname: mine\ndata: {task: own.py}\nevaluation: {generation: null}\n"
    )
    ctx = Context(tmp_path, tmp_path / "user", {})
    _, files, local_files = pack_run("mine", [()], ("mine",), Login("own", "node", (), "/ftkit"), ctx)
    assert local_files == [str(own)]
    (text,) = files.values()
    assert YAML(typ="safe").load(text)["data"]["task"] == f"/ftkit/files{own}"


def test_a_teacher_in_a_folder_is_sent_and_the_recipe_names_its_place_there(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    config = tmp_path / "recipes/teacher/config.json"
    config.parent.mkdir()
    config.touch()
    (tmp_path / "recipes/mine.yaml").write_text(
        "extends: demo\nname: mine\ntraining: {objective: distill, distill: {teacher: ./teacher}}\n"
    )
    ctx = Context(tmp_path, tmp_path / "user", {})
    _, files, local_files = pack_run("mine", [()], ("mine",), Login("own", "node", (), "/ftkit"), ctx)
    assert str(config) in local_files
    (text,) = files.values()
    assert YAML(typ="safe").load(text)["training"]["distill"]["teacher"] == f"/ftkit/files{config.parent}"
