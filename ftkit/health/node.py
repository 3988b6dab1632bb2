"""All checks of one node, together with the other nodes of its job. `python -m ftkit.health` runs them.

First every node checks itself. Then they rendezvous at the first node that responds and exchange their findings, and
the healthy ones measure collectives: all together, and in pairs, which shows whose network is slow. The others wait at
most `wait_seconds` for a missing or unhealthy node.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.cluster import GpuModel
from ftkit.health.findings import Finding, Status, failures
from ftkit.health.machine import Expectation, check_machine
from ftkit.health.measure import (
    CollectiveRates,
    DeviceProcesses,
    DeviceRates,
    Group,
    MeasuredDevice,
    MeasureError,
    free_port,
    is_outlier,
    least_link_bandwidth,
    least_matmul,
    least_memory_bandwidth,
    least_network_bandwidth,
)
from ftkit.health.nvml import open_nvml
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_GROUP_SECONDS: Final = 40.0
_PAIR_ROUNDS: Final = 3
"""Rounds of pairs: a slow node is slow with all of its partners, while they are slow only with it."""
_FAST_NETWORK_GBPS: Final = 100
_CLOCK_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class NodeJob:
    """The checks to run on one node.

    Attributes:
        host: name of the node among `hosts`, which are all nodes of the job.
        port: port of the rendezvous on the first responding node; the following ports are for measurements.
        device: device of training, with `num_devices` on each node.
        gpu: GPU model in the cluster's profile, if known.
        network_gbps: network bandwidth of a node, in Gbit/s, if known.
        local_dir: folder on the node's own disk.
        shared_file: a file that exists if the shared file system is mounted.
        is_short: skip slow checks, as before training: pairs are measured only if all nodes together failed.
        wait_seconds: maximum wait for nodes that start late.
        absent_dir: folder in which HOST.absent marks a node that will not take part.
    """

    host: str
    hosts: tuple[str, ...]
    port: int
    device: MeasuredDevice
    num_devices: int
    gpu: GpuModel | None
    network_gbps: float | None
    local_dir: Path
    shared_file: Path | None
    is_short: bool
    wait_seconds: float
    absent_dir: Path | None = None


@dataclass(frozen=True)
class NodeReport:
    """Results of one node.

    Attributes:
        host: its name.
        findings: findings of all checks.
        devices: rates of each device.
        within: collectives among the devices of the node.
        between: collectives among all healthy nodes.
        pairs: bus bandwidth in GB/s of all-reduces with another node, by its name.
        time: time of the node's clock when all nodes had joined.
        seconds: duration of the checks.
    """

    host: str
    findings: tuple[Finding, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    within: CollectiveRates | None = None
    between: CollectiveRates | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    time: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> list[Finding]:
        """Reasons why the node can't be used; empty if it can."""
        return failures(self.findings)


def check_node(job: NodeJob, environment: Mapping[str, str]) -> NodeReport:
    """Run all checks of this node."""
    start = time.monotonic()
    processes = DeviceProcesses(job.device, job.num_devices)
    try:
        report = _check_alone(job, environment, processes)
        if len(job.hosts) > 1:
            report = _check_together(job, processes, report)
    finally:
        processes.close()
    return replace(report, seconds=time.monotonic() - start)


# --- Alone ---------------------------------------------------------------------------------------


