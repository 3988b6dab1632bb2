"""Other export formats: their requirements, and what is rejected because they would drop it."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from ftkit.errors import PrerequisiteError, TrainingError
from ftkit.evaluate.export_formats import CONVERTER, check_gguf_model, find_converter, write_gguf
from ftkit.files import read_json
from ftkit.models.folder import EXPORT_RECORD, max_lora_rank

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Run


@pytest.mark.parametrize(("rank", "expected"), [(8, 8), (9, 16), (512, 512), (513, 513)])
def test_vllm_reserves_memory_for_the_next_larger_rank(rank: int, expected: int, tmp_path: Path) -> None:
    assert max_lora_rank(tmp_path) == 0
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert max_lora_rank(tmp_path) == expected


def test_a_missing_llama_cpp_converter_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(CONVERTER, raising=False)
    with pytest.raises(PrerequisiteError, match="FTKIT_GGUF_CONVERTER"):
        find_converter()
    monkeypatch.setenv(CONVERTER, str(tmp_path / "none.py"))
    with pytest.raises(PrerequisiteError, match=r"none\.py"):
        find_converter()


GEMMA = {"family": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}


@pytest.mark.parametrize(
    ("fields", "config", "refusal"),
    [
        ({"family": "olmo3", "tie_word_embeddings": True}, {}, "can't load this model, whose output projection"),
        ({"family": "olmo3"}, {}, None),
        ({"family": "qwen3", "tie_word_embeddings": True}, {}, None),
        (GEMMA | {"num_hidden_layers": 62}, {"query_pre_attn_scalar": 168}, None),
        (GEMMA | {"num_hidden_layers": 61}, {"query_pre_attn_scalar": 168}, r"1/sqrt\(128\), .* with 1/sqrt\(168\)"),
        (GEMMA | {"head_dim": 256}, {}, None),
        (GEMMA | {"head_dim": 32}, {}, r"1/sqrt\(32\), .* with 1/sqrt\(256\)"),
        (GEMMA | {"family": "gemma2", "num_hidden_layers": 46}, {"query_pre_attn_scalar": 168}, None),
        (GEMMA | {"family": "gemma", "head_dim": 32}, {}, None),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(
    fields: dict[str, object], config: dict[str, object], refusal: str | None, finished_run: Run
) -> None:
    shape = finished_run.plan.recipe.model.architecture.model_copy(update={"tie_word_embeddings": False} | fields)
    expected = nullcontext() if refusal is None else pytest.raises(TrainingError, match=refusal)
    with expected:
        check_gguf_model(shape, config)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_gemma_without_a_scalar_has_transformers_default(family: str, finished_run: Run) -> None:
    default = AutoConfig.for_model(family).query_pre_attn_scalar
    shape = finished_run.plan.recipe.model.architecture.model_copy(update={"family": family, "head_dim": default})
    check_gguf_model(shape, {})


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


def test_a_sliding_window_that_the_gguf_file_lacks_is_said(
    finished_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    converter, folder, file = tmp_path / "convert_hf_to_gguf.py", tmp_path / "export", tmp_path / "model.gguf"
    monkeypatch.setenv(CONVERTER, str(converter))
    converter.write_text(WRITE)
    shutil.copytree(finished_run.layout.export, folder)
    config = json.loads((folder / "config.json").read_text())
    for changed, is_lost in (
        ({"sliding_window": None}, False),
        ({"sliding_window": 16}, False),  # Qwen3 without layers that use it
        ({"sliding_window": 16, "layer_types": None, "use_sliding_window": False}, False),
        (
            {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            True,
        ),
        ({"sliding_window": 16, "layer_types": None, "use_sliding_window": True}, True),
    ):
        (folder / "config.json").write_text(json.dumps(config | changed))
        assert bool(write_gguf(folder, file, "fp32", [].append)) == is_lost, changed
    converter.write_text(WRITE.replace("writer.write_h", "writer.add_sliding_window(16); writer.write_h"))
    assert write_gguf(folder, file, "fp32", [].append) == []


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
    for line, missing in (("writer.add_chat", "the chat template"), ("writer.add_token", "token <pad> and")):
        converter.write_text(without(line))
        with pytest.raises(TrainingError, match=missing):
            write_gguf(finished_run.layout.export, file, "fp32", said.append)
    converter.write_text("raise SystemExit('BPE pre-tokenizer was not recognized')")
    with pytest.raises(TrainingError, match="BPE pre-tokenizer"):
        write_gguf(finished_run.layout.export, file, "fp32", said.append)
    assert list(file.parent.iterdir()) == []
