"""`ftkit generate` and `ftkit chat` on a trained run: its export, its checkpoints, and its initial weights."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import stand_in_engine
import torch

from ftkit.cli.main import main
from ftkit.config.data import AutoFormat, MessagesFormat
from ftkit.data.prepared_data import PreparedData
from ftkit.data.readers import read_json_lines
from ftkit.data.row_formats import resolve_format
from ftkit.data.rows import Row
from ftkit.errors import NotFoundError, TrainingError
from ftkit.evaluate.generate import write_data
from ftkit.evaluate.loaded_model import LoadedModel, load_model
from ftkit.evaluate.scoring import measure_target
from ftkit.evaluate.source import MeasureSettings, ModelFolder, Target, TrainedStep, find_target
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.runs.records import EvaluationRecord
from ftkit.train.checkpoint.loading import read_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Run

QUESTION = "CREATE TABLE pets (name TEXT)\nHow many pets are there?"


@pytest.fixture(scope="module")
def run(finished_run: Run) -> Run:
    """The finished run under an id that commands can resolve."""
    return finished_run.copy_to("tried-20261121T090000Z-1a2b")


def loaded(run: Run, step: str = "") -> LoadedModel:
    target = find_target(f"tried{step}", Workspace(run.plan.workspace))
    return load_model(target.source, torch.device("cpu"))


def logits(model: LoadedModel) -> torch.Tensor:
    tokens = torch.tensor([model.tokenizer(QUESTION)["input_ids"]])
    with model.inference() as hf_model:
        found: torch.Tensor = hf_model(input_ids=tokens).logits
        return found


def test_the_export_equals_the_last_checkpoint_and_differs_from_the_initial_model(run: Run) -> None:
    export, checkpoint, before = (loaded(run, step) for step in ("", "@20", "@0"))
    torch.testing.assert_close(logits(export), logits(checkpoint))
    assert (logits(export) - logits(before)).abs().max() > 0.1
    assert export.generation.end_tokens == checkpoint.generation.end_tokens
    assert before.label.endswith("@0")


def test_a_run_resolves_to_its_newest_step_and_exports_precede_checkpoints(finished_run: Run, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "demo-20260102T030405Z-ab12")
    shutil.copytree(finished_run.layout.root, layout.root)
    workspace = Workspace(tmp_path)

    def found(step: str) -> str:
        source = find_target(f"{layout.root}{step}", workspace).source
        return source.folder.name if isinstance(source, ModelFolder) else f"checkpoint {source.step}"

    assert [found(step) for step in ("", "@last", "@20", "@best", "@10", "@0")] == [
        "export", "export", "export", "export", "checkpoint 10", "checkpoint 0",
    ]  # fmt: skip
    layout.exports.mkdir()
    layout.export.rename(layout.exports / "step-000020-fp32")
    assert (found(""), found("@20")) == ("step-000020-fp32", "step-000020-fp32")
    shutil.rmtree(layout.checkpoints)
    assert found("") == "step-000020-fp32"
    with pytest.raises(NotFoundError, match="step 10") as refused:
        found("@10")
    assert "its steps: 20" in refused.value.meaning
    shutil.rmtree(layout.exports)
    with pytest.raises(NotFoundError, match="@0"):
        found("")


def test_an_interrupted_output_is_resumed_and_batch_size_changes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    prompts, output = PreparedData(run.plan.data.root).validation_rows, tmp_path / "out.jsonl"
    words = ["generate", "tried", "--input", str(prompts), "--max-new-tokens", "8"]
    assert main([*words, "--output", str(output)]) == 0
    whole = output.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["sql"] for row in rows] == [json.loads(line)["sql"] for line in prompts.read_text().splitlines()]
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    output.write_text("".join(whole.splitlines(keepends=True)[:5]) + '{"half a li')
    assert main([*words, "--output", str(output), "--batch-size", "1"]) == 0
    assert output.read_text() == whole
    assert main(["generate", "tried@0", *words[2:], "--output", str(output)]) == 8  # another model's
    assert "another model" in capfd.readouterr().err


def test_a_file_of_tools_that_is_not_utf_8_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    (tmp_path / "tools.json").write_bytes(b'[{"name": "\xe4"}]')
    assert main(["chat", "tried", "--tools", str(tmp_path / "tools.json")]) == 8
    assert f"{tmp_path / 'tools.json'}: can't read tools as JSON" in capsys.readouterr().err.replace("\n", "")


def test_completions_with_an_end_are_written_as_a_data_set_with_a_card(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    prompts, data = tmp_path / "prompts.jsonl", tmp_path / "new" / "answers.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n{"messages": [{"role": "user", "content": "Which?"}]}\n')
    words = ["generate", "tried", "--input", str(prompts), "--as-data", str(data), "--max-new-tokens", "2"]
    assert main(words) == 0
    card = json.loads(data.with_suffix(".card.json").read_text())
    assert card["weights_sha256"].keys() == {"model.safetensors"}
    assert card["rows"] + card["without_end"] + card["blank"] == 2
    assert {"model", "prompts", "engine", "max_new_tokens", "temperature", "seed", "created"} < card.keys()
    completions = data.with_name("answers.jsonl.completions")
    done = [json.loads(line) | {"finish_reason": "stop"} for line in completions.read_text().splitlines()]
    done[0] |= {"finish_reason": "length"}
    completions.write_text("".join(json.dumps(each) + "\n" for each in done))
    assert main(words) == 0  # all are there: only the data set is written
    (row,) = read_json_lines(data)
    assert row.columns == {
        "messages": [
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": done[1]["completion"]},
        ]
    }
    assert isinstance(resolve_format(AutoFormat(), [row]), MessagesFormat)


def test_a_data_set_of_completions_leaves_out_blank_ones_and_calls_and_keeps_pictures(tmp_path: Path) -> None:
    picture = {"type": "image", "image": "/pictures/a.png"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}
    before = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    call = '[TOOL_CALLS][{"name": "look", "arguments": {}}]'
    given = [
        ({"messages": [asked]}, "A cat."),
        ({"messages": [asked, before, {"role": "user", "content": "And?"}], "tools": [tool]}, "A dog."),
        ({"messages": [asked], "tools": [tool]}, call),
        ({"messages": [asked]}, " "),
    ]
    rows, completions, data = [Row(columns, "f:1") for columns, _ in given], tmp_path / "c.jsonl", tmp_path / "d.jsonl"
    done = [json.dumps({"completion": text, "finish_reason": "stop"}) + "\n" for _, text in given]
    completions.write_text("".join(done))
    assert write_data(data, completions, rows, None, {}) == 2
    written = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    assert written == [
        [asked, {"role": "assistant", "content": "A cat."}],
        [asked, before, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "A dog."}],
    ]
    card = json.loads(data.with_suffix(".card.json").read_text())
    assert (card["rows"], card["without_end"], card["blank"], card["with_calls"]) == (2, 0, 1, 1)


def test_an_output_that_is_a_pipe_gets_the_completions_of_all_batches(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    prompts, pipe = PreparedData(run.plan.data.root).validation_rows, tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ["generate", "tried", "--input", str(prompts), "--max-new-tokens", "1", "--batch-size", "4"]
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    try:
        assert main([*words, "--output", str(pipe)]) == 0
        read, _ = reader.communicate()
    finally:
        reader.kill()
    assert len(read.splitlines()) == len(prompts.read_bytes().splitlines())


def test_chat_streams_the_completion_of_generate_into_a_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    assert main(["generate", "tried", "--input", QUESTION, "--max-new-tokens", "8"]) == 0
    generated = json.loads(capfd.readouterr().out)["completion"]
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION.replace("\n", "\\\n") + "\n/exit\n"))
    assert main(["chat", "tried", "--max-new-tokens", "8"]) == 0
    assert capfd.readouterr().out.strip() == generated
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", "tried", "--before", "--max-new-tokens", "2"]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()][:1] == ["before"]


def test_a_step_without_a_checkpoint_is_rejected_with_the_existing_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    assert main(["generate", "tried@7", "--input", "hi"]) == 4
    assert "its steps: 10, 20" in capfd.readouterr().err


def evaluated(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["eval", *words, "--max-new-tokens", "8", "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_eval_reproduces_the_recorded_losses_and_shows_the_change(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    found = evaluated(capfd, "tried")
    before, after = (each.loss for each in run.records(EvaluationRecord))
    metrics = {each["metric"]: each for each in found["metrics"]}
    assert metrics["loss"]["before"] == pytest.approx(before, rel=1e-4)
    assert metrics["loss"]["after"] == pytest.approx(after, rel=1e-4)
    assert metrics["loss"]["interval"][1] < 0
    assert {"perplexity", "token_accuracy", "sql", "repetition"} <= metrics.keys()
    assert metrics["sql"]["num_cases"] == found["num_rows"] == 12


def test_an_evaluation_says_that_it_measures_documents_in_whole_that_the_run_cut_or_dropped(run: Run) -> None:
    training = run.plan.recipe.training.model_copy(update={"sequence_length": 8})
    plan = replace(run.plan, recipe=run.plan.recipe.model_copy(update={"training": training}))
    source = TrainedStep(run.layout, run.plan, 20)
    settings = MeasureSettings(metrics=("loss",), limit=2)
    long = "; 2 documents longer than sequence_length 8 in whole, which the run's own validation cut or dropped"
    for of_run, expected in ((run.plan, ""), (plan, long)):
        said: list[str] = []
        measure_target(
            Target(source, of_run),
            settings,
            lambda each: nullcontext(load_model(each, torch.device("cpu"))),
            said.append,
        )
        assert said == [f"measuring 2 rows{expected}"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torchrun leaves /dev/null open
def test_eval_gives_the_same_result_on_one_and_two_processes(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    words = ("tried", "--no-before", "--batch-size", "5")
    assert evaluated(capfd, *words, "--gpus", "2") == evaluated(capfd, *words)


@pytest.mark.parametrize(
    "prompt",
    [
        lambda text: {"prompt": text},
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda text: {"conversations": [{"from": "human", "value": text}]},
    ],
)
def test_a_file_of_prompts_gives_perplexity_and_repetition(
    prompt: Callable[[str], object],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    rows = map(prompt, ("How many pets are there?", "Which?"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export = str(run.layout.export)
    found = evaluated(capfd, export, "--data", str(tmp_path / "prompts.jsonl"), "--metrics", "loss,repetition")
    names = ["loss", "perplexity", "token_accuracy", "repetition"]
    assert [(each["metric"], each["before"], each["num_cases"]) for each in found["metrics"]] == [
        (name, None, 2) for name in names
    ]
    assert main(["eval", export]) == 8
    assert "--data FILE" in capfd.readouterr().err


def test_a_harness_task_runs_before_and_after_training_without_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    rows = [{"question": f"{number} + 1 =", "choices": [str(number), str(number + 1)]} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "own_sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "own_sums.yaml").write_text(json.dumps(task))  # JSON is YAML
    words = ["eval", "tried", "--harness", "own_sums", "--harness-tasks", str(tmp_path), "--limit", "6", "--json"]
    if find_spec("lm_eval") is None:
        assert main(words) == 5
        assert "pip install 'ftkit[harness]'" in capfd.readouterr().err
        return
    assert main(words) == 0
    (accuracy,) = json.loads(capfd.readouterr().out)["metrics"]
    assert (accuracy["metric"], accuracy["num_cases"]) == ("own_sums acc", 6)
    assert accuracy["change"] == pytest.approx(accuracy["after"] - accuracy["before"])
    assert main(["eval", "tried", "--harness", "nonesuch"]) == 4


@pytest.fixture
def stand_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server that computes with transformers in place of vLLM's."""
    monkeypatch.setattr("ftkit.evaluate.engines.process.running", stand_in_engine.running)
    monkeypatch.setattr("ftkit.evaluate.served_model.find_spec", lambda _: "vllm")


