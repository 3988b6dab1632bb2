from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.dotenv import load_dotenv, read_dotenv
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, text: str) -> dict[str, str]:
    (folder / ".env").write_text(text)
    return read_dotenv(folder)


def test_common_dotenv_syntax_is_parsed(tmp_path: Path) -> None:
    text = """
# of the hub
HF_TOKEN=hf_abc#def   # a comment
export WANDB_API_KEY = 'a "b" $c'
WANDB_NOTES="two\\nlines \\"quoted\\" \\$5" # a comment
EMPTY=
"""
    assert read(tmp_path, text) == {
        "HF_TOKEN": "hf_abc#def",
        "WANDB_API_KEY": 'a "b" $c',
        "WANDB_NOTES": 'two\nlines "quoted" $5',
        "EMPTY": "",
    }
    assert read(tmp_path, "\ufeffA=1\r\nB=2\r\n") == {"A": "1", "B": "2"}
    assert read_dotenv(tmp_path / "nowhere") == {}


def test_the_environment_overrides_dotenv(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=file\nB=file\n")
    environment = {"A": "shell"}
    load_dotenv(tmp_path, environment)
    assert environment == {"A": "shell", "B": "file"}


def test_all_invalid_lines_are_reported_without_their_values(tmp_path: Path) -> None:
    lines = ["A=fine", "hf_secret1", "TOKEN='hf_secret2", "KEY=hf_$secret3", "LD_PRELOAD=/secret4.so", 'B="x" secret5']
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "\n".join(lines))
    assert [problem.where.rpartition(":")[2] for problem in raised.value.problems] == ["2", "3", "4", "5", "6"]
    assert "secret" not in str(raised.value)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r\0'")))
def test_single_quoted_values_are_literal(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / ".env").write_bytes(f"A='{value}'\n".encode())
    assert read_dotenv(folder) == {"A": value}
    (folder / ".env").unlink()
