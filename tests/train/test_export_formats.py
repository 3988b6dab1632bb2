"""Other export formats: their requirements, and what is rejected because they would drop it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from ftkit.errors import PrerequisiteError, TrainingError
from ftkit.evaluate.formats import CONVERTER, find_converter, verify_vllm_lora, write_gguf
from ftkit.files import read_json
from ftkit.model_folder import EXPORT_RECORD

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Run

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def adapters(folder: Path, names: tuple[str, ...], **config: object) -> Path:
    folder.mkdir()
    save_file({name: torch.zeros(2, 2) for name in names}, folder / "adapter_model.safetensors")
    values = {"r": 9, "target_modules": ["q_proj"], "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_adapters_that_vllm_supports_report_the_max_lora_rank_to_set(tmp_path: Path) -> None:
    folder = adapters(tmp_path / "good", (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"))
    assert verify_vllm_lora(folder) == 16


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (f"{LAYER}.lora_magnitude_vector", {}),
        (LAYER.removeprefix("base_model.") + ".lora_A.weight", {}),
        (f"{LAYER.replace('q_proj', 'k_proj')}.lora_A.weight", {}),
        (f"{LAYER}.lora_A.weight", {"modules_to_save": ["lm_head"]}),
        (f"{LAYER}.lora_A.weight", {"bias": "all"}),
    ],
    ids=["DoRA", "prefix", "other module", "whole modules", "biases"],
)
def test_adapters_that_vllm_would_ignore_are_rejected_by_name(
    name: str, config: dict[str, object], tmp_path: Path
) -> None:
    folder = adapters(tmp_path / "bad", (f"{LAYER}.lora_B.weight", name), **config)
    with pytest.raises(TrainingError, match="vLLM would ignore parts"):
        verify_vllm_lora(folder)


def test_a_missing_llama_cpp_converter_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(CONVERTER, raising=False)
    with pytest.raises(PrerequisiteError, match="git clone https://github"):
        find_converter()
    monkeypatch.setenv(CONVERTER, str(tmp_path / "none.py"))
    with pytest.raises(PrerequisiteError, match=r"there is no .*none\.py"):
        find_converter()


WRITE = """
import json, sys
from pathlib import Path
from gguf import GGUFWriter
folder, file = Path(sys.argv[1]), sys.argv[sys.argv.index("--outfile") + 1]
writer = GGUFWriter(file, "qwen3")
numbers = {each["content"]: each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
writer.add_token_list(sorted(numbers, key=numbers.get))
writer.add_chat_template((folder / "chat_template.jinja").read_text())
end = json.loads((folder / "ftkit-export.json").read_text())["end_tokens"][0]
writer.add_eos_token_id(end)
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.close()
"""


def test_a_gguf_file_has_the_template_special_tokens_and_end_token_of_the_export(
    finished_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    converter, file = tmp_path / "convert_hf_to_gguf.py", tmp_path / "out" / "model.gguf"
    monkeypatch.setenv(CONVERTER, str(converter))
    said: list[str] = []

    def without(line: str) -> str:
        return "\n".join(each for each in WRITE.splitlines() if not each.startswith(line))

    converter.write_text(WRITE)
    write_gguf(finished_run.layout.export, file, "fp32", said.append)
    assert "tokenizer.ggml.eot_token_id" not in gguf.GGUFReader(file).fields
    converter.write_text(without("writer.add_eos"))
    write_gguf(finished_run.layout.export, file, "fp32", said.append)
    end = (read_json(finished_run.layout.export / EXPORT_RECORD, dict) or {})["end_tokens"][0]
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.eot_token_id"].contents() == end
    file.unlink()
    for line, missing in (("writer.add_chat", "the chat template"), ("writer.add_token", "the token <pad> and")):
        converter.write_text(without(line))
        with pytest.raises(TrainingError, match=missing):
            write_gguf(finished_run.layout.export, file, "fp32", said.append)
    converter.write_text("raise SystemExit('BPE pre-tokenizer was not recognized')")
    with pytest.raises(TrainingError, match="BPE pre-tokenizer was not recognized"):
        write_gguf(finished_run.layout.export, file, "fp32", said.append)
    assert list(file.parent.iterdir()) == []
