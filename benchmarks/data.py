"""Benchmark data preparation: tokens per second, memory, fill of the packs; and peers' preparation of the same file.

    python benchmarks/data.py [--rows 12000] [--case chat] [--workers 1 2] [--repeat 3] [--large 10 100]
        [--peer trl=PYTHON] [--peer axolotl=PYTHON] [--peer llamafactory=PYTHON]

Texts are generated from a vocabulary of 20,000 words with Zipf frequencies; the tokenizer is trained on them. Each
measurement is a separate process; measurements alternate, so that other load on the machine affects all equally.
Times are wall times; `CPU µs/token` is CPU time without imports, which depends less on other load. `peak` is the memory
of all processes together, shared pages counted once (PSS), sampled once a second, imports included.

A peer runs with the Python of its own environment: the packages that peers require exclude each other. It loads the
same file, applies the same chat template, tokenizes, sets labels on assistant turns only, and packs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from preparation import Cost, Stopwatch, print_cost
from recording import add_record_option, record_repeats

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.data.prepare import prepare
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.planning.planner import plan_run

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

VOCABULARY = 20_000
PEERS = ("trl", "axolotl", "llamafactory")
COLUMNS = "{:<8} {:<14} {:>12} {:>9} {:>12} {:>13} {:>8} {:>9}"


@dataclass(frozen=True)
class Words:
    """Generates texts."""

    rng: np.random.Generator
    words: tuple[str, ...]
    frequencies: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def make(cls) -> Words:
        """Generate a deterministic vocabulary."""
        rng = np.random.default_rng(0)
        letters, weights = list("etaoinshrdlucmfwypvbgkjqxz"), 1 / np.arange(1, 27)
        sizes = rng.integers(2, 11, VOCABULARY)
        words = tuple("".join(rng.choice(letters, size=size, p=weights / weights.sum())) for size in sizes)
        frequencies = 1 / np.arange(1, VOCABULARY + 1) ** 0.9
        return cls(rng, words, frequencies / frequencies.sum())

    def text(self, mean: float, spread: float) -> str:
        """Return sentences with a random number of words."""
        num = int(self.rng.lognormal(mean, spread)) + 3
        words = [self.words[place] for place in self.rng.choice(VOCABULARY, size=num, p=self.frequencies)]
        sentences = [" ".join(words[begin : begin + 12]).capitalize() for begin in range(0, num, 12)]
        return ". ".join(sentences) + "."


def chat(words: Words) -> dict[str, object]:
    """Return a conversation of one to four questions."""
    turns: list[dict[str, str]] = []
    for _ in range(int(words.rng.integers(1, 5))):
        turns.append({"role": "user", "content": words.text(4.2, 0.8)})
        turns.append({"role": "assistant", "content": words.text(5.2, 0.7)})
    return {"messages": turns}


def alpaca(words: Words) -> dict[str, object]:
    """Return an instruction."""
    return {"instruction": words.text(2.5, 0.5), "input": "", "output": words.text(4.0, 0.9)}


def sql(words: Words) -> dict[str, object]:
    """Return a question over a few tables."""
    columns = ", ".join(f"{words.text(0.1, 0.1)[:9].strip('. ')} INT" for _ in range(int(words.rng.integers(5, 60))))
    return {"prompt": f"CREATE TABLE t ({columns}); {words.text(2.5, 0.4)}", "completion": f"SELECT {words.text(2, 1)}"}


def long(words: Words) -> dict[str, object]:
    """Return a document of 3,000 to 45,000 words (up to 65,536 tokens), log-uniformly distributed."""
    return {"text": words.text(float(np.log(words.rng.uniform(3_000, 45_000))), 0.01)}


@dataclass(frozen=True)
class Case:
    """Generator of rows, and the sequence length."""

    row: Callable[[Words], dict[str, object]]
    length: int
    rows_of_one: float = 1.0
    """Rows per chat of the `chat` case."""


CASES = {
    "chat": Case(chat, 4096),
    "alpaca": Case(alpaca, 2048, 4.0),
    "sql": Case(sql, 2048, 2.0),
    "long": Case(long, 65536, 0.06),
}


@dataclass(frozen=True)
class Who:
    """A program that prepares data.

    Attributes:
        name: `ftkit`, or a peer.
        python: its interpreter.
        workers: tokenizing processes.
    """

    name: str
    python: str
    workers: int

    @property
    def program(self) -> Path:
        """The program that measures itself."""
        here = Path(__file__)
        return here if self.name == "ftkit" else here.parent / "peers" / f"{self.name}_data.py"


def make_data(folder: Path, num_rows: int, names: list[str]) -> None:
    """Write a file for each case, and the tokenizer."""
    words = Words.make()
    for name in names:
        rows = (CASES[name].row(words) for _ in range(int(num_rows * CASES[name].rows_of_one)))
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    learn_tokenizer((words.text(5, 0.5) for _ in range(5000)), 32_000, "chatml").save_pretrained(folder / "tokenizer")
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "hidden_size": 16,
             "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    (folder / "tokenizer" / "config.json").write_text(json.dumps(shape))  # peers load the model's configuration


def make_plan(folder: Path, source: Path, name: str) -> RunPlan:
    """Plan a run on a file."""
    ctx = Context(Path("/nonexistent"), Path("/nonexistent"), {})
    tokenizer = json.dumps({"source": str(folder / "tokenizer"), "vocab_size": None})
    overrides = [
        f"data.source={source}", "data.format=auto", "data.chat_template=model", "data.too_long=drop",
        f"model.tokenizer={tokenizer}", "model.architecture.vocab_size=32000",
        f"training.sequence_length={CASES[name].length}", "model.architecture.max_position_embeddings=131072",
        "evaluation.every_steps=null", "evaluation.generation=null",
    ]  # fmt: skip
    recipe = load_recipe("demo", ctx, overrides)
    cluster = load_cluster("local", ctx).model_copy(update={"device": "cpu", "processes_per_node": 1})
    workspace = Path(tempfile.mkdtemp(dir=folder))
    request = RunRequest(name, None, None, None, False, workspace, sys.executable, datetime.now(UTC), "benchmark")  # noqa: FBT003
    return replace(plan_run(recipe, cluster, None, request), id=name)


def measure(folder: Path, source: Path, name: str, workers: int) -> Cost:
    """Prepare a file in this process."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    AutoTokenizer.from_pretrained(folder / "tokenizer")  # imports are not measured, for ftkit and peers alike
    plan = make_plan(folder, source, name)
    watch = Stopwatch()
    prepared = prepare(plan, lambda _: None, workers)
    watch.stop()
    again = time.perf_counter()
    prepare(plan, lambda _: None, workers)
    if time.perf_counter() - again > 1:
        sys.stderr.write("prepared again although nothing changed\n")
    manifest = prepared.read_manifest()
    digest = hashlib.sha256(json.dumps(manifest.digests, sort_keys=True).encode()).hexdigest()
    shutil.rmtree(prepared.root)
    return watch.cost(manifest.num_train_tokens, manifest.fill_ratio, digest[:12])


