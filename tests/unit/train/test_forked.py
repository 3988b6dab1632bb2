"""Which ranks torchrun forks. tests/train/test_one_trainer.py tests training and termination of forked ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from ftkit.train import forked

if TYPE_CHECKING:
    from collections.abc import Callable

TRAIN = ["--standalone", "--nproc-per-node=2", "-m", "ftkit.train", "/runs/a/plan.json", "1"]
NOT_INITIALIZED, SUCCESS = 3, 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Fake the trainer, which imports torch, and CUDA's driver, which returns a code or is missing."""
    monkeypatch.setitem(sys.modules, "ftkit.train.trainer", ModuleType("ftkit.train.trainer"))

    def install(code: int | None) -> None:
        class Driver:
            def __init__(self, name: str) -> None:
                if code is None:
                    raise OSError(name)

            def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802 - CUDA's name
                assert count is not None
                return code or 0

        monkeypatch.setattr("ftkit.train.forked.ctypes.CDLL", Driver)

    return install


@pytest.mark.parametrize("code", [NOT_INITIALIZED, None])
def test_ranks_of_the_trainer_are_forked(driver: Callable[[int | None], None], code: int | None) -> None:
    driver(code)
    entry = Path(forked.__file__).with_name("__main__.py")
    assert forked.fork_trainer(TRAIN) == [
        "--standalone", "--nproc-per-node=2", "--start-method=fork", "--run-path", str(entry), "/runs/a/plan.json", "1",
    ]  # fmt: skip


def test_ranks_are_not_forked_from_a_process_that_has_initialized_cuda(driver: Callable[[int | None], None]) -> None:
    driver(SUCCESS)
    assert forked.fork_trainer(TRAIN) == TRAIN


def test_ranks_report_why_the_trainer_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftkit.train.trainer", None)
    assert forked.fork_trainer(TRAIN) == TRAIN


def test_scripts_are_started_as_programs() -> None:
    script = ["--standalone", "-m", "ftkit.train.script", "/runs/a/plan.json"]
    assert forked.fork_trainer(script) == script
