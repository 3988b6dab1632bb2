"""Packages with their versions, as pip writes them. Standard library only: the self-check uses it in the image."""

from __future__ import annotations

import re
from typing import Final

_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    """Return the packages that a lock or `pip list` names, with their versions."""
    return {normal_name(name): version for name, version in _PIN.findall(text)}


def normal_name(name: str) -> str:
    """Write the name of a package as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
