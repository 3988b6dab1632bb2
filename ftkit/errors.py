"""The error tree: one class and one exit code per kind of failure.

Every message has three parts: what failed, what it usually means, what to do next.
`ftkit.cli` is the only place that catches these and prints them.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

_MAX_ONE_LINE = 200


class FtkitError(Exception):
    """A failure that a user can understand and act on.

    Args:
        what: what failed, with the value that caused it.
        meaning: what it usually means; empty if `what` suffices.
        fix: what to do next.
        name: stable kebab-case name that tells errors of one class apart.

    Subclasses set their exit code, unless it is their base's, and whether the cause is external to the request: then
    the same request may succeed once it is fixed. The first sentence of a docstring is shown to users (`EXIT_CODES`).
    """

    exit_code: int = 1
    external: ClassVar[bool] = False

    def __init_subclass__(cls, *, exit_code: int | None = None, external: bool | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code
        if external is not None:
            cls.external = external

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


def first_few(words: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """Join the first few words, and say how many more there are."""
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return separator.join([*map(str, words[:most]), *more])


def one_line(error: BaseException | str) -> str:
    """Return an exception's message on one line of at most 200 characters.

    For a system call's error it is the system's reason; for an exception without a message, the name of its type; for
    an import that failed because of another error, as transformers' lazy imports do, that error's message.
    """
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, FtkitError):
        error = str(error).replace("\n", "; ")
    text = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ONE_LINE else text[: _MAX_ONE_LINE - 1] + "…"


def plural(number: float, noun: str) -> str:
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


class ConfigError(FtkitError, exit_code=3):
    """A recipe, profile, option or their combination is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(f"{plural(len(problems), 'problem')} in the configuration; nothing was done")
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {problem}" for problem in self.problems)])


class NotFoundError(FtkitError, exit_code=4, external=True):
    """A run, recipe, cluster, image or file was not found."""


class PrerequisiteError(FtkitError, exit_code=5, external=True):
    """A program, package or permission is missing on this machine."""


class UnreachableError(PrerequisiteError):
    """A store can't be reached from this machine, so nothing is known about what it has."""


class SubmitError(FtkitError, exit_code=6):
    """The job can't be submitted, canceled or removed."""


class NoAnswerError(SubmitError, exit_code=14):
    """The scheduler or another program did not answer in time."""


class RunFailedError(FtkitError, exit_code=7):
    """The followed run did not complete; no other code applies.

    The exit code is that of the run's error, if it is known.
    """

    def __init__(self, what: str, *, exit_code: int = 7, meaning: str = "", fix: str = "") -> None:
        super().__init__(what, meaning=meaning, fix=fix)
        self.exit_code = exit_code


class DataError(FtkitError, exit_code=8):
    """The data can't be used with the recipe."""


class TrainingError(FtkitError, exit_code=9):
    """The trainer refused to start or to continue."""


class ImageError(FtkitError, exit_code=10):
    """An image can't be built, pushed, imported or verified."""


class MemoryExhaustedError(FtkitError, exit_code=11):
    """The run needs more memory than there is."""


class UnfitMachineError(FtkitError, exit_code=12, external=True):
    """A check of the machines failed."""


class DiskFullError(FtkitError, exit_code=13, external=True):
    """No space is left on a disk or in its quota."""


class UnusableFileError(FtkitError, exit_code=15):
    """Files of a run or an image can't be used.

    They are damaged, changed, copied to another place, or of another version of ftkit.
    """


class ProvisionError(FtkitError, exit_code=16):
    """A command of the cloud provider's tools failed."""


class NotRepeatedError(FtkitError, exit_code=17):
    """A rerun did not reproduce its original."""


_EXTRAS: Final = {
    "PIL": "train", "accelerate": "train", "datasets": "train", "fsspec": "train", "numpy": "train", "peft": "train",
    "pyarrow": "train", "regex": "train", "safetensors": "train", "tokenizers": "train", "torch": "train",
    "transformers": "train", "docker": "images", "requests": "images", "spython": "images", "bitsandbytes": "qlora",
    "deepspeed": "deepspeed", "matplotlib": "report", "sentencepiece": "gguf",
}  # fmt: skip
"""The extra of ftkit that installs a package, by the name under which the package is imported."""


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is the most similar; empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def missing_package_error(names: Sequence[str], meaning: str = "") -> PrerequisiteError:
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
    if isinstance(error, OSError) and error.filename is not None and (found := _as_file_error(error)):
        return found
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # Path.resolve before Python 3.13
        return NotFoundError(str(error), fix="remove the symbolic links that point at each other")
    is_known = isinstance(error, PrerequisiteError)
    for cause in _causes(error, only_explicit=is_known):
        if (isinstance(cause, OSError) and cause.errno in _DISK_FULL) or _FULL_DISK_TEXT.search(str(cause)):
            path = cause.filename if isinstance(cause, OSError) else None
            return DiskFullError(
                "the disk is full, or its quota is exceeded" + (f": can't write {path}" if path else ""),
                meaning=one_line(error.what if isinstance(error, FtkitError) else error),
                fix="free space ('df -h' and 'quota -s' show where), and try again",
            )
    for cause in () if is_known else _causes(error, only_explicit=True):
        if isinstance(cause, ModuleNotFoundError) and cause.name in _EXTRAS:
            return missing_package_error([cause.name], f"this command needs it: {sys.executable} does not find it")
    return error


