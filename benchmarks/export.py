"""Benchmark merging and exporting adapters of a large model: time and memory, compared with a copy of the files.

    python benchmarks/export.py [--layers 8] [--folder DIR] [--verify]

Random weights with the shapes of OLMo-3 32B (which has 64 layers) are written to DIR in shards of 2 GiB, and rank-16
adapters for all linear layers are merged into them. Export and copy start with a cold page cache and end after fsync.
Memory is the sampled RssAnon of the process; to test a memory limit, run this in a cgroup. With --verify, the record of
logits is computed too, and another process verifies the export.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from recording import add_record_option, record_repeats
from transformers import LlamaConfig

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.planning.choices import least_memory
from ftkit.planning.layout import RunLayout
from ftkit.planning.planner import plan_model
from ftkit.train.components.exporter import ExportedParts, Exporter, build_export_model, write_weights
from ftkit.train.components.generation import Generation
from ftkit.train.model.hf_model import TextConfig, build_empty
from ftkit.train.model.lora import is_adapter

GIB = 2**30


def make_config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=100_352, hidden_size=5120, intermediate_size=27_648, num_hidden_layers=layers,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip


def write_base(config: LlamaConfig, folder: Path) -> None:
    """Write random weights; matrices of the same shape share their values."""
    shapes = {name: tuple(each.shape) for name, each in build_empty(config, "eager").named_parameters()}
    drawn = {shape: torch.randn(shape, dtype=torch.bfloat16).mul_(0.02) for shape in set(shapes.values())}
    folder.mkdir()
    declared = {name: drawn[shape].to("meta") for name, shape in shapes.items()}
    write_weights(declared, ((name, drawn[shape]) for name, shape in shapes.items()), folder)
    config.save_pretrained(folder)


class PeakMemory(threading.Thread):
    """Samples the anonymous memory of the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.peak = max(self.peak, 1024 * int(next(one for one in lines if one.startswith("RssAnon")).split()[1]))
            time.sleep(0.02)


def forget(folder: Path) -> None:
    """Sync a folder's files to disk, and drop them from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> tuple[float, float]:
    forget(source)
    began, cpu_began = time.perf_counter(), time.process_time()
    shutil.copytree(source, target)
    forget(target)
    return time.perf_counter() - began, time.process_time() - cpu_began


def make_exporter(parts: ExportedParts) -> Exporter:
    model = build_export_model(parts)
    adapters = {name: torch.randn(each.shape) * 0.01 for name, each in model.named_parameters() if is_adapter(name)}
    return Exporter(parts, model, adapters)


def export(parts: ExportedParts, base: Path, target: Path) -> tuple[float, float]:
    exporter = make_exporter(parts)
    record = exporter.record("benchmark", 1, "bf16", merges=True)
    target.mkdir()
    forget(base)
    began, cpu_began = time.perf_counter(), time.process_time()
    exporter.write(record, target, RunLayout(target))
    forget(target)
    return time.perf_counter() - began, time.process_time() - cpu_began


def verify(parts: ExportedParts, target: Path) -> None:
    """Compute the logits of an export, write it, and verify it in another process, as `ftkit export` does."""
    exporter = make_exporter(parts)
    memory = PeakMemory()
    memory.start()
    began, cpu_began = time.perf_counter(), time.process_time()
    record = exporter.with_logits(exporter.record("benchmark", 1, "bf16", merges=True))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    print(f"logits: {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), peak {memory.peak / GIB:.2f} GiB", flush=True)
    target.mkdir()
    exporter.write(record, target, RunLayout(target))
    forget(target)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ftkit", "verify", str(target)], check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"verification: exit code {done.returncode}, {time.perf_counter() - began:.1f} s "
          f"({used.ru_utime + used.ru_stime:.1f} s of CPU), "
          f"peak {used.ru_maxrss * 1024 / GIB:.2f} GiB resident, mapped files included", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--verify", action="store_true")
    add_record_option(parser)
    asked = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {
        "copy of the files": {"CPU, s": [], "wall, s": []}, "export": {"CPU, s": [], "wall, s": [], "peak, GiB": []}
    }  # fmt: skip
    config, tokenizer = make_config(asked.layers), learn_tokenizer(["SELECT name FROM table"], 300, "chatml")
    method = ["training.method=lora", "training.lora={rank: 16}", "evaluation.generation=null"]
    spec = load_recipe("demo", Context(Path("/"), Path("/"), {}), method)
    recipe = RecipePlan.extend(spec, model=plan_model(spec.model, None), training=least_memory(spec.training))
    with tempfile.TemporaryDirectory(dir=asked.folder) as temporary:
        folder = Path(temporary)
        write_base(config, folder / "base")
        size = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
        print(f"{size / GIB:.2f} GiB of weights, {asked.layers} layers")
        parts = ExportedParts(
            recipe, TextConfig(config), tokenizer, Generation((2,), {"eos_token_id": 2}), folder / "base"
        )
        if asked.verify:
            verify(parts, folder / "verified")
            shutil.rmtree(folder / "verified")
        memory = PeakMemory()
        memory.start()
        for number in range(asked.rounds):
            copied, copy_cpu = copy(folder / "base", folder / f"copy-{number}")
            shutil.rmtree(folder / f"copy-{number}")
            memory.peak = 0
            exported, cpu_seconds = export(parts, folder / "base", folder / f"export-{number}")
            shutil.rmtree(folder / f"export-{number}")
            for row, values in (("copy of the files", (copy_cpu, copied)),
                                ("export", (cpu_seconds, exported, memory.peak / GIB))):  # fmt: skip
                for what, value in zip(found[row], values, strict=True):
                    found[row][what].append(value)
            print(
                f"copy {copied:.1f} s ({size / copied / GIB:.2f} GiB/s, {copy_cpu:.1f} s of CPU), "
                f"export {exported:.1f} s "
                f"({size / exported / GIB:.2f} GiB/s, {cpu_seconds:.1f} s of CPU): "
                f"{copied / exported:.0%} of the copy's speed, peak {memory.peak / GIB:.2f} GiB"
            )
    record_repeats(asked.record if asked.rounds else None, "export", found)


if __name__ == "__main__":
    main()
