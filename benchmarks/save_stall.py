"""How long training waits for a checkpoint: ftkit, torch's `async_save`, and accelerate's `save_state`, side by side.

    python benchmarks/save_stall.py --case olmo3-7b-8layers [--gpus 1] [--saves 3] [--folder DIR] [key=value …]

One start of the processes measures all ways, on random weights with AdamW's states: ftkit's synchronous save; ftkit's
save in the background; `torch.distributed.checkpoint.async_save` of the same state, as it is called without options,
and on GPUs with buffers in pinned memory; `Accelerator.save_state` of an equal model. While a save in the background is
not complete, training takes steps. Columns, in seconds, medians of the saves after the first:

    first     training waits for the first save, which may allocate buffers that later saves use again
    waits     training waits for each later save, until it may change the state again
    slowed    the steps until the save is complete take longer than other steps, in sum
    complete  from the call until the checkpoint is complete
    of sync   waits, as a part of ftkit's synchronous save

ftkit and torch flush their files to the disk and accelerate does not; ftkit also computes a digest of each file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from recording import add_record_option, record_repeats
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from train import CASES, CHECKOUT, make_plan, training_of
from transformers import AutoModelForCausalLM

from ftkit.config.execution import GIB
from ftkit.data.packing import IGNORED, Document, build_pack
from ftkit.planning.training_setup import GPUS
from ftkit.runs.checkpoints import TrainState
from ftkit.train.checkpoint.saving import Checkpointer, state_bytes
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.components.recorder import Recorder
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.pretrained import init_weights
from ftkit.train.trainer import make_engine
from ftkit.train.world import World, init_world

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan
    from ftkit.train.engine import Engine

IDS = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
SIMPLE = ("training.compile=none", "training.attention=sdpa", "training.keep_checkpoints=1")
"""Steps that need no compilation: only their changes are of interest."""
USUAL_STEPS = 8
COLUMNS = "{:<38} {:>8} {:>8} {:>8} {:>9} {:>8}"


@dataclass(frozen=True)
class Save:
    """A save that has been called, as training sees it.

    Attributes:
        is_complete: whether the checkpoint is complete; asked between steps.
        finish: waits until it is, and removes it.
    """

    is_complete: Callable[[], bool]
    finish: Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Seconds of one save; see the columns."""

    waits: float
    slowed: float
    complete: float


def make_work(engine: Engine, plan: RunPlan, world: World) -> Callable[[], None]:
    """Return a function that takes a training step and waits for the device."""
    length, vocabulary = plan.recipe.training.sequence_length, plan.recipe.model.architecture.vocab_size
    tokens = np.random.default_rng(world.rank).integers(0, vocabulary, length, dtype=np.int32)
    pack = build_pack([Document(tokens, np.append(tokens[1:], np.int32(IGNORED)))], length)
    batch = to_micro_batch(pack[None], world.device)

    def work() -> None:
        loss = engine.forward(batch)
        engine.backward(loss, world.size * (length - 1), is_last=True)
        engine.step(1e-6, 1.0)
        wait_for(world.device)

    return work


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_model(plan: RunPlan, world: World) -> Engine:
    """Return the engine of the plan's model, with random weights."""
    recipe = plan.recipe
    shape = recipe.model.architecture
    config = make_config(shape, IDS)  # type: ignore[arg-type]
    kernel, _ = choose_kernel(recipe.training, config, world)
    model = build_empty(config, register_kernel(kernel))
    return make_engine(
        plan.engine, model, recipe.training, world,
        lambda sharded: init_weights(sharded, shape, recipe.training.seed),
    )  # fmt: skip


# --- Ways to save --------------------------------------------------------------------------------


def saved_by_ftkit(
    saver: Checkpointer, engine: Engine, plan: RunPlan, world: World, *, in_background: bool
) -> Callable[[int], Save]:
    def save(step: int) -> Save:
        folder = plan.layout.checkpoint(step)
        saver.save(engine, TrainState(step, plan.fingerprint), in_background=in_background)

        def finish() -> None:
            saver.wait()
            remove(folder, world)

        return Save(folder.exists, finish)

    return save


def saved_by_torch(
    engine: Engine, folder: Path, world: World, stager: BlockingAsyncStager | None
) -> Callable[[int], Save]:
    group = torch.distributed.new_group(backend="gloo")

    def save(step: int) -> Save:
        path = folder / f"torch-{step}"
        future: Any = async_save(engine.state(), checkpoint_id=path, process_group=group, async_stager=stager)

        def finish() -> None:
            future.result()
            remove(path, world)

        return Save(future.done, finish)

    return save


def saved_by_accelerate(plan: RunPlan, folder: Path, world: World) -> Callable[[int], Save]:
    """Save an equal model, as accelerate prepares it: on several GPUs sharded by FSDP2, each shard in its own file."""
    training, shape = plan.recipe.training, plan.recipe.model.architecture
    plugin = None
    if world.device.type == "cuda" and world.size > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
        )
    accelerator = Accelerator(cpu=world.device.type == "cpu", mixed_precision="no", fsdp_plugin=plugin)
    config = make_config(shape, IDS)  # type: ignore[arg-type]
    with torch.device(world.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))
    tokens = torch.randint(shape.vocab_size, (1, min(512, training.sequence_length)), device=world.device)
    accelerator.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
    optimizer.step()  # which makes its states
    optimizer.zero_grad()

    def save(step: int) -> Save:
        path = folder / f"accelerate-{step}"
        accelerator.save_state(str(path))
        return Save(lambda: True, lambda: remove(path, world))

    return save


