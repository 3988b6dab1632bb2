"""Prepare the data of a plan: read, format, tokenize, pack, write. Does nothing if the data is already prepared."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from ftkit.config.data import describe_format
from ftkit.config.data_sources import GeneratedSource
from ftkit.config.recipe import RecipePlan
from ftkit.data.conversations import texts_of
from ftkit.data.encoding import MAX_CHARACTERS, RowEncoder
from ftkit.data.formats import DETECTION_ROWS, read_example, resolve_format
from ftkit.data.packing import Packer, count_row_tokens, document_digests
from ftkit.data.sources import first_rows, read_rows, split_of
from ftkit.data.store import DataManifest, PackWriter, PreparedData, SourceStats, new_prepared_data
from ftkit.data.template_fields import find_unread
from ftkit.data.tokenizers import add_tokens, check_size, find_model_end_tokens, learn_tokenizer, load_tokenizer
from ftkit.data.workers import BatchEncoder, encode_rows, skip_bad
from ftkit.errors import DataError, one_line, plural
from ftkit.planning.plan import PREPARATION_VERSION
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.config.data import Format
    from ftkit.data.store import DocumentBatch
    from ftkit.data.workers import EncodedRows
    from ftkit.planning.plan import RunPlan


def prepare(plan: RunPlan, report: Callable[[str], None], num_workers: int | None = None) -> PreparedData:
    """Prepare the data of a plan, or find it prepared.

    Args:
        plan: plan of the run.
        report: called with progress messages.
        num_workers: tokenizing processes; one per CPU if None. The result is the same for any number.

    Raises:
        DataError: the data can't be used with this recipe.
    """
    prepared = PreparedData(plan.data_directory)
    if prepared.is_complete:
        report(f"data {plan.fingerprint}: already prepared")
        return prepared
    with new_prepared_data(prepared.root) as folder:
        manifest = _build(folder, plan, report, num_workers or num_usable_cpus())
        manifest = replace(manifest, digests=manifest.digests | folder.compute_digests())
        folder.write_manifest(manifest)
    if manifest.num_too_long:
        outcomes = {"drop": "dropped", "truncate": "truncated after the last turn that fits", "split": "split"}
        report(f"{plural(manifest.num_too_long, 'document')} longer than a pack: {outcomes[plan.recipe.data.too_long]}")
    report(
        f"data {plan.fingerprint}: {plural(manifest.num_train_documents, 'document')} in "
        f"{plural(manifest.num_train_packs, 'pack')} of {manifest.sequence_length} tokens, {manifest.fill_ratio:.1%} "
        f"full, {plural(manifest.num_train_targets, 'target')}"
    )
    batch = plan.recipe.training.global_batch_size
    if manifest.num_train_packs < batch:
        report(
            f"fewer packs than the {batch:,} of a step: each step repeats documents; lower training.global_batch_size"
        )
    for source in manifest.sources if len(manifest.sources) > 1 else ():
        share = source.num_tokens / max(1, manifest.num_train_tokens)
        tokens = plural(source.num_tokens, "token")
        report(f"source {source.name}: {plural(source.num_rows, 'row')}, {tokens} ({share:.1%})")
    return prepared


def _build(folder: PreparedData, plan: RunPlan, report: Callable[[str], None], num_workers: int) -> DataManifest:
    recipe, length = plan.recipe, plan.recipe.training.sequence_length
    encoder = open_encoder(recipe, report)
    encoder.encoders[0].tokenizer.save_pretrained(folder.tokenizer)
    report(f"reading and tokenizing with {plural(num_workers, 'process')}")
    totals = _Totals(recipe)
    with ExitStack() as stack:
        train = stack.enter_context(_SplitWriter(folder.train, length))
        validation = stack.enter_context(_SplitWriter(folder.validation, length))
        rows, sources = (
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for path in (folder.validation_rows, folder.validation_sources)
        )
        for encoded in encode_rows(encoder, read_rows(recipe.data), num_workers):
            totals.add(encoded, report)
            train.add(encoded.train)
            validation.add(encoded.validation)
            rows.write(encoded.validation_rows)
            sources.write(encoded.validation_sources)
        train.finish()
        validation.finish()
    totals.check(train.writer.num_packs)
    totals.report(report)
    return DataManifest(
        fingerprint=plan.fingerprint,
        sequence_length=length,
        num_train_documents=train.writer.num_documents,
        num_train_packs=train.writer.num_packs,
        num_train_tokens=train.writer.num_tokens,
        num_train_targets=train.writer.num_targets,
        num_validation_documents=validation.writer.num_documents,
        num_validation_packs=validation.writer.num_packs,
        num_too_long=totals.num_too_long,
        max_seqlen=totals.longest,
        num_row_tokens=train.num_row_tokens,
        num_documents=totals.num_documents,
        sources=tuple(totals.sources),
        preparation_version=PREPARATION_VERSION,
        digests={"documents": f"{train.sum_of_digests:064x}"},
    )


def open_encoder(recipe: RecipePlan, report: Callable[[str], None]) -> BatchEncoder:
    """Detect the formats of a recipe's sources, load or train its tokenizer, and return the encoders.

    Raises:
        DataError: a format is unknown, or the tokenizer can't be loaded or lacks tokens of the chat template.
    """
    report("reading the first rows")
    formats = _formats(recipe, report)
    tokenizer = _tokenizer(recipe, formats, report)
    vocab_size = recipe.model.architecture.vocab_size
    check_size(tokenizer, recipe.model, vocab_size, report)
    ends = find_model_end_tokens(recipe.model)
    encoders = {
        source: RowEncoder.of(tokenizer, recipe.data, form, vocab_size, ends) for source, form in formats.items()
    }
    renderer = next((encoder.renderer for encoder in encoders.values() if encoder.renderer), None)  # all have the same
    if renderer and (roles := renderer.changed_roles()):
        report(
            f"warning: the chat template shortens or changes contents of turns ({', '.join(roles)}), so the model may "
            "be trained on texts that differ from the data; 'ftkit data show' prints them; if that is not intended, "
            "correct data.chat_template"
        )
    if renderer and recipe.data.train_on != "all" and (unproven := renderer.find_unproven()):
        report(
            f"the chat template's trained parts can't be shown to be right for {plural(len(unproven), 'kind')} of "
            f"conversations; rows of such a kind are refused, e.g.: {next(iter(unproven.values())).what}"
        )
    options = recipe.data.template_options
    if renderer and (unread := find_unread(options, renderer.template, renderer.tool_template)):
        report(f"warning: data.template_options: the chat template never reads {', '.join(unread)}; check the spelling")
    end = next(iter(renderer.end_tokens), None) if renderer else None
    return BatchEncoder(recipe, encoders, None if end is None else tokenizer.convert_tokens_to_ids(end))


class _SplitWriter:
    """Packs the documents of a split and writes them."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self._packer, self.writer = Packer(capacity), PackWriter(folder)
        self.num_row_tokens = self.sum_of_digests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def add(self, documents: DocumentBatch) -> None:
        self.num_row_tokens += count_row_tokens(documents.lengths, self._packer.capacity)
        total = sum((int.from_bytes(digest) for digest in document_digests(documents)), self.sum_of_digests)
        self.sum_of_digests = total % 2**256
        for packs in self._packer.add(documents):
            self.writer.write(*packs)

    def finish(self) -> None:
        for packs in self._packer.finish():
            self.writer.write(*packs)


