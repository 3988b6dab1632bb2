from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from ftkit.data.cases import Case, Prompt, encode_prompts
from ftkit.data.labels import Rendering
from ftkit.data.rows import Row

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.data.conversations import Conversation


class Renderer(SimpleNamespace):
    def prompt(self, conversation: Conversation) -> Rendering:
        return Rendering(",".join(tool["function"]["name"] for tool in conversation.tools), ())


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_a_prompt_has_the_tools_of_its_row(column: str) -> None:
    columns = {"messages": [{"role": "user", "content": "hi"}], column: [{"name": "f"}, {"name": "g"}]}
    tokenizer: Any = lambda text, **_: {"input_ids": [*map(ord, text)]}  # noqa: E731
    renderer: Any = Renderer(name="template", source=column)
    (tokens,) = encode_prompts(tokenizer, renderer, [Row(columns, "a.jsonl:1")], None)
    assert "".join(map(chr, tokens if isinstance(tokens, list) else [])) == "f,g"


def test_a_case_whose_picture_was_moved_has_no_thumbnail(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(file)
    case = Case(0, {"messages": [], "image": str(file)}, Prompt([1], b"arrays"))
    assert (case.thumbnail() or "").startswith("data:image/jpeg;base64,")
    file.unlink()
    assert case.thumbnail() is None
