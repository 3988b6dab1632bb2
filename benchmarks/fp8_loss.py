"""Compare the demo's loss in FP8 and bf16 with the same weights, packs and order, on one GPU per run.

    python benchmarks/fp8_loss.py [--steps 1000] [--gpus 2] [key=value …]

Prints the mean loss of every hundred steps in both precisions, and their difference.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from recording import add_record_option, record_repeats

from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import StepRecord

CHECKOUT = Path(__file__).parent.parent
WINDOW = 100
"""Steps whose losses are averaged."""


def start(precision: str, gpu: int, options: argparse.Namespace, workspace: Path) -> subprocess.Popen[bytes]:
    """Start a run with a precision."""
    words = [
        f"training.precision={precision}", f"training.max_steps={options.steps}", "training.log_every_steps=1",
        "evaluation.generation=null", "training.micro_batch_size=8", *options.overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "ftkit", "run", "demo", "--cluster", "local", "--gpus-per-node", "1"]
    places = {"FTKIT_WORKSPACE": str(workspace / precision), "CUDA_VISIBLE_DEVICES": str(gpu)}
    paths = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([*command, *words], env=os.environ | places | {"PYTHONPATH": paths})


def main() -> None:
    """Train in both precisions, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=1, help="with two, both runs at the same time")
    add_record_option(parser)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    losses, found = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for gpu, precision in enumerate(("bf16", "fp8")):
            runs[precision] = start(precision, gpu % options.gpus, options, Path(folder))
            if options.gpus == 1:
                runs[precision].wait()
        for precision, run in runs.items():
            if run.wait():
                sys.exit(f"the run in {precision} failed")
            (metrics,) = (Path(folder) / precision).glob("runs/*/metrics.jsonl")
            losses[precision] = [record.loss for record in read_records(metrics) if isinstance(record, StepRecord)]
    print(f"{'steps':>11} {'bf16':>9} {'fp8':>9} {'difference':>10}")
    for first in range(0, options.steps, WINDOW):
        bf16, fp8 = (statistics.mean(losses[name][first : first + WINDOW]) for name in ("bf16", "fp8"))
        found[f"steps {first + 1} to {first + WINDOW}"] = {"bf16": [bf16], "FP8": [fp8]}
        print(f"{first + 1:>5}-{first + WINDOW:>5} {bf16:>9.4f} {fp8:>9.4f} {fp8 / bf16 - 1:>+10.2%}")
    record_repeats(options.record, "fp8-loss", found)


if __name__ == "__main__":
    main()
