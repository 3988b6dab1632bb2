"""Choose the settings of a first recipe: look at the model and the data, and plan each method until one fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ftkit.config.objectives import Objective, usual_learning_rate
from ftkit.data.readers import suffix_of
from ftkit.data.row_formats import DETECTION_ROWS, resolve_format, unknown_columns
from ftkit.data.rows import check_skipped
from ftkit.data.selection import first_rows
from ftkit.data.tokenizer_files import TEMPLATES
from ftkit.errors import ConfigError, DataError
from ftkit.launch.preflight import check_examples
from ftkit.launch.resolve import RunArgs, detect_hardware, load_place, resolve, resolve_recipe
from ftkit.models.adapters import LoraSpec
from ftkit.models.parameters import count_model
from ftkit.paths import is_address
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from ftkit.config.context import Context
    from ftkit.config.data import DataSpec
    from ftkit.config.recipe import RecipePlan
    from ftkit.config.training import Method
    from ftkit.data.workers import BatchEncoder
    from ftkit.planning.plan import RunPlan

_TRAIN, _SECOND_SPLITS = "train", ("validation", "valid", "val", "dev", "eval", "test")
_MOST_ENCODED: Final = 2000
_MOST_COUNTED: Final = 200_000
"""Maximum rows to encode and rows to count, which takes seconds."""
_SHORTEST, _PERCENTILE = 256, 0.95
_TOKENS_PER_STEP: Final = 32_768  # near the 128 short documents of QLoRA and Tulu 2
_STEPS_PER_EPOCH = 20  # minimum steps per epoch: small data needs small batches
_LARGE: Final = 30e9  # parameters from which the sources of the default learning rates halve them
_SMALL: Final = 1e9  # up to this many parameters, all weights are trained if they fit: adapters save little memory


class Choice(NamedTuple):
    """A key under a section of the recipe, its value, and a short reason."""

    key: str
    value: object
    why: str


_OBJECTIVES = {
    "pairs": Choice("objective", "dpo", "the rows are pairs, chosen and rejected"),
    "labeled-completions": Choice("objective", "kto", "the rows are completions with a label"),
}


def find_splits(data: str) -> tuple[str, str | None]:
    """Return the training data, and files of a second split in the same folder, if recognizable by name.

    Their names are those of training files with another word for `train`: `train.jsonl` and `test.jsonl`.
    """
    path = Path(data).expanduser()
    if not path.exists() or is_address(data):
        return data, None
    folder = data.rstrip("/") if path.is_dir() else data.rpartition("/")[0] or "."
    names = [each.name for each in Path(folder).expanduser().iterdir()]
    pattern = path.name
    if path.is_dir():
        train = [name for name in names if name.startswith(_TRAIN) and suffix_of(name)]
        suffixes = {suffix_of(name) for name in train}
        pattern = train[0] if len(train) == 1 else f"{_TRAIN}*{suffixes.pop()}" if len(suffixes) == 1 else ""
    others = [pattern.replace(_TRAIN, word) for word in _SECOND_SPLITS] if _TRAIN in pattern else []
    other = next((each for each in others if any(fnmatchcase(name, each) for name in names)), None)
    return (f"{folder}/{pattern}", f"{folder}/{other}") if other else (data, None)


def choose_recipe(
    draft: Path, data: str, given: Sequence[str], ctx: Context, report: Callable[[str], None], image: str | None = None
) -> tuple[RunPlan, dict[str, list[Choice]]]:
    """Choose settings for a draft recipe with a model and data; return the plan, and the chosen settings by section.

    `data` is the data's name in messages, `given` are overrides whose keys are not chosen, and `image` is for clusters
    with containers. The first method that fits the GPUs is taken; if none fits, the last one.
    Raises as `resolve` and `open_encoder` do; DataError if there are no rows.
    """
    from ftkit.data.inspection import DataInspector  # noqa: PLC0415 - loads tokenizers

    recipe = resolve_recipe(RunArgs(recipe=str(draft), overrides=(*given, "training.sequence_length=1")), ctx)
    recipe, encoder, of_data, of_training = _open(recipe, report)
    inspector = DataInspector(recipe, encoder, report)
    lengths, num_encoded, num_rows = inspector.lengths(_MOST_ENCODED, _MOST_COUNTED)
    if not lengths:
        raise DataError(f"{data} has no rows", fix="give the file or folder with the training data")
    if recipe.training.documents_per_sample > 1:  # both sides share a pack
        lengths = [sum(sides) for sides in zip(lengths[::2], lengths[1::2], strict=True)]
    is_text = all(each.format.kind == "text" for each in encoder.encoders.values())
    found = DocumentLengths(tuple(sorted(lengths)), num_rows, num_encoded, is_text)
    shape = recipe.model.architecture
    length, num_parameters = found.length_of_packs(shape.max_position_embeddings), count_model(shape).total
    hardware = detect_hardware(load_place(RunArgs(), ctx).cluster, ctx.environment, ctx.root)
    of_data += choose_data(found, length, has_validation=recipe.data.validation is not None)
    keys = {override.partition("=")[0] for override in given}
    if "training.max_steps" in keys:  # it replaces the epochs
        keys.add("training.num_epochs")
    best, failure = None, None
    for method in methods_to_try(num_parameters, is_text=is_text, on_gpu=hardware.device == "cuda"):
        settings = choose_training(
            found, length, method, num_parameters, hardware.max_processes, recipe.training.objective
        )
        chosen = {
            section: [each for each in choices if f"{section}.{each.key}" not in keys]
            for section, choices in (("data", of_data), ("training", [*of_training, *settings]))
        }
        overrides = [f"{section}.{each.key}={json.dumps(each.value)}" for section in chosen for each in chosen[section]]
        overrides += given
        try:
            plan = resolve(RunArgs(recipe=str(draft), overrides=tuple(overrides), image=image), ctx)
        except ConfigError as error:  # such as a model without layers for adapters
            failure = failure or error
            continue
        best = plan, chosen
        if _fits(plan):
            break
    if best is None:
        raise failure or AssertionError("there is a method to try")
    try:
        for warning in check_examples(best[0].recipe):
            report(warning)
    except DataError as error:
        check_skipped([error], 0)  # raises it, and says how to skip the row
    return best


def _fits(plan: RunPlan) -> bool:
    gpu = GPUS.get(plan.cluster.gpu) if plan.cluster.gpu else None
    return gpu is None or plan.memory.total <= gpu.usable_gib


def _open(
    recipe: RecipePlan, report: Callable[[str], None]
) -> tuple[RecipePlan, BatchEncoder, list[Choice], list[Choice]]:
    """Return the recipe with the settings that its data needs, its encoder, and these settings by section."""
    from ftkit.data.prepare import open_encoder  # noqa: PLC0415 - loads tokenizers

    of_data: list[Choice] = []
    of_training: list[Choice] = []
    reported = set[str]()

    def report_once(line: str) -> None:  # each attempt reports the same
        if line not in reported:
            reported.add(line)
            report(line)

    if unused := [] if recipe.data.ignore_columns else _unused(recipe.data):
        of_data.append(Choice("ignore_columns", unused, "the format does not use them"))
        data = recipe.data.model_copy(update={"ignore_columns": tuple(unused)})
        recipe = recipe.model_copy(update={"data": data})
    refusals: list[DataError] = []  # of the tokenizer without a template, then of each template of ftkit
    while True:
        try:
            encoder = open_encoder(recipe, report_once)
        except DataError as error:
            if error.name == "no-chat-template" or (refusals and error.name == "template-tokens"):
                refusals.append(error)
                if len(refusals) > len(TEMPLATES):
                    raise refusals[1] from None
                template = list(TEMPLATES)[len(refusals) - 1]
                changed: dict[str, object] = {"data": recipe.data.model_copy(update={"chat_template": template})}
            elif error.name in _OBJECTIVES:
                of_training.append(objective := _OBJECTIVES[error.name])
                changed = {"training": recipe.training.model_copy(update={objective.key: objective.value})}
            else:
                raise
            recipe = recipe.model_copy(update=changed)
            continue
        if refusals:
            template = recipe.data.chat_template
            of_data.append(Choice("chat_template", template, "the tokenizer has none, but its tokens"))
        return recipe, encoder, of_data, of_training


def _unused(data: DataSpec) -> list[str]:
    """Return columns of the first rows that the format does not use."""
    rows = first_rows(data, 0, DETECTION_ROWS)
    form = resolve_format(data.format, rows)
    alike = [row.columns for row in rows if any(name in row.columns for name in form.columns)]
    return sorted({name for columns in alike for name in unknown_columns(columns, data, form)})


# --- Settings from the lengths of the documents and the size of the model ---------------------------


@dataclass(frozen=True)
class DocumentLengths:
    """Sorted token lengths of the encoded documents, at least one; and numbers of rows."""

    lengths: tuple[int, ...]
    num_rows: int  # rows of the data, up to the maximum that is counted
    num_encoded: int  # encoded rows, the first of the data
    is_text: bool  # whether they are plain text, not conversations

    def num_tokens(self, length: int) -> float:
        """Return the tokens of all rows' documents, without those that are dropped as longer than `length`."""
        kept = sum(each for each in self.lengths if self.is_text or each <= length)
        return kept / self.num_encoded * self.num_rows

    def length_of_packs(self, max_positions: int) -> int:
        """Return the power of two that holds 95% of the documents, or all if that is at most twice as long."""
        common = self.lengths[min(len(self.lengths) - 1, int(_PERCENTILE * len(self.lengths)))]
        longest = self.lengths[-1]
        wanted = max(_SHORTEST, longest if longest <= 2 * common and not self.is_text else common)
        return min(max_positions, 1 << (wanted - 1).bit_length())

    def num_longer(self, length: int) -> int:
        return sum(each > length for each in self.lengths)


