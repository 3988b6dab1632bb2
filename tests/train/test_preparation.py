"""`python -m ftkit.data PLAN`, as a job's first stage calls it."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS

from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_image, load_recipe
from ftkit.config.request import RunRequest
from ftkit.data.__main__ import main
from ftkit.data.cases import read_evaluation_rows
from ftkit.data.packing import IGNORED
from ftkit.data.prepare import prepare as prepare_in_process
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import learn_tokenizer, load_saved_tokenizer
from ftkit.errors import DataError
from ftkit.planning.plan import RunPlan, plan_to_json
from ftkit.planning.planner import plan_run

if TYPE_CHECKING:
    from pathlib import Path


SMALL = (
    "model.weights=random",
    "model.tokenizer={source: trained, vocab_size: 400}",
    "data.source.num_train=12",
    "data.source.num_heldout=4",
    "data.source.options={smallest: 1024, largest: 2048}",
)
"""The shipped recipe, but for a tokenizer that is learned here: one of a digit a token, two tokens a byte."""


def plan_for(workspace: Path, *overrides: str) -> RunPlan:
    ctx = Context.here()
    recipe = load_recipe("olmo3-32b-malware-full", ctx, (*SMALL, *overrides))
    request = RunRequest("malware", None, None, recipe.image, False, workspace, "python3", datetime.now(UTC), "test")
    cluster, image = load_cluster("slurm", ctx), load_image(str(recipe.image), ctx)
    plan = replace(plan_run(recipe, cluster, image, request), id="malware")
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    return plan


def prepare(workspace: Path, *overrides: str) -> tuple[RunPlan, str]:
    plan = plan_for(workspace, *overrides)
    command = [sys.executable, "-m", "ftkit.data", str(plan.layout.plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return plan, done.stderr


def refused(plan: RunPlan, capsys: pytest.CaptureFixture[str]) -> str:
    """Prepare in this process, which raises anything except a data error; return what was printed."""
    assert main(plan.layout.plan) == DataError.exit_code
    assert not plan.data.root.exists()
    return capsys.readouterr().err


def test_simulated_malware_is_packed_uncut_and_its_analysis_is_trained(tmp_path: Path) -> None:
    plan, _ = prepare(tmp_path)
    prepared = PreparedData(plan.data.root)
    manifest = prepared.read_manifest()
    assert (manifest.num_train_documents, manifest.num_validation_documents, manifest.num_too_long) == (12, 4, 0)
    tokenizer = load_saved_tokenizer(prepared.tokenizer)
    validation = prepared.read_validation()
    labels = validation.read(range(len(validation)))[:, 1]
    trained = tokenizer.decode(labels[labels != IGNORED])
    analyses = [row.columns["analysis"] for _, row in prepared.read_validation_rows()]
    assert sorted(trained.split(tokenizer.eos_token)) == sorted(["", *analyses])


def test_binaries_too_large_for_a_pack_are_skipped_and_counted(tmp_path: Path) -> None:
    plan, printed = prepare(tmp_path, "training.sequence_length=3584")
    manifest = PreparedData(plan.data.root).read_manifest()
    assert 0 < manifest.num_too_long < 16
    assert manifest.num_train_documents + manifest.num_validation_documents == 16 - manifest.num_too_long
    assert f"{manifest.num_too_long} documents longer" in printed


def test_the_digest_of_documents_is_that_of_packs_of_any_length_that_all_fit(tmp_path: Path) -> None:
    lengths = {8192: "", 16384: "", 3584: ""}
    for length in lengths:
        plan, _ = prepare(tmp_path / str(length), f"training.sequence_length={length}")
        manifest = PreparedData(plan.data.root).read_manifest()
        assert manifest.num_documents == 16
        lengths[length] = manifest.digests["documents"]
    assert lengths[8192] == lengths[16384] != lengths[3584]


def source_of(file: Path, **options: object) -> tuple[str, ...]:
    source = {"kind": "files", "train": str(file)} | options
    form = {"kind": "messages"}
    return f"data.source={json.dumps(source)}", f"data.format={json.dumps(form)}", "evaluation.every_steps=null"


def turns(*contents: str) -> dict[str, object]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]}


def write(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


def test_texts_with_any_line_separator_are_prepared_in_both_splits(tmp_path: Path) -> None:
    rows = [turns(f"{number}\u2028\u0085?", "\u2029yes") | {"url": "u", "id": 1} for number in range(6)]
    file = write(tmp_path / "train.jsonl", *rows)
    plan, printed = prepare(tmp_path, *source_of(file, num_heldout=2))
    prepared = PreparedData(plan.data.root)
    assert all(row.columns in rows for _, row in prepared.read_validation_rows())
    assert prepared.read_manifest().num_train_documents == 4
    assert ": id, url\n" in printed


def test_rows_of_a_separate_validation_file_are_of_no_training_source(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", turns("q", name), turns(name, "a"))) for name in "abc"]
    sources = (f"data.source={json.dumps(files[:2])}", *source_of(tmp_path)[1:], "evaluation.generation=null")
    for split, names in ("count=3", {"a.jsonl", "b.jsonl"}), (f"file={files[2]}", {""}):
        plan = plan_for(tmp_path / split[:4], *sources, f"data.validation.{split}")
        prepare_in_process(plan, lambda _: None, 1)
        assert {name for name, _ in read_evaluation_rows(plan, None, 9)} == names


def test_data_with_fewer_packs_than_a_step_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", turns("q", "a"))
    told: list[str] = []
    prepare_in_process(plan_for(tmp_path, *source_of(file), "training.global_batch_size=16"), told.append, 1)
    assert any("packs than the 16" in line for line in told)


def test_an_invalid_row_is_shown_with_its_line_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = turns("q", "a")
    bad["messages"][1]["mood"] = "good"  # type: ignore[index]
    file = write(tmp_path / "train.jsonl", *[turns("q", "a")] * 20, bad)
    printed = refused(plan_for(tmp_path, *source_of(file)), capsys)
    assert f"error: {file}:21: turn 2: " in printed
    assert 'the example: {"messages": [{"role": "user"' in printed


def test_a_tokenizer_larger_than_the_model_is_rejected_once_such_a_token_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = learn_tokenizer(["quite quite quite"], 300, "chatml")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    size = len(tokenizer) - 1
    last = str(tokenizer.decode([size]))
    source = json.dumps({"source": str(tmp_path / "tokenizer"), "vocab_size": None})
    model = (f"model.tokenizer={source}", f"model.architecture.vocab_size={size}", "data.chat_template=model")
    file = write(tmp_path / "train.jsonl", turns("what", "yes"), turns(f"is{last}", "yes"))
    printed = refused(plan_for(tmp_path, *source_of(file), *model), capsys)
    assert f"the tokenizer has {size + 1} tokens, model.architecture.vocab_size is {size}" in printed
    assert f"error: {file}:2: token {size}" in printed


def test_data_without_a_document_that_fits_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "train.jsonl", turns("7" * 5000, "a"))
    printed = refused(plan_for(tmp_path, *source_of(file), "training.sequence_length=512"), capsys)
    assert "pack of 512 tokens" in printed


def test_a_row_of_a_data_set_is_reported_by_split_and_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", turns("q", "a"), turns("q", " "))
    rest = source_of(folder)[1:]
    source = json.dumps({"kind": "hub", "dataset": str(folder)})
    printed = refused(plan_for(tmp_path, f"data.source={source}", *rest), capsys)
    assert f"'{folder}', split train, row 1: turn 2: " in printed


def test_any_number_of_workers_gives_the_same_packs_and_counts_per_source(tmp_path: Path) -> None:
    rng = random.Random(0)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for file, num_rows in ((first, 400), (second, 100)):
        write(
            file,
            *[turns("count " * rng.randint(1, 30), f"{rng.random()} " * rng.randint(1, 9)) for _ in range(num_rows)],
        )
    mixed = [{"source": str(first), "weight": 3}, {"source": str(second), "weight": 1}]
    options = (f"data.source={json.dumps(mixed)}", "data.validation={fraction: 0.2, by: hash}", "data.format=messages")
    digests = []
    for num_workers in (1, 3):
        plan = plan_for(tmp_path / str(num_workers), *options, "evaluation.every_steps=null")
        prepared = prepare_in_process(plan, lambda _: None, num_workers)
        files = [*sorted(prepared.train.iterdir()), *sorted(prepared.validation.iterdir()), prepared.validation_rows]
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]
    manifest = prepared.read_manifest()
    assert [(source.name, source.num_rows) for source in manifest.sources] == [
        ("first.jsonl", 300),
        ("second.jsonl", 100),
    ]
    assert sum(source.num_tokens for source in manifest.sources) == manifest.num_train_tokens
    assert 40 < manifest.num_validation_documents < 120
    packs = prepared.read_train().read(range(manifest.num_train_packs))
    assert "count" in load_saved_tokenizer(prepared.tokenizer).get_vocab()  # learned from the training rows
    in_second = (packs[:, 3] == 1).sum()
    assert in_second == manifest.sources[1].num_tokens
    told: list[str] = []
    prepare_in_process(plan, told.append)
    assert told == [f"data {plan.fingerprint}: already prepared"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 60_000, "[3]", ""])
def test_a_damaged_tokenizer_of_prepared_data_is_refused(tmp_path: Path, name: str, content: str) -> None:
    folder = tmp_path / "data" / "tokenizer"
    learn_tokenizer(["hello world"], 300, "chatml").save_pretrained(folder)
    (folder / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load_saved_tokenizer(folder)
    assert f"delete {folder.parent}" in caught.value.fix
