from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.errors import PrerequisiteError
from ftkit.process import run, visible_gpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2, 3", ["2", "3"]),
        ("0,9,1", ["0"]),  # CUDA ignores what follows an invalid index
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("GPU-8932f937,MIG-ab", ["GPU-8932f937", "MIG-ab"]),
    ],
)
def test_visible_gpus_are_those_before_the_first_invalid_one(visible: str | None, names: list[str]) -> None:
    assert visible_gpus(4, visible) == names


def test_a_missing_working_folder_is_not_reported_as_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="there is no folder"):
        run(["true"], cwd=tmp_path / "removed")
    with pytest.raises(PrerequisiteError, match="not found on PATH"):
        run(["no-such-program"], cwd=tmp_path)