@dataclass
class _Totals:
    """Totals over all rows."""

    recipe: RecipePlan
    sources: list[SourceStats] = field(init=False)
    num_documents: int = 0
    num_bad: int = 0
    unused: set[str] = field(default_factory=set)
    longest: int = 0

    def __post_init__(self) -> None:
        self.sources = [SourceStats(source.name) for source in self.recipe.data.sources]

    @property
    def num_too_long(self) -> int:
        return sum(source.num_too_long for source in self.sources)

    def add(self, encoded: EncodedRows, report: Callable[[str], None]) -> None:
        """Add a batch; raise the error of the first bad row beyond `data.skip_bad`."""
        for error in skip_bad(encoded.bad, self.recipe.data.skip_bad - self.num_bad):
            self.num_bad += 1
            report(f"skipped: {one_line(error)}")
        self.num_documents += encoded.num_documents
        self.unused |= encoded.unused
        self.longest = max(self.longest, encoded.longest)
        for number in encoded.num_rows:
            stats, train = self.sources[number], encoded.train
            tokens, targets = train.count_tokens(number)
            self.sources[number] = replace(
                stats,
                num_rows=stats.num_rows + encoded.num_rows[number],
                num_documents=stats.num_documents + int((train.sources == number).sum()),
                num_tokens=stats.num_tokens + tokens,
                num_targets=stats.num_targets + targets,
                num_too_long=stats.num_too_long + encoded.num_too_long[number],
            )

    def check(self, num_train: int) -> None:
        """Refuse documents longer than a pack if `data.too_long` is `error`, and data without a document that fits."""
        length, num_too_long = self.recipe.training.sequence_length, self.num_too_long
        if num_too_long and self.recipe.data.too_long == "error":
            raise DataError(
                f"{plural(num_too_long, 'document')} longer than a pack of {length} tokens "
                f"(the longest has {self.longest:,})",
                meaning="truncating them would train the model on completions without an end",
                fix="raise training.sequence_length, or set data.too_long: drop skips them, truncate cuts them "
                "after the last turn that fits, split is for plain text",
            )
        if not num_train:
            raise DataError(
                f"no document fits a pack of {length} tokens (the longest has {self.longest:,})"
                if num_too_long
                else "there are no examples to train on",
                fix="raise training.sequence_length" if num_too_long else "check data.source and data.validation",
            )

    def report(self, report: Callable[[str], None]) -> None:
        """Report unexpected counts."""
        num_rows = sum(source.num_rows for source in self.sources)
        if self.num_documents > num_rows:
            report(
                f"{plural(num_rows, 'conversation')} became {plural(self.num_documents, 'document')}: the chat "
                "template rewrites earlier turns, and each trained turn is in the form in which inference sees it"
            )
        if self.unused and not isinstance(self.recipe.data.source, GeneratedSource):
            report(f"columns that data.format does not use: {', '.join(sorted(self.unused))}")


