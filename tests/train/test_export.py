"""Exports of any checkpoint, and verification that an export equals the trained model."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftkit.cli.main import cli
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, TrainingError
from ftkit.evaluate.checkpoint_export import ExportRequest, export_run
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.scoring import Ranks, evaluation_set, measure
from ftkit.evaluate.source import MeasureSettings, ModelFolder, TrainedStep
from ftkit.evaluate.verify_export import read_record, require_passed, verify_export
from ftkit.files import write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.runs.checkpoints import SavedFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft


LITTLE = 9 * 2**30 // 10
"""Bytes of free memory with which even a tiny model is verified module by module: less than activations may take."""


def quiet(_: object) -> None:
    pass


def verify(folder: Path) -> None:
    require_passed(folder, verify_export(folder, quiet))


def export(run: Any, folder: Path, *, step: str = "last", merges: bool = False, precision: Any = "fp32") -> Path:
    return export_run(run.layout, ExportRequest(step, merges, precision, folder), verify, quiet)


def test_exporting_the_last_checkpoint_gives_the_trainers_export_and_passes_verification(
    finished_run: Any, tmp_path: Path
) -> None:
    verify(finished_run.layout.export)
    exported = export(finished_run, tmp_path / "again", precision=None)
    name = "model.safetensors"
    assert (exported / name).read_bytes() == (finished_run.layout.export / name).read_bytes()
    assert read_record(exported).trained == read_record(finished_run.layout.export).trained


def test_a_folder_that_can_t_be_written_is_refused_before_anything_is_computed(
    finished_run: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    told: list[object] = []
    request = ExportRequest("last", merges=False, precision=None, folder=tmp_path / "file" / "model")
    with pytest.raises(PrerequisiteError, match="can't write to"):
        export_run(finished_run.layout, request, verify, told.append)
    assert told == []


def test_merging_is_refused_for_a_run_without_adapters(finished_run: Any, tmp_path: Path) -> None:
    request = ExportRequest("last", merges=True, precision=None, folder=tmp_path / "model")
    with pytest.raises(ConfigError, match="--merge"):
        export_run(finished_run.layout, request, None, quiet)
    assert not (tmp_path / "model").exists()


def test_an_export_that_can_t_be_verified_for_want_of_memory_is_refused_before_it_is_written(
    finished_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.evaluate.checkpoint_export.available_bytes", lambda: 1000)
    with pytest.raises(PrerequisiteError, match=r"0\.\d GiB .* 0\.0 GiB"):
        export(finished_run, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    export_run(finished_run.layout, ExportRequest("last", False, None, tmp_path / "export"), None, quiet)


def refresh_digests(folder: Path) -> None:
    """Update the digests to the current files, as a conversion tool would."""
    files = {path.name: SavedFile.of(path) for path in folder.glob("*.safetensors")}
    write_json(folder / EXPORT_RECORD, replace(read_record(folder), files=files))


@pytest.fixture(scope="module")
def adapted(finished_run: Any, make_run: Callable[..., Any]) -> Any:
    """DoRA adapters on a 4-bit base. Read-only for tests."""
    method = ("training.method=qlora", "training.lora={rank: 4, use_dora: true}", "training.learning_rate=0.02")
    base = f"model.weights={finished_run.layout.export}"
    run = make_run("for-export", base, *method, "evaluation.generation=null", processes=1)
    run.train()
    return run


def test_adapters_and_the_model_merged_with_them_are_verified(adapted: Any, tmp_path: Path) -> None:
    verify(adapted.layout.export)
    adapters = export(adapted, tmp_path / "adapters", step="10")
    merged = export(adapted, tmp_path / "merged", merges=True)
    rounded = export(adapted, tmp_path / "rounded", merges=True, precision="bf16")
    assert read_record(adapters).step == 10
    assert read_record(adapters).trained != read_record(merged).trained
    assert read_record(adapted.layout.export).merged is None
    exact, coarse = (load_file(folder / "model.safetensors") for folder in (merged, rounded))
    assert all(torch.equal(coarse[name], exact[name].bfloat16()) for name in exact)
    model = AutoModelForCausalLM.from_pretrained(rounded)
    assert model.config.dtype == torch.bfloat16


def test_adapters_are_merged_into_the_4_bit_base_that_they_were_trained_on(adapted: Any, tmp_path: Path) -> None:
    merged = export(adapted, tmp_path / "merged", merges=True)
    settings = MeasureSettings(("loss",))

    def loss(source: TrainedStep | ModelFolder) -> float:
        model = load_model(source, torch.device("cpu"))
        data, _ = evaluation_set(model.input, adapted.plan, settings, quiet)
        total, count, _ = measure(model, data, [], settings, Ranks()).loss.sum(0)
        return float(total / count)

    checkpoint = TrainedStep(adapted.layout, adapted.plan, read_record(merged).step)
    trained, unquantized, count = read_record(merged).merged or (0.0, 0.0, 0)
    assert abs(trained - unquantized) > 1e-4
    assert loss(checkpoint) == pytest.approx(trained, rel=1e-5)
    assert loss(ModelFolder(merged, "merged")) == pytest.approx(trained, rel=1e-5)
    assert loss(ModelFolder(adapted.layout.export, "adapters")) == pytest.approx(unquantized, rel=1e-5)
    card = (merged / "README.md").read_text()
    assert f"{trained:.4f}" in card
    assert f"{count} validation documents" in card


def test_the_card_of_a_merged_export_names_its_base_without_rows_to_compare_too(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.data.prepared_data.PreparedData.read_validation_rows", lambda *_: [])
    said: list[str] = []
    folder = tmp_path / "merged"
    export_run(adapted.layout, ExportRequest("last", merges=True, precision="fp32", folder=folder), verify, said.append)
    assert read_record(folder).merged is None
    assert "dequantized" in (folder / "README.md").read_text()
    assert "dequantized" not in (adapted.layout.export / "README.md").read_text()
    assert not [line for line in said if "--data" in line]


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_a_model_larger_than_memory_is_verified_one_module_at_a_time(
    kind: str, finished_run: Any, adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"full": finished_run, "adapters": adapted}[kind]
    folder = tmp_path / "export"
    shutil.copytree(run.layout.export, folder)
    whole = {check.name: check.found for check in verify_export(folder, quiet)}
    monkeypatch.setattr("ftkit.evaluate.verify_export.available_bytes", lambda: LITTLE)
    said: list[str] = []
    streamed = {check.name: check.found for check in verify_export(folder, said.append)}
    assert any("GiB" in line for line in said)
    assert {name for name, found in streamed.items() if found != whole[name]} == {"end of turn"}
    assert streamed["end of turn"].startswith(f"{whole['end of turn']}, by the exported settings")
    assert "probability" in streamed["end of a reply"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def rename_prefix(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("base_model.model.model.", "base_model.model."): it for name, it in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def zero_adapters(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: it * 0 if "lora_B" in name else it for name, it in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def swap_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<start_of_turn>", "<end_of_turn>"))


def change_tools_of_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text("{% if tools %}No tools.{% endif %}" + file.read_text())


def swap_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))


def store_in_fp16(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: it.half() for name, it in load_file(path).items()}, path, metadata={"format": "pt"})


def drop_end_token(folder: Path) -> None:
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": None}))


def drop_a_merge(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].pop()
    file.write_text(json.dumps(content))


def never_end(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"min_new_tokens": 100}))


def cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("mutate", "check", "free_bytes"),
    [
        (rename_prefix, "logits and the base model's", 2**40),
        (rename_prefix, "logits and the trained model's", LITTLE),
        (zero_adapters, "logits and the trained model's", 2**40),
        (zero_adapters, "logits and the base model's", LITTLE),
        (swap_template, "chat template", 2**40),
        (change_tools_of_template, "chat template: differs", 2**40),
        (swap_tokens, "vocabulary: differs", 2**40),
        (store_in_fp16, "in F16, and it was exported in", 2**40),
        (drop_end_token, "end of turn", LITTLE),
        (drop_a_merge, "settings: differ from what was written: tokenizer.json", 2**40),
        (never_end, "settings: differ from what was written: generation_config.json", LITTLE),
        (cut_short, "loads in transformers", 2**40),
    ],
)
def test_a_modified_export_fails_verification_by_its_output(
    mutate: Callable[[Path], None], check: str, free_bytes: int, adapted: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ftkit.evaluate.verify_export.available_bytes", lambda: free_bytes)
    folder = tmp_path / "changed"
    shutil.copytree(adapted.layout.export, folder)
    mutate(folder)
    is_weights = "weight files" in {one.name for one in verify_export(folder, quiet) if not one.passed}
    assert is_weights == (mutate in (rename_prefix, zero_adapters, cut_short, store_in_fp16))
    refresh_digests(folder)
    with pytest.raises(TrainingError, match=check):
        verify(folder)


def test_the_command_exports_a_zero3_checkpoint_and_removes_a_failed_export(
    make_run: Callable[..., Any], workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("training.engine=zero3", "training.max_steps=3", "evaluation.generation=null")
    run = make_run("zero3-export-20260102T030405Z-ab12", *settings)
    run.train()
    monkeypatch.setenv("FTKIT_WORKSPACE", str(workspace))
    folder = tmp_path / "of-zero3"
    typed = ["export", "zero3-export", "--to", str(folder), "--dtype", "fp32"]
    done = CliRunner().invoke(cli, typed, catch_exceptions=False)
    assert done.stdout == f"{folder}\n"
    assert "generation stops at" in done.stderr
    first, last = (load_file(each / "model.safetensors") for each in (run.layout.export, folder))
    assert all(torch.allclose(first[name], last[name], atol=1e-6) for name in first)
    assert "* Recipe: tiny" in (folder / "README.md").read_text()

    def refuse(_: Path) -> None:
        raise TrainingError("it is another model")

    failing = ExportRequest("last", merges=False, precision=None, folder=tmp_path / "failed")
    with pytest.raises(TrainingError, match="another model"):
        export_run(run.layout, failing, refuse, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["of-zero3"]
    with pytest.raises(NotFoundError, match="its steps: 3;"):
        export_run(run.layout, ExportRequest("2", False, None, None), None, lambda _: None)

    record = json.loads((folder / EXPORT_RECORD).read_text())
    (folder / EXPORT_RECORD).write_text(json.dumps(record | {"run": "another"}))
    with pytest.raises(NotFoundError, match="an export of another"):
        export_run(run.layout, replace(failing, folder=folder), None, quiet)

    killed = subprocess.CompletedProcess((), -signal.SIGKILL, "", "")
    monkeypatch.setattr("ftkit.process.run_stoppable", lambda *_, **__: killed)
    done = CliRunner().invoke(cli, ["export", "zero3-export", "--to", str(tmp_path / "unverified")])
    assert done.exit_code == TrainingError.exit_code
    assert "was killed" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["of-zero3"]


def test_a_failed_export_after_training_names_the_checkpoint_and_the_command_that_exports_it(
    make_run: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("not-exported", "training.max_steps=1", "evaluation.generation=null", processes=1)

    def fail(*_: object) -> None:
        raise FileExistsError(17, "File exists", "export")

    monkeypatch.setattr("ftkit.train.trainer.export", fail)
    with pytest.raises(TrainingError, match="export failed") as caught:
        run.train_here(world)
    assert "step 1 " in caught.value.meaning
    assert f"ftkit export {run.plan.id} --step 1" in caught.value.fix
    assert caught.value.can_resume
    assert [step for step, _ in run.layout.list_checkpoints()] == [1]
    assert not run.layout.export.exists()
