"""`python -m ftkit.health.sampler FILE`: one process per node that samples its GPUs during training.

It does not import torch, uses no GPU memory, and ends with its parent process.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.health.node import open_nvml
from ftkit.runs.gpu_samples import NodeSample, to_line

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

INTERVAL_SECONDS: Final = 10.0
METRICS: Final = {
    "utilization": ("ftkit_gpu_utilization_percent", "Time in which a kernel ran."),
    "sm_activity": ("ftkit_gpu_sm_activity_percent", "SMs that were busy."),
    "memory_gib": ("ftkit_gpu_memory_used_gib", "Memory used."),
    "power": ("ftkit_gpu_power_watts", "Power."),
    "temperature": ("ftkit_gpu_temperature_celsius", "Temperature."),
    "clock": ("ftkit_gpu_sm_clock_mhz", "Clock of the SMs."),
    "energy": ("ftkit_gpu_energy_joules_total", "Energy since the driver was loaded."),
    "nvlink_bytes": ("ftkit_gpu_nvlink_bytes_total", "Sent and received by NVLink since the driver was loaded."),
}
NETWORK_METRIC: Final = "ftkit_node_network_bytes_total"
THROTTLE_METRIC: Final = "ftkit_gpu_throttled"


@contextmanager
def sampling(layout: RunLayout) -> Iterator[None]:
    """Sample this node's GPUs in another process during the block. Errors don't affect training."""
    port = os.environ.get("FTKIT_METRICS_PORT", "")
    words = [sys.executable, "-m", "ftkit.health.sampler", str(layout.gpu_samples / f"{socket.gethostname()}.jsonl")]
    words += ["--run", layout.root.name, "--parent", str(os.getpid()), *(["--metrics-port", port] if port else [])]
    sampler = subprocess.Popen(words)
    try:
        yield
    finally:
        sampler.kill()
        sampler.wait()


def main(words: list[str]) -> int:
    """Write samples until the parent ends; return immediately if NVML is unavailable."""
    parser = argparse.ArgumentParser(prog="python -m ftkit.health.sampler")
    parser.add_argument("file", type=Path, help="file that samples are appended to")
    parser.add_argument("--run", default="", help="name of the run, a label of the metrics")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process that started this one")
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, help="seconds between samples")
    parser.add_argument("--count", type=int, help="number of samples; default: until the parent ends")
    parser.add_argument("--metrics-port", type=int, help="port at which to serve metrics to Prometheus")
    options = parser.parse_args(words)
    process.die_with_parent(options.parent)
    newest: deque[NodeSample] = deque(maxlen=1)
    with open_nvml() as nvml:
        if isinstance(nvml, str):
            sys.stderr.write(f"ftkit: GPUs are not sampled: {nvml}\n")
            return 0
        if options.metrics_port is not None:
            serve_metrics(newest, options.run, options.metrics_port)
        options.file.parent.mkdir(parents=True, exist_ok=True)
        with options.file.open("a", encoding="utf-8") as file:
            for _ in range(options.count) if options.count else iter(int, 1):
                newest.append(
                    NodeSample(time.time(), socket.gethostname(), network_bytes(Path("/")), tuple(nvml.samples()))
                )
                file.write(to_line(newest[0]))
                file.flush()
                time.sleep(options.interval)
    return 0


def network_bytes(root: Path) -> float:
    """Return the bytes sent and received by InfiniBand or RoCE adapters, else by network devices; `root` has /sys."""
    # The kernel counts port_*_data in units of 4 bytes (Documentation/ABI/stable/sysfs-class-infiniband).
    data = [4 * _number(path) for path in root.glob("sys/class/infiniband/*/ports/*/counters/port_*_data")]
    devices = root.glob("sys/class/net/*/device")  # virtual ones have none
    frames = [_number(device.parent / "statistics" / f"{way}_bytes") for device in devices for way in ("rx", "tx")]
    return float(sum(data) or sum(frames))


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def metrics_text(sample: NodeSample, run: str) -> str:
    """Return a sample in Prometheus's text format, version 0.0.4."""
    host = f'run="{run}",host="{sample.host}"'
    lines: list[str] = []

    def add(name: str, about: str, values: Sequence[str]) -> None:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.extend((f"# HELP {name} {about}", f"# TYPE {name} {kind}", *(f"{name}{{{host}{each}" for each in values)))

    for field, (name, about) in METRICS.items():
        values = {gpu.index: getattr(gpu, field) for gpu in sample.gpus}
        add(name, about, [f',gpu="{index}"}} {value}' for index, value in values.items() if value is not None])
    reasons = [f',gpu="{gpu.index}",reason="{reason}"}} 1' for gpu in sample.gpus for reason in gpu.throttle]
    add(THROTTLE_METRIC, "Whether clocks are limited, by reason.", reasons)
    add(NETWORK_METRIC, "Sent and received by the node's adapters.", [f"}} {sample.network_bytes}"])
    return "\n".join(lines) + "\n"


def serve_metrics(newest: Sequence[NodeSample], run: str, port: int) -> None:
    """Serve the newest sample to Prometheus in another thread; if the port is taken, log it and continue."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write("".join(metrics_text(sample, run) for sample in newest).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            del format, args

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as error:
        sys.stderr.write(f"ftkit: can't serve metrics at port {port}: {error}\n")
        return
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
