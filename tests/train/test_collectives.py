"""The choice of collectives, and messages if copy engines can't be used."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ftkit.config.training import TrainingPlan
from ftkit.errors import TrainingError
from ftkit.train.distributed import collectives
from ftkit.train.distributed.collectives import (
    DRIVER,
    AllGather,
    ReduceScatter,
    choose_collectives,
    find_error,
    reaches,
)

if TYPE_CHECKING:
    from ftkit.train.world import World


class OwnMemory:
    """Shared memory of a world of size 1."""

    num_bytes, rank, size = 4096, 0, 1

    def __init__(self) -> None:
        self._memory = torch.zeros(self.num_bytes, dtype=torch.uint8)

    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert rank == 0
        return self._memory.view(dtype)[offset : offset + numel]

    def barrier(self) -> None:
        """Return immediately: there are no other ranks."""


class ForgetfulMemory(OwnMemory):
    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return super().of(rank, offset, numel, dtype).clone()


def training(**changes: object) -> TrainingPlan:
    fields = {"sequence_length": 32, "global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3}
    return TrainingPlan.model_validate(fields | changes)


def two(world: World, **changes: Any) -> World:
    return dataclasses.replace(world, **{"size": 2, **changes})


def test_one_process_needs_no_collectives_and_cpus_support_only_one_kind(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_collectives(training(), world) is None
        assert choose_collectives(training(), two(world)) is None
    assert not caplog.messages


@pytest.mark.parametrize(
    ("changes", "num_hosts", "reason"),
    [({}, 3, "the processes are on 3 hosts"), ({"offload": "all"}, 1, "weights are offloaded to host memory")],
)
def test_nccl_is_used_and_the_reason_logged_if_copy_engines_are_unavailable(
    changes: dict[str, object],
    num_hosts: int,
    reason: str,
    world: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_collectives(training(**changes), two(world, num_hosts=num_hosts, device=torch.device("cuda")))
    assert chosen is None
    assert caplog.messages == [f"collectives: NCCL ({reason})"]


def test_an_old_torch_falls_back_to_nccl(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CUSTOM_COLLECTIVES", False)
    with pytest.raises(TrainingError, match=r"is older than 2\.11"):
        choose_collectives(training(collectives="copy_engine"), two(world, device=torch.device("cuda")))


class Driver:
    """The CUDA driver's API for GPUs with handles 7, 8 and 9. Only the first two have NVLink."""

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:  # noqa: N802
        handle._obj.value = 7 + ordinal
        return 0 if ordinal < 3 else 101

    def cuDeviceGetP2PAttribute(self, answer: Any, attribute: int, one: Any, other: Any) -> int:  # noqa: N802
        answer._obj.value = int(attribute == 3 and {one.value, other.value} == {7, 8})
        return 0


def test_gpus_are_peers_if_the_driver_reports_native_atomics_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {DRIVER: Driver()}[name])
    assert reaches(0, 1)
    assert reaches(1, 0)
    assert not reaches(0, 2)
    assert not reaches(0, 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert not reaches(0, 1)


def test_nccl_is_used_without_nvlink(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(collectives, "CUSTOM_COLLECTIVES", True)
    monkeypatch.setattr("ftkit.train.world.World.sum", lambda _, values: values)
    with caplog.at_level(logging.INFO):
        assert choose_collectives(training(), two(world, size=3, device=torch.device("cuda"))) is None
    assert "NCCL (no NVLink" in caplog.text


def test_requested_but_unavailable_copy_engines_are_an_error(world: World) -> None:
    with pytest.raises(TrainingError, match="no GPUs"):
        choose_collectives(training(collectives="copy_engine"), two(world))


def test_collectives_are_verified_on_known_numbers(world: World) -> None:
    gather = AllGather(OwnMemory())
    assert not find_error(gather, ReduceScatter(OwnMemory(), torch.float32), world)
    assert find_error(gather, ReduceScatter(ForgetfulMemory(), torch.float32), world)


def test_an_unexpected_reduction_is_rejected() -> None:
    reduce = ReduceScatter(OwnMemory(), torch.float32)
    group: Any = None
    with pytest.raises(TrainingError, match="don't support"):
        reduce(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), group, torch.distributed.ReduceOp.AVG)
    with pytest.raises(TrainingError, match="don't support"):
        reduce(torch.zeros(4), torch.zeros(4), group, torch.distributed.ReduceOp.SUM)
