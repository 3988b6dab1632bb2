from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.health.node import Nvml, check_disk, check_gpus, check_interfaces, check_shared_disk
from ftkit.health.rates import bus_bandwidth, compare_with_others, find_transport, least_matmul, pair_rounds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


def found(num_gpus: int = 2, **answers: Any) -> dict[str, str]:
    """Check GPUs; return failures and warnings."""
    nvml = Nvml(library(**answers), [0, 1])
    findings = check_gpus(nvml, num_gpus, "H100 80GB HBM3", {"CUDA_VERSION": "12.8.0.38"})
    return {each.check: each.value for each in findings if each.status != "ok"}


def test_healthy_gpus_pass() -> None:
    assert found() == {}


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
def test_each_fault_of_a_gpu_is_reported(answers: dict[str, Any], check: str, value: str) -> None:
    wrong = found(**answers)
    assert list(wrong) == [check]
    assert value in wrong[check]


def test_a_power_cap_and_thermal_limits_under_load_are_not_faults() -> None:
    assert found(nvmlDeviceGetCurrentClocksThrottleReasons=0x04 | 0x20) == {}


def test_disks_are_written_to_and_left_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    assert check_disk("local disk", tmp_path / "local", 1).status != "failed"
    assert check_shared_disk(tmp_path / "marker", 1).status != "failed"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["marker"]
    assert check_shared_disk(tmp_path / "nowhere" / "marker", 1).status == "failed"


def test_a_folder_that_is_a_file_fails_the_disks_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_disk("local disk", tmp_path / "file", 1).status == "failed"


@given(st.integers(min_value=1, max_value=17))
def test_each_round_pairs_every_node_with_another_partner(count: int) -> None:
    members = tuple(f"n{number}" for number in range(count))
    rounds = pair_rounds(members)
    met = [frozenset(pair) for each in rounds for pair in each.items()]
    assert all(partners[partners[host]] == host != partners[host] for partners in rounds for host in partners)
    assert set(met) == {frozenset(pair) for pair in combinations(members, 2)}
    assert len(met) == 2 * len(set(met))


def numbers(**changes: Any) -> dict[str, Any]:
    return {"matmul": [700.0, 690.0], "pair": 180.0, "time": 1e9} | changes


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"matmul": [700.0, 400.0]}, "matrix products"),
        ({"pair": 60.0}, "pairs"),
        ({"pair": 0.0}, "pairs"),
        ({"time": 1e9 + 60}, "clock"),
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
    # Its table for 1 GiB on 8 ranks: bus bandwidth is 0.875 times the algorithm's, and twice that for an all-reduce.
    assert bus_bandwidth(10**9, 8, 1.0) == pytest.approx(0.875)
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


@pytest.mark.parametrize(
    ("variable", "value", "is_found"),
    [
        ("NCCL_SOCKET_IFNAME", "enp", True),
        ("NCCL_SOCKET_IFNAME", "eth,ib", True),
        ("NCCL_SOCKET_IFNAME", "=ib0", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker,veth", True),
        ("NCCL_SOCKET_IFNAME", "^enp,ib", False),
        ("NCCL_SOCKET_IFNAME", "", True),
        ("GLOO_SOCKET_IFNAME", "enp0s12", True),
        ("GLOO_SOCKET_IFNAME", "enp", False),
    ],
)
def test_a_variable_that_selects_no_interface_of_the_node_fails_it(variable: str, value: str, is_found: bool) -> None:
    findings = list(check_interfaces({variable: value}, ["lo", "enp0s12", "ib0"]))
    assert [each.status for each in findings] == ([] if is_found else ["failed"])


def test_a_node_with_another_model_of_gpu_than_the_profile_fails() -> None:
    statuses = []
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA Something"):
        [_, gpus, *_] = check_gpus(
            Nvml(library(nvmlDeviceGetName=name), [0, 1]), 2, "H100 80GB HBM3", {"CUDA_VERSION": "12.8.1"}
        )
        statuses.append(gpus.status)
    assert statuses == ["failed", "warning"]
