"""Keep secrets out of what is written down."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SECRET_KEY = re.compile(r"(token|secret|password|passwd|api_?key|access_?key|credentials?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_|glpat-|nvapi-)[\w-]{8,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


def without_secrets(command: Sequence[str]) -> list[str]:
    """Replace values that look like secrets by `***`."""
    shown = []
    hide_next = False
    for word in command:
        key, separator, _ = word.partition("=")
        if hide_next:
            shown.append("***")
        elif separator and _SECRET_KEY.search(key):
            shown.append(f"{key}=***")
        else:
            shown.append(_SECRET_VALUE.sub("***", word))
        hide_next = not separator and word.startswith("--") and bool(_SECRET_KEY.search(word))
    return shown