def _check_alone(job: NodeJob, environment: Mapping[str, str], processes: DeviceProcesses) -> NodeReport:
    on_gpu = job.device == "cuda"
    name = GPUS[job.gpu].device_name.removeprefix("NVIDIA ") if job.gpu else ""
    expected = Expectation(job.local_dir, job.shared_file, job.num_devices if on_gpu else 0, name)
    mib = 64 if job.is_short else 256
    with open_nvml(environment) as nvml:
        findings = check_machine(expected, nvml, environment, mib if on_gpu else mib // 4, is_short=job.is_short)
    try:
        devices = processes.rates(is_short=job.is_short)
    except MeasureError as error:
        fix = "check 'nvidia-smi' and the kernel log on that node"
        return NodeReport(job.host, (*findings, Finding("matrix products", "failed", str(error), fix)))
    findings += _judge_devices(job, devices)
    within = None
    if job.num_devices > 1:
        group = Group("127.0.0.1", free_port(), 0, job.num_devices, 2**30 if on_gpu else 2**20, _GROUP_SECONDS)
        try:
            within = processes.collectives(group)
            findings.append(_judge_collectives(job, "within node", within, least_link_bandwidth(job.gpu)))
        except MeasureError as error:
            fix = "check 'nvidia-smi nvlink --status' and 'nvidia-smi topo -m' on that node"
            findings.append(Finding("within node", "failed", str(error), fix))
    if on_gpu:
        with open_nvml(environment) as nvml:  # while they are still warm
            throttled = [] if isinstance(nvml, str) else [each for each in nvml.health() if each.throttle]
        hot = "; ".join(f"GPU {each.index}: {', '.join(each.throttle)}" for each in throttled)
        if hot:
            findings.append(Finding("under load", "ok", f"clocks limited by {hot}"))
    return NodeReport(job.host, tuple(findings), tuple(devices), within)


def _below_peak(job: NodeJob) -> Status:
    """Return the status of a rate below the expected one: before training, a warning; only slower than others fails.

    A site may limit the power of all its GPUs, or a profile may overstate the network, without a fault of the node.
    """
    return "warning" if job.is_short else "failed"


def _judge_devices(job: NodeJob, devices: list[DeviceRates]) -> Iterator[Finding]:
    least, least_memory = least_matmul(job.gpu), least_memory_bandwidth(job.gpu)
    rates = ", ".join(f"{each.matmul:,.3g}" for each in devices)
    slow = [index for index, each in enumerate(devices) if least is not None and each.matmul < least]
    yield Finding("matrix products", "ok", f"{rates} TFLOP/s")
    for index in slow:
        value = f"{devices[index].matmul:,.0f} TFLOP/s, at least {least:,.0f} expected"
        yield Finding("matrix products", _below_peak(job), value, "check its clocks, power limit and cooling", index)
    for index, each in enumerate(devices):
        if least_memory is not None and each.memory < least_memory:
            value = f"{each.memory:,.0f} GB/s, at least {least_memory:,.0f} expected"
            yield Finding("GPU memory", _below_peak(job), value, "have the GPU replaced", index)


def _judge_collectives(job: NodeJob, name: str, rates: CollectiveRates, least: float | None) -> Finding:
    value = f"all-reduce {rates.all_reduce:,.3g}, all-gather {rates.all_gather:,.3g} GB/s"
    value += f" by {rates.transport}" if rates.transport else ""
    if least is not None and rates.all_reduce < least:
        fix = "compare the pairs; check the network's links and NCCL's plug-in"
        return Finding(name, _below_peak(job), f"{value}; at least {least:,.0f} GB/s expected", fix)
    return Finding(name, "ok", value)


# --- Together ------------------------------------------------------------------------------------


class _Rendezvous:
    """The rendezvous of a job's nodes, which exchange findings through a torch store on the first responding node."""

    def __init__(self, job: NodeJob) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - it is exported by name only

        self._job = job
        self._store = None
        for host in job.hosts:
            if self._is_absent(host):
                continue
            with contextlib.suppress(Exception):  # raised by torch if there is no listener
                wait = timedelta(seconds=job.wait_seconds)
                self._store = TCPStore(host, job.port, is_master=host == job.host, wait_for_workers=False, timeout=wait)
                break
        self.is_host = self._store is not None and host == job.host

    def share(self, topic: str, value: Any, hosts: tuple[str, ...]) -> dict[str, Any]:
        """Exchange a value with the other nodes; hosts without a value in time are missing from the result."""
        if self._store is None:
            return {self._job.host: value}
        self._store.set(f"{topic}/{self._job.host}", json.dumps(value))
        deadline = time.monotonic() + self._job.wait_seconds
        found: dict[str, Any] = {}
        for host in hosts:
            while not self._store.check([f"{topic}/{host}"]):
                if time.monotonic() > deadline or self._is_absent(host):
                    break
                time.sleep(_POLL_SECONDS)
            else:
                found[host] = json.loads(self._store.get(f"{topic}/{host}"))
        return found

    def _is_absent(self, host: str) -> bool:
        folder = self._job.absent_dir
        return folder is not None and (folder / f"{host}.absent").exists()

    def decide(self, topic: str, value: Any) -> Any:
        """Return the value of the store's host, because nodes may have different values."""
        if self._store is None or self.is_host:
            if self._store is not None:
                self._store.set(topic, json.dumps(value))
            return value
        try:
            self._store.wait([topic], timedelta(seconds=2 * self._job.wait_seconds))
            return json.loads(self._store.get(topic))
        except Exception:  # noqa: BLE001 - torch's errors if the host is gone
            return value


def _check_together(job: NodeJob, processes: DeviceProcesses, alone: NodeReport) -> NodeReport:
    """Return the report of a node's own checks, extended by the checks with the other nodes."""
    rendezvous = _Rendezvous(job)
    good = rendezvous.share("alone", not alone.failed, job.hosts)
    now = time.time()
    members = tuple(rendezvous.decide("members", [host for host in job.hosts if good.get(host)]))
    missing = [host for host in job.hosts if host not in good]
    findings = list(alone.findings)
    if missing:
        findings.append(Finding("other nodes", "warning", f"no response from: {', '.join(missing)}"))
    between, pairs = None, dict[str, float]()
    if job.host in members and len(members) > 1:
        between, judged = _measure_between(job, processes, members)
        findings += judged
        succeeded = rendezvous.share("between", between is not None, members)
        if not job.is_short or not all(succeeded.values()):
            pairs = _measure_pairs(job, processes, members)
    numbers = {
        "matmul": [each.matmul for each in alone.devices],
        "pair": max(pairs.values(), default=None),
        "time": now,
        "driver": next((each.value for each in findings if each.check == "driver"), None),
    }
    shared = rendezvous.share("numbers", numbers, tuple(good))
    findings += compare_with_others(job.host, job.device, shared)
    rendezvous.share(
        "end", value=True, hosts=tuple(shared) if rendezvous.is_host else ()
    )  # until then, others read its store
    return replace(alone, findings=tuple(findings), between=between, pairs=pairs, time=now)


def _measure_between(
    job: NodeJob, processes: DeviceProcesses, members: tuple[str, ...]
) -> tuple[CollectiveRates | None, list[Finding]]:
    """Return the rates among all nodes, None if they failed, and the findings about them."""
    position = members.index(job.host)
    num_bytes = 2**30 if job.device == "cuda" else 2**20
    group = Group(
        members[0], job.port + 1, position * job.num_devices, len(members) * job.num_devices, num_bytes, _GROUP_SECONDS
    )
    try:
        rates = processes.collectives(group)
    except MeasureError as error:
        return None, [Finding("between nodes", "warning", f"all nodes together: {error}")]
    findings = [_judge_collectives(job, "between nodes", rates, least_network_bandwidth(job.network_gbps))]
    uses_sockets = "Socket" in rates.transport
    if uses_sockets and (job.network_gbps or 0) >= _FAST_NETWORK_GBPS:
        fix = "NCCL's plug-in was not loaded: compare 'nccl:' in the profile with the site's instructions"
        findings.append(Finding("NCCL network", _below_peak(job), "NCCL uses TCP sockets", fix))
    return rates, findings


def _measure_pairs(job: NodeJob, processes: DeviceProcesses, members: tuple[str, ...]) -> dict[str, float]:
    """Return the bus bandwidth with each partner, in GB/s; 0 if it failed."""
    rates: dict[str, float] = {}
    for number, partners in enumerate(pair_rounds(members)[:_PAIR_ROUNDS]):
        partner = partners.get(job.host)
        if partner is None:
            continue
        first = min(job.host, partner, key=members.index)
        group = Group(
            first,
            job.port + 2 + number,
            0 if first == job.host else job.num_devices,
            2 * job.num_devices,
            2**28 if job.device == "cuda" else 2**18,
            _GROUP_SECONDS / 2,
        )
        try:
            rates[partner] = processes.collectives(group).all_reduce
        except MeasureError:
            rates[partner] = 0.0
    return rates


def pair_rounds(members: tuple[str, ...]) -> list[dict[str, str]]:
    """Return rounds in which each node has a different partner: the circle method of round-robin tournaments."""
    ring: list[str | None] = list(members) if len(members) % 2 == 0 else [*members, None]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        rounds.append({a: b for pair in pairs for a, b in (pair, pair[::-1])})
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def compare_with_others(host: str, device: str, numbers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Compare a node with the others: one that differs from most is faulty, even without reference values.

    Args:
        host: the node.
        device: the measured device.
        numbers: measurements of all nodes, by name: `matmul` of each device in TFLOP/s, `pair` with the best partner in
            GB/s, `time` in seconds, `driver`.
    """
    findings, own = [], numbers[host]
    every = [rate for each in numbers.values() for rate in each["matmul"]]
    for index, rate in enumerate(own["matmul"]):
        if is_outlier(rate, every, device):
            value = f"{rate:,.3g} TFLOP/s, others {max(every):,.3g}"
            fix = "check its clocks, power limit and cooling"
            findings.append(Finding("matrix products", "failed", value, fix, index if device == "cuda" else None))
    pairs = [each["pair"] for each in numbers.values() if each["pair"] is not None]
    if own["pair"] is not None and (own["pair"] == 0 or is_outlier(own["pair"], pairs, device)):
        value = f"{own['pair']:,.3g} GB/s with its best partner, others {max(pairs):,.3g}"
        findings.append(Finding("pairs", "failed", value, "check the node's network adapters, cables and switch ports"))
    times = sorted(each["time"] for each in numbers.values() if each["time"])
    if times and abs(own["time"] - times[len(times) // 2]) > _CLOCK_SECONDS:
        value = f"differs by {own['time'] - times[len(times) // 2]:.0f} s from most nodes"
        findings.append(Finding("clock", "warning", value, "synchronize the clocks with NTP"))
    drivers = [each["driver"] for each in numbers.values() if each["driver"]]
    usual = max(drivers, key=drivers.count, default=None)
    if own["driver"] and drivers.count(own["driver"]) < drivers.count(usual):
        findings.append(Finding("driver", "warning", f"{own['driver']}; most nodes have {usual}", "install that one"))
    return findings


def as_json(report: NodeReport) -> dict[str, Any]:
    """Return a report as plain values."""
    return {**asdict(report), "is_healthy": not report.failed}
