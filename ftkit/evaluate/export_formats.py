"""Other formats of an export: GGUF (llama.cpp), compressed models (llm-compressor), adapters for vLLM's loader."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit import process
from ftkit.errors import NotFoundError, PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.source import find_base
from ftkit.files import atomic_file, read_json_if_valid
from ftkit.models.config_json import text_part
from ftkit.models.folder import EXPORT_RECORD, VLLM_LORA_RANKS, read_model_config
from ftkit.models.parameters import count_model

if TYPE_CHECKING:
    from ftkit.models.architecture import ArchitectureSpec
    from ftkit.planning.plan import RunPlan

Format = Literal["hf", "gguf", "fp8", "w4a16", "vllm-lora"]
COMPRESSED = ("fp8", "w4a16")  # formats of llm-compressor

CONVERTER = "FTKIT_GGUF_CONVERTER"
QUANTIZE = "llama-quantize"
_SCRIPT = "convert_hf_to_gguf.py"
_LOADS_OUTPUT = ("olmo2", "olmo3", "olmoe")
"""Families whose output projection must be in the file; for others, llama.cpp falls back to the embedding."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Families with `query_pre_attn_scalar`, and the number of layers by which llama.cpp recognizes their 27B."""
_GEMMA_SCALAR = 256  # transformers' default of `query_pre_attn_scalar`


@dataclass(frozen=True)
class _Record:
    run: str | None = None
    end_tokens: tuple[int, ...] = ()
    precision: str = "bf16"


def check_format(
    form: Format, plan: RunPlan, types: Sequence[str] = (), pythons: tuple[str, str | None] = (sys.executable, None), *,
    merges: bool,
) -> None:  # fmt: skip
    """Reject a format that does not support this run, before reading anything.

    `types` are the types of quantized GGUF files, `pythons` the Pythons of llm-compressor's and vLLM's environments.
    """
    lora = plan.recipe.training.adapters
    if form not in ("hf", "vllm-lora") and lora is not None and not merges:
        raise TrainingError(f"--format {form} is for full models, and this run trained adapters", fix="add --merge")
    if (types or form in COMPRESSED) and not plan.recipe.data.has_validation:
        raise TrainingError(
            "quantized files are measured on the validation split, and this run has none",
            fix="hold out rows in training: data.validation={fraction: 0.02}; or leave --quantize, fp8 and w4a16 out",
        )
    if form in COMPRESSED:
        _check_compressor(*pythons)
    if form == "gguf":
        find_converter()
        if types:
            _check_types(types)
        folder = find_base(plan)
        check_gguf_model(plan.recipe.model.architecture, {} if folder is None else text_part(read_model_config(folder)))
    if form == "vllm-lora":
        _check_vllm_lora(plan, merges=merges)


def _check_vllm_lora(plan: RunPlan, *, merges: bool) -> None:
    lora = plan.recipe.training.adapters
    if lora is None or merges:
        raise TrainingError(
            "--format vllm-lora: there are no adapters to export",
            meaning="the run trained all weights, or --merge makes a full model, which vLLM loads directly",
            fix="leave --format out",
        )
    wrong, max_rank = [], VLLM_LORA_RANKS[-1]
    if any(each.num_ranks(lora.targets) for each in count_model(plan.recipe.model.architecture).expert_matrices):
        wrong.append("training.lora.targets: vLLM does not find the experts' adapters by peft's names")
    if lora.use_dora:
        wrong.append("training.lora.use_dora: vLLM has no DoRA")
    if lora.rank > max_rank:
        wrong.append(f"training.lora.rank: {lora.rank}, and vLLM supports at most {max_rank}")
    if wrong:
        raise TrainingError(
            f"--format vllm-lora: vLLM does not load these adapters: {'; '.join(wrong)}",
            fix="export a full model for it: --merge, without --format",
        )


