"""Run a command on the login node of its cluster, over ssh, as if it ran here."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ftkit.cli.arguments import current_workspace, run_args, split_script_args
from ftkit.cli.commands import SERVED, SUBMITTING
from ftkit.cli.output import current_output, log_output
from ftkit.cli.terminal.console import Terminal
from ftkit.config.load import load_cluster
from ftkit.errors import ConfigError, Problem, one_line, plural
from ftkit.files import digest_of
from ftkit.launch.code import copy_selected, sent_files
from ftkit.launch.resolve import recipe_name
from ftkit.launch.sweep import expand
from ftkit.launch.user_script import copy_script
from ftkit.planning.layout import SCRIPT_CODE
from ftkit.remote import ssh
from ftkit.remote.remote_runs import Records, printed_ids
from ftkit.remote.sending import find_missing, pack_files, pack_run, project_files, project_name, send_files

if TYPE_CHECKING:
    from ftkit.config.context import Context

SECRETS: Final = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)  # fmt: skip
"""Variables of this machine that are also passed to a job on a remote cluster."""
_OUTPUT_VARIABLES: Final = ("NO_COLOR", "FORCE_COLOR", "FTKIT_DEBUG", "LANG", "LC_ALL")
_OWN_OPTIONS: Final = (
    "--script", "--with-code", "--dev", "--accelerate-config", "--hf-token-file", "--follow", "--no-follow",
)  # fmt: skip
"""Options of submitting commands that this machine handles, most of them with files of this machine."""
_NEEDS_PROJECT: Final = 190
"""Exit status of a script if the project's files there differ from this machine's."""
_ONCE: Final = """\
eval "$(cat)"  # the secrets
[ "$is_complete" ] || exit 255  # as ssh does: the connection was lost
folder=$PWD/../../submissions/{submission}
mkdir -p "$folder"
touch "$folder/stderr"
(
  flock 9
  if mkdir "$folder/begun" 2>/dev/null; then
    {command} >"$folder/stdout" 2>>"$folder/stderr" </dev/null
    echo $? >"$folder/exit-code"
  fi
) 9>"$folder/lock" &
tail --pid=$! --sleep-interval=0.1 --lines=+1 -f "$folder/stderr" >&2
if [ ! -s "$folder/exit-code" ]; then
  echo "error: the submission ended without an answer" >&2
  echo "  check with 'ftkit runs' whether the run exists" >&2
  exit 1
