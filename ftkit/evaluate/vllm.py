"""Generate with vLLM's engine if it is installed: the same prompts, end tokens and settings as with transformers.

vLLM is not an extra of ftkit, because it pins its own torch. It is in the serving image, or in a separate environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ftkit.errors import PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.load import find_generation
from ftkit.evaluate.source import ModelFolder
from ftkit.model_folder import ADAPTER_CONFIG, VLLM_LORA_RANKS
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Load an export or a model of the hub into vLLM's engine, sharded over all GPUs of this machine.

    Raises:
        NotFoundError: files are missing.
        TrainingError: vLLM can't load it.
    """
    from vllm import LLM  # noqa: PLC0415 - see above
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    base, tokenizer, generation = find_generation(source)
    options: dict[str, Any] = {}
    adapter = None
    if source.is_adapter:
        rank = json.loads((source.folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"]
        options = {"enable_lora": True, "max_lora_rank": next((each for each in VLLM_LORA_RANKS if each >= rank), rank)}
        adapter = LoRARequest("trained", 1, str(source.folder))
    try:
        engine = LLM(
            model=str(base.folder),
            tensor_parallel_size=max(1, torch.cuda.device_count()),
            generation_config="vllm",  # only the settings of each request
            **options,
        )
    except Exception as error:  # vLLM and its workers may raise any exception
        raise TrainingError(
            f"vLLM can't load {source.label}: {one_line(error)}",
            meaning="it does not know the model, or has too little memory for it",
            fix="leave --engine out, or try --engine transformers",
        ) from error
    return VllmModel(source.label, engine, tokenizer, generation, adapter)
