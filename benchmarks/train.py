"""Benchmark the throughput of the trainer and of other trainers on random weights and packs of random tokens.

    python benchmarks/train.py --case olmo3-7b-8layers [--gpus 1] [--peer trl] [--steps 16] [--record DIR] [key=value …]
    python benchmarks/train.py --case 'llama3-8b training.method=lora' --case 'gemma3-1b training.micro_batch_size=2'

A case is a name in `CASES` or a shape that ftkit knows, with overrides of its own. A case that fails does not end the
others. `--record` writes a JSON record of each trainer (`recording.py`) as soon as it ends.

Each row is a separate run: first ftkit's trainer, started as in a job, then each peer on the same packs, with the same
initial weights and batch size. The table shows medians of the steps after the warm-up. Equal losses of step 1 show that
both did the same work: `--case tiny --device cpu` compares them in fp32.

A peer may use its own environment (`--peer-python`), which needs the dependencies of ftkit and its trainer:
    pip install trl==1.16.0 datasets peft bitsandbytes liger-kernel pydantic ruamel.yaml jinja2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from kernels import KernelTime, StepTrace, read_trace
from recording import GRAPHS, MEASURED, Row, Training, nvidia_smi, record_of, write_record

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.data.packing import REJECTED, TRAINED, DocumentBatch
from ftkit.data.prepared_data import DataManifest, PackWriter, new_prepared_data
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import FtkitError
from ftkit.planning.plan import RunPlan, plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.planning.training_setup import GPUS
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import FirstStepRecord, StepRecord
from ftkit.train.observers.step_metrics import count_flops

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).parent.parent
LONG = "training.sequence_length=65536"
SHORT = "training.sequence_length=8192"
ADAPTED = ("training.sequence_length=2048", "training.learning_rate=1e-4")
CHECKPOINTED = "training.activation_checkpointing=full"
PROFILED_STEPS = 2
TINY = (
    "model.architecture.vocab_size=1280",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
    "model.architecture.num_hidden_layers=4",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=4",
    "model.architecture.head_dim=16",
    "model.architecture.sliding_window=32",
    "training.sequence_length=256",
    "training.precision=fp32",
    "training.learning_rate=1e-3",
)


@dataclass(frozen=True)
class Case:
    """A model, its recipe overrides, and the fraction of a pack that each document takes."""

    architecture: str
    overrides: tuple[str, ...]
    documents: tuple[float, ...] = (1.0,)
    context_parallel: int = 1


QUARTERS = (0.25,) * 4
UNEVEN = (0.55, 0.25, 0.15, 0.05)
CASES = {
    "olmo3-7b-8layers": Case("olmo3-7b", ("model.architecture.num_hidden_layers=8", SHORT)),
    "gemma3-12b-lora": Case("gemma3-12b", ("training.method=lora", *ADAPTED)),
    "gemma3-12b-qlora": Case("gemma3-12b", ("training.method=qlora", *ADAPTED)),
    "llama3.3-70b-lora": Case(
        "llama3.3-70b", ("training.method=lora", SHORT, "training.learning_rate=1e-4", CHECKPOINTED)
    ),
    "llama3-8b": Case("llama3-8b", (SHORT,)),
    "olmo3-7b-262k": Case(
        "olmo3-7b",
        ("training.sequence_length=262144", "model.architecture.max_position_embeddings=262144", CHECKPOINTED),
        UNEVEN,
        context_parallel=2,
    ),
    "qwen3-8b-512k": Case(
        "qwen3-8b",
        (
            "training.sequence_length=524288",
            "model.architecture.max_position_embeddings=524288",
            "training.optimizer=adamw8bit",
            "training.activation_offload=true",
            CHECKPOINTED,
        ),
        context_parallel=2,
    ),
    "qwen3-30b-a3b-lora": Case("qwen3-30b-a3b", ("training.method=lora", SHORT, "training.learning_rate=1e-4")),
    "qwen3.5-9b-lora": Case(
        "qwen3.5-9b", ("training.method=lora", SHORT, "training.learning_rate=1e-4", CHECKPOINTED), UNEVEN
    ),
    "olmo3-32b": Case("olmo3-32b", (SHORT, CHECKPOINTED)),
    "olmo3-32b-65k": Case("olmo3-32b", (LONG, CHECKPOINTED)),
    "tiny": Case("olmo3-7b", TINY, QUARTERS),
    "tiny-lora": Case("olmo3-7b", ("training.method=lora", *TINY), QUARTERS),
    "tiny-qlora": Case("olmo3-7b", ("training.method=qlora", *TINY), QUARTERS),
}


@dataclass(frozen=True)
class Peer:
    """Another trainer: the program that runs it on a plan, and its options."""

    program: str
    options: tuple[str, ...] = ()


PEERS = {
    "trl": Peer("trl_sft.py"),
    "trl-sdpa": Peer("trl_sft.py", ("--attention=sdpa",)),
    "trl-keeps-all": Peer("trl_sft.py", ("--checkpointing=none",)),
    "trl-flex": Peer("trl_sft.py", ("--attention=flex_attention",)),
    "trl-compiled": Peer("trl_sft.py", ("--compile",)),
    "unsloth": Peer("unsloth_sft.py"),
    "unsloth-fp32": Peer("unsloth_sft.py", ("--fp32-weights",)),
    "trl-preferences": Peer("trl_preferences.py"),
    "trl-sdpa-compiled": Peer("trl_sft.py", ("--attention=sdpa", "--compile")),
}


@dataclass(frozen=True)
class Step:
    """A trainer's record of one step."""

    number: int
    seconds: float
    loss: float
    memory_gib: float
    data_wait_ratio: float | None = None
    time: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True)
