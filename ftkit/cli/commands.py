"""Click groups and commands: imported on first use, listed in sections, with examples in their help."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from ftkit.cli.output import OUTPUT_OPTIONS
from ftkit.config.context import Context
from ftkit.errors import closest

SERVED = "FTKIT_FORWARDED"
"""Variable that is set for a forwarded command, so that it is not forwarded again."""
SUBMITTING = ("run", "resume", "rerun")  # commands that submit a job, and then follow it
_SHARED_HELP = {
    "{RUN}": "RUN is a name (the newest run with that name), an id or the beginning or end of an id, a Slurm job id, "
    "or 'last'. SWEEP@best is the best run of a sweep by evaluation.best, or else by validation loss.",
    "{MODEL}": "RUN selects a run as in other commands: its best step if the recipe sets evaluation.best, else the "
    "newest step with an export or a checkpoint. RUN@STEP is the model after a step, RUN@best the best one (else by "
    "validation loss), RUN@0 the model before training. MODEL is a folder (./model) or a hub id (org/model).",
}
"""Texts in the help of several commands, by their placeholder in docstrings."""


class ExamplesCommand(click.Command):
    """A command with output options, which may precede its name, and examples at the end of its help."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        for placeholder, text in _SHARED_HELP.items():
            self.help = (self.help or "").replace(placeholder, text)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own, added = len(self.params), super().get_params(ctx)
        return [*added[:own], *OUTPUT_OPTIONS, *added[own:]]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


@add_completion_class
class BashCompletion(BashComplete):
    """Completion for bash, which also splits words at `=`, `@` and `:`, and expects only the last part."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        breaks = os.environ.get("COMP_WORDBREAKS", "")
        starts = [incomplete.rfind(char) + (char != "@") for char in breaks]  # readline keeps an `@` in the word
        self._before = incomplete[: max(0, *starts, 0)]
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value.removeprefix(self._before)}"


def command(
    name: str, *examples: str, cls: type[ExamplesCommand] = ExamplesCommand
) -> Callable[[Callable[..., object]], ExamplesCommand]:
    return click.command(name, cls=cls, examples=examples)


class LazyCommand(NamedTuple):
    """A command that is not imported yet: the function NAME_command of a module."""

    name: str
    module: str
    help: str


class LazyGroup(ExamplesCommand, click.Group):
    """A group that lists its commands in sections without importing them.

    `default` runs if no word is a command; `renamed` maps names of commands in other tools to the words to type.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[LazyCommand]], default: str = "",
        renamed: Mapping[str, str] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self.default = default
        self.sections = sections
        self.renamed = renamed or {}
        self._by_name = {command.name: command for section in sections.values() for command in section}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = (*self._by_name, "-h", "--help")
        if self.default and not ctx.resilient_parsing and (not args or args[0] not in names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        lazy = self._by_name.get(cmd_name)
        if lazy is None:
            return None
        command: click.Command = getattr(importlib.import_module(lazy.module), f"{lazy.name}_command")
        command.short_help = lazy.help
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing them."""
        names = [CompletionItem(name, help=lazy.help) for name, lazy in self._by_name.items()]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(item for item in names if item.value.startswith(incomplete)), *options]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for a name from another tool, show the command to type; else suggest the closest name."""
        name = args[0]
        if name not in self._by_name and not name.startswith("-") and not ctx.resilient_parsing:
            if name in self.renamed:
                raise click.UsageError(f"No such command '{name}': use 'ftkit {self.renamed[name]}'.", ctx)
            close = closest(name, self._by_name, 0.5)
            hint = f" Did you mean '{close}'?" if close else ""
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(command.name, command.help) for command in commands])


def current_context() -> Context:
    """Return the context of this call, with the cluster of `ftkit --cluster NAME COMMAND`."""
    here, called = Context.here(), click.get_current_context(silent=True)
    root = called.find_root() if called else None
    cluster = root.params.get("cluster") if root and isinstance(root.command, click.Group) else None
    return replace(here, cluster=cluster)
