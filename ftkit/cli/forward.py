"""Run a command on the login node of its cluster, over ssh, as if it ran here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ftkit.cli.arguments import current_workspace, run_args, split_script_args
from ftkit.cli.output import current_output, log_output
from ftkit.cli.terminal.console import Terminal
from ftkit.config.load import load_cluster
from ftkit.errors import ConfigError, Problem, one_line, plural
from ftkit.launch.code import copy_selected, pack_copies
from ftkit.launch.resolve import recipe_name
from ftkit.launch.sweep import expand
from ftkit.launch.user_script import copy_script
from ftkit.planning.layout import SCRIPT_CODE
from ftkit.remote import ssh
from ftkit.remote.remote_runs import Records, printed_ids
from ftkit.remote.sending import pack_run, project_files, project_name, send_files
from ftkit.wheel import code_identity

if TYPE_CHECKING:
    from ftkit.config.context import Context

SUBMITTING: Final = ("run", "resume", "rerun")
"""Commands that submit a job, and then follow it."""
SECRETS: Final = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)  # fmt: skip
"""Variables of this machine that are also passed to a job on a remote cluster."""
_OUTPUT_VARIABLES: Final = ("NO_COLOR", "FORCE_COLOR", "FTKIT_DEBUG", "LANG", "LC_ALL")
_CODE_OPTIONS: Final = ("--script", "--with-code", "--dev", "--accelerate-config")
"""Options of `ftkit run` with files of this machine."""
_GIB: Final = 2**30
_MIB: Final = 2**20


def forward(
    login: ssh.Login, ctx: Context, path: Sequence[str], typed: Sequence[str], params: Mapping[str, Any]
) -> int:
    """Run a command on a login node, and return its exit status."""
    files = project_files(ctx)
    variables = {key: os.environ[key] for key in _OUTPUT_VARIABLES if key in os.environ}
    project, digest = project_name(ctx.project), hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    request = ssh.Request("run", code_identity(), project, digest, login.cluster, (*path, *typed), variables)
    forwarded = _Forwarded(login, request, files, Terminal())
    if path[0] in SUBMITTING:
        return _submit(forwarded, ctx, path[0], typed, params)
    if params.get("follow"):
        return forwarded.follow((*path, *typed), copies_log=path[0] == "logs")
    return forwarded.run((*path, *typed))


@dataclass(frozen=True)
class _Forwarded:
    login: ssh.Login
    request: ssh.Request
    files: Mapping[str, str]
    terminal: Terminal

    def run(self, words: Sequence[str]) -> int:
        code = self._call(tuple(words))
        if ssh.is_lost(code):
            raise ssh.unreachable(self.login)
        return code

    def _call(self, words: tuple[str, ...]) -> int:
        request = replace(self.request, words=words)
        on_output = None if sys.stdin.isatty() and sys.stdout.isatty() else _writer()
        return ssh.with_project(self.login, request, self.files, lambda: ssh.call(self.login, request, on_output))

    def follow(self, words: Sequence[str], *, copies_log: bool) -> int:
        """Run a command that follows a run; reconnect if the connection is lost."""
        ssh.ask(self.login, replace(self.request, action="missing"), self.files)  # fail if the first connection does
        shown, write = 0, _writer()

        def show(chunk: bytes) -> None:
            nonlocal shown
            write(chunk)
            shown += len(chunk)

        def attempt() -> int:
            if not copies_log:
                return self._call(tuple(words))
            request = replace(self.request, words=(*words, f"--from-byte={shown}"))
            return ssh.call_through_pipe(self.login, request, show)

        return self.until_answered(attempt, "the run continues; Ctrl-C stops following it")

    def until_answered(self, attempt: Callable[[], int], meanwhile: str) -> int:
        """Reconnect with increasing pauses until the command ends."""
        pause = 1
        while ssh.is_lost(code := attempt()):
            self.terminal.warn(f"no connection to {self.login.address}: retrying in {pause} s ({meanwhile})")
            time.sleep(pause)
            pause = min(2 * pause, 30)
        return code


def _writer() -> Callable[[bytes], None]:
    """Return a function that writes output of the login node, which is unchanged in a pipe, to stdout."""
    output = log_output()

    def write(chunk: bytes) -> None:
        output.write(chunk)
        output.flush()

    return write


def _submit(forwarded: _Forwarded, ctx: Context, name: str, typed: Sequence[str], params: Mapping[str, Any]) -> int:
    """Send a run's files, submit it there exactly once, record it here, and follow it."""
    login, terminal = forwarded.login, forwarded.terminal
    words, token = _without_own_options(typed), params.get("hf_token_file")
    # They are passed only on ssh's standard input into the environment there.
    secrets = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    if token is not None:
        secrets["HF_TOKEN"] = token.read_text(encoding="utf-8").strip()
    if name == "run":
        words = _send_run(forwarded, ctx, words, params)
    else:
        ssh.ask(login, replace(forwarded.request, action="missing"), forwarded.files)
    if params.get("dry_run"):
        return forwarded.run((name, *words))
    records, output = Records.of(os.environ), bytearray()
    with records.submission(login, ctx.project, (name, *words)) as submission:
        words = [name, "--no-follow", *words]
        request = replace(forwarded.request, action="once", words=tuple(words), secrets=secrets, submission=submission)

        def attempt() -> int:
            output.clear()
            return ssh.call_through_pipe(login, request, output.extend)

        code = forwarded.until_answered(attempt, "the run is submitted only once, even if the request is repeated")
        text = output.decode(errors="replace")
        ids = printed_ids(text) if not code else []
        try:
            if ids:
                records.add(ids, login, ctx.project)
        except OSError as error:  # the runs exist
            terminal.warn(
                f"could not record {', '.join(ids)} on this machine ({records.folder}): {one_line(error)}; commands "
                f"for it need the cluster's name: ftkit --cluster {login.cluster} status {ids[0]}"
            )
    if code or not params.get("follow") or len(ids) != 1:
        terminal.data(text)
        return code
    return forwarded.follow(("status", ids[0], "--follow", *current_output().words), copies_log=False)


