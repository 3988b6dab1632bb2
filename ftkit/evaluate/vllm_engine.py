"""vLLM's engine: its processes, and what they write to stderr before they fail."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch

from ftkit.errors import TrainingError, one_line
from ftkit.models.folder import ADAPTER_CONFIG, VLLM_LORA_RANKS
from ftkit.models.weight_files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
_DEAD = "EngineDeadError"
"""vLLM's exception, of `vllm.v1.engine.exceptions`, if a process of its engine ended."""
_NUM_LINES = 8
_PREFIX = re.compile(r"^(?:\([^()]* pid=\d+\) ?)*(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
"""Process, level, time, and place in vLLM's code at the start of a line of its logs."""


class VllmError(TrainingError):
    """vLLM or a process of its engine failed; `last_lines` are what the engine wrote before.

    Closes `stderr`: the engine is not used any more.
    """

    def __init__(self, what: str, *, meaning: str, fix: str, stderr: IO[bytes]) -> None:
        with stderr:
            stderr.seek(0)
            text = stderr.read().decode(errors="replace")
        lines = [line for each in text.splitlines() if (line := _PREFIX.sub("", each).rstrip())]
        self.last_lines = lines[-_NUM_LINES:]
        below = ["the engine's last lines:", *self.last_lines] if lines else []
        super().__init__(what, meaning=meaning, fix="\n".join([fix, *below]))


@dataclass(frozen=True)
class VllmEngine:
    """vLLM's engine with a model.

    Attributes:
        llm: vLLM's `LLM`.
        adapter: vLLM's `LoRARequest` for adapters; None for a full model.
        stderr: what the engine's processes write to stderr.
    """

    llm: Any
    adapter: Any
    stderr: IO[bytes]

    def generate(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        """Return vLLM's output for each prompt.

        Raises:
            VllmError: the engine ended, or refuses a prompt.
        """
        try:
            outputs: list[Any] = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self.adapter)
        except Exception as error:
            is_dead = type(error).__name__ == _DEAD
            raise VllmError(
                f"vLLM's engine {'ended' if is_dead else 'failed'} while generating: {one_line(error)}",
                meaning="usually a GPU or this machine is out of memory, or a kernel fails on this GPU"
                if is_dead
                else "it does not take these prompts or settings, for example for want of memory for so long a prompt",
                fix="repeat the command with --engine transformers, or with a smaller --batch-size; completions in an "
                "--output file are kept",
                stderr=self.stderr,
            ) from error
        return outputs

    def close(self) -> None:
        """End the engine's processes, which hold the memory of the GPUs."""
        self.llm.llm_engine.engine_core.shutdown()
        self.stderr.close()


def start_engine(folder: Path, base: Path, **options: Any) -> VllmEngine:
    """Start vLLM's engine, sharded over the GPUs of this machine.

    Args:
        folder: a full model, or adapters in peft's layout.
        base: the folder of the full weights; the same one for a full model.
        options: further arguments of `LLM`.

    Raises:
        VllmError: vLLM can't load the model.
    """
    is_quiet = _LOGGING_LEVEL not in os.environ  # else the user reads along
    os.environ.setdefault(_LOGGING_LEVEL, "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # by default it logs to stdout
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the engine's processes write to it as long as they live
    try:
        with _stderr_to(stderr) if is_quiet else nullcontext():
            llm, adapter = _load(folder, base, options)
    except Exception as error:  # vLLM and its workers may raise any exception
        raise VllmError(
            f"vLLM can't load {folder}: {one_line(error)}",
            meaning="it does not know the model, or has too little memory for it",
            fix="leave --engine out, or try --engine transformers",
            stderr=stderr,
        ) from error
    engine = VllmEngine(llm, adapter, stderr)
    weakref.finalize(engine, stderr.close)  # commands that use it to their end don't close it
    return engine


def _load(folder: Path, base: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    from vllm import LLM  # noqa: PLC0415 - only installed where vLLM runs the model
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    adapter = None
    if folder != base:
        rank = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"]
        options |= {
            "enable_lora": True,
            "max_lora_rank": next((each for each in VLLM_LORA_RANKS if each >= rank), rank),
        }
        adapter = LoRARequest("trained", 1, str(folder))
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    llm = LLM(
        model=str(base),
        tokenizer=str(folder if has_tokenizer else base),
        tensor_parallel_size=_num_shards(base),
        enforce_eager=not torch.cuda.is_available(),  # compiling takes a CPU minutes
        **options,
    )
    return llm, adapter


def _num_shards(base: Path) -> int:
    """Return the largest number of GPUs here that divides the attention heads, as vLLM requires."""
    config = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
    heads = int((config.get("text_config") or config).get("num_attention_heads", 1))
    return next(each for each in range(max(1, torch.cuda.device_count()), 0, -1) if heads % each == 0)


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Send the stderr of this process to a file; processes that it starts meanwhile keep the file."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
