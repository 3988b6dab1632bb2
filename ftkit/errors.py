"""The error tree: one class and one exit code per kind of failure.

Every message has three parts: what failed, what it usually means, what to do next.
`ftkit.cli` is the only place that catches these and prints them.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_MAX_ONE_LINE = 200


class FtkitError(Exception):
    """A failure that a user can understand and act on.

    Args:
        what: what failed, with the value that caused it.
        meaning: what it usually means; empty if `what` suffices.
        fix: what to do next.
        name: stable kebab-case name that tells errors of one class apart.
    """

    exit_code: int = 1
    external: ClassVar[bool] = False
    """Whether the cause is outside the request: the same request may succeed once it is fixed."""

    def __init__(self, what: str, *, meaning: str = "", fix: str = "", name: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.meaning = meaning
        self.fix = fix
        self.name = name

    @property
    def can_resume(self) -> bool:
        """Whether a run can be resumed after this error once the cause is fixed; else it needs another plan."""
        return self.external or "ftkit resume" in self.fix

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.meaning, self.fix) if part)


def one_line(error: BaseException | str) -> str:
    """Return an exception's message on one line of at most 200 characters.

    For a system call's error it is the system's reason; for an exception without a message, the name of its type; for
    an import that failed because of another error, as transformers' lazy imports do, that error's message.
    """
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    text = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ONE_LINE else text[: _MAX_ONE_LINE - 1] + "…"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: `1 node`, `2 nodes`, `3,000 processes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True)
class Problem:
    """One problem in the user's input: its place, its key, the message, what to do, and a stable name."""

    where: str
    key: str
    message: str
    fix: str = ""
    name: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        key = f"{self.key}: " if self.key else ""
        return f"{place}{key}{self.message}" + (f" {self.fix}" if self.fix else "")


class ConfigError(FtkitError):
    """Files, options or their combination are wrong; the error has every problem found."""

    exit_code = 3

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(f"{plural(len(problems), 'problem')} in the configuration; nothing was done")
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {problem}" for problem in self.problems)])


class NotFoundError(FtkitError):
    """A run, recipe, cluster, image or file does not exist."""

    exit_code = 4
    external = True


class PrerequisiteError(FtkitError):
    """A program, a Python package or a permission that the command needs is missing on this machine."""

    exit_code = 5
    external = True


class UnreachableError(PrerequisiteError):
    """A store can't be reached from this machine, so nothing is known about what it has."""


class SubmitError(FtkitError):
    """A job can't be submitted, canceled or removed: the scheduler refuses, or the run's state does not allow it."""

    exit_code = 6


class NoAnswerError(SubmitError):
    """The scheduler, or another program, did not answer."""

    exit_code = 14


class RunFailedError(FtkitError):
    """The followed run failed; the exit code is that of its error, if it is known."""

    exit_code = 7

    def __init__(self, what: str, *, exit_code: int = 7, meaning: str = "", fix: str = "") -> None:
        super().__init__(what, meaning=meaning, fix=fix)
        self.exit_code = exit_code


class DataError(FtkitError):
    """The data can't be read, formatted, tokenized or packed as the recipe specifies."""

    exit_code = 8


class TrainingError(FtkitError):
    """The trainer refused to start or to continue: a check failed, or a checkpoint does not fit."""

    exit_code = 9


class ImageError(FtkitError):
    """An image can't be built, pushed, imported or verified."""

    exit_code = 10


class MemoryExhaustedError(FtkitError):
    """The run needs more memory than its GPUs or machines have."""

    exit_code = 11


class UnfitMachineError(FtkitError):
    """A check of machines failed: `ftkit doctor`, or a run's preflight."""

    exit_code = 12
    external = True


class DiskFullError(FtkitError):
    """A disk is full, or a quota is exceeded."""

    exit_code = 13
    external = True


class UnusableFileError(FtkitError):
    """Files that ftkit wrote can't be used: damaged, changed, copied to another place, or of another version."""

    exit_code = 15


class ProvisionError(FtkitError):
    """A command of a cloud provider's tools failed."""

    exit_code = 16


class NotRepeatedError(FtkitError):
    """A rerun completed, but did not reproduce its original."""

    exit_code = 17


