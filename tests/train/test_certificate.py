"""Certificates of exports: servers that compute what was trained pass, and others are refused with the reason.

The servers are stand-ins that compute with transformers, in a thread. `docs/use-the-model.md` says which real ones were
tried.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stand_in_engine
from click.testing import CliRunner
from family_matrix import tiny_config
from tiny_exports import write_adapters, write_export

from ftkit.cli.main import cli
from ftkit.data.conversations import Conversation, Message
from ftkit.data.rows import Row
from ftkit.evaluate.certificate import certify, held_out
from ftkit.evaluate.engines import ENGINES
from ftkit.evaluate.verify_export import read_record, verify_export
from ftkit.runs.certificate import CERTIFICATE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conftest import Run

    from ftkit.runs.certificate import EngineResult

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

CONVERT = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(sys.argv[1])"


@pytest.fixture(autouse=True)
def servers_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start stand-ins in this process, which has imported torch."""
    monkeypatch.setattr("ftkit.evaluate.engines.process.running", stand_in_engine.running)
    # llama.cpp's files are pointers to the folders that they were made of.
    monkeypatch.setattr(
        "ftkit.evaluate.engines.write_gguf", lambda export, file, *_: Path(file).write_text(str(export)) and []
    )


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes an export of a kind, once."""
    made: dict[str, Path] = {}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "tied": ("qwen3", {"tie_word_embeddings": True}),
        "scaled": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        "window": ("mistral", {"sliding_window": 16}),
        "capped": ("gemma2", {"final_logit_softcapping": 3.0}),
    }

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            family, changes = configs.get(kind, ("llama", {}))
            config = tiny_config(family)
            for name, value in changes.items():
                setattr(config, name, value)
            template = "gemma" if kind == "bos" else "chatml"
            if kind == "adapters":
                made[kind] = write_adapters(folder / "export", folder / "base", config)
            else:
                made[kind] = write_export(folder / "export", config, template)
        return made[kind]

    return make


def served(
    exported: Path, engine: str, tmp_path: Path, *options: str, rows: Mapping[str, Conversation] | None = None
) -> EngineResult:
    llama_cpp = tmp_path / "llama.cpp"
    llama_cpp.mkdir(exist_ok=True)
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (llama_cpp / name).write_text(CONVERT)
    (llama_cpp / "llama-server").write_text("#!/bin/sh\n")
    (llama_cpp / "llama-server").chmod(0o755)
    record = read_record(exported)
    return certify(engine, exported, record, lambda _: None, options, sys.executable, llama_cpp, "", rows or {})


def failed(result: EngineResult) -> dict[str, str]:
    return {check.name: check.found for check in result.checks if not check.passed}


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_a_server_that_computes_what_was_trained_passes(
    engine: str, kind: str, export: Callable[[str], Path], tmp_path: Path
) -> None:
    assert all(check.passed for check in verify_export(export(kind), lambda _: None))
    result = served(export(kind), engine, tmp_path)
    assert failed(result) == {}
    prompts = next(check.found for check in result.checks if check.name == "prompts")
    assert int(prompts.split()[0]) >= 40


FAULTS = [
    ("BOS twice", "bos", "prompts", "BOS twice"),
    ("no BOS", "bos", "prompts", "BOS is missing"),
    ("no tools", "full", "prompts", "the tools are left out"),
    ("no system turn", "full", "prompts", "the system turn is left out"),
    ("system turn last", "full", "prompts", "the system turn is in another place"),
    ("end token appended", "full", "prompts", "an end token is appended"),
    ("another template", "full", "prompts", "another chat template"),
    ("special tokens as text", "full", "prompts", "the same text in other tokens"),
    ("end token lost", "full", "end of turn", "does not stop at token 1 of"),
    ("no end", "full", "end of turn", "does not stop at token 1, 0 of"),
    ("repetition penalty", "full", "greedy completions", "less probable than the most probable"),
    ("no rope scaling", "scaled", "log-probabilities", "scaling of rotary embeddings is not applied"),
    ("another rope base", "full", "log-probabilities", "other weights"),
    ("no window", "window", "log-probabilities", "the sliding window is not applied"),
    ("no cap", "capped", "log-probabilities", "logits are not capped"),
    ("vocabulary padded", "full", "log-probabilities", "the vocabulary is padded by 64 tokens"),
    ("no adapters", "adapters", "log-probabilities", "the adapters are not applied"),
    ("adapters scaled", "adapters", "log-probabilities", "applied only in part"),
    ("rank truncated", "adapters", "log-probabilities", "applied only in part"),
    ("adapters of a layer lost", "adapters", "log-probabilities", "applied only in part"),
    ("adapters of modules lost", "adapters", "log-probabilities", "of down_proj (4 of 12 modules) are not loaded"),
    ("head lost", "tied", "log-probabilities", "other weights"),
    ("a layer lost", "full", "log-probabilities", "other weights"),
    ("quantized", "full", "log-probabilities", "a lower precision"),
    ("norms rounded", "full", "log-probabilities", "a lower precision"),
    ("another epsilon", "full", "log-probabilities", "an operation that the engine"),
    ("query and key swapped", "full", "log-probabilities", "other weights"),
]


@pytest.mark.parametrize(("fault", "kind", "check", "reason"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_server_that_computes_something_else_is_refused_with_the_reason(
    fault: str, kind: str, check: str, reason: str, export: Callable[[str], Path], tmp_path: Path
) -> None:
    found = failed(served(export(kind), "vllm", tmp_path, "--fault", fault))
    assert reason in found[check]


FAMILIES = [
    "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral",
    "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_family_raises_no_alarm(family: str, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", tiny_config(family))
    assert failed(served(folder, "vllm", tmp_path)) == {}


PARSES = {
    "vllm": ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "sglang": ("--tool-call-parser", "qwen25"),
    "llama.cpp": (),
}
CALL_FAULTS = {"vllm": ("calls as text", "as text"), "llama.cpp": ("arguments lost", "[('f', {})]")}


@pytest.mark.parametrize("engine", PARSES)
def test_tool_calls_that_an_endpoint_parses_are_compared_with_the_text(
    engine: str, export: Callable[[str], Path], tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
    asked = Conversation((Message("user", "Call it."),))
    rows = {"row 1": replace(asked, tools=(tool,)), "row 2": asked}
    result = served(export("full"), engine, tmp_path, *PARSES[engine], rows=rows)
    assert failed(result) == {}
    assert [check.found for check in result.checks if check.name == "tool calls"] == ["1 call as generated"]
    if engine in CALL_FAULTS:
        fault, found = CALL_FAULTS[engine]
        wrong = served(export("full"), engine, tmp_path, *PARSES[engine], "--fault", fault, rows=rows)
        assert found in failed(wrong)["tool calls"]
    if engine == "vllm":  # without a parser
        unparsed = served(export("full"), engine, tmp_path, "--fault", "calls as text", rows=rows)
        assert "tool calls" not in {check.name for check in unparsed.checks}


def test_rows_of_the_validation_split_are_among_the_conversations(finished_run: Run) -> None:
    rows = held_out(finished_run.plan)
    assert len(rows) == 4
    assert all(each.messages[-1].role == "user" for each in rows.values())
    gone = replace(finished_run.plan, workspace=finished_run.plan.workspace / "gone")
    assert held_out(gone) == {}


def test_rows_with_pictures_are_left_out_and_counted(
    finished_run: Run, export: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"messages": [{"role": "user", "content": "<image>What is it?"}], "image": "a.png"}
    given = [("", Row(columns, f"rows.jsonl:{number}")) for number, columns in enumerate((seen, {"prompt": "hi"}))]
    monkeypatch.setattr("ftkit.evaluate.certificate.read_evaluation_rows", lambda *_: given)
    recipe = finished_run.plan.recipe
    data = recipe.data.model_copy(update={"pictures": True})
    rows = held_out(replace(finished_run.plan, recipe=recipe.model_copy(update={"data": data})))
    assert [[turn.pictures for turn in each.messages] for each in rows.values()] == [[("a.png",)], [()]]
    texts = [{}, {name: each for name, each in rows.items() if name.endswith(":1")}, rows]
    checks = [served(export("full"), "vllm", tmp_path, rows=chosen).checks for chosen in texts]
    without, with_text, with_both = (next(each.found for each in found if each.name == "prompts") for found in checks)
    assert int(with_text.split()[0]) == int(without.split()[0]) + 1
    assert with_both == f"{with_text}; left out: 1 row with pictures"


def test_the_certificate_is_signed_and_of_these_files(export: Callable[[str], Path], tmp_path: Path) -> None:
    folder, key, file = export("full"), tmp_path / "key", tmp_path / CERTIFICATE
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    words = ["verify", str(folder), "--engine", "transformers,vllm"]
    done = CliRunner().invoke(cli, [*words, "--sign", "--key", str(key), "--", "--max-num-seqs", "4"])
    assert done.exit_code == 0, done.output
    certificate = json.loads((folder / CERTIFICATE).read_text())
    assert certificate["verdict"] == "passed"
    assert [each["engine"] for each in certificate["engines"]] == ["transformers", "vllm"]
    assert certificate["engines"][1]["options"] == ["--max-num-seqs", "4"]
    assert "model.safetensors" in certificate["files"]
    checked = ["verify", str(folder), "--engine", "transformers", "--require-signature", f"{key}.pub"]
    assert CliRunner().invoke(cli, checked).exit_code == 0
    settings = folder / "generation_config.json"
    before = settings.read_text()
    settings.write_text(f"{before} ")
    refused = CliRunner().invoke(cli, checked)
    settings.write_text(before)
    assert (refused.exit_code, "generation_config.json" in refused.stderr) == (9, True)
    done = CliRunner().invoke(cli, [*words, "--output", str(file), "--", "--fault", "no end"])
    assert (done.exit_code, json.loads(file.read_text())["verdict"]) == (9, "failed")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_server_that_is_already_running_is_compared(
    engine: str, export: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = export("full")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    modules = {kind: module for module, kind in stand_in_engine.KINDS.items()}
    (tmp_path / "model.gguf").write_text(str(folder))
    model = {"vllm": ["serve", str(folder)], "sglang": ["--model-path", str(folder)]}.get(engine)
    words = ["-m", modules[engine], *model] if model else ["--model", str(tmp_path / "model.gguf")]
    url = f"http://127.0.0.1:{port}"
    arguments = ["verify", str(folder), "--engine", engine, "--url", url, "--output", str(tmp_path / "c.json")]
    with stand_in_engine.running(["python", *words, "--port", str(port)], log=tmp_path / "log"):
        done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert "prompts" in done.stdout
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, "refused" in done.stdout) == (9, True), done.output  # nothing listens there


def test_arguments_for_a_server_need_one_engine(export: Callable[[str], Path]) -> None:
    done = CliRunner().invoke(cli, ["verify", str(export("full")), "--engine", "vllm,sglang", "--", "--x"])
    assert done.exit_code == 2
    done = CliRunner().invoke(cli, ["verify", str(export("full")), "--engine", "vllm,other"])
    assert (done.exit_code, "'other'" in done.stderr) == (2, True)
