"""The texts of errors of `ftkit.evaluate`: tests/golden/errors/evaluate.txt. `FTKIT_UPDATE_GOLDEN=1` rewrites it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from error_texts import check_error_texts

from ftkit.data.rows import Row
from ftkit.evaluate.checkpoint_export import ExportRequest, export_run
from ftkit.evaluate.export_formats import check_format, find_converter
from ftkit.evaluate.generate import count_done
from ftkit.evaluate.served_model import takes_vllm
from ftkit.evaluate.source import ModelFolder, find_target
from ftkit.evaluate.verify_export import check_memory, read_record, require_passed
from ftkit.planning.layout import Workspace
from ftkit.runs.certificate import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
    from conftest import Run


def failures(run: Run, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    run._write_plan()
    layout, plan, workspace = run.layout, run.plan, Workspace(run.plan.workspace)
    output = folder / "completions.jsonl"
    output.write_text('{"prompt": "another one"}\n')
    request = ExportRequest("last", merges=False, precision=None, folder=None)
    yield "a folder that does not exist", lambda: find_target("./none", workspace)
    yield "a folder without a model", lambda: find_target(str(folder), workspace)
    yield "a run that has not saved a checkpoint", lambda: find_target("demo", workspace)
    yield "a run to export that has not saved a checkpoint", lambda: export_run(layout, request, None, print)
    merged = replace(request, merges=True)
    yield "merging without adapters", lambda: export_run(layout, merged, None, print)
    yield "vLLM on a machine without it", lambda: takes_vllm(ModelFolder(folder, "demo"), "vllm")
    yield "GGUF without llama.cpp", find_converter
    yield "vLLM's adapters of a full model", lambda: check_format("vllm-lora", plan, merges=True)
    yield "too little memory to verify an export", lambda: check_memory(2**34, 2**32)
    yield "an export without a record", lambda: read_record(folder)
    yield "an export that differs", lambda: require_passed(folder, [Check("logits", "differ by 0.1", passed=False)])
    yield "an output of other prompts", lambda: count_done(output, [Row({"prompt": "one"}, "--input")], "demo")


def test_error_texts(make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("FTKIT_GGUF_CONVERTER", raising=False)
    monkeypatch.setattr("ftkit.evaluate.served_model.find_spec", lambda _: None)
    folder = tmp_path / "here"
    folder.mkdir()
    check_error_texts("evaluate", failures(make_run("demo-20260102T030505Z-0001"), folder), {str(folder): "/here"})
