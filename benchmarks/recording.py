"""Records of the benchmark programs: JSON files in benchmarks/records/, which scripts/docs writes into pages.

A record is one call of a program, or one trainer of a call: where, when and with what it was measured, and its rows. A
figure whose repeats were not kept has `repeats: null`, and `source` says where it is from.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, with_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

FOLDER = Path(__file__).parent / "records"
CHECKOUT = Path(__file__).parents[1]
MEASURED = "measured by the program, which wrote this file"
GRAPHS = "CUDA graphs"  # the note of a run whose decoder was captured
PACKAGES = (
    "torch", "triton", "transformers", "flash-attn-4", "flash-linear-attention", "tilelang", "bitsandbytes", "torchao",
    "peft", "trl", "liger-kernel", "unsloth", "axolotl", "llamafactory",
)  # fmt: skip


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Training:
    """What a training row ran, enough to plan it again: shape, recipe overrides, and GPUs.

    `documents` are the fractions of a pack that its documents take, `gpu` is a name that a cluster profile takes. The
    documents of a pair share `prompt_share` of them.
    """

    architecture: str
    overrides: tuple[str, ...]
    gpu: str = "h200"
    gpus: int = 1
    context_parallel: int = 1
    documents: tuple[float, ...] = (1.0,)
    prompt_share: float = 0.0


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Row:
    """What was measured once or repeatedly: `medians` by name, and all repeats that were counted, by the same names."""

    labels: dict[str, str]
    medians: dict[str, float | str | None]
    repeats: dict[str, list[float]] | None
    training: Training | None = None


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Record:
    """A measurement: `program` is relative to the checkout, `date` is in UTC, and `command` repeats it."""

    program: str
    command: str
    date: str
    hardware: dict[str, str]
    versions: dict[str, str]
    source: str
    rows: tuple[Row, ...]


READER = TypeAdapter(Record)


def read_record(path: Path) -> Record:
    """Read a record; raises pydantic's ValidationError if a key is unknown or missing."""
    return READER.validate_json(path.read_bytes())


def write_record(folder: Path, name: str, record: Record) -> Path:
    """Write a record as a whole, so that a killed program leaves only complete ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / f"{name}.json", folder / f".{name}.partial"
    partial.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Let a program take the folder to which it writes its record."""
    parser.add_argument("--record", type=Path, metavar="DIR", help="write a JSON record of the measurement there")


def record_repeats(folder: Path | None, name: str, measured: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Write all repeats and their medians, by row and what was measured, if a folder for records was asked for."""
    if folder is None:
        return
    rows = [
        Row({"row": row}, {what: statistics.median(each) for what, each in repeats.items()}, dict(repeats))
        for row, repeats in measured.items()
    ]
    print(f"record: {write_record(folder, name, record_of(rows))}", flush=True)


def record_of(rows: list[Row], *, python: str = sys.executable) -> Record:
    """Return a record of this program's call, on this machine and now, with the versions that `python` imports."""
    program = Path(sys.argv[0]).resolve().relative_to(CHECKOUT)
    command = shlex.join(["python", str(program), *sys.argv[1:]])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(str(program), command, now, hardware(), versions(python), MEASURED, tuple(rows))


def hardware() -> dict[str, str]:
    """Return the processor, and name, number, memory and driver of the GPUs if nvidia-smi finds any."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if line.startswith("model name")), platform.machine())
    found = {"cpu": model, "cpus": str(len(os.sched_getaffinity(0)))}
    if gpus := nvidia_smi("name", "memory.total", "driver_version"):
        name, memory, driver = gpus[0]
        found |= {"gpu": name, "gpus": str(len(gpus)), "gpu_memory_mib": memory, "driver": driver}
    return found


def nvidia_smi(*fields: str) -> list[list[str]]:
    """Return these fields of each GPU; none without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def versions(python: str) -> dict[str, str]:
    """Return the versions of the packages that this Python has, and the commit of ftkit."""
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    asked = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(asked.stdout)
    describe = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return found | {"ftkit": commit or os.environ.get("FTKIT_COMMIT", "unknown: not in a git checkout")}
