"""Read git checkouts without running a program that the repository or the environment names.

Configuration and attributes of a repository can name programs for almost every command of git: file system monitors,
hooks, filters, diff drivers, checks of signatures, transports for missing objects, and whatever submodules configure.
The repository's own configuration is therefore read only by `rev-parse` and `config`, which run none of them. All else
runs in an empty repository that borrows the checkout's files, index, and objects.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import ftkit
from ftkit import process
from ftkit.errors import FtkitError, PrerequisiteError

_SETTINGS: Final = "autocrlf|checkstat|eol|excludesfile|filemode|ignorecase|precomposeunicode|symlinks|trustctime"
"""Settings in `core` that say how files are compared and which are ignored; they name no programs."""


class Commit(NamedTuple):
    """The commit of a checkout, and whether the checkout differs from it.

    It does by new files, and by submodules at another commit, but not by changes within submodules. Filters don't run:
    a file stored in Git LFS counts as changed if its size or times differ from those in the index.
    """

    id: str
    time: int  # when it was committed, in seconds since 1970
    has_changes: bool


def own_checkout() -> Path | None:
    """Return the checkout that ftkit runs from; None for an installed wheel."""
    checkout = Path(ftkit.__file__).resolve().parents[1]
    return checkout if (checkout / ".git").exists() else None


def read_commit(folder: Path | None) -> Commit | None:
    """Return the commit of the checkout around a folder; None without a folder, a checkout, a commit, or git."""
    if folder is None:
        return None
    try:
        with _borrowed(folder) as git:
            head, _, time = git("log", "-1", "--format=%H %ct").strip().partition(" ")
            return Commit(head, int(time), bool(git("status", "--porcelain", "--ignore-submodules=dirty")))
    except FtkitError:
        return None


def list_files(folder: Path) -> list[str] | None:
    """Return the files in a folder that git tracks, or does not ignore, as paths within it; None as `read_commit`.

    Deleted files that the index still has are included. A commit is not needed.
    """
    try:
        with _borrowed(folder) as git:
            listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", ".")
    except FtkitError:
        return None
    names = {name for name in listed.split("\0") if name}
    return sorted(name for name in names if ".." not in name.split("/") and not name.startswith("/"))  # a forged index


def read_changes(folder: Path | None) -> str:
    """Return the uncommitted changes of a checkout as a diff with new files, for `git apply` on the commit.

    Empty without changes, and where `read_commit` returns None.
    """
    if folder is None:
        return ""
    try:
        with _borrowed(folder, has_own_index=True) as git, tempfile.NamedTemporaryFile("w") as added:
            git("read-tree", "--reset", "HEAD")  # keeps which files a sparse checkout lacks
            # By name: `add --all` runs git in submodules, with their configuration. A name with '/' at its end is
            # another repository; one that is not UTF-8 can't be passed on.
            new = git("ls-files", "-z", "--others", "--exclude-standard", ":/").split("\0")
            added.writelines(f"{each}\0" for each in new if each and not each.endswith("/") and "\ufffd" not in each)
            added.flush()
            from_file = (f"--pathspec-from-file={added.name}", "--pathspec-file-nul")
            git("--literal-pathspecs", "add", "--intent-to-add", *from_file)
            return git("diff", "--binary", "--ignore-submodules=dirty", "HEAD")
    except (FtkitError, OSError):
        return ""


@contextmanager
def _borrowed(folder: Path, *, has_own_index: bool = False) -> Iterator[Callable[..., str]]:
    """Yield a function that runs git with an empty repository in place of the one around `folder`.

    The first two commands see the user's configuration, which says whose repositories may be read (`safe.directory`).
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    names = [word for name in ("index", "objects", "info/exclude") for word in ("--git-path", name)]
    found = _run_git(folder, environment, "rev-parse", "--show-toplevel", *names, "--revs-only", "HEAD")
    top, *paths = found.removesuffix("\n").split("\n")
    index, objects, exclude = (Path(os.path.abspath(folder / path)) for path in paths[:3])  # noqa: PTH100 - keeps links
    head = "".join(paths[3:]) or "ref: refs/heads/main"
    read = _run_git(folder, environment, "config", "-z", "--get-regexp", rf"^core\.({_SETTINGS})$", may_find_none=True)
    options = [word for each in read.split("\0") if each for word in ("-c", each.replace("\n", "=", 1))]
    with tempfile.TemporaryDirectory() as name:
        own = Path(name)
        for part in ("info", "objects/info", "refs"):
            (own / part).mkdir(parents=True)
        (own / "HEAD").write_text(head + "\n")
        is_sha256 = re.fullmatch("[0-9a-f]{64}", head)
        (own / "config").write_text("[core]\nrepositoryformatversion = 1\nbare = false\n[extensions]\n"
                                    f"objectFormat = {'sha256' if is_sha256 else 'sha1'}\n")  # fmt: skip
        (own / "objects/info/alternates").write_text(f"{objects}\n")
        (own / "info/exclude").symlink_to(exclude)
        for shared in index.parent.glob("sharedindex.*"):
            (own / shared.name).symlink_to(shared)
        if has_own_index and index.exists():
            # With its time: git reads files again that were written in the same second as the index, or later.
            shutil.copy2(index, own / "index")
        environment |= {
            "GIT_DIR": name,
            "GIT_WORK_TREE": top,
            "GIT_INDEX_FILE": str(own / "index" if has_own_index else index),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        yield lambda *words: _run_git(folder, environment, *options, *words)


def _run_git(folder: Path, environment: dict[str, str], *words: str, may_find_none: bool = False) -> str:
    done = process.run(["git", "-C", str(folder), *words], environment=environment)
    if done.returncode != 0 and not (may_find_none and done.returncode == 1):
        raise PrerequisiteError(f"git can't read {folder}: {done.stderr.strip()}")
    return done.stdout