def methods_to_try(num_parameters: int, *, is_text: bool, on_gpu: bool) -> tuple[Method, ...]:
    """Return the methods in the order to try them."""
    if not on_gpu:
        return ("full", "lora") if num_parameters <= _SMALL else ("lora", "full")
    return ("full", "lora", "qlora") if is_text or num_parameters <= _SMALL else ("lora", "qlora")


def choose_data(found: DocumentLengths, length: int, *, has_validation: bool) -> Iterator[Choice]:
    """Yield settings of `data`, except the source and an existing validation split."""
    longer = found.num_longer(length)
    if longer and not found.is_text:
        yield Choice("too_long", "drop", f"{longer:,} of {len(found.lengths):,} documents looked at are longer")
    if not has_validation and found.num_rows >= 5 * _STEPS_PER_EPOCH:
        yield Choice("validation", {"count": min(200, found.num_rows // 20)}, "5% of the rows, at most 200")


def choose_training(
    found: DocumentLengths, length: int, method: Method, num_parameters: int, num_processes: int,
    objective: Objective = "next_token",
) -> Iterator[Choice]:  # fmt: skip
    """Yield settings of `training`; the batch is a multiple of the number of data-parallel processes."""
    fits = "all weights: they fit" if method == "full" else "trains adapters"
    yield Choice("method", method, "adapters on 4-bit weights, to fit" if method == "qlora" else fits)
    if method != "full":
        rank = LoraSpec().rank
        yield Choice("lora", {"rank": rank}, f"adapters of rank {rank} on all linear layers")
    longer = found.num_longer(length)
    share = f"{1 - longer / len(found.lengths):.1%} of documents fit" if longer else "all documents fit"
    yield Choice("sequence_length", length, f"tokens in a pack; {'longer texts are split' if found.is_text else share}")
    num_tokens = found.num_tokens(length)
    packs = max(1, min(_TOKENS_PER_STEP // length, int(num_tokens / length / _STEPS_PER_EPOCH)))
    packs = 1 << (packs.bit_length() - 1)
    packs = -(-packs // num_processes) * num_processes
    yield Choice("global_batch_size", packs, f"packs in a step: {packs * length:,} tokens")
    passes = ((2e6, 3), (2e7, 2)) if objective == "next_token" else ()  # training on preferences overfits sooner
    num_epochs = next((epochs for most, epochs in passes if num_tokens < most), 1)
    yield Choice("num_epochs", num_epochs, f"passes over about {float(f'{num_tokens:.2g}'):,.0f} tokens")
    usual = usual_learning_rate(objective, method)
    paper = "Zephyr" if objective != "next_token" else "Tulu 2" if method == "full" else "QLoRA"
    is_large = num_parameters >= _LARGE
    size = "from 30B parameters on" if is_large else "for models below 30B"
    yield Choice("learning_rate", usual / 2 if is_large else usual, f"as in {paper} {size}")
