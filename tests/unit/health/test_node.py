from __future__ import annotations

import socket
from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.health.__main__ import compare_with_others, pair_rounds
from ftkit.health.findings import failures
from ftkit.health.measure import all_gather_bus_bandwidth, all_reduce_bus_bandwidth, find_transport, least_matmul
from ftkit.health.node import Expectation, check_machine
from ftkit.health.nvml import Nvml, visible_indices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakePrograms


class NvmlError(Exception):
    pass


def library(**answers: Any) -> Any:
    """A fake nvidia-ml-py: two healthy H100s with overridden values; an exception as value means unsupported."""
    values = {
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30),
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetRetiredPages": NvmlError(),
        "nvmlDeviceGetNvLinkState": 1,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPowerManagementLimit": 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
        "nvmlSystemGetDriverVersion": "570.86.15",
        "nvmlSystemGetCudaDriverVersion_v2": 12080,
        **answers,
    }

    def function(value: Any) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if isinstance(value, NvmlError):
                raise value
            return value

        return call

    constants = {"NVMLError": NvmlError, "NVML_NVLINK_MAX_LINKS": 18, "NVML_CLOCK_SM": 1, "NVML_TEMPERATURE_GPU": 0}
    handles = {"nvmlDeviceGetHandleByIndex": lambda index: index}
    return SimpleNamespace(**constants, **handles, **{name: function(value) for name, value in values.items()})


def found(tmp_path: Path, num_gpus: int = 2, **answers: Any) -> dict[str, str]:
    """Check a machine; return failures and warnings."""
    (tmp_path / "plan.json").touch()
    expected = Expectation(tmp_path / "local", tmp_path / "plan.json", num_gpus, "H100 80GB HBM3")
    nvml = Nvml(library(**answers), [0, 1])
    findings = check_machine(expected, nvml, {"CUDA_VERSION": "12.8.0.38"}, 1)
    assert not list((tmp_path / "local").iterdir())
    return {each.check: each.value for each in findings if each.status != "ok" and "disk" not in each.check}


def test_healthy_gpus_pass(tmp_path: Path) -> None:
    assert found(tmp_path) == {}


def test_a_performance_sample_that_cannot_be_read_is_freed() -> None:
    gpu = library(
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=2**30),
        nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=1),
        nvmlGpmSampleAlloc="sample",
        nvmlGpmSampleGet=NvmlError(),
    )
    freed: list[str] = []
    gpu.nvmlGpmSampleFree = freed.append
    [sample] = Nvml(gpu, [0]).samples()
    assert sample.sm_activity is None
    assert freed == ["sample"]


@pytest.mark.parametrize(
    ("answers", "check", "value"),
    [
        ({"nvmlSystemGetCudaDriverVersion_v2": 11040}, "driver", "the image has CUDA 12.8"),
        ({"nvmlDeviceGetTotalEccErrors": 3}, "ECC", "3 uncorrected"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "row remap", "could not be replaced"),
        ({"nvmlDeviceGetRetiredPages": [1, 2]}, "retired pages", "2"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x80 | 0x01}, "clocks", "power brake"),
        ({"nvmlDeviceGetPowerManagementLimit": 400_000}, "power limit", "400 W, 700 W by default"),
        ({"nvmlDeviceGetCurrPcieLinkWidth": 8}, "PCIe", "x8 of x16"),
        ({"nvmlDeviceGetNvLinkState": 0}, "NVLink", "0 of 18 links"),
        ({"nvmlDeviceGetName": "NVIDIA L4"}, "GPUs", "the profile says H100"),
        ({"num_gpus": 8}, "GPUs", "8 expected"),
    ],
)
def test_each_fault_of_a_gpu_is_reported(tmp_path: Path, answers: dict[str, Any], check: str, value: str) -> None:
    wrong = found(tmp_path, **answers)
    assert list(wrong) == [check]
    assert value in wrong[check]


def test_a_power_cap_and_thermal_limits_under_load_are_not_faults(tmp_path: Path) -> None:
    assert found(tmp_path, nvmlDeviceGetCurrentClocksThrottleReasons=0x04 | 0x20) == {}


