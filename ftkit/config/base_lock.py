"""Which image the tag of a base was when an image was first built on it: a line `HOST/PATH:TAG@DIGEST` for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ftkit.config.image_reference import parse_reference
from ftkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftkit.config.digest import Digest

FILE_NAME: Final = "bases.lock"
_HEAD: Final = """\
# Which image each base was when 'ftkit build' first used it; later builds take the same one.
# 'ftkit build NAME:TAG --repin' takes what the tag is by now. Keep this file with the definitions.
"""


def read_base_lock(path: Path) -> dict[str, Digest]:
    """Return the digest of each base by its `HOST/PATH:TAG`; nothing if there is no file.

    Raises:
        ConfigError: it can't be read, or a line of it is no reference with a digest.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"can't be read: {error}.", _FIX)]) from error
    found = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        base = parse_reference(line.strip(), f"{path}:{number}")
        if base.digest is None:
            raise ConfigError([Problem(f"{path}:{number}", "", f"{line!r} has no digest.", _FIX)])
        found[base.tagged] = base.digest
    return found


_FIX: Final = "Mend it, or remove it: the next build writes a new one."


def base_lock_text(digests: Mapping[str, Digest]) -> str:
    """Return what the file holds."""
    return _HEAD + "".join(f"{base}@{digest}\n" for base, digest in sorted(digests.items()))
