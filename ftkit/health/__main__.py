"""`python -m ftkit.health`: check this node, together with the other nodes of its job. Needs torch, but not Slurm.

First, every node checks itself. Then the nodes rendezvous at the first one that responds, and exchange their findings.
The healthy nodes measure collectives, all together, and then in pairs to find nodes with a slow network. They wait at
most `--wait-seconds` for a missing or unhealthy node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, get_args

from ftkit.config.cluster import GpuModel
from ftkit.errors import UnfitMachineError, one_line
from ftkit.health.findings import REPORT_PREFIX, Finding, Status, failures
from ftkit.health.node import check_disk, check_gpus, check_interfaces, check_shared_disk, open_nvml
from ftkit.health.rates import (
    SLOW_GPU,
    CollectiveRates,
    DeviceProcesses,
    DeviceRates,
    Group,
    MeasuredDevice,
    MeasureError,
    NodeNumbers,
    compare_with_others,
    least_matmul,
    pair_rounds,
)
from ftkit.planning.training_setup import GPUS

_GROUP_SECONDS: Final = 40.0
_PAIR_ROUNDS: Final = 3
"""Rounds of pairs. A slow node is slow with all of its partners; the partners are slow only with it."""
_FAST_NETWORK_GBPS: Final = 100
_POLL_SECONDS: Final = 0.1
VERDICT_PREFIX = "ftkit-node "
WARNING_PREFIX = "ftkit-warning "


@dataclass(frozen=True)
class NodeReport:
    """Results of one node: rates of collectives `within` it, `between` all nodes, and in `pairs` (GB/s by partner)."""

    host: str
    findings: tuple[Finding, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    within: CollectiveRates | None = None
    between: CollectiveRates | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class NodeCheck:
    """The checks of one node, selected by command-line options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.host: str = options.host or socket.gethostname()
        self.hosts: Sequence[str] = options.hosts.split(",") if options.hosts else [self.host]
        self.port: int = options.port
        self.network_gbps: float | None = options.network_gbps
        self.local_dir: Path = options.local_dir
        self.shared_file: Path | None = options.shared_file
        self.absent_dir: Path | None = options.absent_dir
        self.wait_seconds: float = options.wait_seconds
        self.is_short: bool = options.short
        with open_nvml() as nvml:
            names = [] if isinstance(nvml, str) else nvml.names
        self.on_gpu: bool = options.device == "cuda" or (options.device == "auto" and bool(names))
        self.device: MeasuredDevice = "cuda" if self.on_gpu else "cpu"
        self.num_devices: int = options.num_devices or (len(names) if self.on_gpu else 1) or 1
        self.gpu: GpuModel | None = options.gpu if self.on_gpu else None
        if self.on_gpu and self.gpu is None and names:
            self.gpu = next((model for model, known in GPUS.items() if known.device_name == names[0]), None)
        self.processes = DeviceProcesses(self.device, self.num_devices)

    def run(self, environment: Mapping[str, str]) -> NodeReport:
        start = time.monotonic()
        try:
            report = self._check_alone(environment)
            if len(self.hosts) > 1:
                report = self._check_together(report)
        finally:
            self.processes.close()
        return replace(report, seconds=time.monotonic() - start)

    @property
    def _below_peak(self) -> Status:
        """A warning before training, because a site may limit power, or a profile may overstate the network."""
        return "warning" if self.is_short else "failed"

    def _check_alone(self, environment: Mapping[str, str]) -> NodeReport:
        """Check this node; check its GPUs after the matmuls, while they are warm."""
        mib = (64 if self.is_short else 256) // (1 if self.on_gpu else 4)
        findings = [check_disk("local disk", self.local_dir, mib), *check_interfaces(environment)]
        if self.shared_file is not None:
            findings.append(check_shared_disk(self.shared_file, mib))
        devices: Sequence[DeviceRates] = ()
        failure = ""
        try:
            devices = self.processes.rates(is_short=self.is_short)
        except MeasureError as error:
            failure = str(error)
        with open_nvml(environment) as nvml:
            if not isinstance(nvml, str):
                name = GPUS[self.gpu].device_name.removeprefix("NVIDIA ") if self.gpu else ""
                findings += check_gpus(nvml, self.num_devices if self.on_gpu else 0, name, environment)
            elif self.on_gpu:
                findings.append(Finding("driver", "unknown", nvml))
        if failure:
            fix = "check 'nvidia-smi' and the kernel log on that node"
            return NodeReport(self.host, (*findings, Finding("matrix products", "failed", failure, fix)))
        findings += self._judge_devices(devices)
        within = None
        if self.num_devices > 1:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            group = Group("127.0.0.1", port, 0, self.num_devices, 2**30 if self.on_gpu else 2**20, _GROUP_SECONDS)
            try:
                within = self.processes.collectives(group)
                findings.append(self._judge("within node", within))
            except MeasureError as error:
                fix = "check 'nvidia-smi nvlink --status' and 'nvidia-smi topo -m' on that node"
                findings.append(Finding("within node", "failed", str(error), fix))
        return NodeReport(self.host, tuple(findings), tuple(devices), within)

    def _judge_devices(self, devices: Sequence[DeviceRates]) -> Iterator[Finding]:
        rates = ", ".join(f"{each.matmul:,.3g}" for each in devices)
        yield Finding("matrix products", "ok", f"{rates} TFLOP/s")
        for index, each in enumerate(devices):
            if self.gpu and each.matmul < (least := least_matmul(self.gpu)):
                value = f"{each.matmul:,.0f} TFLOP/s, at least {least:,.0f} expected"
                yield Finding("matrix products", self._below_peak, value, SLOW_GPU, index)
            if self.gpu and each.memory < (least := 0.7 * GPUS[self.gpu].memory_bandwidth / 1e9):
                value = f"{each.memory:,.0f} GB/s, at least {least:,.0f} expected"
                yield Finding("GPU memory", self._below_peak, value, "have the GPU replaced", index)

    def _judge(self, name: str, rates: CollectiveRates) -> Finding:
        value = f"all-reduce {rates.all_reduce:,.3g}, all-gather {rates.all_gather:,.3g} GB/s"
        value += f" by {rates.transport}" if rates.transport else ""
        least = self.gpu and 0.5 * GPUS[self.gpu].link_bandwidth / 1e9
        if name == "between nodes":
            least = self.network_gbps and 0.5 * self.network_gbps / 8
        if least is None or rates.all_reduce >= least:
            return Finding(name, "ok", value)
        fix = "compare the pairs; check the network's links and NCCL's plug-in"
        return Finding(name, self._below_peak, f"{value}; at least {least:,.0f} GB/s expected", fix)

    def _check_together(self, alone: NodeReport) -> NodeReport:
        rendezvous = _Rendezvous(self)
        good = rendezvous.share("alone", not failures(alone.findings), self.hosts)
        now = time.time()
        # Use the list of the store's host, because lists may differ. It may wait longer for a missing node.
        members: list[str] = [host for host in self.hosts if good.get(host)]
        [members] = rendezvous.share("members", members, [rendezvous.host], patience=2).values() or [members]
        findings = list(alone.findings)
        if missing := [host for host in self.hosts if host not in good]:
            findings.append(Finding("other nodes", "warning", f"no response from: {', '.join(missing)}"))
        between, pairs = None, dict[str, float]()
        if self.host in members and len(members) > 1:
            between, judged = self._measure_between(members)
            findings += judged
            succeeded = rendezvous.share("between", between is not None, members)
            if not self.is_short or not all(succeeded.values()):
                pairs = self._measure_pairs(members)
        matmul = [each.matmul for each in alone.devices]
        numbers: NodeNumbers = {"matmul": matmul, "pair": max(pairs.values(), default=None), "time": now}
        shared = rendezvous.share("numbers", numbers, list(good))
        findings += compare_with_others(self.host, self.device, shared)
        # The others read its store until then.
        rendezvous.share("end", value=True, hosts=list(shared) if rendezvous.host == self.host else [])
        return replace(alone, findings=tuple(findings), between=between, pairs=pairs)

    def _measure_between(self, members: Sequence[str]) -> tuple[CollectiveRates | None, list[Finding]]:
        first_rank = members.index(self.host) * self.num_devices
        num_bytes = 2**30 if self.on_gpu else 2**20
        size = len(members) * self.num_devices
        group = Group(members[0], self.port + 1, first_rank, size, num_bytes, _GROUP_SECONDS)
        try:
            rates = self.processes.collectives(group)
        except MeasureError as error:
            return None, [Finding("between nodes", "warning", f"all nodes together: {error}")]
        findings = [self._judge("between nodes", rates)]
        if "Socket" in rates.transport and (self.network_gbps or 0) >= _FAST_NETWORK_GBPS:
            fix = "NCCL's plug-in was not loaded: compare 'nccl:' in the profile with the site's instructions"
            findings.append(Finding("NCCL network", self._below_peak, "NCCL uses TCP sockets", fix))
        return rates, findings

    def _measure_pairs(self, members: Sequence[str]) -> dict[str, float]:
        """Return the bus bandwidth with each partner in GB/s; 0 if the measurement failed."""
        rates: dict[str, float] = {}
        num_bytes = 2**28 if self.on_gpu else 2**18
        for number, partners in enumerate(pair_rounds(members)[:_PAIR_ROUNDS]):
            partner = partners.get(self.host)
            if partner is None:
                continue
            first = min(self.host, partner, key=members.index)
            rank = 0 if first == self.host else self.num_devices
            port = self.port + 2 + number
            group = Group(first, port, rank, 2 * self.num_devices, num_bytes, _GROUP_SECONDS / 2)
            try:
                rates[partner] = self.processes.collectives(group).all_reduce
            except MeasureError:
                rates[partner] = 0.0
        return rates