def measure_apart(folder: Path, source: Path, name: str, who: Who) -> tuple[Cost, int]:
    """Measure in a separate process; return the cost, and the peak memory in MiB."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *([str(here.parent)] if who.name == "ftkit" else [])])
    command = [who.python, str(who.program), "--measure", str(folder), str(source), name, str(who.workers)]
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryDirectory() as cache,  # so that no measurement finds rows that an earlier one read
    ):
        environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment, cwd=folder)
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(1)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            sys.exit(f"{who.name}: {errors.read()[-3000:]}")
        return Cost(**json.loads(output.read().splitlines()[-1])), peak >> 10


def memory_of(pid: int) -> int:
    """Return the proportional set size of a process and its descendants in KiB."""
    total = 0
    with suppress(OSError):  # it ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    return total


def show(name: str, who: Who, results: list[tuple[Cost, int]]) -> None:
    """Print the medians."""
    costs = [cost for cost, _ in results]
    seconds = statistics.median(cost.seconds for cost in costs)
    cpu = statistics.median(cost.cpu_seconds / cost.num_tokens for cost in costs)
    first, peak = costs[0], max(peak for _, peak in results)
    print(
        COLUMNS.format(
            name, f"{who.name}, {who.workers}", f"{first.num_tokens:,}", f"{seconds:.1f}",
            f"{first.num_tokens / seconds:,.0f}", f"{cpu * 1e6:.2f}", f"{first.fill_ratio:.2%}", f"{peak:,} MiB",
        ),
        {cost.digest for cost in costs} - {""} or "",
        flush=True,
    )  # fmt: skip


def peer_of(text: str) -> tuple[str, str]:
    """Parse `NAME=PYTHON`; without PYTHON, a peer has this interpreter."""
    name, _, python = text.partition("=")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PEERS)}")
    return name, python or sys.executable


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=12_000, help="number of chats; other cases have about as many tokens"
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peer", action="append", type=peer_of, metavar="NAME[=PYTHON]", default=[])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--large", type=int, nargs="+", default=[], metavar="MILLIONS",
        help="only prepare this many million tokens of chats, which repeat, to measure memory",
    )  # fmt: skip
    add_record_option(parser)
    options = parser.parse_args()
    names = ["chat"] if options.large else options.case or list(CASES)
    print(COLUMNS.format("case", "by", "tokens", "seconds", "tokens/s", "CPU µs/token", "full", "peak"), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder, options.rows, names)
        if options.large:
            record_repeats(options.record, "data-large", measure_large(folder, options.large, options.workers[-1]))
            return
        found = {}
        for name in names:
            programs = [("ftkit", sys.executable), *(options.peer if name == "chat" else [])]
            whos = [Who(*program, workers) for program in programs for workers in options.workers]
            results: dict[Who, list[tuple[Cost, int]]] = {who: [] for who in whos}
            for _ in range(options.repeat):
                for who in whos:
                    results[who].append(measure_apart(folder, folder / f"{name}.jsonl", name, who))
            for who in whos:
                show(name, who, results[who])
                found[f"{name}, {who.name}, workers: {who.workers}"] = repeats_of(results[who])
        record_repeats(options.record, "data", found)


def repeats_of(results: list[tuple[Cost, int]]) -> dict[str, list[float]]:
    """Return what a record has of each preparation."""
    return {
        "tokens, M": [cost.num_tokens / 1e6 for cost, _ in results],
        "seconds": [cost.seconds for cost, _ in results],
        "CPU, µs a token": [cost.cpu_seconds / cost.num_tokens * 1e6 for cost, _ in results],
        "full, %": [cost.fill_ratio * 100 for cost, _ in results],
        "memory, MiB": [float(peak) for _, peak in results],
    }


def measure_large(folder: Path, sizes: list[int], workers: int) -> dict[str, dict[str, list[float]]]:
    """Prepare the chats again and again, as files of one folder, up to some million tokens each time."""
    found = {}
    who = Who("ftkit", sys.executable, workers)
    one, _ = measure_apart(folder, folder / "chat.jsonl", "chat", who)
    for size in sizes:
        many = folder / f"{size}M"
        many.mkdir()
        for number in range(max(1, round(size * 1e6 / one.num_tokens))):
            (many / f"{number}.jsonl").symlink_to(folder / "chat.jsonl")
        results = [measure_apart(folder, many, "chat", who)]
        show(f"{size} M", who, results)
        found[str(size)] = repeats_of(results)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _, _, where, what, case, num_workers = sys.argv
        print_cost(measure(Path(where), Path(what), case, int(num_workers)))
    else:
        main()
