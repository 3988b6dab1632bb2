"""Processes that measure one device each: matmuls, memory, and collectives.

A process that hangs in a collective, as NCCL does on a broken network, is killed, and restarted for the next request.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from ftkit.errors import one_line
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from ftkit.config.cluster import GpuModel

MeasuredDevice = Literal["cpu", "cuda"]
_START_SECONDS: Final = 90.0
"""Time for importing torch and creating a CUDA context on a busy node, in eight processes."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a single device.

    Attributes:
        matmul: rate of bf16 (on a CPU: fp32) matmuls, in TFLOP/s.
        memory: bandwidth of a copy within its memory, reads plus writes, in GB/s.
        host: bandwidth of copies from pinned host memory, in GB/s; None on a CPU.
    """

    matmul: float
    memory: float
    host: float | None


@dataclass(frozen=True)
class CollectiveRates:
    """Bus bandwidths of collectives, in GB/s by nccl-tests' formulas, and their transport.

    Attributes:
        all_reduce: bus bandwidth of an all-reduce in bf16 (on a CPU: fp32).
        all_gather: bus bandwidth of an all-gather.
        num_ranks: processes.
        transport: as logged by NCCL; empty if it logged none.
    """

    all_reduce: float
    all_gather: float
    num_ranks: int
    transport: str = ""


@dataclass(frozen=True)
class Group:
    """A process group to measure: its rendezvous, and the ranks of these processes."""

    host: str
    port: int
    first_rank: int
    size: int
    num_bytes: int
    timeout: float


class MeasureError(Exception):
    """A measurement failed or did not end; the message is one line."""


class DeviceProcesses:
    """One process for each device of this node."""

    def __init__(self, device: MeasuredDevice, count: int) -> None:
        self.device, self.count = device, count
        self._running: list[tuple[SpawnProcess, Connection]] = []

    def rates(self, *, is_short: bool) -> list[DeviceRates]:
        """Measure all devices at the same time, because they share power and cooling, as in training."""
        rates: list[DeviceRates] = self._ask([("rates", is_short)] * self.count, _START_SECONDS)
        return rates

    def collectives(self, group: Group) -> CollectiveRates:
        """Measure collectives of a group; the result is that of the slowest process."""
        questions = [("collectives", group, group.first_rank + local) for local in range(self.count)]
        answers: list[CollectiveRates] = self._ask(questions, group.timeout + (0 if self._running else _START_SECONDS))
        return min(answers, key=lambda each: each.all_reduce)

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._running:
            connection.close()
            process.kill()
            process.join()
        self._running = []

    def _ask(self, questions: list[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Send each process its request.

        Raises:
            MeasureError: one failed, or did not respond in time; then all are ended.
        """
        if not self._running:
            self._start()
        deadline = time.monotonic() + timeout
        for (_, connection), question in zip(self._running, questions, strict=True):
            with suppress(BrokenPipeError):  # it died: there will be no answer
                connection.send(question)
        answers = []
        for index, (_, connection) in enumerate(self._running):
            answer = _receive(connection, index, deadline)
            if isinstance(answer, str):
                self.close()
                raise MeasureError(answer)
            answers.append(answer)
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for index in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.device, index), daemon=True)
            process.start()
            theirs.close()
            self._running.append((process, ours))


def _receive(connection: Connection, index: int, deadline: float) -> Any:
    """Return the response of a process, or the reason why there is none as text."""
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            return connection.recv()
    except (EOFError, ConnectionResetError):
        return f"process {index} died"
    return f"process {index} did not answer in time"


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


# --- In the processes ----------------------------------------------------------------------------


def _serve(connection: Connection, device: MeasuredDevice, index: int) -> None:
    """Handle requests until the other side closes."""
    with tempfile.TemporaryDirectory(prefix="ftkit-nccl-") as logs:
        # NCCL reads these once, on first use. A level that the site or the user has set stays.
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ.setdefault("NCCL_DEBUG_FILE", f"{logs}/%h.%p")
        failure = _select_device(device, index)
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            if failure is not None:
                connection.send(failure)
                continue
            try:
                if question[0] == "rates":
                    connection.send(_measure_rates(device, is_short=question[1]))
                else:
                    connection.send(_measure_collectives(device, question[1], question[2], Path(logs)))
            except Exception as error:  # noqa: BLE001 - any exception of torch, CUDA or NCCL is a finding
                connection.send(f"{type(error).__name__}: {one_line(error)}")


def _select_device(device: MeasuredDevice, index: int) -> str | None:
    """Select this process's device; return the reason if it can't be used."""
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        return None
    try:
        import torch  # noqa: PLC0415

        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(index)
    except Exception as error:  # noqa: BLE001 - a torch without CUDA, a missing or old driver, a broken GPU
        return f"torch can't use GPU {index}: {type(error).__name__}: {one_line(error)}"
    return None


def _seconds(function: Any, device: MeasuredDevice, repeats: int) -> float:
    """Return the seconds of one call: on a GPU the mean after a warm-up, on a CPU the shortest of all."""
    import torch  # noqa: PLC0415

    function()
    if device == "cpu":
        shortest = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            shortest = min(shortest, time.perf_counter() - start)
        return shortest
    function()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start_event.record()
    for _ in range(repeats):
        function()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1000 / repeats