class Result:
    """Summary of a trainer's steps; `failure` is the reason if there are none.

    Attributes:
        tokens_per_second: tokens of documents on one process; a pack has no padding here.
        start_seconds: from the start of torchrun to the end of step 1, where the trainer records it.
        phases: seconds of each of its phases.
        device_gib: used on the fullest GPU after the last step: PyTorch's allocator with what it holds in reserve, and
            all that it does not count.
        repeats: seconds of each step that was counted.
        trace: kernels of later steps, if they were profiled.
        note: how it ran, if that needs saying.
    """

    tokens_per_second: float = 0.0
    memory_gib: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    first_grad_norm: float | None = None
    last_grad_norm: float | None = None
    attention: str = ""
    data_wait_ratio: float | None = None
    start_seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    device_gib: float | None = None
    repeats: tuple[float, ...] = ()
    trace: StepTrace | None = None
    note: str = ""
    failure: str = ""


def training_of(text: str, options: argparse.Namespace) -> Training:
    """Return what `NAME key=value …` and the call's own overrides train."""
    name, *own = shlex.split(text)
    case = CASES.get(name) or Case(name, ())
    overrides = (*case.overrides, *own, *options.overrides)
    documents, share = options.documents or case.documents, options.prompt_share
    return Training(case.architecture, overrides, options.gpu, options.gpus, case.context_parallel, documents, share)


def shares(text: str) -> tuple[float, ...]:
    """Return the fractions of a pack that its documents take: those given, or equal ones."""
    return tuple(map(float, text.split(","))) if "," in text else (1 / int(text),) * int(text)


