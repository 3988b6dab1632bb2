"""End tokens and generation settings of the trained model, in ftkit's evaluation and in the export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ftkit.data.completion_metrics import Completion
from ftkit.data.encoding import find_end_tokens
from ftkit.files import write_json
from ftkit.models.folder import GENERATION_FILE, read_end_tokens, read_generation_config


def end_token_setting(end_tokens: Sequence[int]) -> int | list[int] | None:
    """Return end tokens in config.json's form: a single one as a number, because some readers accept no list."""
    return list(end_tokens) if len(end_tokens) > 1 else next(iter(end_tokens), None)


@dataclass(frozen=True)
class Generation:
    """End tokens of completions, the trained ones first, and the content of the exported `generation_config.json`."""

    end_tokens: tuple[int, ...]
    settings: dict[str, object]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, weights: Path | None) -> Generation:
        """Combine the settings of the tokenizer and of the folder of pretrained weights, if there is one.

        The tokenizer may be another model's: drop end tokens of the weights that are ordinary text in it.
        """
        pretrained = [] if weights is None else read_end_tokens(weights)
        pretrained = [token for token in pretrained if token in tokenizer.added_tokens_decoder]
        known = [*find_end_tokens(tokenizer, pretrained), tokenizer.eos_token_id, *pretrained]
        own = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
        settings = {key: token for key, token in own.items() if token is not None}
        if weights is not None:
            settings |= read_generation_config(weights)
        end_tokens = tuple(dict.fromkeys(token for token in known if token is not None))
        settings.pop("_from_model_config", None)
        return cls(end_tokens, settings | {"eos_token_id": end_token_setting(end_tokens)})

    def greedy(self, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(self.end_tokens) or None,
            pad_token_id=tokenizer.pad_token_id,
        )

    def to_completion(
        self, tokenizer: PreTrainedTokenizerBase, completion: list[int], reference: list[int] | None
    ) -> Completion:
        return Completion(
            self.up_to_end(completion),
            self.text_of(tokenizer, completion),
            self.text_of(tokenizer, completion, is_raw=True),
            None if reference is None else self.text_of(tokenizer, reference),
            None if reference is None else self.text_of(tokenizer, reference, is_raw=True),
        )

    def text_of(self, tokenizer: PreTrainedTokenizerBase, completion: Sequence[int], *, is_raw: bool = False) -> str:
        """Return a completion as text, without its end token; `is_raw` keeps other special tokens."""
        return str(tokenizer.decode(self.up_to_end(list(completion)), skip_special_tokens=not is_raw)).strip()

    def up_to_end(self, completion: list[int]) -> list[int]:
        """Return the tokens of a completion before its end token; in a batch, padding follows shorter ones."""
        ends = (index for index, token in enumerate(completion) if token in self.end_tokens)
        return completion[: next(ends, len(completion))]

    def complete(
        self,
        generate: Callable[..., torch.Tensor],
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        device: torch.device,
        **options: object,
    ) -> list[list[int]]:
        """Return the completion of each prompt, with its end token if it has one.

        `generate` is transformers' `generate`, or has its signature: int64 [B, T] to [B, T + new], with the options.
        Shorter prompts are padded on the left, so that all of them end where generation begins.
        """
        length = max(len(prompt) for prompt in prompts)
        padding = 0 if config.pad_token_id is None else config.pad_token_id
        rows = [[padding] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=config,
            **options,
        )
        completions: list[list[int]] = output[:, length:].tolist()
        return [completion[: len(self.up_to_end(completion)) + 1] for completion in completions]

    def save(self, folder: Path) -> None:
        """Write `generation_config.json`, including settings from the hub that transformers refuses to write."""
        write_json(folder / GENERATION_FILE, self.settings)