def check_gguf_model(shape: ArchitectureSpec, config: Mapping[str, object]) -> None:
    """Reject a model that llama.cpp would not load from a GGUF file, or would compute differently.

    `config` is the raw configuration of the pretrained weights; empty if training started from random weights.
    Source: `olmo2.cpp`, `olmoe.cpp`, `gemma2.cpp` and `gemma3.cpp` in llama.cpp's `src/models`.
    """
    if shape.family in _LOADS_OUTPUT and shape.tie_word_embeddings:
        raise TrainingError(
            "--format gguf: llama.cpp can't load this model, whose output projection is tied to the embedding",
            meaning=f"it reads the projection of '{shape.family}' models from the file, and a tied one is not in it",
            fix="leave --format out: transformers and vLLM load the export",
        )
    if shape.family not in _LAYERS_OF_27B:
        return
    is_27b = shape.num_hidden_layers == _LAYERS_OF_27B[shape.family]
    applied = shape.hidden_size // shape.num_attention_heads if is_27b else shape.head_dim
    if (trained := config.get("query_pre_attn_scalar", _GEMMA_SCALAR)) != applied:
        raise TrainingError(
            f"--format gguf: llama.cpp would scale this model's attention by 1/sqrt({applied}), and it was trained "
            f"with 1/sqrt({trained})",
            meaning="a GGUF file has no query_pre_attn_scalar: llama.cpp uses head_dim, and for Gemma's 27B "
            "hidden_size / num_attention_heads",
            fix="leave --format out: transformers and vLLM read the scalar from the export's config.json",
        )


def _check_compressor(python: str, server: str | None) -> None:
    if process.run([python, "-c", "from importlib.metadata import version; version('llmcompressor')"]).returncode:
        raise PrerequisiteError(
            f"--format fp8 and w4a16 need llm-compressor, and the environment of {python} has none",
            meaning="it pins torch and transformers, so it may need an environment of its own",
            fix="python3 -m venv compressor && compressor/bin/pip install llmcompressor; then add "
            "--llm-compressor compressor/bin/python",
        )
    if server is None and find_spec("compressed_tensors") is None:
        raise PrerequisiteError(
            "--format fp8 and w4a16: transformers needs the package compressed-tensors to measure them",
            fix="pip install compressed-tensors; or let vLLM measure them: --engine-python PYTHON",
        )


def find_converter(llama_cpp: Path | None = None) -> Path:
    """Return llama.cpp's converter from a checkout, from FTKIT_GGUF_CONVERTER, or from PATH."""
    configured = str(llama_cpp / _SCRIPT) if llama_cpp else os.environ.get(CONVERTER)
    found = configured or shutil.which(_SCRIPT)
    if found is None or not Path(found).is_file():
        where = f"there is no {configured}" if configured else f"no {_SCRIPT} on PATH"
        raise PrerequisiteError(
            f"--format gguf needs llama.cpp's converter: {where}",
            meaning="ftkit does not include it: it belongs to the llama.cpp that will run the model",
            fix=f"git clone https://github.com/ggml-org/llama.cpp, and set {CONVERTER}=…/llama.cpp/{_SCRIPT}",
        )
    if find_spec("gguf") is None:
        raise PrerequisiteError(
            "--format gguf: llama.cpp's converter needs the package gguf", fix="pip install 'ftkit[gguf]'"
        )
    return Path(found)


def find_program(name: str, llama_cpp: Path | None = None) -> str | None:
    """Return a program of llama.cpp that is built in the checkout of `find_converter`, or is on PATH."""
    configured = os.environ.get(CONVERTER)
    folder = llama_cpp or (Path(configured).parent if configured else None)
    places = [str(folder / each) for each in ("build/bin", "bin", ".")] if folder else []
    return shutil.which(name, path=os.pathsep.join(places)) or shutil.which(name)


def _check_types(types: Sequence[str]) -> None:
    program = find_program(QUANTIZE)
    if program is None or find_program("llama-server") is None:
        missing = "llama-server" if program else QUANTIZE
        raise PrerequisiteError(
            f"--quantize needs llama.cpp's programs: there is no {missing}",
            meaning=f"ftkit does not include them, and looks in build/bin next to {CONVERTER}, and on PATH",
            fix="build them there: cmake -B build && cmake --build build -t llama-quantize llama-server",
        )
    listed = re.findall(r"^ *\d+ +or +(\S+) *:", process.run([program, "--help"]).stdout, re.MULTILINE)
    if unknown := [name for name in types if name.upper() not in listed]:
        raise NotFoundError(
            f"--quantize: llama.cpp has no type '{unknown[0]}'",
            fix=f"give some of: {', '.join(each.lower() for each in listed)}",
        )


