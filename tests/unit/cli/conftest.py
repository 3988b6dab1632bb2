"""The command line, called in this process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ftkit.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.planning.layout import Workspace


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Call = "Callable[..., Result]"


@pytest.fixture
def ftkit(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Call `ftkit` in an empty project; return its exit code and what it printed."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FTKIT_WORKSPACE", str(workspace.root))

    def call(*words: str) -> Result:
        capsys.readouterr()
        code = main(words)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def no_privileges() -> Iterator[None]:
    """Give up the capabilities with which root reads every file: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~0b110
    assert libc.capset(header, sets) == 0
    yield
    sets[0] = effective
    assert libc.capset(header, sets) == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll runs more often than a scheduler would tolerate."""
    monkeypatch.setattr("ftkit.cli.follow._READ_SECONDS", 0.01)
    monkeypatch.setattr("ftkit.launch.scheduler.LocalScheduler.poll_seconds", 0.02)
    monkeypatch.setattr("ftkit.launch.scheduler.SlurmScheduler.poll_seconds", 0.02)
