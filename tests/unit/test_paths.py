from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.paths import absolute_path, neighbor_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_misspelled_path_is_answered_with_its_neighbor(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "model").mkdir()
    assert str(tmp_path / "chats.jsonl") in neighbor_of(tmp_path / "chat.jsonl")
    assert str(tmp_path / "model") in neighbor_of(tmp_path / "modle")
    assert neighbor_of(tmp_path / "something-else") == ""
    assert neighbor_of(tmp_path / "none" / "model") == ""


def test_paths_have_no_dots_unless_they_lead_elsewhere_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "folder")
    assert absolute_path(".././data/../model", tmp_path / "recipes") == tmp_path / "model"
    assert absolute_path("link/../model", tmp_path) == tmp_path / "link" / ".." / "model"
