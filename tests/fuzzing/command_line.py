"""ftkit's command line, called in this process."""

from __future__ import annotations

import io
import os
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import pytest

from ftkit.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def command_line(folder: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Yield a function that calls ftkit in an empty project without Slurm or network and raises on a bug.

    Args:
        folder: the project is in `project`, the workspace in `workspace`.
    """
    project = folder / "project"
    project.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("FTKIT_", "HF_", "SBATCH_", "XDG_"))]:
            patch.delenv(name)
        for name, value in {
            "HOME": str(folder / "home"),
            "PATH": str(folder / "programs"),
            "FTKIT_WORKSPACE": str(folder / "workspace"),
            "XDG_STATE_HOME": str(folder / "state"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "CUDA_VISIBLE_DEVICES": "",
        }.items():
            patch.setenv(name, value)
        patch.chdir(project)

        def call(*words: str) -> tuple[int, str]:
            out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
            with redirect_stdout(out), redirect_stderr(err):
                code = main(words)
            assert code != 1, "".join(path.read_text(errors="replace") for path in folder.glob("state/ftkit/*"))
            err.seek(0)
            assert "\x1b" not in err.read(), "escape sequences of a file reach the terminal"
            out.seek(0)
            return code, out.read()

        yield call
