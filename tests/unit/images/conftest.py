"""A fake internet for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fuzzing.internet import Internet, connected_to

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def internet() -> Iterator[Internet]:
    made = Internet()
    with connected_to(made):
        yield made
