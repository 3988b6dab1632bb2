"""Benchmark the node checks of `ftkit doctor` against independent measurements on the same machine.

    python benchmarks/node_checks.py [--gpus 1 2] [--rounds 3] [--mib 64 128 256 512 1024 2048]

Each round runs the checks as a job does (`python -m ftkit.health`), then measures the same rates in plain torch: bf16
matmuls and copies on all GPUs at once, and collectives with nccl-tests' method (5 warm-up calls, 20 calls without a
synchronization in between, wall clock, mean of the ranks) and its formulas (doc/PERFORMANCE.md), where S is the size of
the reduced or of the gathered buffer and n the number of ranks:

    all-reduce  busbw = S/t × 2(n-1)/n        all-gather  busbw = S/t × (n-1)/n

Tables show medians of the rounds; the last column is the result of the checks relative to plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from recording import add_record_option, record_repeats

from ftkit.health.__main__ import REPORT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).parent.parent
WARM_UPS, CALLS = 5, 20
CHECKED_MIB = {"cuda": 1024, "cpu": 1}
"""The buffers of the node checks."""
COLUMNS = "{:<5} {:<24} {:>10} {:>12} {:>12} {:>9}"


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Return the mean seconds of a call, of calls that all ranks begin together; the mean of the ranks."""
    for _ in range(WARM_UPS):
        function()
    wait_for(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        function()
    wait_for(device)
    mean = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def measure_rates(device: torch.device, sizes_mib: list[int]) -> dict[str, float]:
    """Return TFLOP/s and GB/s by name, measured in plain torch by all ranks together."""
    on_gpu = device.type == "cuda"
    size, dtype = dist.get_world_size(), torch.bfloat16 if on_gpu else torch.float32
    width = 8192 if on_gpu else 512
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    source = torch.randint(256, (2**30 if on_gpu else 2**24,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    rates = {
        "matmul": 2 * width**3 / seconds(lambda: left @ right, device, 500 if on_gpu else CALLS) / 1e12,
        "memory": 2 * source.numel() / seconds(lambda: target.copy_(source), device) / 1e9,
    }
    for mib in sizes_mib if size > 1 else ():
        count = mib * 2**20 // dtype.itemsize // size * size
        whole, part = (torch.zeros(number, device=device, dtype=dtype) for number in (count, count // size))
        num_bytes = count * dtype.itemsize
        reduced = seconds(lambda: dist.all_reduce(whole), device)  # noqa: B023 - called at once
        gathered = seconds(lambda: dist.all_gather_into_tensor(whole, part), device)  # noqa: B023
        rates[f"all_reduce {mib}"] = num_bytes / reduced * 2 * (size - 1) / size / 1e9
        rates[f"all_gather {mib}"] = num_bytes / gathered * (size - 1) / size / 1e9
    return rates


def run_rank(options: argparse.Namespace) -> None:
    """Measure in plain torch as one of the ranks that torchrun started."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rates = measure_rates(device, options.mib)
    if dist.get_rank() == 0:
        print(json.dumps(rates))
    dist.destroy_process_group()


def run(arguments: list[str], num_gpus: int) -> list[str]:
    """Run Python on the first GPUs; return the lines that it prints."""
    paths = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    visible = ",".join(str(index) for index in range(num_gpus))
    variables = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False, env=variables)
    if done.returncode != 0:
        sys.exit(f"failed with exit code {done.returncode}: {' '.join(arguments)}")
    return done.stdout.splitlines()


def run_checks(num_gpus: int, device: str) -> dict[str, float]:
    """Return the rates of the node checks, by the names of `measure_rates`."""
    arguments = ["-m", "ftkit.health", "--in-job", f"--device={device}", f"--num-devices={num_gpus}"]
    lines = [line for line in run(arguments, num_gpus) if line.startswith(REPORT_PREFIX)]
    report = json.loads(lines[0].removeprefix(REPORT_PREFIX))
    for each in report["findings"]:
        print(f"  {each['status']:8} {each['check']}: {each['value']}", file=sys.stderr)
    rates = {
        "matmul": statistics.mean(each["matmul"] for each in report["devices"]),
        "memory": statistics.mean(each["memory"] for each in report["devices"]),
        "seconds": report["seconds"],
    }
    if report["within"]:
        mib = CHECKED_MIB[device]
        rates |= {f"all_reduce {mib}": report["within"]["all_reduce"]}
        rates |= {f"all_gather {mib}": report["within"]["all_gather"]}
    return rates


def main() -> None:
    """Print a table for each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of GPUs; processes on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048], help="sizes of buffers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_record_option(parser)
    options = parser.parse_args()
    found = {}
    if "RANK" in os.environ:
        run_rank(options)
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; medians of {options.rounds} rounds", flush=True)
    print(COLUMNS.format("GPUs", "rate", "unit", "doctor", "plain torch", "ratio"))
    for num_gpus in options.gpus:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
        rank = [*torchrun, __file__, f"--device={options.device}", "--mib", *map(str, options.mib)]
        checks, plain = [], []
        for _ in range(options.rounds):
            checks.append(run_checks(num_gpus, options.device))
            plain.append(json.loads(run(rank, num_gpus)[-1]))
        for rate in [*plain[0], "seconds"]:
            own, other = (
                statistics.median(each[rate] for each in rounds) if rate in rounds[0] else None
                for rounds in (checks, plain)
            )
            unit = {"matmul": "TFLOP/s", "seconds": "s"}.get(rate, "GB/s")
            ratio = f"{own / other:.3f}" if own and other else ""
            named = {"doctor": checks, "plain torch": plain}
            found[f"{rate}, GPUs: {num_gpus}"] = {
                who: [each[rate] for each in rounds] for who, rounds in named.items() if rate in rounds[0]
            }
            shown = [f"{value:,.4g}" if value else "" for value in (own, other)]
            print(COLUMNS.format(num_gpus, rate + " MiB" * (" " in rate), unit, *shown, ratio), flush=True)
    record_repeats(options.record, "node-checks", found)


if __name__ == "__main__":
    main()