def write_gguf(
    export: Path, file: Path, precision: str, report: Callable[[str], None], llama_cpp: Path | None = None
) -> list[str]:
    """Convert a full model, and check that the result has its chat template, special tokens, and end token.

    Returns warnings about what llama.cpp will compute differently.
    """
    converter = find_converter(llama_cpp)
    report(f"converting to GGUF by {converter}")
    record = _record(export)
    ends = record.end_tokens
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        words = [sys.executable, str(converter), str(export), "--outtype", gguf_type(precision)]
        name = ["--model-name", record.run or export.name]
        run_converter("llama.cpp's converter", [*words, *name, "--outfile"], temporary, file)
        fields = _read_fields(temporary)
        if ends and ends[0] not in _end_tokens(fields):
            # The converter uses the tokenizer's `eos_token`, which does not end a turn for Gemma.
            words = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--special-token-by-id", "eot"]
            with atomic_file(temporary) as changed:
                run_converter("gguf's gguf_new_metadata", [*words, str(ends[0]), str(temporary)], changed, file)
            fields = _read_fields(temporary)
        _check_gguf(fields, export, ends)
    config = text_part(read_model_config(export))
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ["sliding_attention"]
    is_used = config.get("use_sliding_window", True) and "sliding_attention" in kinds
    # The converter drops the sliding window of Mistral, whose file says `llama`, and of Qwen2.
    if not window or not is_used or any(name.endswith(".attention.sliding_window") for name in fields):
        return []
    text = f"the GGUF file has no sliding window, and this model has one of {window:,} tokens"
    return [f"{text}: llama.cpp computes longer texts differently than transformers and vLLM"]


def gguf_type(precision: str) -> str:
    return {"fp32": "f32"}.get(precision, precision)


def run_converter(program: str, words: list[str], output: Path, file: Path, *last: str, fix: str = "") -> str:
    """Run a command line that ends with `output`, the file to write, and `last`; errors call the file `file`.

    Returns the command's stderr.
    """
    done = process.run_stoppable([*words, str(output), *last], timeout_seconds=24 * 3600.0)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "ERROR" in line), lines[-1])  # more may follow it
        raise TrainingError(
            f"{program} failed: {one_line(reason)}",
            meaning="it does not support this model, tokenizer, or type, or is too old or too new",
            fix=fix or f"see its full output: {shlex.join([*words, str(file), *last])}",
        )
    return done.stderr


def read_precision(export: Path) -> str:
    return _record(export).precision


def _record(export: Path) -> _Record:
    return read_json_if_valid(export / EXPORT_RECORD, _Record) or _Record()


def _check_gguf(fields: Mapping[str, object], export: Path, ends: Sequence[int]) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    tokenizer = AutoTokenizer.from_pretrained(export)
    missing = []
    if tokenizer.chat_template and fields.get("tokenizer.chat_template") != tokenizer.chat_template:
        missing.append("the chat template")
    listed = fields.get("tokenizer.ggml.tokens")
    tokens = dict(enumerate(listed if isinstance(listed, list) else []))
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    missing += [f"the token {text}" for number, text in special.items() if tokens.get(number) != text]
    if ends and ends[0] not in _end_tokens(fields):
        missing.append(f"the end token {ends[0]}")
    if missing:
        raise TrainingError(
            f"the GGUF file lacks {' and '.join(missing)} of the export",
            meaning="llama.cpp's converter dropped it: prompts would differ from training, or never stop",
            fix="use a newer llama.cpp",
        )


def _read_fields(file: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in import_module("gguf").GGUFReader(file).fields.items()}


def _end_tokens(fields: Mapping[str, object]) -> set[object]:
    return {fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