class _Rendezvous:
    """The rendezvous of a job's nodes, which exchange findings through a TCPStore on the first responding node."""

    def __init__(self, node: NodeCheck) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - exported by name only

        self._node = node
        self._store = None
        self.host = node.host
        wait = timedelta(seconds=node.wait_seconds)
        for host in node.hosts:
            if self._is_absent(host):
                continue
            with contextlib.suppress(Exception):  # raised by torch if there is no listener
                is_ours = host == node.host
                self._store = TCPStore(host, node.port, is_master=is_ours, wait_for_workers=False, timeout=wait)
                self.host = host
                break

    def share(self, topic: str, value: Any, hosts: Sequence[str], patience: float = 1) -> dict[str, Any]:
        """Exchange a value with the other nodes; the result lacks hosts that did not send one in time."""
        if self._store is None:
            return {self._node.host: value}
        self._store.set(f"{topic}/{self._node.host}", json.dumps(value))
        deadline = time.monotonic() + patience * self._node.wait_seconds
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
        folder = self._node.absent_dir
        return folder is not None and (folder / f"{host}.absent").exists()


def main(words: list[str]) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise torch prints a page for each missing node
    parser = argparse.ArgumentParser(prog="python -m ftkit.health", description="Check this node.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--short", action="store_true", help="skip slow checks, as the preflight of a run does")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--num-devices", type=int, help="number of GPUs of the node; default: all")
    parser.add_argument("--gpu", choices=get_args(GpuModel), help="GPU model; default: detected")
    parser.add_argument("--network-gbps", type=float, help="bandwidth of a node's network, in Gbit/s")
    parser.add_argument("--local-dir", type=Path, default="/tmp", help="folder on the node's own disk")  # noqa: S108
    parser.add_argument("--shared-file", type=Path, help="a file that must exist on every node")
    parser.add_argument("--host", help="name of this node among --hosts")
    parser.add_argument("--hosts", default="", help="all nodes of the job, separated by commas")
    parser.add_argument("--port", type=int, default=29400, help="first of several ports to use on the nodes")
    parser.add_argument("--wait-seconds", type=float, default=60, help="how long to wait for nodes that start late")
    parser.add_argument("--absent-dir", type=Path, help="folder in which HOST.absent marks a node that does not start")
    parser.add_argument("--in-job", action="store_true", help="print one line each of report and verdict; exit with 0")
    options = parser.parse_args(words)
    report = NodeCheck(options).run(os.environ)
    failed = failures(report.findings)
    values = {**asdict(report), "is_healthy": not failed}
    if options.in_job:  # many nodes write to one stream: write whole lines, each with the node's name
        sys.stdout.write(f"{REPORT_PREFIX}{json.dumps(values)}\n")
        warnings = [each for each in report.findings if each.status == "warning"]
        sys.stdout.write("".join(f"{WARNING_PREFIX}{report.host}: {one_line(str(each))}\n" for each in warnings))
        reasons = one_line("; ".join(f"{each} ({each.fix})" if each.fix else str(each) for each in failed))
        sys.stdout.write(f"{VERDICT_PREFIX}{report.host} {f'bad {reasons}' if failed else 'ok'}\n")
        return 0
    if options.json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{each.status:8} {each}\n" for each in report.findings))
    return UnfitMachineError.exit_code if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
