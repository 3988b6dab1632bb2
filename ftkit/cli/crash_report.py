"""Write the traceback of a bug to a file for the bug report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from pathlib import Path

from ftkit import __version__
from ftkit.errors import redact, redact_command


def write_crash_report(traceback: str, words: list[str]) -> Path | None:
    """Write a report to the XDG state folder and return its path; None if it can't be written."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    path = state / "ftkit" / f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    head = (
        f"ftkit {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: ftkit {shlex.join(redact_command(words, os.environ))}",
        f"interpreter: {sys.executable}",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "\n".join([*head, "", redact(traceback, os.environ)]), encoding="utf-8", errors="backslashreplace"
        )
    except OSError:
        return None
    return path