fi
cat "$folder/stdout"
exit "$(cat "$folder/exit-code")"
"""
"""Runs a submission that outlives the connection; repeated, it waits for the same one, and prints its output."""
_GIB: Final = 2**30
_MIB: Final = 2**20


def forward(
    login: ssh.Login, ctx: Context, path: Sequence[str], typed: Sequence[str], params: Mapping[str, Any]
) -> int:
    forwarded = _Forwarded(login, f"projects/{project_name(ctx.project)}", project_files(ctx), Terminal())
    if path[0] in SUBMITTING:
        return _submit(forwarded, ctx, path[0], typed, params)
    if params.get("follow"):
        return forwarded.follow((*path, *typed), copies_log=path[0] == "logs")
    return forwarded.run((*path, *typed))


@dataclass(frozen=True)
class _Forwarded:
    """Runs commands in a project's folder there, which has the project's files."""

    login: ssh.Login
    project: str
    files: Mapping[str, bytes]
    terminal: Terminal

    def run(self, words: Sequence[str]) -> int:
        code = self._call(words)
        if ssh.is_lost(code):
            raise ssh.unreachable(self.login)
        return code

    def _call(self, words: Sequence[str]) -> int:
        on_output = None if sys.stdin.isatty() and sys.stdout.isatty() else _writer()
        return self._call_script(f"exec {self._command(words)}", on_output)

    def _command(self, words: Sequence[str]) -> str:
        variables = {key: os.environ[key] for key in _OUTPUT_VARIABLES if key in os.environ}
        variables |= {"FTKIT_CLUSTER": self.login.cluster, SERVED: "1"}
        exports = (f"{key}={value}" for key, value in variables.items())
        return shlex.join(["env", *exports, "../../venv/bin/ftkit", *words])

    def _call_script(self, script: str, on_output: Callable[[bytes], None] | None, stdin: bytes | None = None) -> int:
        """Run a script in the project's folder; send the project's files first if they differ there."""
        is_current = f'cd {self.project} && [ "$(cat .digest)" = {digest_of(self.files)} ]'
        script = f"{{ {is_current}; }} 2>/dev/null || exit {_NEEDS_PROJECT}\n{script}"
        code = ssh.call(self.login, script, on_output, stdin)
        if code != _NEEDS_PROJECT:
            return code
        self.send(pack_files(self.files))
        return ssh.call(self.login, script, on_output, stdin)

    def send(self, archive: bytes) -> None:
        digest = digest_of(self.files)
        script = f"""\
            mkdir -p {self.project} && cd {self.project} && rm -rf .digest clusters recipes containers sbatch &&
            tar -xzmf - && echo {digest} >.digest"""
        if ssh.call(self.login, script, lambda _: None, archive):
            raise ssh.unreachable(self.login)

    def check(self) -> None:
        """Raise if the login node can't be reached, or has another ftkit; send the project's files if they differ."""
        if self._call_script("exit 0", lambda _: None, b""):
            raise ssh.unreachable(self.login)

    def follow(self, words: Sequence[str], *, copies_log: bool) -> int:
        """Run a command that follows a run; reconnect if the connection is lost."""
        self.check()  # fail if the first connection does
        shown, write = 0, _writer()

        def show(chunk: bytes) -> None:
            nonlocal shown
            write(chunk)
            shown += len(chunk)

        def attempt() -> int:
            if not copies_log:
                return self._call(words)
            return self._call_script(f"exec {self._command([*words, f'--from-byte={shown}'])}", show, b"")

        return self._until_answered(attempt, "the run continues; Ctrl-C stops following it")

    def submit(self, submission: str, words: Sequence[str], secrets: Mapping[str, str]) -> tuple[int, str]:
        """Run a command once, even if the connection is lost; return its exit status and its output."""
        output = bytearray()
        script = _ONCE.format(submission=submission, command=self._command(words))
        # Only on ssh's standard input, and in the environment there.
        exports = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
        stdin = "".join([*exports, "is_complete=1\n"]).encode()

        def attempt() -> int:
            output.clear()
            return self._call_script(script, output.extend, stdin)

        code = self._until_answered(attempt, "the run is submitted only once, even if the request is repeated")
        return code, output.decode(errors="replace")

    def _until_answered(self, attempt: Callable[[], int], meanwhile: str) -> int:
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
    login, terminal, token = forwarded.login, forwarded.terminal, params.get("hf_token_file")
    options, arguments = _split_words(typed, click.get_current_context().command)
    words = [*options, "--", *arguments]
    secrets = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    if token is not None:
        secrets["HF_TOKEN"] = token.read_text(encoding="utf-8").strip()
    if name == "run":
        words = [*options, *_send_run(forwarded, ctx, typed, params)]
    else:
        forwarded.check()
    if params.get("dry_run"):
        return forwarded.run((name, *words))
    records = Records.of(os.environ)
    with records.submission(login, ctx.project, (name, *words)) as submission:
        code, text = forwarded.submit(submission, [name, "--no-follow", *words], secrets)
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


def _send_run(forwarded: _Forwarded, ctx: Context, typed: Sequence[str], params: Mapping[str, Any]) -> list[str]:
    """Send a run's recipe, local files and code; return its arguments, and options with paths, as they are there."""
    login, terminal = forwarded.login, forwarded.terminal
    names = ("image", "cluster", "name", "num_nodes", "gpus_per_node", "processes_per_node")
    words: tuple[str, ...] = params["words"]
    script_args: tuple[str, ...] = ()
    if params["script"]:
        words, script_args = split_script_args(words, typed)
    args = run_args(words, **{key: params[key] for key in names})
    trials = [trial.args.overrides for trial in expand(args, ctx)]
    recipe = args.recipe if params["script"] else recipe_name(args, ctx)
    there, recipe_files, local_files = pack_run(recipe, trials, words, login, ctx)
    code_options, code_files = _pack_code(params)
    archive = pack_files({**forwarded.files, **recipe_files, **code_files})
    missing = find_missing(login, local_files)
    num_bytes = sum(Path(path).stat().st_size for path in missing)
    _confirm_size(num_bytes + len(archive), len(missing), ctx, login)
    if code_files:
        terminal.say(f"sending code ({len(archive) / _MIB:.1f} MiB) to {login.address}")
    forwarded.send(archive)
    if missing:
        size = plural(len(missing), "local file")
        terminal.say(f"sending {size} ({num_bytes / _GIB:.2f} GiB) to {login.address}")
        send_files(login, missing)
    # With a script, what follows '--' are its arguments.
    arguments = [*there, "--", *script_args] if params["script"] else ["--", *there]
    return [*code_options, *arguments]


def _pack_code(params: Mapping[str, Any]) -> tuple[list[str], dict[str, bytes]]:
    """Return the options that select this machine's code there, in place of those typed here, and its files by path."""
    script, config = params["script"], params["accelerate_config"]
    copies = copy_selected(params["with_code"], is_dev=params["is_dev"])
    if script is not None:
        copies.insert(0, copy_script(script, current_workspace()))
    options: list[str] = []
    files: dict[str, bytes] = {}
    if copies:
        digest = hashlib.sha256("".join(copy.plan.sha256 for copy in copies).encode()).hexdigest()
        folder = f"sent/code-{digest[:12]}"
        files |= sent_files(copies, folder)
        options += ["--sent-code", folder]
        options += [] if script is None else ["--script", f"{folder}/{SCRIPT_CODE}/{script.name}"]
    if config is not None:
        name = f"sent/accelerate-{hashlib.sha256(config.read_bytes()).hexdigest()[:12]}.yaml"
        files[name] = config.read_bytes()
        options += ["--accelerate-config", name]
    return options, files


def _split_words(typed: Sequence[str], command: click.Command) -> tuple[list[str], list[str]]:
    """Separate the typed options with their values, but those that this machine handles, from the arguments."""
    declared = [each for each in command.params if isinstance(each, click.Option)]
    with_value = {name for each in declared if not each.is_flag and not each.count for name in each.opts}
    options: list[str] = []
    arguments: list[str] = []
    rest = iter(typed)
    for word in rest:
        if word == "--":
            arguments += rest
        elif not word.startswith("-"):
            arguments.append(word)
        else:
            words = [word, next(rest)] if word in with_value else [word]
            options += words if word.partition("=")[0] not in _OWN_OPTIONS else []
    return options, arguments


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
