"""`python -m ftkit.health`: check this node, together with the other nodes of its job. Needs torch, but not Slurm.

First every node checks itself. Then they rendezvous at the first node that responds and exchange their findings, and
the healthy ones measure collectives: all together, and in pairs, which shows whose network is slow. The others wait at
most `wait_seconds` for a missing or unhealthy node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from ftkit.config.cluster import GpuModel
from ftkit.errors import UnfitMachineError, one_line
from ftkit.health.findings import Finding
from ftkit.health.measure import (
    CollectiveRates,
    DeviceProcesses,
    Group,
    MeasureError,
    is_outlier,
    least_network_bandwidth,
)
from ftkit.health.node import GROUP_SECONDS, NodeJob, NodeReport, below_peak, check_alone, judge_collectives
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.health.measure import MeasuredDevice

_PAIR_ROUNDS: Final = 3
"""Rounds of pairs: a slow node is slow with all of its partners, while they are slow only with it."""
_FAST_NETWORK_GBPS: Final = 100
_CLOCK_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
REPORT_PREFIX = "ftkit-report "
VERDICT_PREFIX = "ftkit-node "
WARNING_PREFIX = "ftkit-warning "


def main(words: list[str]) -> int:
    """Check this node; print the report, return the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise torch prints a page for each missing node
    options = _parser().parse_args(words)
    device, num_devices, gpu = _devices(options)
    host = options.host or socket.gethostname()
    job = NodeJob(
        host=host,
        hosts=tuple(options.hosts.split(",")) if options.hosts else (host,),
        port=options.port,
        device=device,
        num_devices=num_devices,
        gpu=gpu,
        network_gbps=options.network_gbps,
        local_dir=Path(options.local_dir),
        shared_file=Path(options.shared_file) if options.shared_file else None,
        is_short=options.short,
        wait_seconds=options.wait_seconds,
        absent_dir=Path(options.absent_dir) if options.absent_dir else None,
    )
    report = check_node(job, os.environ)
    failed = "; ".join(f"{each} ({each.fix})" if each.fix else str(each) for each in report.failed)
    if options.in_job:  # many nodes write to one stream: write whole lines, each with the node's name
        sys.stdout.write(f"{REPORT_PREFIX}{json.dumps(as_json(report))}\n")
        warnings = [each for each in report.findings if each.status == "warning"]
        sys.stdout.write("".join(f"{WARNING_PREFIX}{host}: {one_line(str(each))}\n" for each in warnings))
        sys.stdout.write(f"{VERDICT_PREFIX}{host} {f'bad {one_line(failed)}' if failed else 'ok'}\n")
        return 0
    if options.json:
        sys.stdout.write(json.dumps(as_json(report), indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{each.status:8} {each}\n" for each in report.findings))
    return UnfitMachineError.exit_code if report.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftkit.health", description="Check this node.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--short", action="store_true", help="skip slow checks, as the preflight of a run does")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--num-devices", type=int, help="number of GPUs of the node; default: all that torch sees")
    parser.add_argument("--gpu", choices=get_args(GpuModel), help="GPU model; default: detected")
    parser.add_argument("--network-gbps", type=float, help="bandwidth of a node's network, in Gbit/s")
    parser.add_argument("--local-dir", default="/tmp", help="folder on the node's own disk")  # noqa: S108
    parser.add_argument("--shared-file", help="a file that must exist on every node")
    parser.add_argument("--host", help="name of this node among --hosts")
    parser.add_argument("--hosts", default="", help="all nodes of the job, separated by commas")
    parser.add_argument("--port", type=int, default=29400, help="first of several ports to use on the nodes")
    parser.add_argument("--wait-seconds", type=float, default=60, help="how long to wait for nodes that start late")
    parser.add_argument("--absent-dir", help="folder in which HOST.absent marks a node whose checks did not run")
    parser.add_argument("--in-job", action="store_true", help="print one line each of report and verdict; exit with 0")
    return parser


def _devices(options: argparse.Namespace) -> tuple[MeasuredDevice, int, GpuModel | None]:
    """Return device, number of devices and GPU model: as given, else as torch detects them."""
    device, count, gpu = options.device, options.num_devices, options.gpu
    if device == "cpu":
        return "cpu", count or 1, None
    import torch  # noqa: PLC0415

    has_gpus = torch.cuda.is_available()
    if device == "auto" and not has_gpus:
        return "cpu", count or 1, None
    if gpu is None and has_gpus:
        name = torch.cuda.get_device_name(0)
        gpu = next((model for model, known in GPUS.items() if known.device_name == name), None)
    return "cuda", count or torch.cuda.device_count() or 1, gpu


def check_node(job: NodeJob, environment: Mapping[str, str]) -> NodeReport:
    """Run all checks of this node."""
    start = time.monotonic()
    processes = DeviceProcesses(job.device, job.num_devices)
    try:
        report = check_alone(job, environment, processes)
        if len(job.hosts) > 1:
            report = _check_together(job, processes, report)
    finally:
        processes.close()
    return replace(report, seconds=time.monotonic() - start)


# --- Alone ---------------------------------------------------------------------------------------


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
        members[0], job.port + 1, position * job.num_devices, len(members) * job.num_devices, num_bytes, GROUP_SECONDS
    )
    try:
        rates = processes.collectives(group)
    except MeasureError as error:
        return None, [Finding("between nodes", "warning", f"all nodes together: {error}")]
    findings = [judge_collectives(job, "between nodes", rates, least_network_bandwidth(job.network_gbps))]
    uses_sockets = "Socket" in rates.transport
    if uses_sockets and (job.network_gbps or 0) >= _FAST_NETWORK_GBPS:
        fix = "NCCL's plug-in was not loaded: compare 'nccl:' in the profile with the site's instructions"
        findings.append(Finding("NCCL network", below_peak(job), "NCCL uses TCP sockets", fix))
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
            GROUP_SECONDS / 2,
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
