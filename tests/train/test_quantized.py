"""Quantized files: what they change is measured by the server, and what the recipe does not accept is not kept.

llama.cpp's programs are stand-ins: files are pointers to folders, and the server computes with transformers. So are
llm-compressor, which leaves the weights as they are, and vLLM, which rounds them.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pytest
import stand_in_engine
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ftkit.cli.main import cli
from ftkit.config.recipe import ExportSpec
from ftkit.data.prepared_data import PreparedData
from ftkit.evaluate.export_formats import CONVERTER
from ftkit.evaluate.loaded_model import load_model
from ftkit.evaluate.quantized import divergence, format_table
from ftkit.evaluate.scoring import Ranks, evaluation_set, measure
from ftkit.evaluate.source import MeasureSettings, ModelFolder
from ftkit.planning.plan import plan_to_json
from ftkit.runs.certificate import CERTIFICATE
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.components.export_record import QuantizedFiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from conftest import Run

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

QUANTIZE = """#!/bin/sh
case $1,$3 in
--help,) echo "usage: llama-quantize
   7  or  Q8_0    :  7.96G, +0.0026 ppl @ Llama-3-8B
  10  or  Q2_K    :  2.96G, +3.5199 ppl @ Llama-3-8B
  19  or  IQ2_XXS :  2.06 bpw quantization
   0  or  F32     : 26.00G              @ 7B
          COPY    : only copy tensors, no quantizing";;
*,iq2_xxs) echo " ERROR: this quantization requires an importance matrix!
llama_quantize: failed to quantize model from '$1'" >&2; exit 1;;
*) [ $3 != q2_k ] || echo "llama_model_quantize_impl: WARNING: 18 of 35 tensor(s) required fallback quantization" >&2
printf '%s\\n%s' "$(cat "$1")" "$(echo "$3" | cut -c2)" >"$2";;
esac
"""


@pytest.fixture(autouse=True)
def bars_are_off_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the command sets for its process: scripts of other tests have bars."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run]) -> Run:
    made = make_run("quantized-20260102T030405Z-ab12", "training.max_steps=20", processes=1)
    made.train()
    return made


@pytest.fixture
def llama_cpp(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    built = tmp_path / "build" / "bin"
    built.mkdir(parents=True)
    for name, text in (("llama-quantize", QUANTIZE), ("llama-server", "#!/bin/sh\n")):
        (built / name).write_text(text)
        (built / name).chmod(0o755)
    (tmp_path / "convert_hf_to_gguf.py").write_text("")
    monkeypatch.setenv("FTKIT_WORKSPACE", str(workspace))
    monkeypatch.setenv(CONVERTER, str(tmp_path / "convert_hf_to_gguf.py"))
    monkeypatch.setattr("ftkit.evaluate.engines.process.running", stand_in_engine.running)
    monkeypatch.setattr("ftkit.cli.export.write_gguf", lambda export, file, *_: file.write_text(str(export)) and [])


COMPRESSOR = f"""#!{sys.executable}
import json, pathlib, shutil, sys
if sys.argv[1] == "-c":
    sys.exit()
_, script, export, form, calibration, folder = sys.argv
assert script.endswith("compress.py")
documents = json.loads(pathlib.Path(calibration).read_text())
if bool(documents) != (form == "w4a16"):
    sys.exit("ERROR: wrong calibration")
folder = pathlib.Path(folder)
folder.mkdir()
shutil.copy(pathlib.Path(export, "model.safetensors"), folder)
(folder / "tokenizer.json").write_text("of another version")
config = {{"quantization_config": {{"quant_method": "stand-in", "bits": 8 if form == "fp8" else 3}}, "vocab_size": 1}}
(folder / "config.json").write_text(json.dumps(config))
pathlib.Path(export).with_name("calibration.json").write_text(json.dumps(documents))
"""


@pytest.fixture
def programs(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that select stand-ins of llm-compressor and vLLM."""
    program = tmp_path / "python"
    program.write_text(COMPRESSOR)
    program.chmod(0o755)
    monkeypatch.setenv("FTKIT_WORKSPACE", str(workspace))
    monkeypatch.setattr("ftkit.evaluate.engines.process.running", stand_in_engine.running)
    return ["--llm-compressor", str(program), "--engine-python", "vllm"]


def export(run: Run, *words: str, form: str = "gguf") -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["export", run.plan.id, "--no-verify", "--format", form, *words])
    return done.exit_code, done.output


def quantized(folder: Path) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads((folder / "ftkit-export.json").read_text())["quantized"]
    return files


