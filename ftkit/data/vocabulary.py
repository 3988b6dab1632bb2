"""The tokens in a tokenizer's files, for planning without loading the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftkit.files import MAX_JSON_BYTES, load_json, read_small
from ftkit.hub.client import TOKENIZER_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCABULARY_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files with a tokenizer's vocabulary. The first is required."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        ids: the id of each token.
        size: size of the tokenizer's model, without added tokens.
    """

    ids: dict[str, int]
    size: int

    def lacking(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """Return the tokens that are not in the vocabulary."""
        return tuple(token for token in tokens if token not in self.ids)

    def with_tokens(self, tokens: Sequence[str]) -> Vocabulary:
        """Return the vocabulary with tokens added: new tokens get the next ids, as in `tokenizers`."""
        first = max(self.size, 1 + max(self.ids.values(), default=-1))
        added = {token: first + number for number, token in enumerate(self.lacking(tokens))}
        return Vocabulary(self.ids | added, self.size)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary listed in a tokenizer's files; None without tokenizer.json."""
    tokenizer_file, config, special_map, added_file = (_read_json(folder / name) for name in VOCABULARY_FILES)
    try:
        found = _vocabulary(tokenizer_file, config, special_map, added_file)
    except (LookupError, TypeError, ValueError, AttributeError):  # damaged: loading it reports how
        return None
    return found if found.size else None


def _vocabulary(
    tokenizer_file: dict[str, Any], config: dict[str, Any], special_map: dict[str, Any], added_file: dict[str, Any]
) -> Vocabulary:
    listed = (tokenizer_file.get("model") or {}).get("vocab") or {}
    # Unigram models list pairs of token and score.
    names = listed if isinstance(listed, dict) else {pair[0]: number for number, pair in enumerate(listed)}
    added = {_content(token): int(token["id"]) for token in tokenizer_file.get("added_tokens") or ()}
    in_config = (config.get("added_tokens_decoder") or {}).items()
    added |= {_content(token): int(number) for number, token in in_config}
    known = Vocabulary({**names, **added_file, **added}, len(names))
    # transformers adds special tokens that the configuration lists and the vocabulary lacks.
    return known.with_tokens(list(dict.fromkeys([*_special_tokens(config), *_special_tokens(special_map)])))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = load_json(read_small(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _special_tokens(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in config.items():
        tokens = value if key.endswith("_special_tokens") and isinstance(value, list) else [value]
        if key.endswith(("_token", "_special_tokens")):
            found += [_content(token) for token in tokens if isinstance(token, (str, dict))]
    return found


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content"))
