"""Compiled layers have no graph breaks, or the log reports them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo import lookup_backend

from ftkit.train.memory.compile import CompiledForward


@pytest.fixture(autouse=True)
def _without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: lookup_backend("eager"))


def test_a_graph_break_is_reported_once_and_computes_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(values: torch.Tensor) -> torch.Tensor:
        doubled = values * 2
        torch._dynamo.graph_break()
        return doubled + 1

    values = torch.arange(4.0)
    with caplog.at_level(logging.WARNING, logger="ftkit"):
        results = [CompiledForward(broken, "broken")(values) for _ in range(2)]
    assert all(torch.equal(result, values * 2 + 1) for result in results)
    assert len(_said(caplog)) == 1
    assert "broken can't be compiled as one graph" in _said(caplog)[0]


def test_nothing_is_logged_if_there_is_no_graph_break(caplog: pytest.LogCaptureFixture) -> None:
    def plain(values: torch.Tensor) -> torch.Tensor:
        return values * 2 + 1

    with caplog.at_level(logging.WARNING, logger="ftkit"):
        forward = CompiledForward(plain, "plain")
        assert torch.equal(forward(torch.arange(4.0)), torch.arange(4.0) * 2 + 1)
    assert not _said(caplog)


def test_forward_passes_with_changing_shapes_do_not_exhaust_the_recompile_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def numbered(values: torch.Tensor, number: str) -> torch.Tensor:
        return values + int(number)

    with caplog.at_level(logging.WARNING, logger="ftkit"), torch._dynamo.config.patch(cache_size_limit=2):
        forward = CompiledForward(numbered, "numbered")
        results = [forward(torch.zeros(2), str(number)) for number in range(4)]
    assert [result[0].item() for result in results] == [0, 1, 2, 3]
    assert ["recompiled too often" in message for message in _said(caplog)] == [True]


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("ftkit")]