def profile_overrides(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the recipe overrides that profile a few steps after those that are counted."""
    if not options.kernels:
        return ()
    steps = (f"profile.wait_steps={options.steps}", "profile.warmup_steps=1", f"profile.active_steps={PROFILED_STEPS}")
    return ("profile.enabled=true", "profile.memory=false", *steps)


def make_plan(
    training: Training,
    workspace: Path,
    *,
    name: str = "benchmark",
    device: str = "cuda",
    overrides: tuple[str, ...] = (),
) -> RunPlan:
    """Plan such a run on one machine, which need not be this one; `overrides` do not change what is measured."""
    ctx = Context(Path("/nonexistent"), Path("/nonexistent"), {})
    num = training.gpus
    settings = [
        f"model.architecture={training.architecture}",
        "data.source.num_heldout=0",
        "data.train_on=all",
        "evaluation.generation=null",
        "training.precision=bf16",
        "training.micro_batch_size=1",
        "training.activation_checkpointing=none",
        f"training.global_batch_size={num // training.context_parallel}",
        f"training.context_parallel={training.context_parallel}",
        "training.max_steps=1000",
        "training.checkpoint_every_steps=1000",
        "training.log_every_steps=1",
        "training.learning_rate=1e-5",
        "training.schedule=constant",
        "training.warmup_ratio=0",
        *training.overrides,
        *overrides,
    ]
    recipe = load_recipe("demo", ctx, settings)
    local = load_cluster("local", ctx)
    size = {"gpus_per_node": num, "gpu": training.gpu} if device == "cuda" else {"processes_per_node": num}
    cluster = local.model_copy(update={"device": device, "cpus_per_node": 8 * num, **size})
    request = RunRequest(name, None, None, None, False, workspace, sys.executable, datetime.now(UTC), "benchmark")  # noqa: FBT003
    return replace(plan_run(recipe, cluster, None, request), id=name)


def document_lengths(training: Training, plan: RunPlan) -> list[int]:
    """Return the tokens of each document of a pack, which is full: prompts of pairs count once if they are shared."""
    documents, length = training.documents, plan.recipe.training.sequence_length
    if plan.recipe.data.share_prompts:
        num_pairs = len(documents) // 2
        length = int((length - 3 * num_pairs) / (1 - num_pairs * training.prompt_share * min(documents)))
    *first, _ = (int(share * length) for share in documents)
    return [*first, length - sum(first)]


def write_data(plan: RunPlan, lengths: list[int], prompt_share: float) -> tuple[list[int], int]:
    """Write packs of random tokens to the folder of the prepared data.

    For an objective on preferences, documents are pairs, which share a prompt of `prompt_share` of the shortest one;
    for kto, completions with a label. Returns the stored tokens of each document, and those of a pack that are trained.
    """
    length = sum(lengths)
    vocabulary = plan.recipe.model.architecture.vocab_size
    num_packs = 4 * plan.batch.global_batch_size
    num_documents = num_packs * len(lengths)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_packs, length), dtype=np.uint32)
    is_first = np.zeros(length, dtype=bool)
    is_first[np.cumsum([0, *lengths[:-1]])] = True
    sources, starts = np.zeros(num_documents, np.uint16), np.zeros(num_documents, np.int64)
    is_stored = np.ones(length, dtype=bool)
    if plan.recipe.training.preferences is not None:
        sources[1::2] = REJECTED
        size = max(1, int(prompt_share * min(lengths)))
        for chosen, rejected in zip(np.flatnonzero(is_first)[::2], np.flatnonzero(is_first)[1::2], strict=True):
            tokens[:, rejected : rejected + size] = tokens[:, chosen : chosen + size]
            is_first[chosen : chosen + size] = is_first[rejected : rejected + size] = True  # not trained
            if plan.recipe.data.share_prompts:
                is_stored[rejected : rejected + size - 1] = False
        if plan.recipe.data.share_prompts:
            starts[1::2] = size - 1
    tokens[:, ~is_first] |= TRAINED
    tokens, stored = tokens[:, is_stored], np.tile(lengths, num_packs) - starts
    documents = DocumentBatch(tokens.reshape(-1), stored, sources, starts, np.zeros((len(stored), 2), np.int64))
    with new_prepared_data(plan.data.root) as folder:
        learn_tokenizer(["random"], 300, "chatml").save_pretrained(folder.tokenizer)
        with PackWriter(folder.train) as writer, PackWriter(folder.validation):
            writer.write(documents, [len(lengths)] * num_packs)
        folder.validation_rows.write_text("")
        folder.validation_sources.write_text("")
        num_targets = int((~is_first).sum())
        sizes = (num_documents, num_packs, tokens.size, num_packs * num_targets)
        sequence_length = plan.recipe.training.sequence_length
        folder.write_manifest(DataManifest(plan.fingerprint, sequence_length, *sizes, 0, 0, 0, max(lengths)))
    return stored[: len(lengths)].tolist(), num_targets


def measure_ftkit(plan: RunPlan, options: argparse.Namespace) -> Result:
    """Run ftkit's trainer until it has taken the steps, without waiting for the final checkpoint and export."""
    command = ["-m", "ftkit.train.launcher", "--heed-signals", *torchrun(plan), "-m", "ftkit.train"]

    def read_steps() -> list[Step]:
        records = [record for record in read_records(plan.layout.metrics) if isinstance(record, StepRecord)]
        return [
            Step(
                record.step,
                record.step_seconds,
                record.loss,
                record.memory_gib or 0.0,
                record.data_wait_ratio,
                record.time,
                record.grad_norm,
            )
            for record in records
        ]

    result = measure(plan, [sys.executable, *command, str(plan.layout.plan)], read_steps, options)
    starts = [record for record in read_records(plan.layout.metrics) if isinstance(record, FirstStepRecord)]
    trace = plan.layout.profile_trace(0, 0)
    return replace(
        result,
        phases=starts[0].phases if starts else {},
        trace=read_trace(trace, PROFILED_STEPS) if trace.exists() else None,
    )


def measure_peer(plan: RunPlan, peer: Peer, name: str, options: argparse.Namespace) -> Result:
    """Run another trainer on the same plan."""
    results = plan.layout.root / name / "steps.jsonl"
    results.parent.mkdir()
    program = [str(CHECKOUT / "benchmarks" / "peers" / peer.program), str(plan.layout.plan), *peer.options]
    program += [f"--results={results}", f"--steps={options.steps}", f"--warm-up-steps={options.warm_up_steps}"]

    def read_steps() -> list[Step]:
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        return [Step(**json.loads(line)) for line in lines]

    command = [options.peer_python, "-m", "torch.distributed.run", *torchrun(plan), *program]
    return measure(plan, command, read_steps, options)


def tokens_per_step(plan: RunPlan) -> int:
    """Return the tokens of a step's documents, which fill its packs."""
    return plan.batch.global_batch_size * plan.recipe.training.sequence_length


def torchrun(plan: RunPlan) -> list[str]:
    """Return torchrun's options that start the plan's processes."""
    return ["--standalone", f"--nproc-per-node={plan.placement.world_size}"]


def measure(
    plan: RunPlan, command: list[str], read_steps: Callable[[], list[Step]], options: argparse.Namespace
) -> Result:
    """Run a trainer until it has taken the steps, has ended or has timed out."""
    output = plan.layout.root / "output"
    paths = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began, limit = time.time(), time.monotonic() + options.limit_seconds
    with output.open("w") as file:
        # ftkit keeps bytecode there, as in a job.
        cache = os.environ.get("FTKIT_CACHE_DIR", f"{tempfile.gettempdir()}/ftkit-{os.getuid()}")
        environment = os.environ | {"PYTHONPATH": paths, "FTKIT_CACHE_DIR": cache}
        trainer = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        profiles = plan.recipe.profile.enabled and "ftkit.train" in command
        while trainer.poll() is None and time.monotonic() < limit:
            if len(read_steps()) >= options.steps and not (profiles and not plan.layout.profile_trace(0, 0).exists()):
                break
            time.sleep(0.5)
        used = max((float(used) / 1024 for (used,) in nvidia_smi("memory.used")), default=None)
        # On SIGTERM torchrun ends its workers; with SIGKILL they would remain and keep their GPU memory.
        trainer.terminate()
        trainer.wait()
    steps = read_steps()[: options.steps]  # it may have taken more steps before it ended
    steady = steps[options.warm_up_steps :]
    if not steady:
        errors = [path.read_text() for path in sorted(plan.layout.logs.glob("error-*.json"))]
        return Result(failure=errors[0] if errors else output.read_text()[-3000:])
    text = output.read_text()
    attention = re.search(r"attention: (\w+)", text)
    is_whole = "can't be compiled" not in text
    seconds = statistics.median(step.seconds for step in steady)
    waits = [step.data_wait_ratio for step in steady if step.data_wait_ratio is not None]
    return Result(
        tokens_per_second=tokens_per_step(plan) / seconds / plan.placement.world_size,
        memory_gib=max(step.memory_gib for step in steady),
        first_loss=steps[0].loss,
        last_loss=steps[-1].loss,
        first_grad_norm=steps[0].grad_norm,
        last_grad_norm=steps[-1].grad_norm,
        attention=(attention.group(1) if attention else "") + ("" if is_whole else ", in parts"),
        data_wait_ratio=statistics.median(waits) if waits else None,
        start_seconds=None if steps[0].time is None else steps[0].time - began,
        device_gib=used,
        repeats=tuple(step.seconds for step in steady),
        note=GRAPHS if "were captured as CUDA graphs" in text else "",
    )


COLUMNS = "{:<18} {:<17} {:<17} {:>12} {:>7} {:>6} {:>9} {:>9} {:>9} {:>10} {:>10} {:>8}"


def record(training: Training, plan: RunPlan, trainer: str, result: Result, options: argparse.Namespace) -> None:
    """Write the record of a trainer, unless it failed: then there is nothing to record."""
    if result.failure or options.record is None:
        return
    tokens = plan.batch.global_batch_size * plan.recipe.training.sequence_length
    medians = {
        "tokens_per_second": result.tokens_per_second,
        "step_seconds": statistics.median(result.repeats),
        "tokens_per_step": tokens,
        "peak_gib": result.memory_gib,
        "device_gib": result.device_gib,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "first_grad_norm": result.first_grad_norm,
        "last_grad_norm": result.last_grad_norm,
        "data_wait_ratio": result.data_wait_ratio,
        "start_seconds": result.start_seconds,
        **{f"start: {phase}": seconds for phase, seconds in result.phases.items()},
    }
    labels = {"case": plan.name, "trainer": trainer, "attention": result.attention, "device": options.device}
    labels |= {"note": result.note} if result.note else {}
    row = Row(labels, medians, {"step_seconds": list(result.repeats)}, training)
    python = sys.executable if trainer == "ftkit" else options.peer_python
    name = f"{plan.name}-{trainer}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    print(f"record: {write_record(options.record, f'train-{name}', record_of([row], python=python))}", flush=True)
    if trace := result.trace:
        case = shlex.join([training.architecture, *training.overrides])
        whole = KernelTime(
            "step, first kernel to last", trace.milliseconds, sum(each.launches for each in trace.groups)
        )
        shares = [("whole", [whole, KernelTime("GPU busy", trace.busy, 0)])]
        shares += [("group", trace.groups), ("kernel", trace.kernels)]
        rows = [
            Row({"case": case, level: name}, {"milliseconds": milliseconds, "launches": launches}, None)
            for level, times in shares
            for name, milliseconds, launches in times
        ]
        kernels = replace(record_of(rows), source=f"{MEASURED}; {PROFILED_STEPS} steps, repeats were not kept")
        print(f"record: {write_record(options.record, f'kernels-{name}', kernels)}", flush=True)


def row(plan: RunPlan, trainer: str, result: Result, ours: Result, mfu_of_one_token: float) -> str:
    """Return a row of the table. The ratio is the speed of ftkit over that of the peer."""
    if result.failure:
        return f"{plan.name:<18} {trainer:<17} failed: {result.failure}"
    return COLUMNS.format(
        plan.name,
        trainer,
        result.attention,
        f"{result.tokens_per_second:,.0f}",
        f"{ours.tokens_per_second / result.tokens_per_second:.2f}",
        f"{result.tokens_per_second * mfu_of_one_token:.1%}",
        f"{result.memory_gib:.1f}",
        f"{plan.memory.total:.1f}" if result is ours else "",
        "" if result.data_wait_ratio is None else f"{result.data_wait_ratio:.2%}",
        f"{result.first_loss:.5f}",
        f"{result.last_loss:.5f}",
        "" if result.start_seconds is None else f"{result.start_seconds:.1f}",
    )


def measure_case(text: str, options: argparse.Namespace, workspace: Path) -> bool:
    """Measure ftkit, then each peer; return whether all of them took their steps."""
    training = training_of(text, options)
    name, also = shlex.split(text)[0], profile_overrides(options)
    plan = make_plan(training, workspace, name=name, device=options.device, overrides=also)
    lengths, num_targets = write_data(plan, document_lengths(training, plan), training.prompt_share)
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    shape, settings = plan.recipe.model.architecture, plan.recipe.training
    peak = GPUS[options.gpu].peak_flops(settings.compute_precision)
    mfu_of_one_token = count_flops(shape, settings, np.array(lengths), num_targets) / sum(lengths) / peak
    ours = measure_ftkit(plan, options)
    print(row(plan, "ftkit", ours, ours, mfu_of_one_token))
    if ours.trace:
        print(f"GPU busy {ours.trace.busy:.1f} of {ours.trace.milliseconds:.1f} ms: ", end="")
        print(
            ", ".join(
                f"{name} {milliseconds:.1f} ({launches:.0f})" for name, milliseconds, launches in ours.trace.groups
            )
        )
    print("start: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in ours.phases.items()), flush=True)
    record(training, plan, "ftkit", ours, options)
    failed = bool(ours.failure)
    for peer in options.peer:
        result = measure_peer(plan, PEERS[peer], peer, options)
        print(row(plan, peer, result, ours, mfu_of_one_token), flush=True)
        record(training, plan, peer, result, options)
        failed = failed or bool(result.failure)
    return not failed


def main() -> int:
    """Measure the requested cases in sequence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, metavar="'NAME [key=value …]'")
    parser.add_argument("--peer", action="append", choices=PEERS, default=[])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="processes, with --device cpu")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="model of the GPU, which is not detected")
    parser.add_argument(
        "--documents", type=shares, metavar="N|SHARE,…", help="documents of a pack (default: the case's)"
    )
    parser.add_argument("--prompt-share", type=float, default=0.5, help="of each document of a pair")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up-steps", type=int, default=4, help="number of warm-up steps, which are not counted")
    parser.add_argument(
        "--limit-seconds", type=float, default=300, help="time limit of each trainer, including its start"
    )
    parser.add_argument("--kernels", action="store_true", help="profile ftkit's steps after those that are counted")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write a record of each trainer there")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    titles = "case,trainer,attention,tokens/s/GPU,ftkit ×,MFU,peak GiB,predicted,data wait,first loss,last loss,start s"
    print(COLUMNS.format(*titles.split(",")))
    failed = []
    for case in options.case:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if not measure_case(case, options, Path(folder)):
                    failed.append(case)
            except FtkitError as error:
                print(f"{case}: {error}", flush=True)
                failed.append(case)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