_EXTRAS: Final = {
    **dict.fromkeys(
        (
            *("accelerate", "datasets", "fsspec", "numpy", "peft", "pyarrow", "regex", "safetensors"),
            *("tokenizers", "torch", "transformers"),
        ),
        "train",
    ),
    **dict.fromkeys(("docker", "requests", "spython"), "images"),
    "bitsandbytes": "qlora",
    "deepspeed": "deepspeed",
    "matplotlib": "report",
    "sentencepiece": "gguf",
}
"""The extra of ftkit that installs a package, by the name under which the package is imported."""


def missing_package_error(names: Sequence[str], meaning: str = "") -> PrerequisiteError:
    """Return the error that packages of ftkit's extras are not installed."""
    extras = ",".join(dict.fromkeys(_EXTRAS[name] for name in names))
    return PrerequisiteError(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed in this Python environment",
        meaning=meaning,
        fix=f"pip install 'ftkit[{extras}]'",
    )


def as_user_error(error: Exception) -> Exception:
    """Return the error as one that the user can act on, if it is one of the machine; else as it is.

    These are a full disk, a file that this user can't read or write, a read-only file system, and a missing package. A
    full disk is also found among the errors that led to it, a missing package only among its explicit causes: code that
    handles an `ImportError` may fail later for another reason. So is the full disk of a `PrerequisiteError`, which has
    its own reason otherwise.
    """
    if isinstance(error, DiskFullError):
        return error
    is_known = isinstance(error, PrerequisiteError)
    if isinstance(error, OSError) and error.filename is not None and (found := _as_file_error(error)):
        return found
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # Path.resolve before Python 3.13
        return NotFoundError(str(error), fix="remove the symbolic links that point at each other")
    for cause in _explicit_causes(error) if is_known else _causes(error):
        if _is_disk_full(cause):
            path = cause.filename if isinstance(cause, OSError) else None
            return DiskFullError(
                "the disk is full, or its quota is exceeded" + (f": can't write {path}" if path else ""),
                meaning=one_line(error.what if isinstance(error, FtkitError) else error),
                fix="free space ('df -h' and 'quota -s' show where), and try again",
            )
    for cause in () if is_known else _explicit_causes(error):
        if isinstance(cause, ModuleNotFoundError) and cause.name in _EXTRAS:
            return missing_package_error([cause.name], f"this command needs it: {sys.executable} does not find it")
    return error


def _as_file_error(error: OSError) -> FtkitError | None:
    """Return the error for a file that can't be opened or written as the user can act on it; None for others."""
    shown = str(error.filename)[:200]
    if isinstance(error, PermissionError):
        return PrerequisiteError(
            f"permission denied: {shown}",
            meaning="the file or its folder belongs to another user, who does not share it",
            fix="ask its owner ('ls -ld' shows who that is) for access, or choose another folder",
        )
    if error.errno == errno.EROFS:
        return PrerequisiteError(
            f"the file system is read-only: can't write {shown}",
            meaning="it is mounted without write access on this machine, or was remounted after a disk error",
            fix="choose another folder, or ask the machine's administrators",
        )
    if error.errno in _NO_FILE:
        return NotFoundError(
            f"can't read {shown}: {error.strerror}",
            meaning=_NO_FILE[error.errno],
            fix="check the path, and the file that contains it",
        )
    return None


_NO_FILE = {
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ELOOP),
        "a name is longer than file systems allow, or symbolic links point at each other",
    ),
    **dict.fromkeys((errno.EINVAL, errno.EISDIR, errno.ENXIO), "a folder, pipe or device is in the file's place"),
    errno.EFBIG: "the file is damaged, or another one was copied to its place",
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written|unexpected pos \d+ vs \d+|database or disk is full")
"""Messages of numpy, torch and sqlite about a short write, without the system's reason."""


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    text = str(error)
    return any(os.strerror(number) in text for number in _DISK_FULL) or _SHORT_WRITE.search(text) is not None


def _explicit_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all of its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__context__, cause.__cause__]
        waiting += cause.exceptions if isinstance(cause, BaseExceptionGroup) else []


EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "a bug in ftkit: please report it",
    2: "wrong usage of the command line",
    ConfigError.exit_code: "a recipe, profile, option or their combination is wrong",
    NotFoundError.exit_code: "a run, recipe, cluster, image or file was not found",
    PrerequisiteError.exit_code: "a program, package or permission is missing on this machine",
    SubmitError.exit_code: "the job can't be submitted, canceled or removed",
    RunFailedError.exit_code: "the followed run did not complete; no other code applies",
    DataError.exit_code: "the data can't be used with the recipe",
    TrainingError.exit_code: "the trainer refused to start or to continue",
    ImageError.exit_code: "an image can't be built, pushed, imported or verified",
    MemoryExhaustedError.exit_code: "the run needs more memory than there is",
    UnfitMachineError.exit_code: "a check of the machines failed",
    DiskFullError.exit_code: "no space is left on a disk or in its quota",
    NoAnswerError.exit_code: "the scheduler or another program did not answer in time",
    UnusableFileError.exit_code: "files of a run or an image can't be used",
    ProvisionError.exit_code: "a command of the cloud provider's tools failed",
    NotRepeatedError.exit_code: "a rerun did not reproduce its original",
    130: "interrupted from the keyboard",
}


# --- Secrets -------------------------------------------------------------------------------------

_HIDDEN = "***"
_MIN_SECRET_LENGTH = 8
"""Minimum length of a variable's value to search for: shorter ones may be ordinary words."""
_SENSITIVE_NAME = (
    r"(?:(?<!bos_)(?<!cls_)(?<!eos_)(?<!pad_)(?<!sep_)(?<!unk_)token|secret|passw(?:or)?d|passphrase|"
    r"(?:access|account|api|private|secret)[_-]?key(?:[_-]?id)?|credentials?|(?<!require-)signature)"
)
_SECRET_KEY = re.compile(rf"{_SENSITIVE_NAME}$", re.IGNORECASE)
_QUOTED_OR_WORD = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"'&;,)\]}]+)"""
_SECRETS = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", _HIDDEN),
        # Tokens with known prefixes: of hubs, forges and clouds, and JSON Web Tokens.
        (r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|nvapi-|xox[a-z]-|AIza|ya29\.)[\w-]{8,}", _HIDDEN),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b", _HIDDEN),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", _HIDDEN),
        # TOKEN@ or USER:PASSWORD@ before a host. An image's digest also follows an @.
        (r"(?<=://)[^/\s\"'<>]*@(?!sha256:)", rf"{_HIDDEN}@"),
        (r"(?<![\w/.:@-])[\w.+-]+:[^\s/\"'<>]+@(?!sha256:)(?=\w)", rf"{_HIDDEN}@"),
        # Authorization: SCHEME VALUE; NAME=VALUE; "NAME": VALUE; --NAME VALUE.
        (r"(?i)\b((?:authorization|cookie)[\"']?\s*[:=]\s*[\"']?)[^\n\"']+", rf"\1{_HIDDEN}"),
        (r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}", rf"\1{_HIDDEN}"),
        (rf"(?i)({_SENSITIVE_NAME}(?:[\"']?\s?=\s?|[\"']:\s?)){_QUOTED_OR_WORD}", rf"\1{_HIDDEN}"),
        (rf"(?i)(--[\w-]*{_SENSITIVE_NAME}\s+){_QUOTED_OR_WORD}", rf"\1{_HIDDEN}"),
    )
)


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Replace secrets with `***`, before an error or a command is printed or written to a file.

    Args:
        text: a message, a traceback, or part of a command line.
        environment: variables; the values of those named like a secret (`..._TOKEN`) are replaced too.
    """
    for name, value in environment.items():
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_KEY.search(name):
            text = text.replace(value, _HIDDEN)
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def redact_command(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Replace secrets in a command line, word by word, and the word after an option such as `--token`."""
    shown = []
    is_secret = False
    for word in words:
        key, separator, _ = word.partition("=")
        if is_secret:
            shown.append(_HIDDEN)
        elif separator and _SECRET_KEY.search(key):
            shown.append(f"{key}={_HIDDEN}")
        else:
            shown.append(redact(word, environment))
        is_secret = not separator and word.startswith("-") and bool(_SECRET_KEY.search(word))
    return shown