def remove(folder: Path, world: World) -> None:
    """Make room on the disk."""
    world.barrier()
    if world.is_first:
        shutil.rmtree(folder)


# --- Measure -------------------------------------------------------------------------------------


def measure(save: Callable[[int], Save], work: Callable[[], None], world: World, num_saves: int) -> list[Timing]:
    """Save repeatedly while training; ranks take the same number of steps."""
    usual = []
    for _ in range(USUAL_STEPS):
        began = time.perf_counter()
        work()
        usual.append(time.perf_counter() - began)
    step_seconds = statistics.median(usual[2:])
    timings = []
    for number in range(1, num_saves + 1):
        world.barrier()
        began = time.perf_counter()
        begun = save(number)
        wait_for(world.device)
        resumed = time.perf_counter()
        num_steps = 0
        while world.sum([float(begun.is_complete())])[0] < world.size:
            work()
            num_steps += 1
        complete = time.perf_counter()
        begun.finish()
        slowed = complete - resumed - num_steps * step_seconds if num_steps else 0.0
        timings.append(Timing(resumed - began, slowed, complete - began))
    return timings


def print_row(title: str, timings: list[Timing], synchronous: float) -> float:
    """Print the medians of a way to save; return how long training waits for a save."""
    later = timings[1:]
    waits, slowed, complete = (
        statistics.median(getattr(each, name) for each in later) for name in ("waits", "slowed", "complete")
    )
    part = f"{waits / (synchronous or waits):.1%}"
    print(COLUMNS.format(title, *(f"{each:.2f}" for each in (timings[0].waits, waits, slowed, complete)), part),
          flush=True)  # fmt: skip
    return waits


def ways_to_save(engine: Engine, plan: RunPlan, world: World) -> Iterator[tuple[str, Callable[[int], Save]]]:
    """Yield each way with its title; its buffers are freed before the next one's are allocated."""
    folder = plan.layout.root
    with Checkpointer(plan, world, Recorder(plan.layout, world, lambda _: None).write) as saver:
        yield "ftkit, synchronous", saved_by_ftkit(saver, engine, plan, world, in_background=False)
        yield "ftkit, in the background", saved_by_ftkit(saver, engine, plan, world, in_background=True)
    del saver
    yield "torch async_save", saved_by_torch(engine, folder, world, None)
    if world.device.type == "cuda":
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        yield "torch async_save, pinned buffers", saved_by_torch(engine, folder, world, stager)
        del stager
    yield "accelerate save_state", saved_by_accelerate(plan, folder, world)


def measure_all(plan: RunPlan, world: World, options: argparse.Namespace) -> None:
    """Print the table, each row once it is measured."""
    num_saves, found = options.saves, {}
    engine = make_model(plan, world)
    work = make_work(engine, plan, world)
    work()  # which makes the optimizer's states
    size = world.sum([float(state_bytes(engine.state()))])[0] / GIB
    if world.is_first:
        print(f"{plan.name}: {size:.2f} GiB of weights and AdamW's states on {world.size} × {world.device.type}, "
              f"written to {plan.layout.root}; medians of {num_saves} saves after the first")  # fmt: skip
        print(COLUMNS.format("save", "first", "waits", "slowed", "complete", "of sync"), flush=True)
    synchronous = 0.0
    for title, save in ways_to_save(engine, plan, world):
        timings = measure(save, work, world, num_saves + 1)
        if world.is_first:
            waits = print_row(title, timings, synchronous)
            synchronous = synchronous or waits
            found[title] = {
                name: [getattr(each, name) for each in timings[1:]] for name in ("waits", "slowed", "complete")
            }
    if world.is_first:
        record_repeats(options.record, "save-stall", found)


# --- Processes -----------------------------------------------------------------------------------


def case_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark of one case in processes of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="processes, with --device cpu")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="model of the GPU, which is not detected")
    parser.add_argument("--folder", type=Path, help="where files are written (a temporary folder)")
    add_record_option(parser)
    parser.add_argument("overrides", nargs="*")
    return parser


def measure_in_processes(
    options: argparse.Namespace,
    measure: Callable[[RunPlan, World], None],
    prepare: Callable[[Path], None] = lambda _: None,
) -> None:
    """Start the processes of a case, or measure in one of them; end this process.

    Args:
        options: as parsed by `case_parser`.
        measure: called in each process.
        prepare: called before the processes start, with their folder.
    """
    if "RANK" in os.environ:
        options.overrides = [*SIMPLE, *options.overrides]
        training = training_of(options.case, options)
        plan = make_plan(training, options.folder, name=options.case, device=options.device)
        with init_world(plan.placement) as world:
            measure(plan, world)
        os._exit(0)  # as the trainer does: threads of the communication library can abort while the interpreter ends
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prepare(Path(folder))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        command = [sys.executable, *torchrun, *sys.argv, f"--folder={folder}"]
        code = subprocess.run(command, check=False).returncode
    sys.exit(code)


def main() -> None:
    """Measure the ways to save."""
    parser = case_parser(__doc__)
    parser.add_argument("--saves", type=int, default=3, help="saves of each kind, after the first")
    options = parser.parse_args()
    measure_in_processes(options, lambda plan, world: measure_all(plan, world, options))


if __name__ == "__main__":
    main()
