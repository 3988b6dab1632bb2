"""Benchmark weight loading by the ranks of a node: bytes read from disk, memory, time; compared with `from_pretrained`.

    python benchmarks/loading.py [--layers 16] [--width 2048] [--ranks 2] [--folder DIR]

A Llama model with random bf16 weights is written to DIR in shards of 500 MB. Before each measurement the files are
dropped from the page cache; `read_bytes` of /proc/PID/io then counts the bytes that each rank has read from disk. Ranks
share the page cache, so their sum is what the node reads. Times are from the start of the ranks until the weights are
loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from recording import add_record_option, record_repeats
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ftkit.config.training import TrainingPlan
from ftkit.models.adapters import LoraSpec
from ftkit.planning.plan import PlacementPlan
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.hf_model import build_empty
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import load_weights
from ftkit.train.world import init_world

BEGAN = "FTKIT_BENCHMARK_BEGAN"
CASES = ("full", "lora", "fp32 full", "qlora", "dora", "fp8 frozen", "from_pretrained")
COLUMNS = "{:<16} {:>9} {:>12} {:>10} {:>14}"
MEBI = 2**20


def write_model(folder: Path, layers: int, width: int) -> None:
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, head_dim=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def load(case: str, folder: Path) -> None:
    """Load the weights of one rank; print bytes, memory and time."""
    held: Any
    if case == "from_pretrained":
        held = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        held = load_sharded(case, folder, AutoConfig.from_pretrained(folder))
    seconds = time.time() - float(os.environ[BEGAN])
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    result = {"seconds": seconds, "read": int(counters["read_bytes"]), "anonymous": int(peak.split()[1]) * 1024}
    sys.stdout.write(f"result {json.dumps(result)}\n")
    del held


def load_sharded(case: str, folder: Path, config: Any) -> Any:
    method = {"fp32 full": "full", "dora": "lora", "fp8 frozen": "lora"}.get(case, case)
    lora = None if method == "full" else LoraSpec(use_dora=case == "dora")
    training = TrainingPlan(
        sequence_length=128, global_batch_size=2, max_steps=1, learning_rate=1e-4, method=method, lora=lora,
        precision="fp32" if case == "fp32 full" else "bf16", base_precision="fp8" if case == "fp8 frozen" else "auto",
    )  # fmt: skip
    size = int(os.environ["WORLD_SIZE"])
    with init_world(PlacementPlan(num_nodes=1, processes_per_node=size, device="cpu", threads_per_process=1)) as world:
        model: Any = build_empty(config, "sdpa")
        prepare_method(model, training, world.device)

        def initialize(sharded: Any) -> None:
            load_weights(sharded, folder)
            init_adapters(sharded, 0)

        engine = Fsdp2Engine(model, training, world, initialize)
        world.barrier()
    return engine


def measure(case: str, folder: Path, ranks: int) -> list[dict[str, float]]:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    environment = os.environ | {BEGAN: str(time.time()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--load", case, "--folder", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or len(results) != ranks:
        raise SystemExit(done.stdout + done.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder of the model; it is written if missing")
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--load", choices=CASES, help=argparse.SUPPRESS)
    add_record_option(parser)
    asked = parser.parse_args()
    found = {}
    if asked.load:
        load(asked.load, asked.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            write_model(folder, asked.layers, asked.width)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{size / MEBI:,.0f} MiB of safetensors, {asked.ranks} ranks")
        print(COLUMNS.format("", "seconds", "read, MiB", "of files", "MiB in a rank"))
        for case in asked.case:
            ranks = measure(case, folder, asked.ranks)
            read, held = sum(each["read"] for each in ranks), max(each["anonymous"] for each in ranks)
            seconds = max(each["seconds"] for each in ranks)
            found[case] = {"read, MiB": [read / MEBI], "of the files": [read / size], "seconds": [seconds]}
            print(COLUMNS.format(
                case, f"{seconds:.1f}", f"{read / MEBI:,.0f}", f"{read / size:.2f}", f"{held / MEBI:,.0f}"
            ), flush=True)  # fmt: skip
    record_repeats(asked.record, "loading", found)


if __name__ == "__main__":
    main()
