"""Unexpected errors in the first stage of a job."""

from __future__ import annotations

import os
from errno import ENOSPC
from typing import TYPE_CHECKING

import pytest

from ftkit.data.__main__ import main
from ftkit.errors import DiskFullError
from ftkit.planning.plan import plan_to_json
from ftkit.runs.failure import read_rank_error

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(ENOSPC, os.strerror(ENOSPC)), DiskFullError.exit_code), (ValueError("https://TOKEN@host"), 1)],
)
def test_an_unexpected_error_is_written_as_a_rank_error_without_secrets(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("ftkit.data.__main__.prepare", fail)
    layout = plan.layout
    layout.logs.mkdir(parents=True)
    layout.plan.write_text(plan_to_json(plan))
    layout.disk_full.touch()  # of an earlier start
    assert main(layout.plan) == code
    left = read_rank_error(layout.rank_error(0))
    assert left is not None
    assert left.exit_code == code
    assert layout.disk_full.exists() == (code == DiskFullError.exit_code)
    assert "TOKEN" not in left.traceback + left.message + capsys.readouterr().err
