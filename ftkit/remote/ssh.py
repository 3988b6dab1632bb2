"""Run shell scripts on a login node, over the system's ssh, and install ftkit there.

A script is an argument in base64, so that every login shell passes it on unchanged and standard input stays free for
the terminal, for files, or for secrets. `bash -l` runs it: that reads the site's profile, with Slurm's PATH.
"""

from __future__ import annotations

import base64
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ftkit import assets, process
from ftkit.errors import PrerequisiteError
from ftkit.wheel import WHEEL_NAME, code_identity, make_wheel

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile

_OTHER_CODE: Final = 191  # exit status of a script if ftkit there is missing, or differs from this machine's
_BEGINNING: Final = b"ftkit-output-begins-here"
"""Line before the output of a script: the login shell's start-up files may print too."""
_SSH_FAILED: Final = 255


@dataclass(frozen=True)
class Login:
    """A login node: the profile's name, `user@host`, more options for ssh, and ftkit's folder there."""

    cluster: str
    address: str
    options: tuple[str, ...]
    folder: str

    def ssh(self, command: str, *, terminal: bool = False) -> list[str]:
        return ["ssh", *self.options, "-t" if terminal else "-T", self.address, command]


def login_of(profile: ClusterProfile) -> Login | None:
    """Return the login node of a profile; None if it has none, or if it is this machine."""
    if profile.login is None or profile.login.rpartition("@")[2] == socket.gethostname():
        return None
    return Login(profile.name, profile.login, profile.ssh_options, profile.login_folder.rstrip("/"))


def call(login: Login, script: str, on_output: Callable[[bytes], None] | None, stdin: bytes | None = None) -> int:
    """Run a script in ftkit's folder there, and return its exit status.

    `on_output` gets its output, and `stdin` is its standard input. Without `on_output`, it runs on this process's
    terminal. Raises `PrerequisiteError` if ftkit there is not this one.
    """
    is_this_one = f'cd {login.folder} && [ "$(cat venv/identity)" = {code_identity()} ]'
    begin = "" if on_output is None else f"echo {_BEGINNING.decode()}\n"
    script = f"{begin}{{ {is_this_one}; }} 2>/dev/null || exit {_OTHER_CODE}\n{script}"
    command = f"bash -lc 'eval \"$(echo {base64.b64encode(script.encode()).decode()} | base64 -d)\"'"
    if on_output is None:
        code = process.run_attached(login.ssh(command, terminal=True))
    else:
        code = process.run_passing(login.ssh(command), stdin, _after_beginning(on_output))
    if code == _OTHER_CODE:
        raise PrerequisiteError(
            f"ftkit on {login.address} is missing, or differs from this machine's ({code_identity()})",
            fix=f"install this one there: ftkit cluster connect {login.cluster}",
        )
    return code


def _after_beginning(on_output: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that passes on what follows the first line of a script's output; lines before go to stderr."""
    rest, has_begun = b"", False

    def receive(chunk: bytes) -> None:
        nonlocal rest, has_begun
        rest += chunk
        while not has_begun and b"\n" in rest:
            line, _, rest = rest.partition(b"\n")
            has_begun = line.endswith(_BEGINNING)
            if before := line.removesuffix(_BEGINNING):
                sys.stderr.write(f"{before.decode(errors='replace')}\n")
        if has_begun and rest:
            on_output(rest)
            rest = b""

    return receive


def is_lost(code: int) -> bool:
    """Return whether ssh ended without the command's exit status, because there was no connection, or it was lost."""
    return code == _SSH_FAILED or code < 0


def unreachable(login: Login) -> PrerequisiteError:
    return PrerequisiteError(
        f"ssh could not reach {login.address}, or lost the connection",
        meaning="the network is down, the host does not answer, or it does not accept your key",
        fix=f"try the connection with: {shlex.join(login.ssh('true'))}",
    )


# --- Installation --------------------------------------------------------------------------------

_NO_PYTHON: Final = 93  # exit status of install.sh


def install(login: Login, extras: Sequence[str] = ()) -> None:
    """Install this ftkit in the virtual environment on the login node, replacing an existing ftkit."""
    chosen = f"[{','.join(extras)}]" if extras else ""
    values = {
        "FOLDER": login.folder, "WHEEL": WHEEL_NAME, "REQUIREMENT": f"./{WHEEL_NAME}{chosen}",
        "IDENTITY": code_identity(), "CONTENT": base64.encodebytes(make_wheel()).decode().strip(),
    }  # fmt: skip
    script = "".join(f"FTKIT_{name}={shlex.quote(value)}\n" for name, value in values.items())
    script += (assets.SHELL / "install.sh").read_text(encoding="utf-8")
    if code := process.run_passing(login.ssh("bash -ls"), script.encode(), lambda _: None):
        fix = f"try the connection with: {shlex.join(login.ssh('true'))}"
        if code == _NO_PYTHON:
            fix = "install uv there (which can install Python), or load a module with Python 3.11"
        raise PrerequisiteError(
            f"ftkit could not be installed on {login.address}",
            meaning="ssh can't reach it, or the installation failed there: the lines above say which",
            fix=fix,
        )
