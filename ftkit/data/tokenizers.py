"""Tokenizers: trained on the training split, or loaded from a folder or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ftkit.data.imports import import_transformers
from ftkit.data.tokenizer_files import (
    PROCESSOR_TEMPLATE,
    TEKKEN_FILE,
    TEMPLATES,
    check_own_template,
    check_tokenizer_files,
    convert_command,
)
from ftkit.errors import DataError, one_line
from ftkit.files import load_json, read_small
from ftkit.models.folder import GENERATION_FILE, read_end_tokens
from ftkit.models.weight_files import CONFIG_FILE
from ftkit.paths import is_path

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from ftkit.models.architecture import ModelSpec

PAD = "<pad>"


def learn_tokenizer(texts: Iterable[str], vocab_size: int, template_name: str) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE; each digit is one token, so that numbers are copied digit by digit."""
    template = TEMPLATES[template_name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, *template.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=template.begin,
        eos_token=template.end_of_turn,
        clean_up_tokenization_spaces=False,
    )
    trained.chat_template = template.template
    return trained


def load_tokenizer(
    model: ModelSpec, chat_template: str | None, report: Callable[[str], None] = lambda _: None
) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer from a folder or the hub, with added tokens and chat template.

    `chat_template` is `model` for its own, the name of a shipped one, or Jinja; None for plain text.
    """
    source = model.weights if model.tokenizer.source == "model" else model.tokenizer.source
    revision = model.revision if model.tokenizer.source == "model" else None
    if is_path(source):
        check_tokenizer_files(Path(source))
    try:
        tokenizer = _load(source, revision)
    except Exception as error:  # it also reads the model's configuration, whose values may raise anything
        version = import_transformers().__version__
        if "trust_remote_code" in str(error):
            raise DataError(
                f"the tokenizer or the model of '{source}' contains custom code",
                meaning=f"transformers {version} lacks its class, and ftkit never runs code of a model",
                fix="choose another model; or a tokenizer of the same vocabulary with tokenizer.json (model.tokenizer)",
            ) from error
        raise DataError(
            f"can't load the tokenizer of '{source}' with transformers {version}: {one_line(error)}",
            meaning="a file is missing or broken, its class needs another version of transformers or another package, "
            "or the hub refuses access or is unreachable",
            fix=f"where it can be loaded, write it as tokenizer.json: {convert_command(source)}; for a gated model "
            "accept its license and set HF_TOKEN",
        ) from error
    add_tokens(tokenizer, model.added_tokens, report)
    if chat_template == "model" and not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(source, revision)
    if chat_template is not None:
        _set_template(tokenizer, source, chat_template)
    return _with_padding(tokenizer, source)


def load_listed_tokenizer(folder: Path, model: ModelSpec, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer as `load_tokenizer` does: the model's class may split words unlike tokenizer.json."""
    tokenizer = _load(str(folder), None)
    add_tokens(tokenizer, model.added_tokens, lambda _: None)
    if chat_template is not None:
        _set_template(tokenizer, str(folder), chat_template)
    return tokenizer


def _load(source: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Load a tokenizer as `tokenizers` runs it.

    For Mistral's models, transformers 5 prefers mistral-common where it is installed, as beside vLLM. It does not read
    the roles of the special tokens in `tekken.json`, which are the same in all of Mistral's vocabularies.
    """
    transformers = import_transformers()
    load = partial(
        transformers.AutoTokenizer.from_pretrained, source, revision=revision, trust_remote_code=False,
        **({} if transformers.__version__.startswith("4.") else {"mistral_format": False}),
    )  # fmt: skip
    tokenizer = load()
    if tokenizer.eos_token is None and Path(getattr(tokenizer, "vocab_file", None) or "").name == TEKKEN_FILE:
        return load(bos_token="<s>", eos_token="</s>", add_bos_token=True)  # noqa: S106
    return tokenizer


def _processor_template(source: str, revision: str | None) -> str | None:
    """Return the chat template of a multimodal model's processor; None if it has none in a file of its own."""
    try:
        file = import_transformers().utils.cached_file(source, PROCESSOR_TEMPLATE, revision=revision)
        template = load_json(read_small(Path(file)))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else None


def find_model_end_tokens(model: ModelSpec) -> list[int]:
    """Return the end tokens of the weights' configurations, at which generation stops; empty if there are none."""
    if is_path(model.weights):
        return read_end_tokens(Path(model.weights)) if (Path(model.weights) / CONFIG_FILE).is_file() else []
    if model.weights == "random":
        return []
    cached = partial(import_transformers().utils.cached_file, model.weights, revision=model.revision)
    try:
        folder = Path(cached(CONFIG_FILE)).parent
        with suppress(OSError):  # few models have none
            cached(GENERATION_FILE)
    except OSError:  # the hub can't be reached, and the cache has only the tokenizer
        return []
    return read_end_tokens(folder)


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], report: Callable[[str], None]) -> None:
    """Add special tokens to a tokenizer that lacks them or has them as plain tokens."""
    vocabulary = tokenizer.get_vocab()
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    new = [AddedToken(token, special=True, normalized=False) for token in tokens if token not in special]
    tokenizer.add_tokens(new, special_tokens=True)
    for token in tokens:
        was = "added" if token not in vocabulary else "already there" if token in special else "was a plain token"
        report(f"special token {token}: id {tokenizer.convert_tokens_to_ids(token)}, {was}")


