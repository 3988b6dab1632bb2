"""A tokenizer's files, read and checked without loading it; the chat templates shipped with ftkit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ftkit.errors import DataError, one_line
from ftkit.files import MAX_JSON_BYTES, load_json, read_small
from ftkit.hub.client import TOKENIZER_FILE

JsonFile = dict[str, Any]
_CONFIG = "tokenizer_config.json"
TEKKEN_FILE = "tekken.json"  # vocabulary of Mistral's newer models
_VOCABULARIES = (TOKENIZER_FILE, TEKKEN_FILE, "*vocab*", "*.model", "*.tiktoken")
"""Files with a vocabulary, of which a tokenizer needs one."""
VOCABULARY_FILES = (TOKENIZER_FILE, _CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files that `read_vocabulary` reads. The first is required."""
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
"""File in which transformers 4 saved the chat template of a multimodal model's processor, unknown to its tokenizer."""


class ChatTemplate(NamedTuple):
    """A chat template that ftkit ships in `ftkit/data/templates`, and the special tokens that it writes."""

    name: str
    end_of_turn: str
    begin: str | None
    other_tokens: tuple[str, ...]

    @property
    def template(self) -> str:
        return resources.files("ftkit.data").joinpath("templates", f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def special_tokens(self) -> list[str]:
        """Tokens that the tokenizer must have as special tokens."""
        return [*([self.begin] if self.begin else []), self.end_of_turn, *self.other_tokens]

    def check_tokens(self, known: Collection[str], source: str) -> None:
        if missing := [token for token in self.special_tokens if token not in known]:
            raise DataError(
                f"the tokenizer of '{source}' lacks {', '.join(missing)} of the '{self.name}' chat template",
                meaning="the template belongs to another model family; its markers would be text to this model",
                fix="set data.chat_template to the template that this model was trained with, or to 'model'; if the "
                f"tokenizer has none, write a {TEMPLATE_FILE} beside its files. With training.method=full, the missing "
                "tokens can be learned: model.added_tokens",
                name="template-tokens",
            )


_LLAMA_HEADER = ("<|start_header_id|>", "<|end_header_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
TEMPLATES: dict[str, ChatTemplate] = {
    template.name: template
    for template in (
        ChatTemplate("chatml", "<|im_end|>", None, ("<|im_start|>",)),
        ChatTemplate("gemma", "<end_of_turn>", "<bos>", ("<start_of_turn>",)),
        ChatTemplate("llama3", "<|eot_id|>", "<|begin_of_text|>", _LLAMA_HEADER),
        ChatTemplate("mistral", "</s>", "<s>", _MISTRAL),
        ChatTemplate("olmo", "<|im_end|>", None, ("<|im_start|>",)),
        ChatTemplate("phi4", "<|im_end|>", None, ("<|im_start|>", "<|im_sep|>")),
    )
}


def check_own_template(source: str, template: object, names: Collection[str] = ()) -> None:
    """Check that a tokenizer has a chat template, or named ones with a default."""
    if not template and not names:
        raise DataError(
            f"the tokenizer of '{source}' has no chat template",
            meaning="base models often have none",
            fix=f"set data.chat_template to {', '.join(TEMPLATES)} or a file of your own; or train on plain text "
            "(data.format=text)",
            name="no-chat-template",
        )
    if names and "default" not in names:
        raise DataError(
            f"the tokenizer of '{source}' has several chat templates, and none of them is the default: "
            + ", ".join(sorted(names)),
            meaning="transformers uses the template named 'default' if a program selects none",
            fix="write the right one to a file: data.chat_template=./FILE.jinja",
        )


def check_tokenizer_folder(
    folder: Path, template_name: str, *, added_tokens: Collection[str] = (), needs_template: bool = True
) -> None:
    """Check that a folder has a tokenizer, and that it has the tokens of the chat template; reads files only.

    `template_name` is `model`, or the name of a shipped template.
    """
    check_tokenizer_files(folder)
    if not needs_template:
        return
    if template_name in TEMPLATES:
        known = read_vocabulary(folder)  # None: only loading a SentencePiece or tiktoken file shows its tokens
        if known is not None:
            TEMPLATES[template_name].check_tokens({*known.ids, *added_tokens}, str(folder))
    elif template_name == "model" and not any(
        (folder / name).is_file() for name in (TEMPLATE_FILE, PROCESSOR_TEMPLATE)
    ):
        template = _read_json(folder / _CONFIG).get("chat_template")
        names = [path.stem for path in folder.glob("additional_chat_templates/*.jinja")]
        if isinstance(template, list):
            names += [str(each.get("name")) for each in template if isinstance(each, dict)]
        check_own_template(str(folder), template, names)


def needs_loading(folder: Path) -> bool:
    """Return whether only loading a tokenizer shows that it can be loaded: without tokenizer.json, or with code."""
    has_fast_file = (folder / TOKENIZER_FILE).is_file() or (folder / TEKKEN_FILE).is_file()
    return not has_fast_file or "auto_map" in _read_json(folder / _CONFIG)


def check_tokenizer_files(folder: Path) -> None:
    config = _read_json(folder / _CONFIG)
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        found = f": it has {_CONFIG}, but no vocabulary" if config else ""
        raise DataError(
            f"{folder} has no tokenizer{found}",
            meaning="it was not saved with the weights, or not copied with them",
            fix="tokenizer.save_pretrained(FOLDER), or set model.tokenizer.source to a folder or hub id that has it",
        )
    if (folder / TOKENIZER_FILE).is_file() and not isinstance(_read_json(folder / TOKENIZER_FILE).get("model"), dict):
        raise _incomplete(folder, f"{folder / TOKENIZER_FILE} has no 'model', so it holds no vocabulary")


def convert_command(source: str) -> str:
    """Return the command that writes a tokenizer as tokenizer.json."""
    load = f"AutoTokenizer as T; T.from_pretrained('{source}').save_pretrained('FOLDER')"
    return f'python -c "from transformers import {load}", then model.tokenizer.source=FOLDER'


def _incomplete(folder: Path, what: str) -> DataError:
    return DataError(
        what,
        meaning="a copy was interrupted, it is only a Git LFS pointer, or it was edited manually",
        fix=f"copy or download {folder} again, or set model.tokenizer.source to a complete tokenizer",
    )


def _read_json(path: Path) -> JsonFile:
    """Return the content of a JSON file; empty if there is none."""
    try:
        stored = load_json(read_small(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _incomplete(path.parent, f"can't read {path}: {one_line(error)}") from error
    return stored if isinstance(stored, dict) else {}


class Vocabulary(NamedTuple):
    """The ids of a tokenizer's tokens; `size` is without added tokens."""

    ids: dict[str, int]
    size: int

    def lacking(self, tokens: Sequence[str]) -> tuple[str, ...]:
        return tuple(token for token in tokens if token not in self.ids)

    def with_tokens(self, tokens: Sequence[str]) -> Vocabulary:
        """Return the vocabulary with tokens added: new tokens get the next ids, as in `tokenizers`."""
        first = max(self.size, 1 + max(self.ids.values(), default=-1))
        added = {token: first + number for number, token in enumerate(self.lacking(tokens))}
        return Vocabulary(self.ids | added, self.size)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary listed in a tokenizer's files; None without tokenizer.json."""
    try:
        tokenizer_file, config, special_map, added_file = (_read_json(folder / name) for name in VOCABULARY_FILES)
        listed = (tokenizer_file.get("model") or {}).get("vocab") or {}
        # Unigram models list pairs of token and score.
        names = listed if isinstance(listed, dict) else {pair[0]: number for number, pair in enumerate(listed)}
        added = {_content(token): int(token["id"]) for token in tokenizer_file.get("added_tokens") or ()}
        added |= {_content(each): int(number) for number, each in (config.get("added_tokens_decoder") or {}).items()}
        known = Vocabulary({**names, **added_file, **added}, len(names))
        # transformers adds special tokens that the configuration lists and the vocabulary lacks.
        special = [*_special_tokens(config), *_special_tokens(special_map)]
    except (DataError, LookupError, TypeError, ValueError, AttributeError):  # damaged: loading it reports how
        return None
    return known.with_tokens(list(dict.fromkeys(special))) if known.size else None


def _special_tokens(config: JsonFile) -> list[str]:
    found: list[str] = []
    for key, value in config.items():
        tokens = value if key.endswith("_special_tokens") and isinstance(value, list) else [value]
        if key.endswith(("_token", "_special_tokens")):
            found += [_content(token) for token in tokens if isinstance(token, (str, dict))]
    return found


def _content(token: str | JsonFile) -> str:
    return token if isinstance(token, str) else str(token.get("content"))
