"""Measure device rates in one process per device, compare nodes, and give the rates of healthy devices.

A process that hangs in a collective, as NCCL does on a broken network, is killed, and restarted for the next request.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, TypedDict, TypeVar

from ftkit.errors import one_line
from ftkit.health.findings import Finding
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from ftkit.config.cluster import GpuModel

ResultT = TypeVar("ResultT")
MeasuredDevice = Literal["cpu", "cuda"]
_START_SECONDS: Final = 90.0  # time for eight processes to import torch and create CUDA contexts on a busy node


@dataclass(frozen=True)
class DeviceRates:
    """TFLOP/s of matmuls in bf16 (on a CPU: fp32), and GB/s of copies within its memory, reads plus writes."""

    matmul: float
    memory: float


@dataclass(frozen=True)
class CollectiveRates:
    """Bus bandwidths in bf16 (on a CPU: fp32) in GB/s, as in nccl-tests, and the transport if NCCL logged one."""

    all_reduce: float
    all_gather: float
    transport: str = ""


@dataclass(frozen=True)
class Group:
    """A process group to measure: its rendezvous, the first rank of this node, and the bytes of a buffer."""

    host: str
    port: int
    first_rank: int
    size: int
    num_bytes: int
    timeout: float


class MeasureError(Exception):
    """A measurement failed or timed out; the message is one line."""


class DeviceProcesses:
    """One process per device of this node."""

    def __init__(self, device: MeasuredDevice, count: int) -> None:
        self.device = device
        self.count = count
        self._running: list[tuple[SpawnProcess, Connection]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="ftkit-nccl-")
        # The processes inherit these. Keep a level that the site or the user has set.
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ.setdefault("NCCL_DEBUG_FILE", f"{self._logs.name}/%h.%p")

    def rates(self, *, is_short: bool) -> list[DeviceRates]:
        """Measure all devices at the same time, because they share power and cooling in training."""
        return self._ask(_rates, [(is_short,)] * self.count, _START_SECONDS)

    def collectives(self, group: Group) -> CollectiveRates:
        """Measure collectives of a group; return the slowest process's result."""
        questions = [(group, group.first_rank + local) for local in range(self.count)]
        answers = self._ask(_collectives, questions, group.timeout + (0 if self._running else _START_SECONDS))
        log = "".join(path.read_text(errors="replace") for path in Path(self._logs.name).iterdir())
        transport = find_transport(log) if self.device == "cuda" else "gloo"
        return replace(min(answers, key=lambda each: each.all_reduce), transport=transport)

    def close(self) -> None:
        self._end()
        self._logs.cleanup()

    def _end(self) -> None:
        for process, connection in self._running:
            connection.close()
            process.kill()
            process.join()
        self._running = []

    def _ask(
        self, measure: Callable[..., ResultT], questions: Sequence[tuple[object, ...]], timeout: float
    ) -> list[ResultT]:
        """Measure in each process. If one fails, dies or times out, end all, and raise MeasureError.

        The standard library's pools don't fit: `Pool` replaces a dead process without an error. The processes of
        `ProcessPoolExecutor` can't be killed, and survive if this process is killed.
        """
        if not self._running:
            context = multiprocessing.get_context("spawn")
            for index in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self.device, index), daemon=True)
                process.start()
                theirs.close()
                self._running.append((process, ours))
        deadline = time.monotonic() + timeout
        waiting = {connection: index for index, (_, connection) in enumerate(self._running)}
        answers: dict[int, ResultT] = {}
        index = 0
        failure = ""
        try:
            for connection, index in waiting.items():
                connection.send((measure, questions[index]))
            while waiting and not failure:
                ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
                if not ready:
                    failure = f"process {min(waiting.values())} did not answer in time"
                for connection in [each for each in waiting if each in ready]:
                    index = waiting.pop(connection)
                    answer = connection.recv()
                    if isinstance(answer, MeasureError):
                        failure = str(answer)
                    else:
                        answers[index] = answer
        except (EOFError, OSError):
            failure = f"process {index} died"
        if failure:
            self._end()
            raise MeasureError(failure)
        return [answers[index] for index in range(self.count)]


# --- In the processes, which import torch ----------------------------------------------------------


def _serve(connection: Connection, device: MeasuredDevice, index: int) -> None:
    """Answer requests until the other side closes; return any exception of torch, CUDA or NCCL as a result."""
    opened = None
    while True:
        try:
            measure, question = connection.recv()
        except EOFError:
            return
        try:
            opened = opened or _Device(device, index)
            answer = measure(opened, *question)
        except Exception as error:  # noqa: BLE001 - also a torch without CUDA, a missing or old driver, a broken GPU
            what = "" if opened else f"torch can't use GPU {index}: "
            answer = MeasureError(f"{what}{type(error).__name__}: {one_line(error)}")
        connection.send(answer)


class _Device:
    def __init__(self, name: MeasuredDevice, index: int) -> None:
        if name == "cpu":
            os.environ["OMP_NUM_THREADS"] = "1"
        import torch.distributed  # noqa: PLC0415

        if name == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(index)
        self.torch = torch
        self.name = name
        self.on_gpu = name == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def seconds(self, function: Callable[[], object], repeats: int) -> float:
        """Return the seconds of one call: on a GPU the mean after a warm-up, on a CPU the shortest of all."""
        function()
        if not self.on_gpu:
            return min(timeit.repeat(function, number=1, repeat=repeats))
        cuda = self.torch.cuda
        function()
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000 / repeats


