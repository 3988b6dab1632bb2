"""Format numbers, times and paths for people."""

from __future__ import annotations

import math
import re
from pathlib import Path

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_AGES = 1000 * 365 * _DAY
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape what could control a terminal or reorder its text: ESC as `\x1b`, U+202E as `\u202e`.

    Line breaks and tabs are kept. JSON remains valid, with the same values: it has no characters that become `\x`.
    """
    return _UNPRINTABLE.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if match[0] < " " else f"\\u{ord(match[0]):04x}",
        text.replace("\r\n", "\n"),
    )


def count(number: float) -> str:
    """Format a large number with three digits and a unit: 934528 as `935 k`."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1, "")):
        if number >= 0.9995 * size:
            return f"{float(f'{number:.2e}') / size:.4g}{unit}"
    return f"{number:.3g}"


def gib(amount: float) -> str:
    """Format an amount of memory, given in GiB."""
    if amount < 0.1:  # noqa: PLR2004 - below, MiB are easier to read
        return f"{amount * 1024:.0f} MiB"
    return f"{amount:.1f} GiB"


def energy(amount: float) -> str:
    """Format an amount of energy, given in kWh, with three digits: `0.52 Wh`, `41.3 kWh`, `2.05 MWh`."""
    if amount < 0.9995:  # noqa: PLR2004 - below, Wh are easier to read
        return f"{amount * 1e3:.3g} Wh"
    if amount < 999.5:  # noqa: PLR2004
        return f"{amount:.3g} kWh"
    return f"{float(f'{amount:.2e}') / 1e3:,.4g} MWh"


def duration(seconds: float) -> str:
    """Format a duration: `0.45 s`, `45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`; `ages` from 1,000 years on."""
    if not seconds < _AGES:
        return "ages"
    whole = max(0, round(seconds))
    if 0 < seconds < 9.95:  # noqa: PLR2004 - two digits are more informative than one
        return f"{seconds:.2g} s"
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def age(seconds: float) -> str:
    """Format an age in one unit: `45 s`, `3 min`, `2 h`, `4 d`."""
    whole = max(0, round(seconds))
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def short_path(path: Path) -> str:
    """Format a path for typing: relative if it is in the current folder, with `~` if it is in the home folder."""
    here, home = Path.cwd(), Path.home()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    if path.is_relative_to(home) and home != home.parent:  # `/` is the home of users without an account
        return str("~" / path.relative_to(home))
    return str(path)


def finite(value: object) -> object:
    """Replace numbers that JSON does not have, such as a NaN loss, with null, also in lists and dictionaries."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value
