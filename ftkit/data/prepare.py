"""Prepare the data of a plan: read, format, tokenize, pack, write. Does nothing if the data is already prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.config.data import DataSpec, Format, describe_format, describe_in_both, describe_too_long
from ftkit.config.data_sources import GeneratedSource
from ftkit.data.conversations import PlainText
from ftkit.data.encoding import MAX_CHARACTERS, RowEncoder
from ftkit.data.packing import DocumentBatch, Packer, count_row_tokens
from ftkit.data.pictures import PictureProcessor
from ftkit.data.preferences import conversations_of
from ftkit.data.prepared_data import DataManifest, PackWriter, PreparedData, new_prepared_data
from ftkit.data.row_formats import DETECTION_ROWS, check_format, describe_roles, read_example, resolve_format
from ftkit.data.selection import first_rows, read_rows, split_of
from ftkit.data.template_probes import find_unread
from ftkit.data.tokenizers import add_tokens, check_size, find_model_end_tokens, learn_tokenizer, load_tokenizer
from ftkit.data.workers import BatchEncoder, SplitDigests, Totals, encode_rows, share_saved
from ftkit.errors import DataError, one_line, plural
from ftkit.planning.plan import PREPARATION_VERSION, RunPlan
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipePlan


def prepare(plan: RunPlan, report: Callable[[str], None], num_workers: int | None = None) -> PreparedData:
    """Prepare the data of a plan, or find it prepared. The result is the same for any number of workers."""
    prepared = PreparedData(plan.data.root)
    if prepared.is_complete:
        report(f"data {plan.fingerprint}: already prepared")
        return prepared
    with new_prepared_data(prepared.root) as folder:
        manifest = _build(folder, plan, report, num_workers or num_usable_cpus())
        manifest = replace(manifest, digests=manifest.digests | folder.compute_digests())
        folder.write_manifest(manifest)
    if manifest.num_too_long:
        found = plural(manifest.num_too_long, plan.recipe.training.sample_name)
        report(f"{found} longer than a pack: {describe_too_long(manifest.too_long)}")
    report(
        f"data {plan.fingerprint}: {plural(manifest.num_train_documents, 'document')} in "
        f"{plural(manifest.num_train_packs, 'pack')} of {manifest.sequence_length} tokens, {manifest.fill_ratio:.1%} "
        f"full, {plural(manifest.num_train_targets, 'target')}"
    )
    if in_both := describe_in_both(manifest.num_in_both, plan.recipe.data, plan.recipe.training.sample_name):
        report(in_both)
    if saved := manifest.num_shared_tokens:
        report(f"prompts of pairs are computed once: {saved / (manifest.num_train_tokens + saved):.0%} fewer tokens")
    batch = plan.recipe.training.global_batch_size
    if manifest.num_train_packs < batch:
        report(f"fewer packs than the {batch:,} of a step: lower training.global_batch_size, or use fewer processes")
    for source in manifest.sources if len(manifest.sources) > 1 else ():
        share = source.num_tokens / max(1, manifest.num_train_tokens)
        tokens = plural(source.num_tokens, "token")
        report(f"source {source.name}: {plural(source.num_train_rows, 'training row')}, {tokens} ({share:.1%})")
    return prepared


def _build(folder: PreparedData, plan: RunPlan, report: Callable[[str], None], num_workers: int) -> DataManifest:
    recipe, length = plan.recipe, plan.recipe.training.sequence_length
    num = recipe.training.documents_per_sample
    encoder = open_encoder(recipe, report)
    encoder.encoders[0].tokenizer.save_pretrained(folder.tokenizer)
    report(f"reading and tokenizing with {plural(num_workers, 'process')}")
    totals, digests = Totals(encoder), SplitDigests()
    with ExitStack() as stack:
        train, validation = (
            _SplitWriter(stack.enter_context(PackWriter(split)), Packer(length, documents_per_sample=num))
            for split in (folder.train, folder.validation)
        )
        rows, sources = (
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for path in (folder.validation_rows, folder.validation_sources)
        )
        for encoded in encode_rows(encoder, read_rows(recipe.data), num_workers):
            totals.add(encoded)
            for error in encoded.bad:
                report(f"skipped: {one_line(error)}")
            train.add(encoded.train)
            validation.add(encoded.validation)
            if recipe.data.has_validation:
                digests.add(encoded, num)
            rows.write(encoded.validation_rows)
            sources.write(encoded.validation_sources)
        train.finish()
        validation.finish()
    _check_totals(totals, recipe, train.writer.num_packs, report)
    pictures = encoder.encoders[0].pictures
    return DataManifest(
        fingerprint=plan.fingerprint,
        sequence_length=length,
        num_train_documents=train.writer.num_documents,
        num_train_packs=train.writer.num_packs,
        num_train_tokens=train.writer.num_tokens,
        num_train_targets=train.writer.num_targets,
        num_in_both=digests.num_in_both,
        num_shared_tokens=train.writer.num_shared,
        num_validation_documents=validation.writer.num_documents,
        num_too_long=totals.too_long.total(),
        max_seqlen=totals.longest,
        num_row_tokens=train.num_row_tokens,
        num_documents=totals.num_documents,
        too_long=dict(totals.too_long),
        sources=tuple(totals.sources),
        preparation_version=PREPARATION_VERSION,
        digests={"documents": f"{train.sum_of_digests:064x}"}
        | ({"processor": pictures.inputs.digest} if pictures else {}),
        pictures=pictures.inputs if pictures else None,
    )


class _SplitWriter:
    def __init__(self, writer: PackWriter, packer: Packer) -> None:
        self._packer, self.writer = packer, writer
        self.num_row_tokens = self.sum_of_digests = 0

    def add(self, documents: DocumentBatch) -> None:
        self.num_row_tokens += count_row_tokens(documents.lengths, self._packer.capacity)
        self.sum_of_digests = sum(map(int.from_bytes, documents.digests), self.sum_of_digests) % 2**256
        for packs in self._packer.add(self.writer.keep_pictures(documents)):
            self.writer.write(*packs)

    def finish(self) -> None:
        for packs in self._packer.finish():
            self.writer.write(*packs)


def _check_totals(totals: Totals, recipe: RecipePlan, num_packs: int, report: Callable[[str], None]) -> None:
    """Refuse documents longer than a pack if `data.too_long` is `error`, and data without a document that fits."""
    length, name, num_too_long = recipe.training.sequence_length, recipe.training.sample_name, totals.too_long.total()
    if num_refused := totals.too_long["error"]:
        longest = "" if num_refused < num_too_long else f" (the longest has {totals.longest:,})"
        others = ", truncate cuts them after the last turn that fits, split is for plain text"
        raise DataError(
            f"{plural(num_refused, name)} longer than a pack of {length} tokens{longest}",
            meaning="cut anywhere, they would train the model on completions without an end",
            fix="raise training.sequence_length, or set data.too_long: drop skips them"
            + others * (recipe.training.preferences is None),
        )
    if not num_packs:
        raise DataError(
            f"no {name} fits a pack of {length} tokens (the longest has {totals.longest:,})"
            if num_too_long
            else "there are no examples to train on",
            fix="raise training.sequence_length" if num_too_long else "check data.source and data.validation",
        )
    if totals.num_dropped:
        report(f"data.contradictions: {plural(totals.num_dropped, 'equal or contradicting pair')} dropped")
    num_rows = sum(source.num_rows for source in totals.sources)
    if totals.num_documents > num_rows and recipe.training.preferences is None:
        report(
            f"{plural(num_rows, 'conversation')} became {plural(totals.num_documents, 'document')}: the chat "
            "template rewrites earlier turns, and each trained turn is in the form in which inference sees it"
        )
    num_documents = sum(source.num_documents for source in totals.sources)
    if warning := recipe.training.warn_of_balance(num_documents - totals.num_rejected, totals.num_rejected):
        report(f"warning: {warning}")
    if recipe.training.objective == "kto" and num_documents < 2 * num_packs:
        report(
            "warning: kto: many packs have a single completion, and none to mismatch: raise training.sequence_length"
        )
    if totals.unused and not isinstance(recipe.data.source, GeneratedSource):
        report(f"columns that data.format does not use: {', '.join(sorted(totals.unused))}")


def open_encoder(recipe: RecipePlan, report: Callable[[str], None]) -> BatchEncoder:
    """Detect the formats of a recipe's sources, load or train its tokenizer, and return the encoders."""
    report("reading the first rows")
    data = recipe.data
    formats: dict[int, Format] = {}
    for number, name in enumerate(data.source_names):
        rows = first_rows(data, number, DETECTION_ROWS)
        formats[number] = resolve_format(data.format, rows, data.ignore_columns)
        of_source = f" of {name}" if len(data.sources) > 1 else ""
        report(f"format{of_source}: {describe_format(formats[number])}{describe_roles(rows, formats[number])}")
        check_format(data, formats[number], recipe.training.objective)
    if (learned_size := recipe.model.tokenizer.vocab_size) is None:
        is_text = all(form.kind == "text" for form in formats.values())
        tokenizer = load_tokenizer(recipe.model, None if is_text else data.chat_template, report)
    else:
        report(f"training a tokenizer of {learned_size} tokens")
        tokenizer = learn_tokenizer(_train_texts(data, formats), learned_size, data.chat_template)
        add_tokens(tokenizer, recipe.model.added_tokens, report)
    vocab_size = recipe.model.architecture.vocab_size
    check_size(tokenizer, recipe.model, vocab_size, report)
    ends = find_model_end_tokens(recipe.model)
    pictures = PictureProcessor.of(recipe.model, tokenizer) if data.pictures else None
    encoders = {
        source: RowEncoder.of(tokenizer, data, form, vocab_size, ends, pictures) for source, form in formats.items()
    }
    renderer = next((encoder.renderer for encoder in encoders.values() if encoder.renderer), None)  # the same for all
    if renderer is None:
        return BatchEncoder(recipe, encoders)
    if data.train_on != "all" and (unproven := renderer.find_unproven()):
        report(
            f"the chat template's trained parts can't be shown to be right for {plural(len(unproven), 'kind')} of "
            f"conversations; rows of such a kind are refused, e.g.: {next(iter(unproven.values())).what}"
        )
    if unread := find_unread(data.template_options, renderer.template, renderer.tool_template):
        report(f"warning: data.template_options: the chat template never reads {', '.join(unread)}; check the spelling")
    read = (each for number in encoders for each in encoders[number].encode(first_rows(data, number, DETECTION_ROWS)))
    saved = share_saved(recipe, (each for each in read if not isinstance(each, DataError)))
    return BatchEncoder(recipe, encoders, shares_prompts=saved is not None)


def _train_texts(data: DataSpec, formats: dict[int, Format]) -> Iterator[str]:
    for source, split, raw in read_rows(data):
        with suppress(DataError):  # encoding the row reports why it is bad
            row = raw.parse() if split != "validation" else None
            if row is None or (split is None and data.validation and split_of(row.columns, data.validation) != "train"):
                continue
            example = read_example(row.columns, data, formats[source])
            turns = [turn.content for conversation in conversations_of(example) for turn in conversation.messages]
            turns += [example.text] if isinstance(example, PlainText) else []
            yield from (text for text in turns if len(text) <= MAX_CHARACTERS)
