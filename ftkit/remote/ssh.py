"""Requests to the ftkit on a login node, over ssh, and its installation there.

A request is one JSON document. Without secrets, it is an argument in base64, so that every login shell passes it on
unchanged and standard input stays free for the terminal. With secrets or files, it goes to standard input.
"""

from __future__ import annotations

import base64
import json
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from ftkit import process
from ftkit.errors import PrerequisiteError
from ftkit.files import parse_json, to_json
from ftkit.wheel import WHEEL_NAME, make_wheel

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile

LOGIN_SIDE: Final = "ftkit.cli.login_side"
"""The module that answers requests on the login node."""
NEEDS_PROJECT: Final = 190
"""Exit status of the login side: its files of the project differ from this machine's."""
OTHER_CODE: Final = 191
"""Exit status of the login side: its code differs from this machine's."""
CODE_FOLDER: Final = "code"
"""Name of the folder for sent code, in ftkit's folder there: it has a folder for each archive, named by digest."""
_BEGINNING: Final = "ftkit-output-begins-here"
"""Line before the output of a request: the login shell's start-up files may print too."""
_SSH_FAILED: Final = 255
_NOT_FOUND: Final = (126, 127)


@dataclass(frozen=True)
class Login:
    """A login node: the profile's name, `user@host`, more options for ssh, and ftkit's folder there."""

    cluster: str
    address: str
    options: tuple[str, ...]
    folder: str

    def ssh(self, command: str, *, terminal: bool = False) -> list[str]:
        """Return the command line of ssh that runs a shell command there."""
        return ["ssh", *self.options, "-t" if terminal else "-T", self.address, command]


def login_of(profile: ClusterProfile) -> Login | None:
    """Return the login node of a profile; None if it has none, or if it is this machine."""
    if profile.login is None or profile.login.rpartition("@")[2] == socket.gethostname():
        return None
    return Login(profile.name, profile.login, profile.ssh_options, profile.login_folder.rstrip("/"))


@dataclass(frozen=True)
class SentFile:
    """A local file on the login node: its path below `files/` there, its size in bytes, its modification time."""

    path: str
    num_bytes: int
    mtime: int


@dataclass(frozen=True)
class Request:
    # Run a command; run it exactly once; store the project's files; list missing local files and code; unpack code.
    action: Literal["run", "once", "store", "missing", "unpack"]
    identity: str  # of the code here
    project: str
    digest: str  # of the project's files
    cluster: str
    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    submission: str = ""  # what is run `once`, even if the connection is lost
    secrets: dict[str, str] = field(default_factory=dict)  # variables, passed only on standard input
    files: dict[str, str] = field(default_factory=dict)
    local_files: tuple[SentFile, ...] = ()
    code: str = ""  # digest of the archive of the run's code; empty if it has none
    archive: str = ""


def read_request(argument: str, read_stdin: Callable[[], bytes]) -> Request:
    """Read the request from an argument, or from standard input for the argument `-`."""
    return parse_json(read_stdin() if argument == "-" else base64.b64decode(argument), Request)


def call(login: Login, request: Request, on_output: Callable[[bytes], None] | None) -> int:
    """Make a request without secrets, on this process's terminal or passing on its output; return its exit status."""
    argument = base64.b64encode(to_json(request).encode()).decode()
    if on_output is not None:
        return _call_quietly(login, request, argument, None, on_output)
    return _checked(login, request, process.run_attached(login.ssh(_command(login, argument), terminal=True)))


def call_through_pipe(login: Login, request: Request, on_output: Callable[[bytes], None]) -> int:
    """Make a request on standard input; return its exit status. Raises as `call`."""
    return _call_quietly(login, request, "-", to_json(request).encode(), on_output)


def _call_quietly(
    login: Login, request: Request, argument: str, stdin: bytes | None, on_output: Callable[[bytes], None]
) -> int:
    """Make a request, and pass on its own output; what start-up files of the login shell print goes to stderr."""
    begins, received, has_begun = f"{_BEGINNING}\n".encode(), b"", False

    def receive(chunk: bytes) -> None:
        nonlocal received, has_begun
        if not has_begun:
            received, line, chunk = (received + chunk).partition(begins)
            has_begun = bool(line)
            if has_begun:
                show_noise()
        if chunk:
            on_output(chunk)

    def show_noise() -> None:
        sys.stderr.write(received.decode(errors="replace"))
        sys.stderr.flush()

    command = _command(login, argument, before=f"echo {_BEGINNING}; ")
    code = process.run_passing(login.ssh(command), stdin, receive)
    if not has_begun:
        show_noise()
    return _checked(login, request, code)


