"""The digest of content: a manifest, a configuration, a layer, an image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

DIGEST_PATTERN: Final = r"sha256:[0-9a-f]{64}"
_DIGEST: Final = re.compile(DIGEST_PATTERN)
_LONGEST_SHOWN: Final = 80


class Digest(str):
    """`sha256:` and 64 small hexadecimal digits; text that is anything else never becomes one.

    What a registry, an engine or a file calls a digest ends up in paths, addresses and labels: so each is made one of
    these where it arrives.

    Raises:
        ValueError: it is no digest, or one of another algorithm.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text; `re.fullmatch` takes no line break at the end."""
        if not isinstance(text, str) or not _DIGEST.fullmatch(text):
            raise ValueError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {shortened(text)}")
        return super().__new__(cls, text)

    @property
    def hex(self) -> str:
        """The 64 digits alone."""
        return self.removeprefix("sha256:")

    @property
    def file_name(self) -> str:
        """The digest as the name of a file."""
        return f"sha256-{self.hex}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let specs and manifests declare fields of this type; in JSON schemas it is text with a pattern."""
        del source, handler
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(strict=True), serialization=core_schema.to_string_ser_schema(),
            metadata={"pydantic_js_updates": {"pattern": f"^{DIGEST_PATTERN}$"}},
        )  # fmt: skip


def shortened(value: object) -> str:
    """Return a stranger's value as a message can show it: escaped, and no longer than a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
