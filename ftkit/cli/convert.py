"""`ftkit convert`: a recipe from the configuration of another tool."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import json_option, number_option, output_option
from ftkit.cli.commands import command
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.convert import convert, detect_tool
from ftkit.config.foreign_files import read_foreign
from ftkit.config.other_tools import LAUNCHERS, TOOLS, read_tool
from ftkit.config.yaml_files import to_yaml
from ftkit.errors import ConfigError, Problem
from ftkit.files import write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.convert import Converted
    from ftkit.config.convert_rows import Row
    from ftkit.config.foreign_files import Settings

_LONGEST_VALUE = 60
_DATASET_INFO = "dataset_info.json"


@command(
    "convert",
    "ftkit convert axolotl.yaml -o recipes/mine.yaml",
    "ftkit convert train.sh accelerate.yaml    # several files of one configuration",
    "ftkit convert llama3_lora_sft.yaml dataset_info.json --gpus 8",
    "ftkit convert notebook.ipynb --json | jq '.rows[] | {key, became, note}'",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--tool", type=click.Choice(TOOLS), help="Tool of the configuration; default: detected from its keys.")
@number_option("--gpus", about="Number of GPUs, if the files do not say it; default: 1.")
@number_option("--mean-length", about="Mean tokens of a document, to convert a batch of documents to packs.")
@output_option
@click.option("--yes", is_flag=True, help="Replace the file of --output if it exists.")
@json_option
def convert_command(  # noqa: PLR0913 - its options
    files: tuple[Path, ...], *, tool: str | None, gpus: int | None, mean_length: int | None, output: Path | None,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a recipe from the configuration of Axolotl, LLaMA-Factory, TRL, torchtune, Unsloth, or NeMo AutoModel.

    FILE is a YAML file, a shell script, a Python script, or a notebook; files of accelerate and DeepSpeed may follow
    it. LLaMA-Factory's dataset_info.json is found in dataset_dir or beside FILE, or may follow it. No code is run. The
    recipe is written to stdout or --output, and to stderr what each key became, or why there is nothing for it in
    ftkit.
    """
    terminal = Terminal()
    if output is not None and output.exists() and not yes:
        fix = "Replace it with --yes."
        raise ConfigError([Problem(short_path(output), "", "already exists and was not changed.", fix)])
    calls = {name: names for each in (*TOOLS, LAUNCHERS) for name, names in read_tool(each).calls.items()}
    parts = {str(path): read_foreign(path, calls) for path in files}
    if info := _find_dataset_info(files, parts):
        parts[str(info)] = read_foreign(info, calls)
        terminal.say(f"read {short_path(info)} too")
    name = (output or files[0]).stem
    converted = convert(parts, tool or detect_tool(parts), name, num_gpus=gpus, mean_length=mean_length)
    names = ", ".join(repr(path.name)[1:-1] for path in files)
    text = f"# From {names} ({converted.tool}) by 'ftkit convert'.\n{to_yaml(converted.recipe)}"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(output, text.encode())
    if as_json:
        terminal.json({"tool": converted.tool, "recipe": converted.recipe, "rows": list(map(asdict, converted.rows))})
        return
    _show_rows(converted, terminal)
    if output is None:
        terminal.data(text)
    else:
        terminal.say(f"\nwrote {short_path(output)}; next: ftkit data check {short_path(output)}")


def _find_dataset_info(files: tuple[Path, ...], parts: Mapping[str, Settings]) -> Path | None:
    """Find LLaMA-Factory's list of datasets in its own search path or next to the configuration, unless given."""
    if any(file.name == _DATASET_INFO for file in files) or not any("dataset" in part for part in parts.values()):
        return None
    named = [str(part["dataset_dir"]) for part in parts.values() if part.get("dataset_dir")] or ["data"]
    folders = [parent / name for parent in (Path(), files[0].parent) for name in named]
    found = (folder / _DATASET_INFO for folder in (*folders, files[0].parent))
    return next((path for path in found if path.is_file()), None)


def _show_rows(converted: Converted, terminal: Terminal) -> None:
    """Write the result for each key to stderr: a table of keys with a counterpart, then notes with their keys."""
    found = [(row.key, _value(row), row.became) for row in converted.rows if row.became]
    terminal.table((f"{converted.tool.upper()}…", "VALUE…", "FTKIT…"), found, is_data=False)
    titles = {"changed": "Not quite the same", "none": "Without a counterpart", "unknown": "Unknown"}
    for status, title in {"converted": "How values follow", **titles}.items():
        rows = [row for row in converted.rows if row.status == status and row.note]
        if rows:
            terminal.say(f"\n{title}:")
        for note, same in groupby(sorted(rows, key=lambda row: row.note), key=lambda row: row.note):
            terminal.say(f"{', '.join(f'{row.key}: {_value(row)}' for row in same)}", indent=2)
            terminal.say(note, indent=6)


def _value(row: Row) -> str:
    text = row.value if isinstance(row.value, str) else json.dumps(row.value, ensure_ascii=False)
    text = " ".join(text.split())
    return (text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…") + " (default)" * row.is_default
