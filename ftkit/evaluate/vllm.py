"""Generate with vLLM's engine if it is installed: the same prompts, end tokens and settings as with transformers.

vLLM is not an extra of ftkit, because it pins its own torch. It is in the serving image, or in a separate environment.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ftkit.errors import PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.load import find_generation
from ftkit.evaluate.source import ModelFolder
from ftkit.model_folder import ADAPTER_CONFIG, CONFIG_FILE, VLLM_LORA_RANKS
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import GenerationConfig

    from ftkit.evaluate.source import ModelSource

EngineName = Literal["auto", "transformers", "vllm"]


def takes_vllm(source: ModelSource, engine: EngineName) -> bool:
    """Return whether vLLM runs a model: on request, or with `auto` on GPUs if it is installed.

    Raises:
        PrerequisiteError: vLLM was requested, and is missing here or can't load a checkpoint.
    """
    is_installed, is_folder = find_spec("vllm") is not None, isinstance(source, ModelFolder)
    if engine == "vllm" and not is_installed:
        raise PrerequisiteError(
            "--engine vllm: vLLM is not installed here",
            meaning="it pins its own torch, and so is in no training image",
            fix="type the same command in the serving image (vllm:0.33), or omit --engine",
        )
    if engine == "vllm" and not is_folder:
        raise PrerequisiteError(
            f"--engine vllm: {source.label} is a checkpoint, and vLLM loads Hugging Face's layout",
            fix="export it first (ftkit export), or omit --engine",
        )
    return engine == "vllm" or (engine == "auto" and is_installed and is_folder and torch.cuda.is_available())


@dataclass(frozen=True)
class VllmModel:
    """A model in vLLM's engine.

    Attributes:
        engine: vLLM's `LLM`.
        adapter: vLLM's `LoRARequest` for adapters; None for a whole model.
    """

    label: str
    engine: Any
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    adapter: Any = None

    def complete(self, prompts: Sequence[Sequence[int]], config: GenerationConfig, **options: Any) -> list[list[int]]:
        """Return the completion of each prompt in tokens, with its end token if it has one.

        A `streamer` gets the completion once it is complete: vLLM's offline engine returns no tokens before.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - only installed where vLLM runs the model

        params = SamplingParams(
            max_tokens=config.max_new_tokens,
            temperature=config.temperature if config.do_sample else 0.0,
            seed=torch.initial_seed() % 2**31 if config.do_sample else None,
            stop_token_ids=list(self.generation.end_tokens),
            detokenize=False,
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.engine.generate(given, params, use_tqdm=False, lora_request=self.adapter)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        streamer = options.get("streamer")
        if streamer is not None:
            streamer.put(torch.tensor(prompts[0]))
            for token in completions[0]:
                streamer.put(torch.tensor([token]))
            streamer.end()
        return completions

    def text_of(self, completion: Sequence[int], *, is_raw: bool = False) -> str:
        """Return a completion as text, without its end token; `is_raw` keeps other special tokens."""
        return self.generation.text_of(self.tokenizer, completion, is_raw=is_raw)

    def is_ended(self, completion: Sequence[int]) -> bool:
        """Tell whether a completion has its end token."""
        return bool(completion) and completion[-1] in self.generation.end_tokens


def load_with_vllm(source: ModelFolder) -> VllmModel:
    """Load an export or a model of the hub into vLLM's engine, sharded over the GPUs of this machine.

    Raises:
        NotFoundError: files are missing.
        TrainingError: vLLM can't load it.
    """
    base, tokenizer, generation = find_generation(source)
    try:
        # "vllm": only the settings of each request apply, not those of the folder.
        engine, adapter = start_engine(source.folder, base.folder, generation_config="vllm")
    except Exception as error:  # vLLM and its workers may raise any exception
        raise TrainingError(
            f"vLLM can't load {source.label}: {one_line(error)}",
            meaning="it does not know the model, or has too little memory for it",
            fix="leave --engine out, or try --engine transformers",
        ) from error
    return VllmModel(source.label, engine, tokenizer, generation, adapter)


def start_engine(folder: Path, base: Path, **options: Any) -> tuple[Any, Any]:
    """Start vLLM's engine; return its `LLM`, and its `LoRARequest` for adapters.

    Args:
        folder: a whole model, or adapters in peft's layout.
        base: the folder of the whole weights; the same one for a whole model.
        options: more for `LLM`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # by default it logs to stdout
    from vllm import LLM  # noqa: PLC0415 - see above
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
    engine = LLM(
        model=str(base),
        tokenizer=str(folder if has_tokenizer else base),
        tensor_parallel_size=_num_shards(base),
        enforce_eager=not torch.cuda.is_available(),  # compiling takes a CPU minutes
        **options,
    )
    return engine, adapter


def _num_shards(base: Path) -> int:
    """Return the largest number of GPUs here that divides the attention heads, as vLLM requires."""
    config = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
    heads = int((config.get("text_config") or config).get("num_attention_heads", 1))
    return next(each for each in range(max(1, torch.cuda.device_count()), 0, -1) if heads % each == 0)
