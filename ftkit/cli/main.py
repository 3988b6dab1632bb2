"""The entry point. Only this module catches errors and prints them."""

from __future__ import annotations

import atexit
import gc
import os
import platform
import shlex
import shutil
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import NoArgsIsHelpError

from ftkit import __version__, process
from ftkit.cli.commands import LazyCommand, LazyGroup
from ftkit.cli.output import in_color, open_standard_streams, styled
from ftkit.cli.terminal.format import printable
from ftkit.config.context import Context, load_dotenv, set_home
from ftkit.errors import EXIT_CODES, ConfigError, FtkitError, PrerequisiteError, as_user_error, redact, redact_command

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "ftkit"
COMPLETE_VARIABLE = "_FTKIT_COMPLETE"
INTERRUPTED = 130

_SECTIONS = {
    "Start": (
        LazyCommand("init", "ftkit.cli.machine", "Set up a project on this cluster or machine."),
        LazyCommand("plan", "ftkit.cli.run", "Preview a run and check that it fits."),
        LazyCommand("run", "ftkit.cli.run", "Plan a run, submit it, and follow it."),
        LazyCommand("status", "ftkit.cli.status", "Show the state and results of a run.", "command"),
        LazyCommand("chat", "ftkit.cli.chat", "Chat with a trained model."),
        LazyCommand("export", "ftkit.cli.export", "Export a checkpoint for transformers, peft or vLLM."),
    ),
    "Runs": (
        LazyCommand("runs", "ftkit.cli.groups", "List runs; show their checkpoints and GPUs; copy them.", "runs"),
        LazyCommand("logs", "ftkit.cli.jobs", "Print the log of a run."),
        LazyCommand(
            "report", "ftkit.cli.report", "Write report.html for a run, or a comparison of several.", "command"
        ),
        LazyCommand("compare", "ftkit.cli.compare", "Compare the settings and results of runs.", "command"),
        LazyCommand("resume", "ftkit.cli.resume", "Continue a run from its newest checkpoint."),
        LazyCommand("rerun", "ftkit.cli.resume", "Repeat a run, and compare its losses with the original's."),
        LazyCommand("cancel", "ftkit.cli.jobs", "Cancel a run, or all runs of a sweep."),
        LazyCommand("rm", "ftkit.cli.run_files", "Remove runs, or what nothing uses."),
    ),
    "Models and data": (
        LazyCommand("data", "ftkit.cli.groups", "Inspect and check training data.", "data"),
        LazyCommand("eval", "ftkit.cli.eval", "Evaluate a model before and after training."),
        LazyCommand("generate", "ftkit.cli.chat", "Generate completions for prompts, as JSON Lines."),
        LazyCommand("serve", "ftkit.cli.chat", "Serve a trained model with vLLM, as a Slurm job."),
        LazyCommand("verify", "ftkit.cli.export", "Verify an imported image, or an export."),
    ),
    "Images": (
        LazyCommand("images", "ftkit.cli.groups", "List images; pin their packages.", "images"),
        LazyCommand("build", "ftkit.cli.build", "Build an image."),
        LazyCommand("push", "ftkit.cli.build", "Push an image to a registry."),
        LazyCommand("import", "ftkit.cli.build", "Import an image as one file for a cluster."),
    ),
    "Machines": (
        LazyCommand("doctor", "ftkit.cli.machine", "Check the login node, and GPUs and networks of nodes."),
        LazyCommand("cluster", "ftkit.cli.groups", "List, connect to, create, and remove clusters.", "cluster"),
        LazyCommand("config", "ftkit.cli.groups", "Show settings and recipes; set up editors and shells.", "config"),
    ),
}
RENAMED = {
    "bundle": "runs bundle",
    "checkpoints": "runs checkpoints",
    "clusters": "cluster list",
    "completion": "config completion",
    "gc": "rm --unused",
    "lock": "images lock",
    "prune": "rm --unused",
    "recipe": "images definition",
    "recipes": "config recipes",
    "remote": "cluster connect",
    "schema": "config schema",
    "sync": "runs sync",
    "top": "runs top",
    "verify-export": "verify",
}
"""Former names of commands, and what to type now."""


VARIABLES = {
    "FTKIT_CLUSTER": "Cluster profile, like --cluster.",
    "FTKIT_IMAGE": "Training image, like --image.",
    "FTKIT_REGISTRY": "Image registry, like --registry.",
    "FTKIT_WORKSPACE": "Folder of runs, data and images.",
    "FTKIT_DEBUG": "1: print the traceback of an error.",
    "HF_TOKEN": "Token of the Hugging Face Hub, for gated models.",
    "NO_COLOR, FORCE_COLOR": "Never, or always, print in color.",
}