def _measure_rates(device: MeasuredDevice, *, is_short: bool) -> DeviceRates:
    import torch  # noqa: PLC0415

    on_gpu = device == "cuda"
    width = 8192 if on_gpu else 512
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    # A few seconds, so that clocks settle at the limits of power and cooling.
    repeats = (100 if is_short else 1000) if on_gpu else 5
    matmul = 2 * width**3 / _seconds(lambda: torch.mm(left, right, out=out), device, repeats) / 1e12
    source = torch.empty(2**30 if on_gpu else 2**24, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    memory = 2 * source.numel() / _seconds(lambda: target.copy_(source), device, 20 if on_gpu else 5) / 1e9
    host = None
    if on_gpu:
        pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        part = target[: pinned.numel()]
        host = pinned.numel() / _seconds(lambda: part.copy_(pinned, non_blocking=True), device, 10) / 1e9
    return DeviceRates(matmul, memory, host)


def _measure_collectives(device: MeasuredDevice, group: Group, rank: int, logs: Path) -> CollectiveRates:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    on_gpu = device == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{group.host}:{group.port}",
        rank=rank,
        world_size=group.size,
        timeout=timedelta(seconds=group.timeout),
    )
    try:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        count = group.num_bytes // dtype.itemsize // group.size * group.size
        whole = torch.zeros(count, device=device, dtype=dtype)
        part = torch.zeros(count // group.size, device=device, dtype=dtype)
        num_bytes, repeats = count * dtype.itemsize, 20 if on_gpu else 3
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14
        dist.barrier()
        reduced = _seconds(lambda: dist.all_reduce(whole), device, repeats)
        gathered = _seconds(lambda: gather(whole, part), device, repeats)
    finally:
        dist.destroy_process_group()
    return CollectiveRates(
        all_reduce_bus_bandwidth(num_bytes, group.size, reduced),
        all_gather_bus_bandwidth(num_bytes, group.size, gathered),
        group.size,
        find_transport("".join(path.read_text(errors="replace") for path in logs.iterdir())) if on_gpu else "gloo",
    )


def find_transport(log: str) -> str:
    """Return the transport in NCCL's log (NCCL_DEBUG=INFO): its network, and the paths within the node."""
    networks = re.findall(r"NCCL INFO (?:Using network|Assigned NET plugin) ([\w./-]+(?: [\w.]+)?)", log)
    paths = {path for path in re.findall(r"NCCL INFO Channel .* via ([A-Z0-9]+)", log) if path != "NET"}
    found = [*dict.fromkeys(name.removesuffix(" to comm").strip() for name in networks[-1:]), *sorted(paths)]
    return ", ".join([*found, *(["NVLS"] if re.search(r"NVLS multicast support is available", log) else [])])


_MATMUL_SHARE: Final = 0.5
_MATMUL_SHARES: Final[dict[str, float]] = {"l4": 0.3}
_MEMORY_SHARE: Final = 0.7
_LINK_SHARE: Final = 0.5
_NETWORK_SHARE: Final = 0.5
OUTLIER: Final = {"cuda": 0.85, "cpu": 0.1}
"""Fraction of the median of all devices below which a device is an outlier. CPUs are shared with other processes."""


def least_matmul(gpu: GpuModel | None) -> float | None:
    """Return the minimum TFLOP/s of bf16 matmuls on a healthy GPU; None for an unknown one."""
    return None if gpu is None else _MATMUL_SHARES.get(gpu, _MATMUL_SHARE) * GPUS[gpu].bf16_flops / 1e12


def least_memory_bandwidth(gpu: GpuModel | None) -> float | None:
    """Return the minimum GB/s that a copy within a healthy GPU's memory reads and writes."""
    return None if gpu is None else _MEMORY_SHARE * GPUS[gpu].memory_bandwidth / 1e9


def least_link_bandwidth(gpu: GpuModel | None) -> float | None:
    """Return the minimum bus bandwidth in GB/s of collectives within a node."""
    return None if gpu is None else _LINK_SHARE * GPUS[gpu].link_bandwidth / 1e9


def least_network_bandwidth(network_gbps: float | None) -> float | None:
    """Return the minimum bus bandwidth in GB/s of collectives between nodes, from their network's Gbit/s."""
    return None if network_gbps is None else _NETWORK_SHARE * network_gbps / 8


def all_reduce_bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Return nccl-tests' bus bandwidth in GB/s: S/t x 2(n-1)/n, with S bytes on each rank (its doc/PERFORMANCE.md)."""
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks / 1e9


def all_gather_bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Return nccl-tests' bus bandwidth in GB/s: S/t x (n-1)/n, with S bytes gathered on each rank."""
    return num_bytes / seconds * (num_ranks - 1) / num_ranks / 1e9


def is_outlier(value: float, others: Sequence[float], device: str) -> bool:
    """Return whether a measured rate is far below the median of all rates (of two rates: below the other)."""
    return (len(others) > 1 and value < OUTLIER[device] * median(others)) or (
        len(others) == 2 and value < OUTLIER[device] * max(others)  # noqa: PLR2004 - the median is between them
    )
