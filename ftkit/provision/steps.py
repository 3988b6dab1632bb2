"""Clusters as data - files, checks, and commands of the provider's own tools - and their creation step by step.

Repeating an interrupted command continues it: a state file has the begun and completed steps.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ftkit import process
from ftkit.config.context import state_folder
from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import (
    ConfigError,
    NotFoundError,
    PrerequisiteError,
    Problem,
    ProvisionError,
    UnusableFileError,
    one_line,
    redact,
)
from ftkit.files import DamagedFileError, PrivateFileError, read_json, write_file, write_json
from ftkit.provision.settings import Kind

FOLDER = "{folder}"  # placeholder for the folder of the cluster in a command, which is in a shell's notation
_STATE = "state.json"
_VERSION = 2
"""Changes with the keys of a state file, and with the ids of steps: `destroy` removes only what it finds there."""
_LOG = "commands.log"
_SHOWN_USERS = 5
_SHOWN_LINES = 12  # number of last lines of a failed command's output in its error

Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """A condition for creation; `problem` returns what is wrong with the command's output, None if nothing is."""

    title: str
    command: str
    advice: str
    problem: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Step:
    """A command that creates a resource."""

    id: str
    title: str
    command: str
    existing: str = ""  # prints something if the resource exists: then it is neither created nor removed
    undo: tuple[str, ...] = ()  # removes it; empty if it stays; clusters whose commands are equal share it
    users: tuple[str, ...] = ()  # print what else uses it, one per line: then it is not removed
    minutes: int = 0
    is_image: bool = False  # the operating system's image, which can be kept for the next cluster


@dataclass(frozen=True)
class Provision:
    """A cluster to create; its steps are undone in reverse order."""

    name: str
    kind: Kind
    files: Mapping[str, str]  # read by its commands
    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
    status: str  # a command that shows the cluster
    cost: str
    advice: Mapping[str, str]  # fixes by a pattern in a failed command's output
    next_steps: tuple[str, ...]  # commands to type next


@dataclass(frozen=True)
class StepState:
    """A step that was begun or made, or whose resource was found, with the commands that remove the resource."""

    outcome: Literal["begun", "made", "found"]
    undo: tuple[str, ...]


@dataclass(frozen=True)
class ProvisionState:
    """State of a cluster's creation. If `is_destroyed`, only what other clusters use is left."""

    kind: Kind
    settings: dict[str, object]
    steps: dict[str, StepState] = field(default_factory=dict)
    is_destroyed: bool = False
    version: int = _VERSION

    def outcome(self, step: Step) -> Literal["begun", "made", "found"] | None:
        """Return the outcome of a step; None if it was not begun."""
        found = self.steps.get(step.id)
        return found.outcome if found else None


def words_of(command: str, folder: Path) -> list[str]:
    """Return a command as words, with the folder of the cluster."""
    return [word.replace(FOLDER, str(folder)) for word in shlex.split(command)]


def clusters_folder() -> Path:
    """Return the folder of all clusters that were created from this account."""
    return state_folder(os.environ) / "clusters"


def read_state(folder: Path) -> ProvisionState:
    """Read the state of a cluster; NotFoundError if none was created under this name."""
    state = _read(folder)
    if state is None:
        names = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{_STATE}")))
        raise NotFoundError(
            f"no cluster '{folder.name}' was created from this account",
            meaning=f"these were: {names}" if names else f"none is recorded in {folder.parent}",
            fix="create it with: ftkit cluster create NAME --kind KIND",
        )
    return state


def _read(folder: Path) -> ProvisionState | None:
    path = folder / _STATE
    try:
        values = read_json(path, dict[str, object])
        if values is None or values.get("version") == _VERSION:
            return read_json(path, ProvisionState)
        reason = f"it has version {values.get('version', 1)}, this ftkit reads version {_VERSION}"
    except PrivateFileError:
        raise
    except DamagedFileError as error:
        reason = error.reason
    raise UnusableFileError(
        f"the state of cluster '{folder.name}' can't be read: {reason}",
        meaning=f"another version of ftkit wrote {path}, or it was edited; nothing was created or removed",
        fix="use the ftkit that created the cluster; its resources may still exist, and cost money",
    )


def begin_or_continue(folder: Path, new: ProvisionState) -> ProvisionState:
    """Return the state of an earlier start of the same creation, or a new state."""
    before = _read(folder)
    if before is None:
        return new
    changed = [key for key, value in new.settings.items() if before.settings.get(key) != value]
    changed = changed if before.kind == new.kind else ["kind"]
    if changed:
        message = f"differs from what '{folder.name}' was created with."
        fix = f"Use another name, or first run: ftkit cluster destroy {folder.name}"
        raise ConfigError([Problem(COMMAND_LINE, ", ".join(changed), message, fix)])
    return before