class _TopGroup(LazyGroup):
    """Prints errors, and adds environment variables and exit codes to the help."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print its error here, where the output options are known."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:  # noqa: BLE001 - reported
            return ctx.exit(_report(error, ctx.obj))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for a former name, say what to type now."""
        if args[0] in RENAMED and not ctx.resilient_parsing:
            raise click.UsageError(f"'{args[0]}' is now 'ftkit {RENAMED[args[0]]}'", ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the environment variables and the exit codes."""
        del ctx
        for title, rows in (("Environment", VARIABLES), ("Exit codes", EXIT_CODES)):
            with formatter.section(title):
                formatter.write_dl([(str(name), meaning) for name, meaning in rows.items()])


@click.group(cls=_TopGroup, sections=_SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.option("--cluster", metavar="NAME", help="Cluster profile, before the command's name. [env var: FTKIT_CLUSTER]")
def cli(*, cluster: str | None) -> None:
    """Fine-tune language models on Slurm GPU clusters, in versioned containers.

    Start with: ftkit run demo
    """
    del cluster  # read by `ftkit.cli.commands.current_context`
    if sys.platform != "linux":
        raise PrerequisiteError(
            f"ftkit runs on Linux, and this is {sys.platform}",
            meaning="it starts containers and Slurm jobs, and follows processes in /proc",
            fix="use a Linux container or virtual machine (on Windows: WSL 2), or the cluster's login node",
        )


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    # Modules and schemas stay alive: scanning them takes 3% of a dry run, and 10% when the interpreter exits.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    # Otherwise pydantic reads the metadata of every installed package to look for plugins; ftkit uses none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Of the threads in which torch computes on CPUs, as in job scripts; libgomp reads it when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    open_standard_streams()
    set_home(os.environ)
    if COMPLETE_VARIABLE in os.environ:
        cli.main(words, prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE)
    try:
        load_dotenv(Context.here().project, os.environ)
        with process.exit_on_termination():
            code = _invoke(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - reported
        return _report(error, words)
    return code


def _report(error: Exception, words: list[str]) -> int:
    """Print an error and return its exit code; with FTKIT_DEBUG, raise it."""
    if isinstance(error, click.ClickException):
        _print_usage_error(error)
        return error.exit_code
    if os.environ.get("FTKIT_DEBUG", "") not in ("", "0"):
        raise error
    error = as_user_error(error)
    if isinstance(error, ExceptionGroup) and all(isinstance(each, FtkitError) for each in error.exceptions):
        first, *_ = [_report(each, words) for each in error.exceptions]
        return first
    if isinstance(error, FtkitError):
        _print_error(error)
        return error.exit_code
    _print_bug(error, words)
    return 1


def _invoke(words: list[str]) -> int:
    """Run the command; unlike click's own `main`, let every exception through."""
    try:
        with cli.make_context(PROGRAM, words, obj=words) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0


def _print_usage_error(error: click.ClickException) -> None:
    if not isinstance(error, click.UsageError) or error.ctx is None or isinstance(error, NoArgsIsHelpError):
        error.show()
        return
    _write(f"error: {error.format_message()}")
    _write(error.ctx.get_usage().replace("Usage:", "usage:", 1), indent="  ")
    _write(f"see '{error.ctx.command_path} --help'", indent="  ")


def _print_error(error: FtkitError) -> None:
    _write(f"error: {error.what}")
    problems = error.problems if isinstance(error, ConfigError) else []
    for problem in problems:
        _write(str(problem), indent="  - ")
    for part in (error.meaning, error.fix):
        if part:
            _write(part, indent="  ")


def _print_bug(error: Exception, words: list[str]) -> None:
    """Report a bug in ftkit, and keep the traceback for the bug report."""
    _write(f"error: a bug in ftkit: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    report = _write_crash_report("".join(traceback.format_exception(error)), words)
    if report:
        _write(f"please report it with the traceback in {report}", indent="  ")
    _write("set FTKIT_DEBUG=1 to print the traceback", indent="  ")


def _write_crash_report(text: str, words: list[str]) -> Path | None:
    """Write a report to the XDG state folder and return its path; None if it can't be written."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    path = state / "ftkit" / f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    head = (
        f"ftkit {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: ftkit {shlex.join(redact_command(words, os.environ))}",
        f"interpreter: {sys.executable}",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*head, "", redact(text, os.environ)]), encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    return path


def _write(text: str, indent: str = "") -> None:
    """Write to stderr, escaped, without secrets: wrapped at words on a terminal, whole lines to a log or a pipe."""
    colored = in_color(sys.stderr)
    for number, line in enumerate(printable(redact(text, os.environ)).splitlines() or [""]):
        lead = indent if number == 0 else " " * len(indent)
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            line = textwrap.fill(  # noqa: PLW2901
                line,
                width,
                initial_indent=lead,
                subsequent_indent=" " * max(2, len(indent)),
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            line = lead + line  # noqa: PLW2901
        if colored and number == 0 and line.startswith("error:"):
            line = click.style("error:", fg="red", bold=True) + line.removeprefix("error:")  # noqa: PLW2901
        click.echo(line, file=styled(sys.stderr), color=colored)
