"""The login node's side of a forwarded command: `python -m ftkit.cli.login_side REQUEST`.

A submission runs in a separate process that outlives the connection; a repeated request prints its output.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ftkit import process
from ftkit.cli.forwarded import SERVED
from ftkit.cli.main import main as ftkit
from ftkit.files import copy_new, write_file
from ftkit.launch.code import unpack_copies
from ftkit.remote.ssh import CODE_FOLDER, LOGIN_SIDE, NEEDS_PROJECT, OTHER_CODE, Request, read_request
from ftkit.wheel import code_identity

_CHILD: Final = "--child"
_START_SECONDS: Final = 30


def answer(arguments: Sequence[str]) -> int:
    if arguments[0] == _CHILD:
        return _run_submission(Path(arguments[1]))
    request = read_request(arguments[0], sys.stdin.buffer.read)
    if request.identity != code_identity():
        return OTHER_CODE
    root = Path(sys.prefix).parent
    project = root / "projects" / request.project
    marker = project / ".digest"
    if request.action == "store":
        for name in ("clusters", "recipes", "containers", "sbatch"):  # removed here: remove there too
            shutil.rmtree(project / name, ignore_errors=True)
        _write(request, project)
        write_file(marker, request.digest.encode())
    elif not marker.is_file() or marker.read_text(encoding="ascii") != request.digest:
        return NEEDS_PROJECT
    elif request.action == "missing":
        _write(request, project)
        print(json.dumps(_missing(request, root)))  # noqa: T201 - the answer
    elif request.action == "unpack":
        unpack_copies(base64.b64decode(request.archive), root / CODE_FOLDER / request.code)
    else:
        os.chdir(project)
        variables = {**request.environment, "FTKIT_CLUSTER": request.cluster, SERVED: "1"}
        if request.action == "once":
            environment = {**os.environ, **variables, **request.secrets}
            return _run_once(request, root / "submissions" / request.submission, environment)
        os.environ.update(variables)
        if not sys.stdout.isatty():
            threading.Thread(target=_end_with_reader, daemon=True).start()
        return ftkit(request.words)
    return 0


def _write(request: Request, project: Path) -> None:
    project.mkdir(parents=True, exist_ok=True)
    for name, text in request.files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode("utf-8", "surrogateescape"))


def _missing(request: Request, root: Path) -> dict[str, object]:
    """Return the local files that are missing or have another size or time, and whether the code is missing."""
    files = root / "files"
    files.mkdir(exist_ok=True)
    (root / CODE_FOLDER).mkdir(exist_ok=True)
    missing = []
    for each in request.local_files:
        try:
            stat = (files / each.path.lstrip("/")).stat()
        except OSError:
            missing.append(each.path)
            continue
        if (stat.st_size, int(stat.st_mtime)) != (each.num_bytes, each.mtime):
            missing.append(each.path)
    needs_code = bool(request.code) and not (root / CODE_FOLDER / request.code).is_dir()
    return {"missing": missing, "code": needs_code, "rsync": shutil.which("rsync") is not None}


def _end_with_reader() -> None:
    """End this process when nothing reads its output anymore: without a terminal, sshd sends no signal."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    watched.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _run_once(request: Request, folder: Path, environment: dict[str, str]) -> int:
    """Start a submission unless it was started before; pass on its output, and return its exit status."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir()
        write_file(folder / "words.json", json.dumps(request.words).encode())
        command = [sys.executable, "-m", LOGIN_SIDE, _CHILD, str(folder)]
        pid = process.start_detached(command, log=folder / "stderr", cwd=Path.cwd(), environment=environment)
        write_file(folder / "process.json", json.dumps([socket.gethostname(), pid, process.start_time(pid)]).encode())
    offset, started = 0, time.monotonic()
    while True:
        is_over = (folder / "exit-code").is_file() or _has_died(folder, started)
        offset = copy_new(folder / "stderr", offset, sys.stderr.buffer)
        if is_over:
            break
        time.sleep(0.1)
    copy_new(folder / "stdout", 0, sys.stdout.buffer)
    with suppress(FileNotFoundError):
        return int((folder / "exit-code").read_text(encoding="ascii"))
    sys.stderr.write(
        "error: the submission ended without an answer\n  check with 'ftkit runs' whether the run exists\n"
    )
    return 1


def _has_died(folder: Path, started: float) -> bool:
    """Return whether a submission's process ended without an answer; False if it is on another login node."""
    try:
        host, pid, start = json.loads((folder / "process.json").read_bytes())
    except FileNotFoundError:
        return time.monotonic() > started + _START_SECONDS
    return host == socket.gethostname() and process.start_time(pid) != start and not (folder / "exit-code").is_file()


def _run_submission(folder: Path) -> int:
    """Run the command of a submission, in the process that outlives the connection."""
    words = json.loads((folder / "words.json").read_bytes())
    with (folder / "stdout").open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
    code = ftkit(words)
    sys.stdout.flush()
    write_file(folder / "exit-code", str(code).encode())
    return code


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))
