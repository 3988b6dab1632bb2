"""Benchmark data preparation: tokens per second, memory, fill of the packs; and TRL's preparation of the same file.

    python benchmarks/data.py [--rows 12000] [--case chat] [--workers 1 2] [--peer trl] [--repeat 3] [--large]

Texts are generated from a vocabulary of 20,000 words with Zipf frequencies; the tokenizer is trained on them. Each
measurement is a separate process; measurements alternate, so that other load on the machine affects all equally.
Times are wall times; `CPU µs/token` is CPU time without imports, which depends less on other load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.request import RunRequest
from ftkit.data.prepare import prepare
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.planning.planner import plan_run

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

VOCABULARY = 20_000
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
class Result:
    """Cost of one preparation."""

    seconds: float
    cpu_seconds: float
    num_tokens: int
    fill_ratio: float
    peak_mib: int
    digest: str = ""


def make_data(folder: Path, num_rows: int, names: list[str]) -> None:
    """Write a file for each case, and the tokenizer."""
    words = Words.make()
    for name in names:
        rows = (CASES[name].row(words) for _ in range(int(num_rows * CASES[name].rows_of_one)))
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    learn_tokenizer((words.text(5, 0.5) for _ in range(5000)), 32_000, "chatml").save_pretrained(folder / "tokenizer")


def make_plan(folder: Path, source: Path, name: str) -> RunPlan:
    """Plan a run on a file."""
    ctx = Context(Path("/nonexistent"), Path("/nonexistent"), {})
    tokenizer = json.dumps({"source": str(folder / "tokenizer"), "vocab_size": None})
    overrides = [
        f"data.source={source}", "data.format=auto", "data.chat_template=model", "data.too_long=drop",
        f"model.tokenizer={tokenizer}", "model.architecture.vocab_size=32000",
        f"training.sequence_length={CASES[name].length}", "model.architecture.max_position_embeddings=131072",
        "evaluation.every_steps=null", "evaluation.sql_execution=null",
    ]  # fmt: skip
    recipe = load_recipe("demo", ctx, overrides)
    cluster = load_cluster("local", ctx).model_copy(update={"device": "cpu", "gpus_per_node": 1})
    workspace = Path(tempfile.mkdtemp(dir=folder))
    request = RunRequest(name, None, None, None, False, workspace, sys.executable, datetime.now(UTC), "benchmark")  # noqa: FBT003
    return replace(plan_run(recipe, cluster, None, request, ftkit_version="benchmark"), id=name)


def measure(folder: Path, source: Path, name: str, workers: int) -> Result:
    """Prepare a file in this process."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    AutoTokenizer.from_pretrained(folder / "tokenizer")  # imports are not measured, for ftkit and peers alike
    plan = make_plan(folder, source, name)
    began, cpu = time.perf_counter(), cpu_seconds()
    prepared = prepare(plan, lambda _: None, workers)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    again = time.perf_counter()
    prepare(plan, lambda _: None, workers)
    if time.perf_counter() - again > 1:
        sys.stderr.write("prepared again although nothing changed\n")
    manifest = prepared.read_manifest()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(prepared.train.iterdir()))).hexdigest()
    return Result(seconds, cpu, manifest.num_train_tokens, manifest.fill_ratio, peak_mib(), digest[:12])


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def peak_mib() -> int:
    """Return the peak memory of this process or a worker, whichever is larger."""
    whos = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in whos) >> 10


def measure_apart(folder: Path, source: Path, name: str, who: str) -> Result:
    """Measure in a separate process: ftkit with a number of workers, or a peer."""
    program = Path(__file__).parent / "peers" / "trl_data.py" if who == "trl" else Path(__file__)
    command = [sys.executable, str(program), "--measure", str(folder), str(source), name, who]
    here = Path(__file__).parent  # so that peers can import this module
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def show(name: str, who: str, results: list[Result]) -> None:
    """Print the medians."""
    seconds = statistics.median(result.seconds for result in results)
    cpu = statistics.median(result.cpu_seconds / result.num_tokens for result in results)
    first = results[0]
    print(
        COLUMNS.format(
            name, who, f"{first.num_tokens:,}", f"{seconds:.1f}", f"{first.num_tokens / seconds:,.0f}",
            f"{cpu * 1e6:.2f}", f"{first.fill_ratio:.2%}", f"{first.peak_mib:,} MiB",
        ),
        {result.digest for result in results} - {""} or "",
        flush=True,
    )  # fmt: skip


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=12_000, help="number of chats; other cases have about as many tokens"
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peer", action="append", choices=["trl"], default=[])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--large", action="store_true", help="also prepare twenty times as many chats, to measure memory"
    )
    options = parser.parse_args()
    names = options.case or list(CASES)
    print(COLUMNS.format("case", "by", "tokens", "seconds", "tokens/s", "CPU µs/token", "full", "peak"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder, options.rows, names)
        for name in names:
            whos = [f"ftkit, {num}" for num in options.workers] + (options.peer if name == "chat" else [])
            results: dict[str, list[Result]] = {who: [] for who in whos}
            for _ in range(options.repeat):
                for who in whos:
                    results[who].append(measure_apart(folder, folder / f"{name}.jsonl", name, who))
            for who in whos:
                show(name, who, results[who])
        if options.large:
            many = folder / "many"
            many.mkdir()
            for number in range(20):
                (many / f"{number}.jsonl").symlink_to(folder / "chat.jsonl")
            who = f"ftkit, {options.workers[-1]}"
            show("large", who, [measure_apart(folder, many, "chat", who)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _, _, where, what, case, by = sys.argv
        print(json.dumps(measure(Path(where), Path(what), case, int(by.split()[-1])).__dict__))
    else:
        main()