def test_a_missing_vllm_is_reported_with_the_image_that_has_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    assert main(["generate", "tried", "--input", QUESTION, "--engine", "vllm"]) == 5
    assert "vllm:0.33" in capfd.readouterr().err


@pytest.mark.usefixtures("stand_in_vllm")
def test_evaluations_with_vllm_and_transformers_agree(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    words = ("tried", "--no-before", "--limit", "6", "--max-new-tokens", "8")
    by_transformers = evaluated(capfd, *words, "--engine", "transformers")
    by_vllm = evaluated(capfd, *words, "--engine", "vllm")
    assert (by_transformers.pop("engine"), by_vllm.pop("engine")) == ("transformers", "vllm")
    for one, other in zip(by_vllm.pop("metrics"), by_transformers.pop("metrics"), strict=True):
        for key, value in other.items():
            is_measured = key in ("after", "interval")
            assert one[key] == (pytest.approx(value, rel=1e-2) if is_measured else value), other["metric"]
    assert by_vllm == by_transformers
    assert main(["eval", "tried", "--engine", "vllm"]) == 5  # random weights are in no file
    assert "--no-before" in capfd.readouterr().err
    assert main(["eval", "tried", "--engine", "vllm", "--gpus", "2"]) == 2


@pytest.mark.usefixtures("stand_in_vllm")
def test_generate_and_chat_with_vllm_match_transformers(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.plan.workspace))
    words = ["generate", "tried", "--input", QUESTION, "--max-new-tokens", "8"]
    assert main(words) == 0
    expected = json.loads(capfd.readouterr().out)
    assert main([*words, "--engine", "vllm"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == expected
    assert "with vLLM" in captured.err
    assert main([*words[:1], "tried@10", *words[2:], "--engine", "vllm"]) == 5
    assert "export it first" in capfd.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION.replace("\n", "\\\n") + "\n/exit\n"))
    assert main(["chat", "tried", "--max-new-tokens", "8", "--engine", "vllm"]) == 0
    assert capfd.readouterr().out.strip() == expected["completion"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_an_error(
    finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run.copy_to("removed")
    shutil.rmtree(run.layout.export)

    def read_too_late(state: Any, folder: Path) -> None:
        for file in folder.glob("*.distcp"):
            file.unlink()
        read_state(state, folder)

    monkeypatch.setattr("ftkit.evaluate.loaded_model.read_state", read_too_late)
    with pytest.raises(TrainingError, match="can't be loaded"):
        load_model(TrainedStep(run.layout, run.plan, 20), torch.device("cpu"))
