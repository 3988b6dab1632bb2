"""Other formats of an export: GGUF with llama.cpp's converter, and adapters for vLLM's LoRA loader."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from ftkit import process
from ftkit.errors import PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.source import find_base
from ftkit.files import atomic_file, read_json_if_valid
from ftkit.models.config_json import text_part
from ftkit.models.folder import ADAPTER_CONFIG, ADAPTER_FILE, EXPORT_RECORD, VLLM_LORA_RANKS, read_model_config
from ftkit.models.parameters import count_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.models.architecture import ArchitectureSpec
    from ftkit.planning.plan import RunPlan

Format = Literal["hf", "gguf", "vllm-lora"]

CONVERTER = "FTKIT_GGUF_CONVERTER"
_SCRIPT = "convert_hf_to_gguf.py"
_CONVERSION_SECONDS = 24 * 3600.0
_LOADS_OUTPUT = ("olmo2", "olmo3", "olmoe")
"""Families whose output projection must be in the file; for others, llama.cpp falls back to the embedding."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Families with `query_pre_attn_scalar`, and the number of layers by which llama.cpp recognizes their 27B."""
_GEMMA_SCALAR = 256
"""transformers' default of `query_pre_attn_scalar`."""
_VLLM_MODULE = re.compile(r"base_model\.model\.(?:.+\.)?(?P<module>[a-z_]+)\.lora_[AB]\.weight")


def check_format(form: Format, plan: RunPlan, *, merges: bool) -> None:
    """Refuse a format that this run can't be exported in, before anything is read.

    Raises:
        PrerequisiteError: llama.cpp's converter is missing here.
        TrainingError: the format is for another kind of export.
    """
    lora = plan.recipe.training.adapters
    if form == "gguf":
        find_converter()
        if lora is not None and not merges:
            raise TrainingError(
                "--format gguf: this run trained adapters, and a GGUF file has a full model", fix="add --merge"
            )
        folder = find_base(plan)
        check_gguf_model(plan.recipe.model.architecture, {} if folder is None else text_part(read_model_config(folder)))
    if form != "vllm-lora":
        return
    if lora is None or merges:
        raise TrainingError(
            "--format vllm-lora: there are no adapters to export",
            meaning="the run trained all weights, or --merge makes a full model, which vLLM loads directly",
            fix="leave --format out",
        )
    matrices = count_model(plan.recipe.model.architecture).expert_matrices
    of_experts = any(each.num_ranks(lora.targets) for each in matrices)
    wrong = [
        text
        for is_wrong, text in (
            (of_experts, "training.lora.targets: vLLM does not find the experts' adapters by peft's names"),
            (lora.use_dora, "training.lora.use_dora: vLLM has no DoRA"),
            (
                lora.rank > VLLM_LORA_RANKS[-1],
                f"training.lora.rank: {lora.rank}, and vLLM supports at most {VLLM_LORA_RANKS[-1]}",
            ),
        )
        if is_wrong
    ]
    if wrong:
        raise TrainingError(
            f"--format vllm-lora: vLLM does not load these adapters: {'; '.join(wrong)}",
            fix="export a full model for it: --merge, without --format",
        )