def _rates(device: _Device, is_short: bool) -> DeviceRates:  # noqa: FBT001 - called by position
    torch, on_gpu = device.torch, device.on_gpu
    width = 8192 if on_gpu else 512
    left, right = (torch.randn(width, width, device=device.name, dtype=device.dtype) for _ in range(2))
    out = torch.empty_like(left)
    # Run for a few seconds, so that clocks settle at the power and cooling limits.
    repeats = (100 if is_short else 1000) if on_gpu else 5
    matmul = 2 * width**3 / device.seconds(lambda: torch.mm(left, right, out=out), repeats) / 1e12
    source = torch.empty(2**30 if on_gpu else 2**24, device=device.name, dtype=torch.uint8)
    target = torch.empty_like(source)
    memory = 2 * source.numel() / device.seconds(lambda: target.copy_(source), 20 if on_gpu else 5) / 1e9
    return DeviceRates(matmul, memory)


def _collectives(device: _Device, group: Group, rank: int) -> CollectiveRates:
    torch, dist = device.torch, device.torch.distributed
    dist.init_process_group(
        "nccl" if device.on_gpu else "gloo", init_method=f"tcp://{group.host}:{group.port}", rank=rank,
        world_size=group.size, timeout=timedelta(seconds=group.timeout),
    )  # fmt: skip
    try:
        count = group.num_bytes // device.dtype.itemsize // group.size * group.size
        whole = torch.zeros(count, device=device.name, dtype=device.dtype)
        part = torch.zeros(count // group.size, device=device.name, dtype=device.dtype)
        num_bytes, repeats = count * device.dtype.itemsize, 20 if device.on_gpu else 3
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14
        dist.barrier()
        reduced = device.seconds(lambda: dist.all_reduce(whole), repeats)
        gathered = device.seconds(lambda: gather(whole, part), repeats)
    finally:
        dist.destroy_process_group()
    bandwidths = (2 * bus_bandwidth(num_bytes, group.size, reduced), bus_bandwidth(num_bytes, group.size, gathered))
    return CollectiveRates(*bandwidths)


def bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Return the GB/s of an all-gather (nccl-tests' doc/PERFORMANCE.md); an all-reduce has twice as much."""
    return num_bytes / seconds * (num_ranks - 1) / num_ranks / 1e9


def find_transport(log: str) -> str:
    """Return the transport in NCCL's log (NCCL_DEBUG=INFO): its network, and the paths within the node."""
    networks = re.findall(r"NCCL INFO (?:Using network|Assigned NET plugin) ([\w./-]+(?: [\w.]+)?)", log)
    paths = {path for path in re.findall(r"NCCL INFO Channel .* via ([A-Z0-9]+)", log) if path != "NET"}
    found = [*(name.removesuffix(" to comm").strip() for name in networks[-1:]), *sorted(paths)]
    return ", ".join([*found, *(["NVLS"] if "NVLS multicast support is available" in log else [])])


# --- Expected rates ------------------------------------------------------------------------------

_MATMUL_SHARES: Final[dict[GpuModel, float]] = {"l4": 0.3}
_OUTLIER: Final = {"cuda": 0.85, "cpu": 0.1}
"""A device below this fraction of the median of all devices is an outlier. CPUs are shared with other processes."""
_CLOCK_SECONDS: Final = 5.0
SLOW_GPU: Final = "check its clocks, power limit and cooling"


def least_matmul(gpu: GpuModel) -> float:
    """Return the minimum TFLOP/s of bf16 matmuls on a healthy GPU."""
    return _MATMUL_SHARES.get(gpu, 0.5) * GPUS[gpu].bf16_flops / 1e12


class NodeNumbers(TypedDict):
    """Values that nodes compare: TFLOP/s per device, GB/s with the best partner, and clock time."""

    matmul: list[float]
    pair: float | None
    time: float


def compare_with_others(host: str, device: MeasuredDevice, numbers: Mapping[str, NodeNumbers]) -> list[Finding]:
    """Compare a node with all nodes. A node that differs from most is faulty, even without reference values."""
    findings = []
    own = numbers[host]
    every = [rate for each in numbers.values() for rate in each["matmul"]]
    for index, rate in enumerate(own["matmul"]):
        if _is_outlier(rate, every, device):
            value = f"{rate:,.3g} TFLOP/s, others {max(every):,.3g}"
            findings.append(Finding("matrix products", "failed", value, SLOW_GPU, index if device == "cuda" else None))
    pairs = [each["pair"] for each in numbers.values() if each["pair"] is not None]
    if own["pair"] is not None and (own["pair"] == 0 or _is_outlier(own["pair"], pairs, device)):
        value = f"{own['pair']:,.3g} GB/s with its best partner, others {max(pairs):,.3g}"
        findings.append(Finding("pairs", "failed", value, "check the node's network adapters, cables and switch ports"))
    ahead = own["time"] - sorted(each["time"] for each in numbers.values())[len(numbers) // 2]
    if abs(ahead) > _CLOCK_SECONDS:
        value = f"differs by {ahead:.0f} s from most nodes"
        findings.append(Finding("clock", "warning", value, "synchronize the clocks with NTP"))
    return findings


def _is_outlier(value: float, others: Sequence[float], device: MeasuredDevice) -> bool:
    usual = max(others) if len(others) == 2 else median(others)  # noqa: PLR2004 - the median is between them
    return len(others) > 1 and value < _OUTLIER[device] * usual


def pair_rounds(members: Sequence[str]) -> list[dict[str, str]]:
    """Return rounds in which each node has a different partner: the circle method of round-robin tournaments."""
    ring: list[str | None] = list(members) if len(members) % 2 == 0 else [*members, None]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        rounds.append({a: b for pair in pairs for a, b in (pair, pair[::-1])})
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds
