"""The first recipe for a model and data: settings chosen from the lengths of the documents and the model's size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ftkit.config.objectives import Objective, usual_learning_rate
from ftkit.models.adapters import LoraSpec

if TYPE_CHECKING:
    from ftkit.config.training import Method

_SHORTEST, _PERCENTILE = 256, 0.95
_TOKENS_PER_STEP: Final = 32_768
"""Near the 128 short documents of QLoRA and Tulu 2."""
_STEPS_PER_EPOCH = 20
"""Least number of steps in an epoch: few steps with large batches learn little from small data."""
_LARGE: Final = 30e9
"""Parameters from which both sources of the default learning rates halve them."""
_SMALL: Final = 1e9
"""Parameters up to which all weights are trained if they fit: adapters save little memory there."""


class Choice(NamedTuple):
    """A key under a section of the recipe, its value, and why, in a few words."""

    key: str
    value: object
    why: str


@dataclass(frozen=True)
class DocumentLengths:
    """What was seen of the data: the lengths of the documents that were encoded, in tokens, sorted; at least one."""

    lengths: tuple[int, ...]
    num_rows: int
    """Rows of the data, as far as they were counted."""
    num_encoded: int
    """Rows that were encoded: the first of the data."""
    is_text: bool
    """Whether they are plain text, not conversations."""

    @property
    def num_tokens(self) -> float:
        return sum(self.lengths) / self.num_encoded * self.num_rows

    def length_of_packs(self, max_positions: int) -> int:
        """Return the power of two that holds 95% of the documents, or all if that is at most twice as long."""
        common = self.lengths[min(len(self.lengths) - 1, int(_PERCENTILE * len(self.lengths)))]
        longest = self.lengths[-1]
        wanted = max(_SHORTEST, longest if longest <= 2 * common and not self.is_text else common)
        return min(max_positions, 1 << (wanted - 1).bit_length())

    def num_longer(self, length: int) -> int:
        return sum(each > length for each in self.lengths)


def methods_to_try(num_parameters: int, *, is_text: bool, on_gpu: bool) -> tuple[Method, ...]:
    """Return the methods in the order in which the first that fits is taken."""
    if not on_gpu:
        return ("full", "lora") if num_parameters <= _SMALL else ("lora", "full")
    return ("full", "lora", "qlora") if is_text or num_parameters <= _SMALL else ("lora", "qlora")


def choose_data(found: DocumentLengths, length: int, *, has_validation: bool) -> Iterator[Choice]:
    """Yield the settings of `data` besides its source, and a validation split that it has already."""
    longer = found.num_longer(length)
    if longer and not found.is_text:
        yield Choice("too_long", "drop", f"{longer:,} of {len(found.lengths):,} documents looked at are longer")
    if not has_validation and found.num_rows >= 5 * _STEPS_PER_EPOCH:
        yield Choice("validation", {"count": min(200, found.num_rows // 20)}, "5% of the rows, at most 200")


def choose_training(
    found: DocumentLengths, length: int, method: Method, num_parameters: int, num_processes: int,
    objective: Objective = "next_token",
) -> Iterator[Choice]:  # fmt: skip
    """Yield the settings of `training`; the batch is a multiple of the processes that compute different packs."""
    fits = "all weights: they fit" if method == "full" else "trains adapters"
    yield Choice("method", method, "adapters on 4-bit weights, to fit" if method == "qlora" else fits)
    if method != "full":
        rank = LoraSpec().rank
        yield Choice("lora", {"rank": rank}, f"adapters of rank {rank} on all linear layers")
    longer = found.num_longer(length)
    share = f"{1 - longer / len(found.lengths):.1%} of documents fit" if longer else "all documents fit"
    yield Choice("sequence_length", length, f"tokens in a pack; {'longer texts are split' if found.is_text else share}")
    num_packs = found.num_tokens / length
    packs = max(1, min(_TOKENS_PER_STEP // length, int(num_packs / _STEPS_PER_EPOCH)))
    packs = 1 << (packs.bit_length() - 1)
    packs = -(-packs // num_processes) * num_processes
    yield Choice("global_batch_size", packs, f"packs in a step: {packs * length:,} tokens")
    passes = ((2e6, 3), (2e7, 2)) if objective == "next_token" else ()  # preferences are overfitted sooner
    num_epochs = next((epochs for most, epochs in passes if found.num_tokens < most), 1)
    yield Choice("num_epochs", num_epochs, f"passes over about {float(f'{found.num_tokens:.2g}'):,.0f} tokens")
    usual = usual_learning_rate(objective, method)
    paper = "Zephyr" if objective != "next_token" else "Tulu 2" if method == "full" else "QLoRA"
    is_large = num_parameters >= _LARGE
    size = "from 30B parameters on" if is_large else "for models below 30B"
    yield Choice("learning_rate", usual / 2 if is_large else usual, f"as in {paper} {size}")