def _formats(recipe: RecipePlan, report: Callable[[str], None]) -> dict[int, Format]:
    """Return the format of each source, detected from its first rows if the recipe sets none."""
    formats = {}
    for number, source in enumerate(recipe.data.sources):
        rows = first_rows(recipe.data, number, DETECTION_ROWS)
        formats[number] = resolve_format(recipe.data.format, rows)
        name = f" of {source.name}" if len(recipe.data.sources) > 1 else ""
        report(f"format{name}: {describe_format(formats[number])}")
    return formats


def _tokenizer(recipe: RecipePlan, formats: dict[int, Format], report: Callable[[str], None]) -> Any:
    vocab_size = recipe.model.tokenizer.vocab_size
    if vocab_size is None:
        is_text = all(form.kind == "text" for form in formats.values())
        return load_tokenizer(recipe.model, None if is_text else recipe.data.chat_template, report)
    report(f"training a tokenizer of {vocab_size} tokens")
    learned = learn_tokenizer(_train_texts(recipe, formats), vocab_size, recipe.data.chat_template)
    add_tokens(learned, recipe.model.added_tokens, report)
    return learned


def _train_texts(recipe: RecipePlan, formats: dict[int, Format]) -> Iterator[str]:
    for source, split, raw in read_rows(recipe.data):
        with suppress(DataError):  # encoding the row reports why it is bad
            row = raw.parse() if split != "validation" else None
            validation = recipe.data.validation
            is_train = split == "train" or (row and validation and split_of(row.columns, validation) == "train")
            if row is not None and is_train:
                texts = texts_of(read_example(row.columns, recipe.data, formats[source]))
                yield from (text for text in texts if len(text) <= MAX_CHARACTERS)
