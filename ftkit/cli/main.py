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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from ftkit import __version__, process
from ftkit.cli.commands import LazyCommand, LazyGroup
from ftkit.cli.output import in_color, open_standard_streams, styled
from ftkit.cli.terminal.format import printable
from ftkit.config.context import Context, load_dotenv, set_home, state_folder
from ftkit.errors import EXIT_CODES, ConfigError, FtkitError, PrerequisiteError, as_user_error, redact, redact_command

PROGRAM = "ftkit"
COMPLETE_VARIABLE = "_FTKIT_COMPLETE"
INTERRUPTED = 130

_SECTIONS = {
    "Start": (
        LazyCommand("init", "ftkit.cli.init", "Set up a project, or write a recipe for a model and data."),
        LazyCommand("convert", "ftkit.cli.convert", "Write a recipe from another tool's configuration."),
        LazyCommand("plan", "ftkit.cli.run", "Preview a run and check that it fits."),
        LazyCommand("run", "ftkit.cli.run", "Plan a run, submit it, and follow it."),
        LazyCommand("status", "ftkit.cli.status", "Show the state and results of a run."),
        LazyCommand("chat", "ftkit.cli.chat", "Try a trained model yourself, turn by turn."),
        LazyCommand("export", "ftkit.cli.export", "Export a checkpoint for transformers, peft or vLLM."),
    ),
    "Runs": (
        LazyCommand("runs", "ftkit.cli.groups", "List runs; show their checkpoints and GPUs; copy them."),
        LazyCommand("logs", "ftkit.cli.jobs", "Print the log of a run."),
        LazyCommand("report", "ftkit.cli.report", "Write report.html for a run, or a comparison of several."),
        LazyCommand("compare", "ftkit.cli.report", "Compare the settings and results of runs."),
        LazyCommand("resume", "ftkit.cli.resume", "Continue a run from its newest checkpoint."),
        LazyCommand("rerun", "ftkit.cli.resume", "Repeat a run, and compare its losses with the original's."),
        LazyCommand("cancel", "ftkit.cli.jobs", "Cancel a run, or all runs of a sweep."),
        LazyCommand("rm", "ftkit.cli.run_files", "Remove runs, or what nothing uses."),
    ),
    "Models and data": (
        LazyCommand("data", "ftkit.cli.groups", "Inspect and check training data."),
        LazyCommand("eval", "ftkit.cli.eval", "Evaluate a model before and after training."),
        LazyCommand("generate", "ftkit.cli.chat", "Complete a file of prompts, as JSON Lines."),
        LazyCommand("serve", "ftkit.cli.chat", "Serve a trained model to other programs, with vLLM."),
        LazyCommand("verify", "ftkit.cli.export", "Verify an imported image, or an export."),
    ),
    "Images": (
        LazyCommand("images", "ftkit.cli.groups", "List images; pin their packages."),
        LazyCommand("build", "ftkit.cli.images", "Build an image."),
        LazyCommand("push", "ftkit.cli.images", "Push an image to a registry."),
        LazyCommand("import", "ftkit.cli.images", "Import an image as one file for a cluster."),
    ),
    "Machines": (
        LazyCommand("doctor", "ftkit.cli.doctor", "Check the login node, and GPUs and networks of nodes."),
        LazyCommand("cluster", "ftkit.cli.groups", "List, connect to, create, and remove clusters."),
        LazyCommand("config", "ftkit.cli.groups", "Show settings and recipes; set up editors and shells."),
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
    **dict.fromkeys(("finetune", "launch", "sft", "sweep", "train", "tune"), "run"),
    **dict.fromkeys(("list", "ls", "ps"), "runs list"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("info", "show"), "status"),
    **dict.fromkeys(("kill", "stop"), "cancel"),
    **dict.fromkeys(("prepare", "preprocess", "stage"), "data prepare"),
    "evaluate": "eval",
    "inference": "generate",
    "merge": "export --merge",
    "validate": "plan",
}
"""Former names of commands, and names in other tools, with what to type."""
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

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, rows in (("Environment", VARIABLES), ("Exit codes", EXIT_CODES)):
            with formatter.section(title):
                formatter.write_dl([(str(name), meaning) for name, meaning in rows.items()])


@click.group(
    cls=_TopGroup, sections=_SECTIONS, renamed=RENAMED, context_settings={"help_option_names": ["-h", "--help"]}
)
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
    received: list[int] = []
    try:
        load_dotenv(Context.here().project, os.environ)
        # Unlike click's own `main`, let every exception through.
        with process.exit_on_termination() as received, cli.make_context(PROGRAM, words, obj=words) as context:
            cli.invoke(context)
        sys.stdout.flush()
        code = 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        code = 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - reported
        code = _report(error, words)
    except BaseException:  # SystemExit; torch's CheckpointException, whose cause may be a signal
        if not received:
            raise
        code = 128 + received[-1]
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk: otherwise the interpreter writes what is left when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _report(error: Exception, words: list[str]) -> int:
    """Print an error and return its exit code; with FTKIT_DEBUG, raise it."""
    if isinstance(error, click.UsageError) and error.ctx and not isinstance(error, NoArgsIsHelpError):
        _write(f"error: {error.format_message()}")
        if isinstance(error, click.NoSuchOption) and any(each.name == "words" for each in error.ctx.command.params):
            from ftkit.config.problems import key_here
            from ftkit.config.recipe import RecipeSpec

            if here := key_here(error.option_name.lstrip("-").replace("-", "_"), RecipeSpec):
                _write(f"keys of a recipe are given as KEY=VALUE, without dashes: here it is {here}", indent="  ")
        _write(error.ctx.get_usage().replace("Usage:", "usage:", 1), indent="  ")
        _write(f"see '{error.ctx.command_path} --help'", indent="  ")
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if os.environ.get("FTKIT_DEBUG", "") not in ("", "0"):
        raise error
    error = as_user_error(error)
    if isinstance(error, ExceptionGroup) and all(isinstance(each, FtkitError) for each in error.exceptions):
        first, *_ = [_report(each, words) for each in error.exceptions]
        return first
    if not isinstance(error, FtkitError):
        _report_bug(error, words)
        return 1
    _write(f"error: {error.what}")
    for problem in error.problems if isinstance(error, ConfigError) else ():
        _write(str(problem), indent="  - ")
    for part in filter(None, (error.meaning, error.fix)):
        _write(part, indent="  ")
    return error.exit_code


def _report_bug(error: Exception, words: list[str]) -> None:
    """Report a bug in ftkit, and keep the traceback for the bug report in the XDG state folder."""
    _write(f"error: a bug in ftkit: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    path = state_folder(os.environ) / f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    text = (
        f"ftkit {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"command: ftkit {shlex.join(redact_command(words, os.environ))}\ninterpreter: {sys.executable}\n\n"
        f"{redact(''.join(traceback.format_exception(error)), os.environ)}"
    )
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        _write(f"please report it with the traceback in {path}", indent="  ")
    _write("set FTKIT_DEBUG=1 to print the traceback", indent="  ")


def _write(text: str, indent: str = "") -> None:
    """Write to stderr, escaped, without secrets: wrapped at words on a terminal, whole lines to a log or a pipe."""
    colored = in_color(sys.stderr)
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * max(2, len(indent)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number, line in enumerate(printable(redact(text, os.environ)).splitlines() or [""]):
        wrapper.initial_indent = " " * len(indent) if number else indent
        shown = wrapper.fill(line) if sys.stderr.isatty() else wrapper.initial_indent + line
        if colored and number == 0 and shown.startswith("error:"):
            shown = click.style("error:", fg="red", bold=True) + shown.removeprefix("error:")
        click.echo(shown, file=styled(sys.stderr), color=colored)