def _set_template(tokenizer: PreTrainedTokenizerBase, source: str, template: str) -> None:
    if template == "model":
        own = tokenizer.chat_template
        check_own_template(source, own, own if isinstance(own, dict) else ())
    elif template in TEMPLATES:
        shipped = TEMPLATES[template]
        shipped.check_tokens(tokenizer.get_vocab(), source)
        tokenizer.chat_template = shipped.template
        # A base model's end of texts becomes the end of turns, for programs that read only the tokenizer. If padding
        # was the end of texts, it must not become the end of turns.
        if tokenizer.pad_token is None and tokenizer.eos_token is not None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.eos_token = shipped.end_of_turn
    else:
        tokenizer.chat_template = template


def _with_padding(tokenizer: PreTrainedTokenizerBase, source: str) -> PreTrainedTokenizerBase:
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of '{source}' lacks a fast version, which `tokenizers` can run",
            fix=f"with a newer transformers: {convert_command(source)}",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"the tokenizer of '{source}' lacks a padding or end token",
            fix="set eos_token in its tokenizer_config.json, or set model.tokenizer.source to another tokenizer",
        )
    return tokenizer


def check_size(
    tokenizer: PreTrainedTokenizerBase, model: ModelSpec, vocab_size: int, report: Callable[[str], None]
) -> None:
    """Check that padding and added tokens are in the model's vocabulary; warn about other tokens beyond it.

    A padding token beyond it, as fine-tuned models add, is replaced by the end token: padding is never trained.
    """
    if tokenizer.pad_token_id >= vocab_size > (tokenizer.eos_token_id or 0):
        report(f"padding token {tokenizer.pad_token} is beyond the embedding: {tokenizer.eos_token} is used instead")
        tokenizer.pad_token = tokenizer.eos_token
    needed = [tokenizer.pad_token_id, *map(tokenizer.convert_tokens_to_ids, model.added_tokens)]
    check_tokens(tokenizer, np.array(needed), vocab_size)
    if len(tokenizer) > vocab_size:
        report(
            f"the tokenizer has {len(tokenizer):,} tokens, model.architecture.vocab_size is {vocab_size:,}: "
            "examples with tokens beyond it are refused"
        )


def check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: NDArray[np.integer[Any]], vocab_size: int) -> None:
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"token {largest:,} ({tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the model's vocabulary of "
            f"{vocab_size:,}",
            meaning="the tokenizer belongs to another model, or has added tokens that the weights lack",
            fix="use the model's tokenizer: model.tokenizer.source=model; or correct model.architecture.vocab_size",
        )


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return a tokenizer's special tokens. Those in the data, as in a user's question, stay text."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return frozenset(token for token in special if len(token) > 1)


_SAMPLE = "Hello, world!  x_1 = 3.14159; Größe 25 °C — “naïve” 你好 🙂\n\tdef f(n):\n\t\treturn n  # 1,000\r\n"
"""Text whose tokens depend on normalization, on the splitting of words and numbers, and on merges."""


def check_same_tokenizer(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str) -> None:
    """Refuse (DataError) a teacher whose tokenizer has other ids or special tokens, or encodes text otherwise."""
    ours, theirs = (
        {
            *(f"token {number} '{token}'" for token, number in tokenizer.get_vocab().items()),
            *(f"special token '{token}'" for token in tokenizer.added_tokens_decoder.values() if token.special),
            f"'{_SAMPLE}' as {tokenizer.encode(_SAMPLE, add_special_tokens=False)}",
        }
        for tokenizer in (own, other)
    )
    if difference := sorted(ours ^ theirs, key=lambda each: (each[0] == "'", len(each), each)):
        has, lacks = ("model", "teacher") if difference[0] in ours else ("teacher", "model")
        raise DataError(
            f"training.distill.teacher: the tokenizer of {teacher} is another: the {has}'s has {difference[0]}, "
            f"the {lacks}'s has not; {len(difference):,} such differences",
            meaning="a teacher's distributions are over its own tokens",
            fix="choose a teacher with the same tokenizer; or train on its answers: ftkit generate --as-data",
        )


def load_saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        check_tokenizer_files(folder)
        return import_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for damaged files
        raise DataError(
            f"the tokenizer of the prepared data can't be loaded: {folder}: {one_line(error)}",
            meaning="a file is missing, truncated or replaced",
            fix=f"delete {folder.parent} and prepare again",
        ) from error