def _as_file_error(error: OSError) -> FtkitError | None:
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
            f"can't use {shown}: {error.strerror}",
            meaning="it is damaged, a file where a folder should be, not a regular file, behind symbolic links that "
            "point at each other, or its name is longer than file systems allow",
            fix="check the path, and the file that contains it",
        )
    return None


_NO_FILE = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EFBIG),
    *(errno.EEXIST, errno.ENOTDIR),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_DISK_TEXT = re.compile(
    "|".join(re.escape(os.strerror(number)) for number in _DISK_FULL)
    + r"|\d+ requested and \d+ written|unexpected pos \d+ vs \d+|database or disk is full"
)
"""The system's reason within a message, and what numpy, torch and sqlite say about a short write."""


def _causes(error: BaseException, *, only_explicit: bool) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from, or also those that were being handled."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting.append(cause.__cause__)
        if not only_explicit:
            waiting.append(cause.__context__)
            waiting += cause.exceptions if isinstance(cause, BaseExceptionGroup) else []


def _meaning(error: type[FtkitError]) -> str:
    sentence = (error.__doc__ or "").partition(".")[0]
    return sentence[:1].lower() + sentence[1:]


_WITH_CODES: list[type[FtkitError]] = [*FtkitError.__subclasses__(), NoAnswerError]
EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "a bug in ftkit: please report it",
    2: "wrong usage of the command line",
    **{each.exit_code: _meaning(each) for each in sorted(_WITH_CODES, key=lambda each: each.exit_code)},
    130: "interrupted from the keyboard",
}


# --- Secrets -------------------------------------------------------------------------------------

_HIDDEN = "***"
_MIN_SECRET_LENGTH = 8  # minimum length of a variable's value to search for: shorter ones may be ordinary words
_SENSITIVE_NAME = (
    r"(?:(?<!bos_)(?<!cls_)(?<!eos_)(?<!pad_)(?<!sep_)(?<!unk_)token|secret|passw(?:or)?d|passphrase|"
    r"(?:access|account|api|private|secret)[_-]?key(?:[_-]?id)?|credentials?|(?<!require-)signature)"
)
_SECRET_KEY = re.compile(rf"{_SENSITIVE_NAME}$", re.IGNORECASE)
_QUOTED_OR_WORD = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"'&;,)\]}]+)"""
_STEP_OF_RUN = r"run:[\w.-]+@(?:best|last|\d+)\b(?![.:])"
_SECRETS = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", _HIDDEN),
        # Tokens with known prefixes: of hubs, forges and clouds, and JSON Web Tokens.
        (r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|nvapi-|xox[a-z]-|AIza|ya29\.)[\w-]{8,}", _HIDDEN),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b", _HIDDEN),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", _HIDDEN),
        # TOKEN@ or USER:PASSWORD@ before a host; not IMAGE@sha256:DIGEST or run:NAME@STEP.
        (r"(?<=://)[^/\s\"'<>]*@(?!sha256:)", rf"{_HIDDEN}@"),
        (rf"(?<![\w/.:@-])(?!{_STEP_OF_RUN})[\w.+-]+:[^\s/\"'<>]+@(?!sha256:)(?=\w)", rf"{_HIDDEN}@"),
        # Authorization: SCHEME VALUE; NAME=VALUE; "NAME": VALUE; --NAME VALUE.
        (r"(?i)\b((?:authorization|cookie)[\"']?\s*[:=]\s*[\"']?)[^\n\"']+", rf"\1{_HIDDEN}"),
        (r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}", rf"\1{_HIDDEN}"),
        (rf"(?i)({_SENSITIVE_NAME}(?:[\"']?\s?=\s?|[\"']:\s?)){_QUOTED_OR_WORD}", rf"\1{_HIDDEN}"),
        (rf"(?i)(--[\w-]*{_SENSITIVE_NAME}\s+){_QUOTED_OR_WORD}", rf"\1{_HIDDEN}"),
    )
)


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Replace secrets with `***`, before an error or a command is printed or written to a file.

    The values of environment variables named like a secret (`..._TOKEN`) are replaced too.
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
