"""The machine that unit tests see: a few harmless programs, a fixed environment, an empty home folder, and no hardware.

The same tests pass on a login node whose Slurm does not respond, on a GPU machine, and in an empty container. A test
that needs more of a machine makes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ftkit.config.context

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = """
awk base64 basename bash cat chmod cksum cmp comm cp cut date df dirname du echo env expr false find flock grep gzip
head id kill ln ls mkdir mkfifo mktemp mv nproc od paste printf ps pwd readlink rm rmdir sed seq setsid sh sha256sum
sleep sort stat tac tail tar tee test timeout touch tr true uname uniq wc xargs
git openssl shellcheck ssh-keygen
"""
"""What tests may call; none of these looks at a cluster, a container runtime, or hardware."""

FIXED = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "CUDA_VISIBLE_DEVICES": "",
    "FTKIT_REPORT": "0",  # saves seconds of plotting per trained run
    "GIT_CONFIG_NOSYSTEM": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there: no test contacts the real hub
    "OMP_WAIT_POLICY": "PASSIVE",
}

KEPT = ("CI", "COVERAGE_", "FTKIT_UPDATE_GOLDEN", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTEST_", "TMPDIR")
"""Prefixes of variables that say how the tests are run."""


class Machine:
    """A folder with programs and a home, and the environment that has only these."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ftkit-machine-"))
        self.home, programs = self.root / "home", self.root / "bin"
        programs.mkdir()
        (self.root / "root").mkdir()
        # The system's folders first: a program of the same name may be earlier on PATH.
        path = os.pathsep.join((os.confstr("CS_PATH") or os.defpath, "/usr/local/bin", os.environ.get("PATH", "")))
        for name in PROGRAMS.split():
            if found := shutil.which(name, path=path):
                (programs / name).symlink_to(found)
        self.path = str(programs)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Show this process nothing else until the block ends."""
        before, kept = dict(os.environ), {key: os.environ[key] for key in os.environ if key.startswith(KEPT)}
        defpath, root = os.defpath, ftkit.config.context.ROOT
        if not self.home.is_dir() or any(self.home.iterdir()):  # most tests leave it empty
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir()
        _set_environment(kept | FIXED | {"PATH": self.path, "HOME": str(self.home)})
        os.defpath, ftkit.config.context.ROOT = self.path, self.root / "root"
        try:
            yield
        finally:
            _set_environment(before)
            os.defpath, ftkit.config.context.ROOT = defpath, root


def _set_environment(wanted: dict[str, str]) -> None:
    for key in os.environ.keys() - wanted.keys():
        del os.environ[key]
    for key, value in wanted.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
    time.tzset()