def test_a_node_without_the_shared_file_system_is_reported(tmp_path: Path) -> None:
    findings = check_machine(Expectation(tmp_path, tmp_path / "nowhere" / "plan.json", 0, ""), "no NVML", {}, 1)
    assert [each.check for each in failures(findings)] == ["shared disk"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("| Deployment | Pass |\n| PCIe      | Fail - All |", {"DCGM": "PCIe"}),
        ("Error: unable to connect; exit 1", {"DCGM": "Error: unable to connect; exit 1"}),
        ("| Deployment | Pass |", {}),
    ],
)
def test_nvidias_diagnostics_are_used_if_permitted(
    tmp_path: Path, programs: FakePrograms, said: str, expected: dict[str, str]
) -> None:
    programs.answer("dcgmi", said, code=int("exit" in said))
    assert found(tmp_path) == expected


def test_only_gpus_visible_to_cuda_are_checked() -> None:
    assert visible_indices(8, None) == list(range(8))
    assert visible_indices(8, "2,3,9") == [2, 3]
    assert visible_indices(2, "GPU-8932f937") == [0, 1]
    assert visible_indices(2, "") == []


@given(st.integers(min_value=1, max_value=17))
def test_each_round_pairs_every_node_with_another_partner(count: int) -> None:
    members = tuple(f"n{number}" for number in range(count))
    rounds = pair_rounds(members)
    met = [frozenset(pair) for each in rounds for pair in each.items()]
    assert all(partners[partners[host]] == host != partners[host] for partners in rounds for host in partners)
    assert set(met) == {frozenset(pair) for pair in combinations(members, 2)}
    assert len(met) == 2 * len(set(met))


def numbers(**changes: Any) -> dict[str, Any]:
    return {"matmul": [700.0, 690.0], "pair": 180.0, "time": 1e9, "driver": "570"} | changes


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"matmul": [700.0, 400.0]}, "matrix products"),
        ({"pair": 60.0}, "pairs"),
        ({"pair": 0.0}, "pairs"),
        ({"time": 1e9 + 60}, "clock"),
        ({"driver": "470"}, "driver"),
    ],
)
def test_the_node_that_differs_from_the_others_is_the_faulty_one(changes: dict[str, Any], check: str) -> None:
    nodes = {"n1": numbers(), "n2": numbers(**changes), "n3": numbers()}
    findings = {host: [each.check for each in compare_with_others(host, "cuda", nodes)] for host in nodes}
    assert findings == {"n1": [], "n2": [check], "n3": []}


def test_the_slower_of_two_nodes_is_excluded() -> None:
    nodes = {"n1": numbers(), "n2": numbers(matmul=[300.0, 310.0])}
    assert [each.gpu for each in compare_with_others("n2", "cuda", nodes)] == [0, 1]
    assert compare_with_others("n1", "cuda", nodes) == []


def test_bus_bandwidths_match_nccl_tests() -> None:
    # Its table for 1 GiB on 8 ranks: bus bandwidth is 1.75 and 0.875 times the algorithm's.
    assert all_reduce_bus_bandwidth(10**9, 8, 1.0) == pytest.approx(1.75)
    assert all_gather_bus_bandwidth(10**9, 8, 1.0) == pytest.approx(0.875)
    assert least_matmul("h200") == pytest.approx(494.5)


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("n1:7:8 [0] NCCL INFO Using network Socket\n", "Socket"),
        ("n1:7:8 [0] NCCL INFO Using network AWS Libfabric\n", "AWS Libfabric"),
        ("x NCCL INFO Using network gIB\nx NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", "gIB, P2P"),
        ("", ""),
    ],
)
def test_the_transport_is_read_from_nccls_log(log: str, transport: str) -> None:
    assert find_transport(log) == transport


def test_no_process_listens_on_a_free_port() -> None:
    from ftkit.health.measure import free_port

    with socket.socket() as probe:
        probe.bind(("", free_port()))