@pytest.mark.usefixtures("llama_cpp")
def test_each_file_has_its_own_loss_on_the_validation_split(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, output = export(run, "--quantize", "q8_0,Q2_K", "--to", str(folder))
    assert code == 0, output
    files = quantized(folder)
    plain, eight, two = (each["metrics"] for each in files)
    assert plain["increase"] == plain["KL"] == 0
    assert 0 < abs(eight["increase"]) < two["increase"]
    assert 0 < eight["KL"] < two["KL"]
    assert two["increase"] == pytest.approx(two["loss"] - plain["loss"])
    source = ModelFolder(folder, "made")
    model = load_model(source, torch.device("cpu"))
    settings = MeasureSettings(("loss",), limit=100)
    data, metrics = evaluation_set(model.input, run.plan, settings, [].append)
    summed, count, _ = measure(model, data, metrics, settings, Ranks()).loss.sum(0)
    assert plain["loss"] == pytest.approx(summed / count, rel=1e-4)
    card = (folder / "README.md").read_text()
    assert [line.split(":")[0] for line in card.splitlines() if "18 of 35 tensors" in line] == [files[2]["name"]]
    assert all(each["name"] in card and (folder / each["name"]).is_file() for each in files)
    assert CliRunner().invoke(cli, ["verify", str(folder)]).exit_code != 0  # no logits were recorded


@pytest.mark.usefixtures("llama_cpp")
def test_a_file_whose_loss_is_above_the_bound_is_not_kept(run: Run, tmp_path: Path) -> None:
    bounded = run.copy_to("bounded-20260102T030405Z-ab12")
    recipe = run.plan.recipe.model_copy(update={"export": ExportSpec(max_loss_increase=0.02)})
    bounded.layout.plan.write_text(plan_to_json(replace(bounded.plan, recipe=recipe)))
    folder = tmp_path / "made"
    assert export(bounded, "--to", str(folder))[0] == 0
    (folder / CERTIFICATE).write_text("{}")  # of other files
    code, output = export(bounded, "--quantize", "q8_0,q2_k", "--to", str(folder))
    assert code == 9, output
    names = [f"{bounded.plan.id}-{kind}.gguf" for kind in ("fp32", "q8_0")]
    assert [path.name for path in sorted(folder.glob("*.gguf"))] == names
    assert [each["name"] for each in quantized(folder)] == names
    assert "q2_k" not in (folder / "README.md").read_text()
    assert not list(folder.glob(".quantized-*"))
    assert not (folder / CERTIFICATE).exists()


@pytest.mark.usefixtures("llama_cpp")
def test_a_type_that_llama_cpp_does_not_list_is_refused_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    code, output = export(run, "--quantize", "q9", "--to", str(tmp_path / "made"))
    assert (code, "q9" in output, "q8_0" in output, (tmp_path / "made").exists()) == (4, True, True, False)
    for word in ("--quantize", "--llm-compressor", "--engine-python"):
        assert CliRunner().invoke(cli, ["export", run.plan.id, word, "q8_0"]).exit_code == 2


@pytest.mark.usefixtures("llama_cpp")
def test_a_run_without_validation_rows_is_refused_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    data = run.plan.recipe.data
    source = data.source.model_copy(update={"num_heldout": 0, "heldout": None})
    recipe = run.plan.recipe.model_copy(update={"data": data.model_copy(update={"source": source, "validation": None})})
    whole = run.copy_to("all-trained-20260102T030405Z-ab12")
    whole.layout.plan.write_text(plan_to_json(replace(whole.plan, recipe=recipe)))
    code, output = export(whole, "--quantize", "q8_0", "--to", str(tmp_path / "made"))
    assert (code, "data.validation" in output, (tmp_path / "made").exists()) == (9, True, False), output


@pytest.mark.usefixtures("llama_cpp")
def test_each_type_is_written_once_and_that_of_the_unquantized_file_is_this_file(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, output = export(run, "--quantize", "Q8_0,f32,q8_0", "--to", str(folder))
    assert code == 0, output
    names = [f"{run.plan.id}-{kind}.gguf" for kind in ("fp32", "q8_0")]
    assert sorted(path.name for path in folder.glob("*.gguf")) == names
    assert [each["name"] for each in quantized(folder)] == names
    assert export(run, "--quantize", "", "--to", str(folder))[0] == 4


@pytest.mark.usefixtures("llama_cpp")
def test_a_failed_quantization_has_the_programs_reason_and_leaves_an_export_without_quantized_files(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    code, output = export(run, "--quantize", "q8_0,iq2_xxs", "--to", str(folder))
    output = " ".join(output.split())
    assert (code, "requires an importance matrix!" in output) == (9, True), output
    assert f"the export is in {folder}, but not" in output
    assert f"{folder}/{run.plan.id}-iq2_xxs.gguf" in output
    assert [path.name for path in folder.glob("*.gguf")] == [f"{run.plan.id}-fp32.gguf"]
    assert not list(folder.glob(".quantized-*"))


def test_compressed_models_are_measured_and_have_the_tokenizer_of_the_export(
    run: Run, programs: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    code, output = export(run, *programs, "--to", str(folder), form="fp8,w4a16")
    assert code == 0, output
    plain, eight, four = quantized(folder)
    assert [each["name"] for each in (plain, eight, four)] == ["fp32", "fp8", "w4a16"]
    assert plain["metrics"]["increase"] == plain["metrics"]["KL"] == 0
    assert 0 < eight["metrics"]["KL"] < four["metrics"]["KL"]
    documents = (tmp_path / "calibration.json").read_bytes()
    assert (eight["note"], sha256(documents).hexdigest() in four["note"]) == ("", True)
    assert f"{len(json.loads(documents))} training documents" in four["note"]
    shape = json.loads((folder / "config.json").read_text())
    for name, bits in (("fp8", 8), ("w4a16", 3)):
        config = json.loads((folder / name / "config.json").read_text())
        assert config.pop("quantization_config")["bits"] == bits
        assert config == shape
        assert (folder / name / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        assert not (folder / name / "README.md").exists()
    assert "Measured with vllm" in (folder / "README.md").read_text()


def test_calibration_documents_are_whole_ones_of_the_training_split(
    run: Run, programs: list[str], tmp_path: Path
) -> None:
    assert export(run, *programs, "--to", str(tmp_path / "made"), form="w4a16")[0] == 0
    store = PreparedData(run.plan.data.root).read_train()
    packs = list(range(len(store)))
    lengths, tokens = [store.document_lengths([pack]) for pack in packs], store.read(packs)[:, 0]
    trained = {
        tuple(part.tolist())
        for row, each in zip(tokens, lengths, strict=True)
        for part in np.split(row, np.cumsum(each))[:-1]
    }
    documents = json.loads((tmp_path / "calibration.json").read_text())
    assert {*map(tuple, documents)} == trained  # all of so few


def test_a_compressed_model_whose_loss_is_above_the_bound_is_not_kept(
    run: Run, programs: list[str], tmp_path: Path
) -> None:
    bounded = run.copy_to("bounded-fp8-20260102T030405Z-ab12")
    recipe = run.plan.recipe.model_copy(update={"export": ExportSpec(max_loss_increase=0.02)})
    bounded.layout.plan.write_text(plan_to_json(replace(bounded.plan, recipe=recipe)))
    folder = tmp_path / "made"
    code, output = export(bounded, *programs, "--to", str(folder), form="fp8,w4a16")
    assert code == 9, output
    assert [(folder / name).is_dir() for name in ("fp8", "w4a16")] == [True, False]
    assert [each["name"] for each in quantized(folder)] == ["fp32", "fp8"]
    assert not list(folder.glob(".quantized-*"))


def test_an_environment_without_llm_compressor_is_refused_before_anything_is_written(
    run: Run, programs: list[str], tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    code, output = export(run, *programs, "--to", str(tmp_path / "made"), form="fp8")
    assert (code, "pip install llmcompressor" in output, (tmp_path / "made").exists()) == (5, True, False), output


def test_llm_compressor_quantizes_and_transformers_measures(
    make_run: Callable[..., Run], tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llmcompressor", reason="needs an environment with llm-compressor: see CONTRIBUTING.md")
    size = ("model.architecture.hidden_size=128", "model.architecture.head_dim=32")  # GPTQ's groups have 128 weights
    run = make_run("compressed-20260102T030405Z-ab12", "training.max_steps=20", *size, processes=1)
    run.train()
    monkeypatch.setenv("FTKIT_WORKSPACE", str(workspace))
    folder = tmp_path / "made"
    code, output = export(run, "--to", str(folder), form="fp8,w4a16")
    assert code == 0, output
    plain, eight, four = (each["metrics"] for each in quantized(folder))
    assert plain["KL"] == 0
    assert 0 < eight["KL"] < four["KL"] < 0.1
    assert abs(four["increase"]) < 0.1
    sizes = [(folder / name / "model.safetensors").stat().st_size for name in ("", "fp8", "w4a16")]
    assert sizes[0] > sizes[1] > sizes[2]


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 40))
def test_divergence_is_that_of_all_tokens_or_below(seed: int, vocabulary: int, num_listed: int) -> None:
    rows = np.random.default_rng(seed).normal(0, 3, (2, vocabulary))
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    exact = math.fsum((np.exp(rows[0]) * (rows[0] - rows[1])).tolist())
    everything = [dict(enumerate(row.tolist())) for row in rows]
    assert divergence(*everything) == pytest.approx(exact, abs=1e-9)
    listed = [dict(sorted(each.items(), key=lambda pair: -pair[1])[:num_listed]) for each in everything]
    assert -1e-9 <= divergence(*listed) <= exact + 1e-9


def test_numbers_of_a_column_are_written_alike() -> None:
    files = [
        QuantizedFiles("m", {"m.gguf": SavedFile(2**30, "0")}, {"loss": 5.40361, "tokens/s": speed})
        for speed in (635.8, 10310.2)
    ]
    assert format_table(files)[1] == [["m", "1", "5.404", "635.8"], ["m", "1", "5.404", "10,310"]]
