"""Checks of a tokenizer's files, without loading it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ftkit.data.chat_templates import (
    PROCESSOR_TEMPLATE,
    TEMPLATES,
    missing_template,
    missing_tokens,
    no_default_template,
)
from ftkit.data.vocabulary import read_vocabulary
from ftkit.errors import DataError, one_line
from ftkit.files import MAX_JSON_BYTES, load_json, read_small
from ftkit.hub.client import TOKENIZER_FILE

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_CONFIG = "tokenizer_config.json"
TEKKEN_FILE = "tekken.json"
"""Vocabulary of Mistral's newer models."""
_VOCABULARIES = (TOKENIZER_FILE, TEKKEN_FILE, "*vocab*", "*.model", "*.tiktoken")
"""Files with a vocabulary, of which a tokenizer needs one."""
_CHAT_TEMPLATES = ("chat_template.jinja", PROCESSOR_TEMPLATE)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def check_tokenizer_folder(
    folder: Path, template_name: str, *, added_tokens: Collection[str] = (), needs_template: bool = True
) -> None:
    """Check that a folder has a tokenizer, and that it has the tokens of the chat template; reads files only.

    Args:
        folder: the folder with the tokenizer's files.
        template_name: `model`, or the name of a shipped template.
        added_tokens: tokens that the recipe adds to the tokenizer.
        needs_template: whether the data is rendered with a chat template.

    Raises:
        DataError: it does not.
    """
    check_tokenizer_files(folder)
    if not needs_template:
        return
    if template_name in TEMPLATES:
        known = read_vocabulary(folder)  # None: only loading a SentencePiece or tiktoken file shows its tokens
        missing = TEMPLATES[template_name].missing_tokens({*known.ids, *added_tokens}) if known else []
        if missing:
            raise missing_tokens(str(folder), template_name, missing)
        return
    if template_name == "model" and not any((folder / name).is_file() for name in _CHAT_TEMPLATES):
        _check_template_of_config(folder)


def _check_template_of_config(folder: Path) -> None:
    """Check that tokenizer_config.json has a chat template, or a list of named ones with a default."""
    template = _read_json(folder / _CONFIG).get("chat_template")
    names = [path.stem for path in folder.glob(_MORE_TEMPLATES)]
    if isinstance(template, list):
        names += [str(each.get("name")) for each in template if isinstance(each, dict)]
    if not template and not names:
        raise missing_template(str(folder))
    if names and "default" not in names:
        raise no_default_template(str(folder), names)


def needs_loading(folder: Path) -> bool:
    """Return whether only loading a tokenizer shows that it can be loaded: without tokenizer.json, or with code."""
    has_fast_file = (folder / TOKENIZER_FILE).is_file() or (folder / TEKKEN_FILE).is_file()
    return not has_fast_file or "auto_map" in _read_json(folder / _CONFIG)


def check_tokenizer_files(folder: Path) -> None:
    """Check that a folder has all files of a tokenizer, and that ftkit can load it.

    Raises:
        DataError: a file is missing or damaged, or the tokenizer consists of code.
    """
    config = _read_json(folder / _CONFIG)
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        found = f": it has {_CONFIG}, but no vocabulary" if config else ""
        raise DataError(
            f"{folder} has no tokenizer{found}",
            meaning="it was not saved with the weights, or not copied with them",
            fix="tokenizer.save_pretrained(FOLDER), or set model.tokenizer.source to a folder or hub id that has it",
        )
    if (folder / TOKENIZER_FILE).is_file():
        if not isinstance(_read_json(folder / TOKENIZER_FILE).get("model"), dict):
            raise DataError(
                f"{folder / TOKENIZER_FILE} has no 'model', so it holds no vocabulary",
                meaning="another program wrote it, or it was edited manually",
                fix=_copy_again(folder),
            )
        return
    _check_other_files(folder)


def _check_other_files(folder: Path) -> None:
    """Check a tokenizer without tokenizer.json, which transformers makes of its other files."""
    if (folder / "vocab.json").is_file() and not (folder / "merges.txt").is_file():
        raise DataError(
            f"{folder} has vocab.json, but neither merges.txt nor {TOKENIZER_FILE}",
            meaning="a BPE tokenizer needs its merges too: the copy is incomplete",
            fix=_copy_again(folder),
        )
    models = sentencepiece_files(folder)
    if empty := [path for path in models if not path.stat().st_size]:
        raise DataError(f"{empty[0]} is empty", meaning="a copy was interrupted", fix=_copy_again(folder))
    if models and find_spec("transformers") and not find_spec("sentencepiece"):
        raise DataError(
            f"{folder} has its tokenizer only as {models[0].name}, without {TOKENIZER_FILE}",
            meaning="converting it needs the package sentencepiece, which is not installed here",
            fix=f"pip install sentencepiece; or where it is installed: {convert_command(str(folder))}",
        )


def sentencepiece_files(folder: Path) -> list[Path]:
    """Return the files that hold a SentencePiece (or tiktoken) model; none beside tokenizer.json."""
    return [] if (folder / TOKENIZER_FILE).is_file() else sorted(folder.glob("*.model"))


def convert_command(source: str) -> str:
    """Return the command that writes a tokenizer as tokenizer.json."""
    load = f"AutoTokenizer as T; T.from_pretrained('{source}').save_pretrained('FOLDER')"
    return f'python -c "from transformers import {load}", then model.tokenizer.source=FOLDER'


def _copy_again(folder: Path) -> str:
    return f"copy or download {folder} again, or set model.tokenizer.source to a complete tokenizer"


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is none.

    Raises:
        DataError: it is damaged.
    """
    try:
        stored = load_json(read_small(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"can't read {path}: {one_line(error)}",
            meaning="a copy was interrupted, it is only a Git LFS pointer, or it was edited manually",
            fix=_copy_again(path.parent),
        ) from error
    return stored if isinstance(stored, dict) else {}
