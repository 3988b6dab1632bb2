"""Tests that share something costly (a Slurm, a docker engine, a trained model) stay in one worker of pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder != "unit":
            item.add_marker(pytest.mark.xdist_group(folder))