def _command(login: Login, argument: str, before: str = "") -> str:
    """Return a shell command that works in every login shell; `bash -l` reads the site's profile, with Slurm's PATH."""
    return f"bash -lc '{before}exec {login.folder}/venv/bin/python -m {LOGIN_SIDE} {argument}'"


def _checked(login: Login, request: Request, code: int) -> int:
    if code in _NOT_FOUND:
        raise _not_set_up(login, f"ftkit is not set up on {login.address}")
    if code == OTHER_CODE:
        raise _not_set_up(login, f"ftkit on {login.address} differs from this machine's ({request.identity})")
    return code


def _not_set_up(login: Login, what: str) -> PrerequisiteError:
    return PrerequisiteError(what, fix=f"install this one there: ftkit cluster connect {login.cluster}")


def is_lost(code: int) -> bool:
    """Return whether ssh ended without the command's exit status, because there was no connection, or it was lost."""
    return code == _SSH_FAILED or code < 0


def unreachable(login: Login) -> PrerequisiteError:
    return PrerequisiteError(
        f"ssh could not reach {login.address}, or lost the connection",
        meaning="the network is down, the host does not answer, or it does not accept your key",
        fix=f"try the connection with: {shlex.join(login.ssh('true'))}",
    )


class Missing(TypedDict):
    """The answer to `missing`: local files to send, whether the code is to be sent, and whether there is rsync."""

    missing: list[str]
    code: bool
    rsync: bool


def ask(login: Login, request: Request, files: Mapping[str, str]) -> Missing:
    """Ask which local files are missing there; `files` are the project's."""
    output = bytearray()
    code = with_project(login, request, files, lambda: call_through_pipe(login, request, output.extend))
    lines = output.decode(errors="replace").splitlines()
    if is_lost(code):
        raise unreachable(login)
    if code or not lines:
        raise _not_set_up(login, f"ftkit does not start on {login.address}: see the lines above")
    answer: Missing = json.loads(lines[-1])
    return answer


def with_project(login: Login, request: Request, files: Mapping[str, str], send: Callable[[], int]) -> int:
    """Send a request; if the login side lacks the project's files, send them, and then the request again."""
    code = send()
    if code != NEEDS_PROJECT:
        return code
    store = replace(request, action="store", files=dict(files), words=(), secrets={})
    if call_through_pipe(login, store, lambda _: None):
        raise unreachable(login)
    return send()


# --- Installation --------------------------------------------------------------------------------

_NO_PYTHON: Final = 93
_INSTALL: Final = """\
set -eu
exec >&2
folder={folder}
mkdir -p "$folder" && cd "$folder" && chmod 700 .
rm -rf venv.new ftkit-*.whl tmp
mkdir tmp
export TMPDIR=$PWD/tmp  # /tmp is often small or full
trap 'rm -rf "$TMPDIR"' EXIT
base64 -d >{wheel} <<'END'
{content}
END
python=
for each in python3.13 python3.12 python3.11 python3; do
  if "$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$each
    break
  fi
done
if command -v uv >/dev/null; then
  uv venv --quiet --allow-existing --python '>=3.11' venv
  uv pip install --quiet --python venv/bin/python --reinstall-package ftkit {requirements}
elif [ -n "$python" ]; then
  [ -x venv/bin/python ] || "$python" -m venv venv
  venv/bin/python -m pip install --quiet --disable-pip-version-check {requirements}
  venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./{wheel}
else
  echo "neither uv nor Python 3.11 or later (with venv) is on PATH there"
  exit {no_python}
fi
rm -f {wheel}
"""


def install(login: Login, extras: Sequence[str] = ()) -> None:
    """Install this ftkit in the virtual environment on the login node, replacing an existing ftkit."""
    chosen = f"[{','.join(extras)}]" if extras else ""
    script = _INSTALL.format(
        folder=shlex.quote(login.folder), wheel=WHEEL_NAME, no_python=_NO_PYTHON,
        content=base64.encodebytes(make_wheel()).decode().strip(), requirements=shlex.quote(f"./{WHEEL_NAME}{chosen}"),
    )  # fmt: skip
    code = process.run_passing(login.ssh("bash -ls"), script.encode(), lambda _: None)
    if code:
        fix = f"try the connection with: {shlex.join(login.ssh('true'))}"
        if code == _NO_PYTHON:
            fix = "install uv there (which can install Python), or load a module with Python 3.11"
        raise PrerequisiteError(
            f"ftkit could not be installed on {login.address}",
            meaning="ssh can't reach it, or the installation failed there: the lines above say which",
            fix=fix,
        )
