"""`python -m ftkit.health`: check this node, together with the other nodes of its job. Needs torch, but not Slurm."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ftkit.config.cluster import GpuModel
from ftkit.errors import UnfitMachineError, one_line
from ftkit.health.node import NodeJob, as_json, check_node
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from ftkit.health.measure import MeasuredDevice

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
