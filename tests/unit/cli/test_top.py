from __future__ import annotations

import importlib.util
import json
import math
import re
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

import ftkit
from ftkit.cli.terminal.format import energy
from ftkit.health import sampler
from ftkit.planning.layout import RunLayout
from ftkit.runs.gpu_samples import (
    GpuCurve,
    GpuSample,
    NodeSample,
    gpu_curve,
    read_last_samples,
    read_samples,
    summarize_samples,
    to_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Result, RunMaker

STAND_IN = Path(__file__).parents[2] / "slurm" / "stand_ins" / "pynvml.py"


@pytest.fixture
def _nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fake nvidia-ml-py of tests/slurm."""
    spec = importlib.util.spec_from_file_location("pynvml", STAND_IN)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def node(time: float, host: str = "n1", **gpu: object) -> NodeSample:
    values = {"utilization": 90.0, "memory_gib": 60.0, "power": 600.0, "energy": 600.0 * time}
    return NodeSample(time, host, 0.0, (GpuSample(0, **(values | gpu)),))  # type: ignore[arg-type]


@pytest.mark.usefixtures("_nvml")
def test_samples_are_written_shown_and_served(
    ftkit: Callable[..., Result], make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("busy")
    file = run.layout.gpu_samples / f"{socket.gethostname()}.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(file), "--run", run.id, "--interval", "0.05", "--count", "40", "--metrics-port", str(port)]
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: type("C", (), {"prctl": lambda *_: 0}))
    thread = threading.Thread(target=sampler.main, args=(words,))
    thread.start()
    wait_until(lambda: len(read_samples(run.layout)) > 1, lambda: "no sample came")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    assert f'ftkit_gpu_power_watts{{run="{run.id}",host="{socket.gethostname()}",gpu="1"}} 650.0' in text
    (last,) = read_last_samples(run.layout)
    assert [gpu.memory_gib for gpu in last.gpus] == [60.0, 60.0]
    assert "650 W" in ftkit("runs", "top", run.id).out
    assert json.loads(ftkit("runs", "top", run.id, "--json").out)[0]["gpus"][1]["clock"] == 1755.0
    assert "2: 97% busy, 650 W each" in ftkit("status", run.id).out
    thread.join()


def test_an_old_sample_is_not_shown_as_the_present_one(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run("ended")
    run.layout.gpu_samples.mkdir()
    (run.layout.gpu_samples / "n1.jsonl").write_text(to_line(node(1000.0, throttle=("power",))))
    assert re.search(r"sampled .* ago, power", ftkit("runs", "top", run.id).out)


def test_each_dashboard_query_uses_a_served_metric() -> None:
    dashboard = (Path(ftkit.__file__).parent / "dashboards" / "grafana.json").read_text()
    json.loads(dashboard)
    served = {name for name, _ in sampler.METRICS.values()} | {sampler.NETWORK_METRIC, sampler.THROTTLE_METRIC}
    assert set(re.findall(r"ftkit_\w+", dashboard)) == served


def test_samples_of_all_nodes_are_merged_without_damaged_lines(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.gpu_samples.mkdir()
    (layout.gpu_samples / "n1.jsonl").write_text(to_line(node(0)) + '{"time": 5, "gpus": [{"ind\n' + to_line(node(20)))
    (layout.gpu_samples / "n2.jsonl").write_text(to_line(node(10, "n2")) + "[]\nnull\n")
    assert [(sample.time, sample.host) for sample in read_samples(layout)] == [(0, "n1"), (10, "n2"), (20, "n1")]


def test_energy_covers_only_the_time_in_which_the_job_ran() -> None:
    job = [node(0), node(10), node(20), node(10_000), node(10_010)]
    summary = summarize_samples([*job, *(node(sample.time, "n2", energy=None) for sample in job)])
    assert summary
    assert summary.energy_kwh == pytest.approx(2 * 30 * 600 / 3.6e6)  # once from the counter, once from power
    assert (summary.num_gpus, summary.utilization, summary.peak_memory_gib) == (2, 90.0, 60.0)
    assert summarize_samples([]) is None


def test_a_curve_has_the_mean_and_range_of_gpus_and_gaps_while_nothing_ran() -> None:
    times = (*range(0, 100, 10), *range(200, 300, 10))
    samples = [node(time, host, power=watts) for time in times for host, watts in (("n1", 500.0), ("n2", 700.0))]
    curve = gpu_curve(samples, lambda gpu: gpu.power, begin=-50)
    assert curve.seconds[:2] == (60.0, 80.0)  # each combines two samples
    known = [index for index, value in enumerate(curve.mean) if not math.isnan(value)]
    assert len(known) == 10
    assert known != list(range(10))
    assert {(curve.lowest[each], curve.mean[each], curve.highest[each]) for each in known} == {(500, 600, 700)}
    assert gpu_curve(samples, lambda gpu: gpu.sm_activity) == GpuCurve()
    long = [node(10 * index, power=float(index % 7)) for index in range(5000)]
    assert len(gpu_curve(long, lambda gpu: gpu.power).mean) <= 241


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.00052, "0.52 Wh"),
        (0.99949, "999 Wh"),
        (1, "1 kWh"),
        (41.27, "41.3 kWh"),
        (999.6, "1 MWh"),
        (2.05e6, "2,050 MWh"),
    ],
)
def test_energy_is_formatted_with_three_digits(amount: float, text: str) -> None:
    assert energy(amount) == text


def test_infiniband_counters_are_in_units_of_four_bytes(tmp_path: Path) -> None:
    statistics = tmp_path / "sys/class/net/eth0/statistics"
    statistics.mkdir(parents=True)
    (statistics.parent / "device").mkdir()
    (statistics / "rx_bytes").write_text("7\n")
    (statistics / "tx_bytes").write_text("5\n")
    assert sampler.network_bytes(tmp_path) == 12
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("100\n")
    assert sampler.network_bytes(tmp_path) == 400


def test_status_shows_the_nodes_excluded_by_the_preflight(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run("picky")
    run.layout.excluded_nodes.write_text("1795316249\t8\tn2\tdriver: CUDA 11.4; the image has CUDA 12.8\n8\tcut sho")
    assert "excluded n2" in ftkit("status", run.id).out
    expected = {"n2": "driver: CUDA 11.4; the image has CUDA 12.8"}
    assert json.loads(ftkit("status", run.id, "--json").out)["excluded_nodes"] == expected