def _send_run(forwarded: _Forwarded, ctx: Context, typed: list[str], params: Mapping[str, Any]) -> list[str]:
    """Send a run's recipe, local files and code; return its arguments with paths on the login node."""
    login, terminal = forwarded.login, forwarded.terminal
    names = ("image", "cluster", "name", "num_nodes", "gpus_per_node", "processes_per_node")
    words: tuple[str, ...] = params["words"]
    script_args: tuple[str, ...] = ()
    if params["script"]:
        words, script_args = split_script_args(words, typed)
    args = run_args(words, **{key: params[key] for key in names})
    trials = [trial.args.overrides for trial in expand(args, ctx)]
    recipe = args.recipe if params["script"] else recipe_name(args, ctx)
    parcel = pack_run(recipe, trials, words, login, ctx)
    archive, code_options, code_files = _pack_code(params)
    code = _digest(archive)
    files = parcel.files | code_files
    wanted = replace(forwarded.request, action="missing", files=files, local_files=parcel.local_files, code=code)
    answer = ssh.ask(login, wanted, forwarded.files)
    missing: list[str] = answer["missing"]
    archive = archive if answer["code"] else b""
    num_bytes = sum(Path(path).stat().st_size for path in missing)
    _confirm_size(num_bytes + len(archive), len(missing), ctx, login)
    if archive:
        terminal.say(f"sending code ({len(archive) / _MIB:.1f} MiB) to {login.address}")
        unpack = replace(forwarded.request, action="unpack", code=code, archive=b64encode(archive).decode())
        if ssh.call_through_pipe(login, unpack, lambda _: None):
            raise ssh.unreachable(login)
    if missing:
        size = plural(len(missing), "local file")
        terminal.say(f"sending {size} ({num_bytes / _GIB:.2f} GiB) to {login.address}")
        send_files(login, missing, with_rsync=shutil.which("rsync") is not None and answer["rsync"])
    options = [*_options(typed, click.get_current_context().command), *code_options]
    # With a script, what follows '--' are its arguments.
    return [*options, *parcel.words, "--", *script_args] if params["script"] else [*options, "--", *parcel.words]


def _pack_code(params: Mapping[str, Any]) -> tuple[bytes, list[str], dict[str, str]]:
    """Pack code of this machine that a run needs.

    Returns its archive, which may be empty; the options that select it on the login node, in place of those typed here;
    and small files that it needs in the project's folder.
    """
    script, config = params["script"], params["accelerate_config"]
    copies = copy_selected(params["with_code"], is_dev=params["is_dev"])
    if script is not None:
        copies.insert(0, copy_script(script, current_workspace()))
    archive = pack_copies(copies) if copies else b""
    folder = f"../../{ssh.CODE_FOLDER}/{_digest(archive)}"  # from the project's folder there
    options = ["--sent-code", folder] if copies else []
    if script is not None:
        options += ["--script", f"{folder}/{SCRIPT_CODE}/{script.name}"]
    files: dict[str, str] = {}
    if config is not None:
        text = config.read_text(encoding="utf-8")
        name = f"sent/accelerate-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
        files[name] = text
        options += ["--accelerate-config", name]
    return archive, options, files


def _digest(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()[:32] if archive else ""


def _options(typed: Sequence[str], command: click.Command) -> list[str]:
    """Return the typed options with their values, but not arguments, and not options with code of this machine."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    with_value = {name for each in options if not each.is_flag and not each.count for name in each.opts}
    kept: list[str] = []
    rest = iter(typed)
    for word in rest:
        if word == "--":
            break
        if word.startswith("-"):
            words = [word, next(rest)] if word in with_value else [word]
            kept += words if word.partition("=")[0] not in _CODE_OPTIONS else []
    return kept


def _confirm_size(num_bytes: int, num_files: int, ctx: Context, login: ssh.Login) -> None:
    limit = load_cluster(login.cluster, ctx).send_limit_gib
    if num_bytes <= limit * _GIB:
        return
    size = f"{num_bytes / _MIB:.0f} MiB of code"
    if num_files:
        size = f"{plural(num_files, 'local file')} ({num_bytes / _GIB:.1f} GiB)"
    if sys.stdin.isatty():
        click.confirm(f"Send {size} to {login.address}?", default=False, abort=True, err=True)
        return
    what = f"{size} would be sent, more than {limit:g} GiB."
    fix = "Raise it in the profile, or copy them there and give their paths there."
    raise ConfigError([Problem(f"cluster {login.cluster}", "send_limit_gib", what, fix)])


def _without_own_options(typed: Sequence[str]) -> list[str]:
    """Remove the options that only this machine handles; what follows `--` are a script's arguments."""
    kept: list[str] = []
    rest = iter(typed)
    for word in rest:
        if word == "--":
            return [*kept, word, *rest]
        if word == "--hf-token-file":
            next(rest, None)
        elif word not in ("--follow", "--no-follow") and not word.startswith("--hf-token-file="):
            kept.append(word)
    return kept
