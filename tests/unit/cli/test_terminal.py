"""What others wrote can't control the terminal, whichever way it gets there."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.cli.terminal.format import printable

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2066\u2028b"
BOLD, RESET = "\x1b[1m", "\x1b[0m"  # of the titles of tables
FORBIDDEN = "\x1b\x07\x9b\u202e\u2066\u2028"


@given(st.text())
def test_printable_text_has_no_controls_and_keeps_all_else(text: str) -> None:
    shown = printable(text)
    assert not [each for each in shown if each not in "\n\t" and (ord(each) < 32 or 127 <= ord(each) < 160)]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
    shown.encode()
    if text.isprintable():
        assert shown == text


def on_terminal(command: list[str], cwd: Path) -> str:
    """Run a command on a terminal of 80 columns; return all that it received."""
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, cwd=cwd, env=environment
    ):
        os.close(follower)
        received = bytearray()
        while chunk := _read(leader):
            received += chunk
    os.close(leader)
    return received.decode().replace(BOLD, "").replace(RESET, "")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


def python(code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"from ftkit.cli.streams import *\nopen_standard_streams()\nHOSTILE = {HOSTILE!r}\n{code}",
    ]


@pytest.mark.parametrize("code", [
    "import warnings; warnings.warn(HOSTILE)",
    "import logging; logging.getLogger('matplotlib').warning(HOSTILE)",
    "import sys; print(HOSTILE, file=sys.stderr)",
    "data_output().write(HOSTILE.encode()); data_output().flush()",
    "from ftkit.cli.terminal.console import Terminal; Terminal().warn(HOSTILE)",
    "from ftkit.cli.terminal.console import Terminal; Terminal().data(HOSTILE)",
    "from ftkit.cli.terminal.console import Terminal, Column; Terminal().table([Column(HOSTILE)], [[HOSTILE]])",
    "from ftkit.cli.main import _report; import ftkit.errors as e; _report(e.DataError(HOSTILE, fix=HOSTILE), [])",
    "from ftkit.cli.main import _report; import click; _report(click.ClickException(HOSTILE), [])",
])  # fmt: skip
def test_nothing_that_is_printed_controls_the_terminal(code: str, tmp_path: Path) -> None:
    received = on_terminal(python(code), tmp_path)
    assert "evil" in received
    assert not set(received) & set(FORBIDDEN), received


def test_progress_bars_of_libraries_still_return_to_the_start_of_their_line(tmp_path: Path) -> None:
    received = on_terminal(python("import sys; sys.stderr.write('1/2\\r2/2\\n')"), tmp_path)
    assert "1/2\r2/2" in received


def test_data_in_a_pipe_stays_as_it_is(tmp_path: Path) -> None:
    code = "from ftkit.cli.terminal.console import Terminal; Terminal().data(HOSTILE); Terminal().json(HOSTILE)"
    output = subprocess.run(python(code), capture_output=True, cwd=tmp_path, check=True).stdout.decode()
    assert output.startswith(HOSTILE)
    assert json.loads(output.removeprefix(HOSTILE)) == HOSTILE


def test_a_hostile_argument_is_escaped_in_the_error_about_it(tmp_path: Path) -> None:
    main = "import sys; from ftkit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for words in (["status", HOSTILE], ["run", HOSTILE], ["plan", "demo", f"training.{HOSTILE}=1"], [HOSTILE]):
        received = on_terminal([sys.executable, "-c", main, *words], tmp_path)
        assert "error:" in received
        assert not set(received) & set(FORBIDDEN), received
