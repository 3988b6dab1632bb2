from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.paths import neighbor_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_misspelled_path_is_answered_with_its_neighbor(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "model").mkdir()
    assert str(tmp_path / "chats.jsonl") in neighbor_of(tmp_path / "chat.jsonl")
    assert str(tmp_path / "model") in neighbor_of(tmp_path / "modle")
    assert neighbor_of(tmp_path / "something-else") == ""
    assert neighbor_of(tmp_path / "none" / "model") == ""