def check_gguf_model(shape: ArchitectureSpec, config: Mapping[str, Any]) -> None:
    """Refuse a model that llama.cpp would not load from a GGUF file, or would compute differently.

    Source: `olmo2.cpp`, `olmoe.cpp`, `gemma2.cpp` and `gemma3.cpp` in llama.cpp's `src/models`.

    Args:
        shape: the model's shape.
        config: raw configuration of its pretrained weights; empty if training started from random ones.

    Raises:
        TrainingError: llama.cpp can't use it.
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
    trained = config.get("query_pre_attn_scalar", _GEMMA_SCALAR)
    if trained != applied:
        raise TrainingError(
            f"--format gguf: llama.cpp would scale this model's attention by 1/sqrt({applied}), and it was trained "
            f"with 1/sqrt({trained})",
            meaning="a GGUF file has no query_pre_attn_scalar: llama.cpp uses head_dim, and for Gemma's 27B "
            "hidden_size / num_attention_heads",
            fix="leave --format out: transformers and vLLM read the scalar from the export's config.json",
        )


def verify_vllm_lora(folder: Path) -> int:
    """Check that vLLM's loader finds every tensor of an adapter folder; return the `--max-lora-rank` that it needs.

    vLLM silently drops unknown tensors, and then serves the base model.

    Raises:
        TrainingError: with the names of tensors that it would drop.
    """
    config = read_json_if_valid(folder / ADAPTER_CONFIG, dict[str, Any]) or {}
    targets = set(config.get("target_modules") or ())
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        names = list(file.keys())
    modules = {name: match["module"] if (match := _VLLM_MODULE.fullmatch(name)) else None for name in names}
    wrong = [name for name, module in modules.items() if module is None or module not in targets]
    if config.get("modules_to_save"):
        wrong.append("modules_to_save")
    if config.get("bias", "none") != "none":
        wrong.append(f"bias {config['bias']}")
    if wrong or not names or not isinstance(rank := config.get("r"), int):
        raise TrainingError(
            f"vLLM would ignore parts of {folder}: {', '.join(wrong[:3]) or 'it has no adapters'}",
            meaning="its LoRA loader reads only lora_A and lora_B of the target modules",
            fix="export a full model for it: --merge, without --format",
        )
    return next(each for each in VLLM_LORA_RANKS if each >= rank)


def find_converter() -> Path:
    """Return llama.cpp's converter: from the variable FTKIT_GGUF_CONVERTER, or on PATH.

    Raises:
        PrerequisiteError: the converter, or the package that it imports, is missing.
    """
    configured = os.environ.get(CONVERTER)
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


def write_gguf(export: Path, file: Path, precision: str, report: Callable[[str], None]) -> list[str]:
    """Convert a full model, and check that the result has its chat template, special tokens, and end token.

    Returns:
        Warnings about what llama.cpp will compute differently.

    Raises:
        TrainingError: the converter failed, or dropped something.
    """
    converter = find_converter()
    report(f"converting to GGUF by {converter}")
    record = read_json_if_valid(export / EXPORT_RECORD, dict[str, Any]) or {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        words = [sys.executable, str(converter), str(export), "--outtype", {"fp32": "f32"}.get(precision, precision)]
        name = ["--model-name", str(record.get("run") or export.name)]
        _run("llama.cpp's converter", [*words, *name, "--outfile"], temporary, file)
        _set_end_of_turn(temporary, record.get("end_tokens") or [], file)
        _check_gguf(temporary, export, record.get("end_tokens") or [])
        return _lost_window(temporary, export)


def _run(program: str, words: list[str], output: Path, file: Path) -> None:
    done = process.run_stoppable([*words, str(output)], timeout_seconds=_CONVERSION_SECONDS)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise TrainingError(
            f"{program} failed: {one_line(lines[-1] if lines else f'exit code {done.returncode}')}",
            meaning="it does not support this model or this tokenizer, or is too old or too new",
            fix=f"see its full output: {shlex.join([*words, file.name])}",
        )


def _set_end_of_turn(converted: Path, ends: list[int], file: Path) -> None:
    """Set the trained end token in a file that has another one, with gguf's own program, which copies the file.

    The converter uses the tokenizer's `eos_token`, which for Gemma is not the token that ends a turn.
    """
    from gguf import GGUFReader  # noqa: PLC0415 - see below

    if not ends or ends[0] in _end_tokens(GGUFReader(converted).fields):
        return
    words = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--special-token-by-id", "eot", str(ends[0])]
    with atomic_file(converted) as changed:
        _run("gguf's gguf_new_metadata", [*words, str(converted)], changed, file)


def read_precision(export: Path) -> str:
    """Return the dtype of an export's weights."""
    return str((read_json_if_valid(export / EXPORT_RECORD, dict[str, Any]) or {}).get("precision", "bf16"))


def _check_gguf(file: Path, export: Path, ends: list[int]) -> None:
    from gguf import GGUFReader  # noqa: PLC0415 - the converter needs it, nothing else does
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    fields = GGUFReader(file).fields
    tokenizer = AutoTokenizer.from_pretrained(export)
    missing = []
    if tokenizer.chat_template and _field(fields, "tokenizer.chat_template") != tokenizer.chat_template:
        missing.append("the chat template")
    tokens = dict(enumerate(_field(fields, "tokenizer.ggml.tokens") or ()))
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


def _lost_window(file: Path, export: Path) -> list[str]:
    """Return a warning if the converter dropped the sliding window: llama.cpp would compute full attention.

    It does so for Mistral, whose file says `llama`, and for Qwen2.
    """
    from gguf import GGUFReader  # noqa: PLC0415 - the converter needs it, nothing else does

    config = text_part(read_model_config(export))
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ["sliding_attention"]
    is_used = config.get("use_sliding_window", True) and "sliding_attention" in kinds
    if not window or not is_used or any(name.endswith(".attention.sliding_window") for name in GGUFReader(file).fields):
        return []
    text = f"the GGUF file has no sliding window, and this model has one of {window:,} tokens"
    return [f"{text}: llama.cpp computes longer texts differently than transformers and vLLM"]


def _end_tokens(fields: Any) -> set[Any]:
    return {_field(fields, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}


def _field(fields: Any, name: str) -> Any:
    return fields[name].contents() if name in fields else None
