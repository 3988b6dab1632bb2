"""Plan, create and destroy a cluster step by step; repeating an interrupted command continues it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import ConfigError, Problem, ProvisionError, one_line, redact
from ftkit.files import write_file
from ftkit.provision.gcp_slurm import plan_gcp_slurm
from ftkit.provision.gcp_vm import plan_gcp_vm
from ftkit.provision.soperator import plan_soperator
from ftkit.provision.spec import (
    GcpSlurmSpec,
    GcpVmSpec,
    SoperatorSpec,
    clusters_of_account,
    read_state,
    restore_spec,
    write_state,
)
from ftkit.provision.steps import placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.provision.spec import AnySpec, GcpSlurmKind, Kind, ProvisionState
    from ftkit.provision.steps import Command, Provision, Step

    Say = Callable[[str], None]
    Answers = dict[Command, str]

_NAME = re.compile(r"[a-z][a-z0-9]{1,19}")
_LOG = "commands.log"
_SHOWN_USERS = 5
_SHOWN_LINES = 12
"""Number of last lines of a failed command's output in its error."""


def plan_provision(name: str, kind: Kind, spec: AnySpec) -> Provision:
    """Return the steps that create a cluster.

    Raises:
        ConfigError: the name is not valid for all providers.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            [Problem(COMMAND_LINE, "NAME", f"'{name}' can't be a cluster's name.",
                     "Use 2 to 20 lowercase letters and digits, a letter first.")]
        )  # fmt: skip
    match spec:
        case GcpVmSpec():
            return plan_gcp_vm(name, spec)
        case SoperatorSpec():
            return plan_soperator(name, spec)
        case GcpSlurmSpec():
            slurm_kind: GcpSlurmKind = kind  # type: ignore[assignment] # only these kinds have this spec
            return plan_gcp_slurm(name, slurm_kind, spec)


def create(provision: Provision, state: ProvisionState, folder: Path, say: Say) -> None:
    """Create the missing resources.

    Raises:
        ProvisionError: a check or a command failed; created resources are recorded.
        PrerequisiteError: a program is missing.
    """
    for check in provision.checks:
        say(f"check: {check.title}")
        output = process.run(placed(check.command, folder), timeout_seconds=120)
        problem = check.problem(output.stdout) if output.returncode == 0 else one_line(output.stderr or output.stdout)
        if problem is not None:
            raise ProvisionError(f"{check.title}: {problem}", fix=check.advice)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in provision.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / path, text.encode())
    state = replace(state, is_destroyed=False)
    write_state(folder, state)
    for step in provision.steps:
        if step.id in (*state.made, *state.found):
            continue
        there = is_there(step, folder)
        if there and state.begun != step.id:
            say(f"found: {step.title}")
            state = replace(state, found=(*state.found, step.id))
            write_state(folder, state)
            continue
        if not there:
            say(f"create: {step.title}" + (f" (about {step.minutes} min)" if step.minutes else ""))
            write_state(folder, replace(state, begun=step.id))
            run_command(step.command, provision, folder, say)
        state = replace(state, made=(*state.made, step.id), begun=None)
        write_state(folder, state)


def destroy(provision: Provision, folder: Path, say: Say, *, keep_image: bool) -> bool:
    """Remove created resources in reverse order, then the cluster's folder; return whether it is gone.

    A resource that something else uses stays and is recorded, so that a repetition removes it once it is unused.

    Raises:
        ProvisionError: a command failed; remaining resources are recorded.
    """
    state, is_shared = read_state(folder), False
    answers: Answers = {}
    for step in reversed(provision.steps):
        if step.id not in state.made and step.id != state.begun:
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
                run_command(command, provision, folder, say)
        made = tuple(other for other in state.made if other != step.id)
        state = replace(state, made=made, begun=None if state.begun == step.id else state.begun)
        write_state(folder, state)
    if is_shared:  # a later creation starts with an empty folder
        kept, log = replace(state, is_destroyed=True), (folder / _LOG).read_bytes()
        shutil.rmtree(folder)
        folder.mkdir()
        write_state(folder, kept)
        write_file(folder / _LOG, log)
    else:
        shutil.rmtree(folder)
    return not is_shared


def used_by(users: tuple[str, ...]) -> str:
    """Return the first users of a resource, and the number of others."""
    more = len(users) - _SHOWN_USERS
    return "used by " + ", ".join(users[:_SHOWN_USERS]) + (f", and {more} more" if more > 0 else "")


def users_of(step: Step, folder: Path, answers: Answers) -> tuple[str, ...]:
    """Return what else uses a step's resource: clusters created from this account, and what the provider lists.

    `answers` keeps the provider's answers, which are the same for several steps.

    Raises:
        ProvisionError: the provider does not respond.
    """
    users = [] if not step.users else [
        f"cluster {other}" for other in clusters_of_account(folder.parent)
        if other != folder.name and _shares(folder.parent / other, step)
    ]  # fmt: skip
    for command in step.users:
        if command not in answers:
            answers[command] = _answer(command, step, folder)
        users += answers[command].splitlines()
    return tuple(dict.fromkeys(users))


def _shares(folder: Path, step: Step) -> bool:
    """Return whether another cluster uses a resource; a record that this release can't read counts as a user."""
    state = read_state(folder)
    try:
        other = plan_provision(folder.name, state.kind, restore_spec(state.kind, state.settings))
    except ValueError:
        return True
    used = (*state.made, *state.found, state.begun)
    return not state.is_destroyed and any(each.undo == step.undo and each.id in used for each in other.steps)


def is_there(step: Step, folder: Path) -> bool:
    """Return whether the result of a step exists.

    Raises:
        ProvisionError: the provider does not respond: treating that as "no" could leave paid resources behind.
    """
    if not step.existing:
        return False
    return bool(_answer(step.existing, step, folder))


def _answer(command: Command, step: Step, folder: Path) -> str:
    output = process.run(placed(command, folder), timeout_seconds=120)
    if output.returncode != 0:
        raise ProvisionError(
            f"can't find out whether this exists, or what uses it: {step.title}: "
            + one_line(output.stderr or output.stdout),
            meaning="the login has expired, an API is disabled, or the network is down",
            fix="fix the cause and repeat the command: it continues here",
        )
    return output.stdout.strip()


def run_command(command: Command, provision: Provision, folder: Path, say: Say) -> None:
    """Run a command, show its output, and append it to a log.

    Raises:
        ProvisionError: it failed.
    """
    words = placed(command, folder)
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
    text = "\n".join(lines)
    advice = next((fix for pattern, fix in provision.advice.items() if re.search(pattern, text)), None)
    raise ProvisionError(
        f"'{words[0]}' failed with exit status {code}: " + "\n".join(lines[-_SHOWN_LINES:]),
        meaning=f"the complete output is in {folder / _LOG}; created resources are recorded",
        fix=advice
        or "fix the cause and repeat the command to continue here; or remove the created resources: "
        f"ftkit cluster destroy {provision.name}",
    )
