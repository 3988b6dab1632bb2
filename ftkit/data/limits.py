"""Limits of CPU time and memory for chat templates, which are programs that come with a model.

Jinja's sandbox keeps a template from files and from Python's internals, but not from loops of 10^10 rounds, texts of
gigabytes, and comparisons of nested lists, during which Python handles no signal. So templates run only in forked
processes, which the kernel stops. A fork takes milliseconds, and has the imported libraries.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from ftkit.data.rows import Row, errors_at
from ftkit.errors import DataError, MemoryExhaustedError
from ftkit.process import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

CPU_SECONDS: Final = 5.0
"""For inspecting a template, or for all renderings of a row: normal ones take 0.05 s, or one second for 10 MB."""
MEMORY_BYTES: Final = 512 << 20
"""In addition to the memory that the process already uses: a conversation of 10 MB takes 130 MiB."""
MAX_TEXT: Final = 32 << 20
"""Characters of a rendering: several times the longest text that is tokenized."""
_CALLS_PER_CHECK = 16  # reading the size of the process takes as long as a rendering


class TemplateLimitError(DataError):
    """A chat template reached a limit: no row can be rendered with it at a known cost."""


@dataclass(frozen=True)
class Template:
    """A chat template: its name in errors, and its text."""

    name: str
    source: str


class LimitReachedError(BaseException):
    """A template reached a limit. Not an `Exception`, because Jinja or a probe of the template may catch those."""


@dataclass
class _Process:
    """The state of this process: whether it was forked for templates, has limits, and runs a limited call."""

    is_fork: bool = False
    is_limited: bool = False
    is_calling: bool = False
    num_calls: int = 0


_process = _Process()
_refused: dict[str, TemplateLimitError] = {}
"""Errors of templates that reached a limit, by the template's text, so that no caller waits for them again."""


def run_limited(template: Template, function: Callable[..., T], *args: object) -> T:
    """Call a function that runs a chat template within limits of CPU time and memory, in a fork.

    Raises TemplateLimitError: the template reached a limit, now or before.
    """
    if _process.is_calling:
        return function(*args)
    if not _process.is_limited:
        return run_in_fork(template, run_limited, template, function, *args)  # type: ignore[no-any-return]
    if _process.num_calls % _CALLS_PER_CHECK == 0:
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + MEMORY_BYTES)
    _process.num_calls += 1
    _process.is_calling = True
    # The kernel ends the process a second later if Python handles no signal by then.
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + CPU_SECONDS + 1))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, CPU_SECONDS)
    try:
        try:
            return function(*args)
        finally:
            _process.is_calling = False  # a signal while an error is handled would replace the error
    except LimitReachedError as error:
        raise _refusal(template.name, str(error)) from None
    except MemoryError:
        raise _refusal(template.name, _TOO_BIG) from None
    finally:
        _process.is_calling = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def run_in_fork(template: Template, function: Callable[..., T], *args: object) -> T:
    """Call a function in a forked process, in which calls of `run_limited` don't fork again.

    The result or the error is pickled. Raises as `run_limited` does, or MemoryExhaustedError.
    """
    if _process.is_limited:
        return function(*args)
    if _process.is_fork:
        with _limits():
            return function(*args)
    if template.source in _refused:
        raise _refused[template.source]
    try:
        return _call_in_fork(template.name, function, args)
    except TemplateLimitError as error:
        _refused[template.source] = error
        raise


def _call_in_fork(name: str, function: Callable[..., T], args: tuple[object, ...]) -> T:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(os.getpid(), sender, name, function, args), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the fork runs Jinja, which takes no locks
        process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        raise explain_death(name, process.exitcode) from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return] # what the function returned


def try_rows(function: Callable[[Row], T], rows: Sequence[Row]) -> list[T | DataError]:
    """Return the function's result for each row, or its DataError with the row's place; raise TemplateLimitError."""
    results: list[T | DataError] = []
    for row in rows:
        try:
            with errors_at(row):
                results.append(function(row))
        except TemplateLimitError:
            raise
        except DataError as error:
            results.append(error)
    return results


def begin_fork(parent: int) -> None:
    """Let this process, a fork of `parent`, run templates. It dies with the parent and ignores Ctrl-C.

    The parent's objects are never collected here: some destructors, such as those of torch's process groups, would
    wait for threads that a fork does not have.
    """
    gc.freeze()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGPROF, _end_call)
    _process.is_fork = True


def explain_death(name: str, *exit_codes: int | None) -> TemplateLimitError | MemoryExhaustedError:
    """Return why processes that render with a template ended: a limit, or usually the machine's memory."""
    if -signal.SIGXCPU in exit_codes:
        return _refusal(name, _TOO_SLOW)
    if -signal.SIGSEGV in exit_codes:
        return _refusal(name, "crashes Python")
    return MemoryExhaustedError(
        "a process that prepares data was killed",
        meaning="usually the machine or the job is out of memory",
        fix="give the job more memory, or use fewer workers: ftkit data prepare --workers 1",
    )


_TOO_SLOW: Final = f"takes more than {CPU_SECONDS:g} s of CPU time"
_TOO_BIG: Final = f"takes more than {MEMORY_BYTES >> 20} MiB of memory"


def _refusal(name: str, reason: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"{name} {reason}",
        meaning="templates need milliseconds and a few times the memory of the text; this one is damaged, or was "
        "written to stop programs",
        fix="set data.chat_template to another, or use a tokenizer from a source that you trust",
    )


def _serve(
    parent: int, sender: Connection, name: str, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    begin_fork(parent)
    answer: tuple[object, Exception | None]
    try:
        with _limits():
            answer = (function(*args), None)
    except MemoryError:
        answer = (None, _refusal(name, _TOO_BIG))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        answer = (None, error)
    sender.send(answer)


@contextmanager
def _limits() -> Iterator[None]:
    _process.is_limited, _process.num_calls = True, 0
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}
    try:
        yield
    finally:
        _process.is_limited = False
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


def _end_call(*_: object) -> None:
    if _process.is_calling:
        raise LimitReachedError(_TOO_SLOW)


def _limit(kind: int, limit: int) -> None:
    """Set a soft limit, capped by the hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
