"""Generation settings of the trained model, for ftkit's evaluation and for the export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ftkit.data.encoding import find_answer_end
from ftkit.files import write_json
from ftkit.model_folder import GENERATION_FILE, read_end_tokens, read_generation_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def end_token_setting(end_tokens: Sequence[int]) -> int | list[int] | None:
    """Return end tokens as configurations have them: some who read these know no list where there is one token."""
    return list(end_tokens) if len(end_tokens) > 1 else next(iter(end_tokens), None)


@dataclass(frozen=True)
class Generation:
    """Where answers end, and what the pretrained model's makers recommend besides.

    Attributes:
        end_tokens: the one that was trained first, then those of the tokenizer and of the pretrained model.
        settings: what a `generation_config.json` holds, as it will be exported.
    """

    end_tokens: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, weights: Path | None) -> Generation:
        """Put together what the tokenizer and the folder of pretrained weights, if there are any, say.

        The tokenizer may be another's: an end token of the weights that it has as ordinary text is none. The export
        can't call itself made from the model's configuration: transformers 4 would then generate by that one instead.

        Raises:
            NotFoundError: a file of the weights can't be read.
        """
        known = [find_answer_end(tokenizer), tokenizer.eos_token_id]
        own = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
        settings = {key: token for key, token in own.items() if token is not None}
        if weights is not None:
            known += [token for token in read_end_tokens(weights) if token in tokenizer.added_tokens_decoder]
            settings |= read_generation_config(weights)
        end_tokens = tuple(dict.fromkeys(token for token in known if token is not None))
        settings.pop("_from_model_config", None)
        return cls(end_tokens, settings | {"eos_token_id": end_token_setting(end_tokens)})

    def greedy(self, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> GenerationConfig:
        """Return how evaluation generates: the likeliest token each time, whatever the makers recommend."""
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(self.end_tokens) or None,
            pad_token_id=tokenizer.pad_token_id,
        )

    def up_to_end(self, answer: list[int]) -> list[int]:
        """Return an answer's tokens before its end; of a batch, shorter ones are followed by padding."""
        ends = (index for index, token in enumerate(answer) if token in self.end_tokens)
        return answer[: next(ends, len(answer))]

    def save(self, folder: Path) -> None:
        """Write `generation_config.json`. transformers would refuse to write some that are on the hub."""
        write_json(folder / GENERATION_FILE, self.settings)
