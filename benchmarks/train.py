"""Throughput of the trainer on a model with random weights and packs of random tokens.

    python benchmarks/train.py --case olmo3-7b-8layers [--gpus 1] [key=value …]

Each case is a whole run of the trainer, as a job starts it; the table shows the median of the steady steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ftkit.data.encoding import IGNORED
from ftkit.data.store import DataManifest, PackStore, building
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.plan import RunPlan, plan_run, plan_to_json
from ftkit.records import StepRecord, read_records
from ftkit.specs.load import Surroundings, load_cluster, load_recipe
from ftkit.specs.request import RunRequest

WARM_UP_STEPS = 5
NUM_STEPS = 20
LONG = "training.sequence_length=65536"
SHORT = "training.sequence_length=8192"
CHECKPOINTED = "training.activation_checkpointing=full"


@dataclass(frozen=True)
class Case:
    """A model and what is changed in the recipe for it."""

    architecture: str
    overrides: tuple[str, ...]


CASES = {
    "olmo3-7b-8layers": Case("olmo3-7b", ("model.architecture.num_hidden_layers=8", SHORT)),
    "llama3-8b": Case("llama3-8b", (SHORT,)),
    "olmo3-32b": Case("olmo3-32b", (SHORT, CHECKPOINTED)),
    "olmo3-32b-65k": Case("olmo3-32b", (LONG, CHECKPOINTED)),
}


def make_plan(name: str, case: Case, num_gpus: int, workspace: Path, extra: list[str]) -> RunPlan:
    """Plan a run of the case on this machine's GPUs."""
    around = Surroundings(Path("/nonexistent"), Path("/nonexistent"), {})
    overrides = [
        f"model.architecture={case.architecture}",
        "data.source.num_heldout=0",
        "data.train_on=all",
        "evaluation.sql_execution=null",
        "training.precision=bf16",
        "training.micro_batch_size=1",
        f"training.global_batch_size={num_gpus}",
        "training.max_steps=1000",
        "training.checkpoint_every_steps=1000",
        "training.log_every_steps=1",
        "training.learning_rate=1e-5",
        *case.overrides,
        *extra,
    ]
    recipe = load_recipe("demo", around, overrides)
    local = load_cluster("local", around)
    cluster = local.model_copy(update={"device": "cuda", "gpus_per_node": num_gpus, "cpus_per_node": 8 * num_gpus})
    request = RunRequest(name, None, None, None, False, workspace, sys.executable, datetime.now(UTC), "benchmark")  # noqa: FBT003
    return replace(plan_run(recipe, cluster, None, request, ftkit_version="benchmark"), id=name)


def write_data(plan: RunPlan) -> None:
    """Write packs of random tokens, each pack one document, where the trainer looks for prepared data."""
    length = plan.recipe.training.sequence_length
    vocabulary = plan.recipe.model.architecture.vocab_size
    num_packs = 4 * plan.batch.global_batch_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_packs, length + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (num_packs, length))
    packs = np.stack([tokens[:, :-1], tokens[:, 1:], positions], axis=1)
    packs[:, 1, -1] = IGNORED
    with building(plan.data_directory) as folder:
        learn_tokenizer(["random"], 300, "chatml").save_pretrained(folder.tokenizer)
        PackStore.write(folder.train, packs)
        PackStore.write(folder.heldout, packs[:0])
        folder.heldout_examples.write_text("")
        sizes = (num_packs, num_packs, num_packs * length, num_packs * (length - 1))
        folder.write_manifest(DataManifest(plan.fingerprint, length, *sizes, 0, 0, 0, length))


def measure(plan: RunPlan) -> str:
    """Run the trainer, and return a row of the table."""
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={plan.placement.world_size}", "-m", "ftkit.train", str(plan.layout.plan)]
    with (plan.layout.root / "output").open("w") as output:
        trainer = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        steps: list[StepRecord] = []
        # The end of a run writes a checkpoint and exports the model: there is no need to wait for either.
        while trainer.poll() is None and len(steps) < NUM_STEPS:
            time.sleep(1)
            steps = [record for record in read_records(plan.layout.metrics) if isinstance(record, StepRecord)]
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()
    steady = [record for record in steps if record.step > WARM_UP_STEPS]
    if not steady:
        errors = [path.read_text() for path in sorted(plan.layout.logs.glob("error-*.json"))]
        return f"{plan.name:<24} failed: " + (
            errors[0] if errors else (plan.layout.root / "output").read_text()[-3000:]
        )
    speed = statistics.median(record.tokens_per_second for record in steady) / plan.placement.world_size
    memory = max(record.memory_gib or 0 for record in steady)
    return f"{plan.name:<24} {speed:>12,.0f} {memory:>9.1f} {plan.memory.total:>9.1f} {steady[-1].loss:>8.4f}"


def main() -> None:
    """Measure the cases that are asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print(f"{'case':<24} {'tokens/s/GPU':>12} {'peak GiB':>9} {'predicted':>9} {'loss':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.case):
            plan = make_plan(f"{name}-{number}", CASES[name], options.gpus, Path(folder), options.overrides)
            write_data(plan)
            print(measure(plan), flush=True)


if __name__ == "__main__":
    main()