def create(provision: Provision, state: ProvisionState, folder: Path, say: Say) -> None:
    for check in provision.checks:
        say(f"check: {check.title}")
        try:
            output, problem = _answer(check.command, folder)
            problem = problem or check.problem(output)
        except PrerequisiteError as error:  # the program is missing
            problem = error.what
        if problem is not None:
            raise ProvisionError(f"{check.title}: {problem}", fix=check.advice)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in provision.files.items():
        write_file(folder / path, text.encode())
    state = replace(state, is_destroyed=False)
    write_json(folder / _STATE, state)
    for step in provision.steps:
        if state.outcome(step) in ("made", "found"):
            continue
        outcome: Literal["made", "found"] = "made"
        if not is_there(step, folder):
            say(f"create: {step.title}" + (f" (about {step.minutes} min)" if step.minutes else ""))
            begun = {**state.steps, step.id: StepState("begun", step.undo)}
            write_json(folder / _STATE, replace(state, steps=begun))
            _run(step.command, provision, folder, say)
        elif state.outcome(step) != "begun":
            say(f"found: {step.title}")
            outcome = "found"
        state = replace(state, steps={**state.steps, step.id: StepState(outcome, step.undo)})
        write_json(folder / _STATE, state)


def destroy(provision: Provision, folder: Path, say: Say, *, keep_image: bool) -> bool:
    """Remove created resources in reverse order, then the cluster's folder; return whether it is gone.

    A resource that something else uses stays and is recorded, so that a repetition removes it once it is unused.
    """
    state = read_state(folder)
    is_shared = False
    answers: dict[str, str] = {}
    for step in reversed(provision.steps):
        if state.outcome(step) not in ("made", "begun"):
            continue
        if keep_image and step.is_image:
            say(f"kept: {step.title}")
            return False
        if not step.existing or is_there(step, folder):
            if users := users_of(step, folder, answers):
                say(f"kept: {step.title}; {used_by(users)}")
                is_shared = True
                continue
            for command in step.undo:
                say(f"remove: {step.title}")
                _run(command, provision, folder, say)
        state = replace(state, steps={key: value for key, value in state.steps.items() if key != step.id})
        write_json(folder / _STATE, state)
    if not is_shared:
        shutil.rmtree(folder)
        return True
    log = (folder / _LOG).read_bytes()
    shutil.rmtree(folder)  # a later creation starts with an empty folder
    folder.mkdir()
    write_json(folder / _STATE, replace(state, is_destroyed=True))
    write_file(folder / _LOG, log)
    return False


def used_by(users: tuple[str, ...]) -> str:
    more = len(users) - _SHOWN_USERS
    return "used by " + ", ".join(users[:_SHOWN_USERS]) + (f", and {more} more" if more > 0 else "")


def users_of(step: Step, folder: Path, answers: dict[str, str]) -> tuple[str, ...]:
    """Return what else uses a step's resource: clusters of this account, and the provider's list, kept in `answers`."""
    users = []
    for other in sorted(folder.parent.iterdir()) if step.users else ():
        state = _read(other) if other != folder else None
        if state and not state.is_destroyed and step.undo in [each.undo for each in state.steps.values()]:
            users.append(f"cluster {other.name}")
    for command in step.users:
        if command not in answers:
            answers[command] = _ask(command, step, folder)
        users += answers[command].splitlines()
    return tuple(dict.fromkeys(users))


def is_there(step: Step, folder: Path) -> bool:
    """Return whether a step's result exists; a ProvisionError if unknown: a wrong "no" leaves paid resources."""
    return bool(step.existing and _ask(step.existing, step, folder))


def _ask(command: str, step: Step, folder: Path) -> str:
    output, problem = _answer(command, folder)
    if problem:
        raise ProvisionError(
            f"can't find out whether this exists, or what uses it: {step.title}: {problem}",
            meaning="the login has expired, an API is disabled, or the network is down",
            fix="fix the cause and repeat the command: it continues here",
        )
    return output.strip()


def _answer(command: str, folder: Path) -> tuple[str, str | None]:
    """Return a command's output, and why it failed if it did."""
    done = process.run(words_of(command, folder), timeout_seconds=120)
    problem = one_line(done.stderr or done.stdout or f"exit status {done.returncode}") if done.returncode else None
    return done.stdout, problem


def _run(command: str, provision: Provision, folder: Path, say: Say) -> None:
    words = words_of(command, folder)
    lines: list[str] = []
    with (folder / _LOG).open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(words)}\n")

        def take(line: str) -> None:
            shown = redact(line, os.environ)
            log.write(shown + "\n")
            log.flush()
            lines.append(shown)
            say("  " + shown)

        code = process.run_lines(words, take, cwd=folder)
    if code == 0:
        return
    again = "fix the cause and repeat the command to continue here; or remove the created resources: "
    fixes = [fix for pattern, fix in provision.advice.items() if re.search(pattern, "\n".join(lines))]
    raise ProvisionError(
        f"'{words[0]}' failed with exit status {code}: " + "\n".join(lines[-_SHOWN_LINES:]),
        meaning=f"the complete output is in {folder / _LOG}; created resources are recorded",
        fix=fixes[0] if fixes else f"{again}ftkit cluster destroy {provision.name}",
    )
