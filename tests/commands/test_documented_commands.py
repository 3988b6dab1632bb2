"""Every command in the README, docs and `--help` works as written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from ftkit.cli.commands import LazyGroup
from ftkit.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from conftest import Machine

CHECKOUT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
    # Generated: the examples of the commands' help are tested below, and mistakes in test_mistakes.py.
    if page.name not in ("cli.md", "mistakes.md")
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Its file name is in its first line (`# recipes/mine.yaml`) or in the sentence above ("`chats.jsonl` has …:").
    """

    kind: str
    text: str
    file: str | None


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text()
    for fence in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        indent, kind, body = fence.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        above = re.search(r"^ *`([\w./-]+\.\w+)`[^\n]*:\n\n\Z", text[: fence.start()], re.MULTILINE)
        name = re.match(r"# (\S+\.yaml)\n", body) or above
        found.append(Block(kind, body, name[1] if name else None))
    return found


def commands(block: Block) -> list[str]:
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]


DEMO = "ftkit run demo"
STOPPED = ("echo stopped >$MACHINE/outcome", "! ftkit run demo", "echo completed >$MACHINE/outcome")

EXPORT = (
    "flock $EXPORTED sh -c '[ -d $EXPORTED/data ] || $REAL_PYTHON $CHECKOUT/tests/commands/write_export.py $EXPORTED'",
    "cp -r $EXPORTED/. $MACHINE",
)
"""Files that the stand-in for the trainer leaves as its export."""
TRAINED = (*EXPORT, DEMO)
PROMPTS = """echo '{"prompt": "How many pets are there?"}' >prompts.jsonl"""

FEW_ROWS = (
    "sed 's/num_train: .*/num_train: 300/' $CHECKOUT/examples/demo.yaml >recipes/demo.yaml; "
    "cp -r $CHECKOUT/examples/tasks recipes/"
)

CHATS = """echo '{"prompt": "How many pets?", "completion": "SELECT 2"}' | tee chats.jsonl >data/more.jsonl"""
LOGIN_NODE = ("touch $MACHINE/is-login-node",)

BEFORE_PAGE = {
    "README": (*EXPORT, "cp -rn $MACHINE/export ~/model; mkdir -p data", CHATS, "cp chats.jsonl ~"),
    "distill": (*TRAINED, PROMPTS, "mkdir -p data", CHATS),
    "train-on-preferences": EXPORT,
    "use-the-model": EXPORT,
    "when-something-fails": STOPPED,
    "on-a-cluster": (*LOGIN_NODE, "rm ftkit.yaml"),
}
"""State before the commands of a page run."""

WITH_COMMANDS = [page for page in PAGES if any(commands(block) for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_in_blocks_that_are_tested(page: Path) -> None:
    for block in blocks(page):
        assert bool(commands(block)) == (block.kind == "console"), block.text
        if block.kind != "console":
            assert not re.search(r"^(ftkit|pip|git|scripts/|\./scripts)\b", block.text, re.MULTILINE), block.text


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_written(page: Path, machine: Machine) -> None:
    machine.environment["PATH"] += f":{machine.project}/.venv/bin"
    done = machine.type("python3 -m venv .venv")
    assert done.returncode == 0, done.stderr
    if "git clone" in page.read_text():
        machine.environment["FTKIT_WORKSPACE"] = str(machine.root / "shared")  # shared by the demo and later commands
    else:
        machine.write("ftkit.yaml", "workspace: /shared/me/ftkit\nregistry: registry.example.com/team\n")
    before = machine.type(*BEFORE_PAGE.get(page.stem, ()))
    assert before.returncode == 0, before.stderr
    for block in blocks(page):
        if block.file:
            machine.write(block.file, block.text)
        if block.kind == "console":
            done = machine.type(*commands(block))
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr


# --- The examples of --help ------------------------------------------------------------------------

IMPORTED = ("ftkit build olmo3:25.02", "ftkit import olmo3:25.02")
ON_SLURM = (*IMPORTED, "ftkit run --image olmo3:25.02 --nodes 2 --no-follow")
BUSY = (
    "until rm -rf /shared/runs; do sleep 0.1; done",
    *IMPORTED,
    "touch $MACHINE/is-busy",
    ON_SLURM[-1],
    "ftkit run demo --no-follow",
)

FOREIGN = (
    "echo '{base_model: a/b, datasets: [{path: a/c, type: alpaca}], sequence_len: 512}' >axolotl.yaml",
    "echo 'accelerate launch sft.py --model_name_or_path a/b --dataset_name a/c --max_steps 9' >train.sh",
    "echo '{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, num_processes: 8}' >accelerate.yaml",
    "echo '{model_name_or_path: a/b, stage: sft, finetuning_type: lora, dataset: d}' >llama3_lora_sft.yaml",
    """echo '{"d": {"hf_hub_url": "a/c"}}' >dataset_info.json""",
    """cell="model, _ = FastLanguageModel.from_pretrained('a/b', max_seq_length=512)" """,
    """printf '{"cells": [{"cell_type": "code", "source": ["%s"]}]}' "$cell" >notebook.ipynb""",
)
"""Configurations of other tools."""

BEFORE: dict[str, tuple[str, ...]] = {
    "convert": FOREIGN,
    "run": (*IMPORTED, "mkdir mylib", "touch train.py mylib/__init__.py"),
    "data": ("mkdir recipes", FEW_ROWS),
    "doctor": (*LOGIN_NODE, *IMPORTED, "echo 'cluster: mycluster' >>ftkit.yaml"),
    "status": (*ON_SLURM, DEMO),
    "compare": (DEMO, "ftkit run demo --name other"),
    "report": (DEMO, "ftkit run demo --name other"),
    "rerun": (DEMO,),
    "runs": (DEMO,),
    "runs bundle": (DEMO,),
    "serve": (
        *EXPORT,
        "ftkit build vllm:0.33",
        "ftkit import vllm:0.33",
        *IMPORTED,
        f"{ON_SLURM[-1]} --name demo",
        "cp -r $MACHINE/export /shared/runs/demo*/export",
    ),
    "runs checkpoints": (DEMO,),
    "runs top": (DEMO,),
    "rm": (DEMO,),
    "logs": (DEMO,),
    "export": (DEMO,),
    "runs sync": (DEMO,),
    "push": IMPORTED[:1],
    "import": IMPORTED[:1],
    "verify": (*IMPORTED, "mkdir my-model"),
    "chat": TRAINED,
    "generate": (*TRAINED, PROMPTS),
    "eval": (*TRAINED, PROMPTS),
}
"""Files that a command needs."""

BEFORE_EACH = {
    "init": (*EXPORT, "rm -rf ftkit.yaml clusters *.yaml", "cp -rn $MACHINE/export model; mkdir -p data", CHATS),
    "resume": STOPPED,
    "cancel": BUSY,
    "runs list": BUSY,
}
"""The same, where an example uses it up."""

ELSEWHERE = ("cluster", "data")
"""Groups whose commands call providers and ssh, or need data of their own; they have tests of their own."""


def documented(group: LazyGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each command below a group with its examples."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield " ".join((*path, name)), getattr(command, "examples", ())
        if isinstance(command, LazyGroup) and name not in ELSEWHERE:
            yield from documented(command, (*path, name))


COMMANDS = dict(documented(cli))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_a_commands_help_work_as_written(command: str, machine: Machine) -> None:
    machine.write("ftkit.yaml", "workspace: /shared\nregistry: registry.example.com/team\n")
    machine.write("clusters/mycluster.yaml", "name: mycluster\nextends: slurm\ndescription: ours\n")
    machine.write("my-recipe.yaml", "name: mine\nextends: olmo3-7b-full\n")
    before = machine.type(*BEFORE.get(command, BEFORE.get(command.split(maxsplit=1)[0], ())))
    assert before.returncode == 0, before.stderr
    for example in COMMANDS[command]:
        before = machine.type(*BEFORE_EACH.get(command, ()))
        assert before.returncode == 0, before.stderr
        # zsh code can't be evaluated by bash, so only its presence is checked.
        done = machine.type(*["eval() { [[ $1 == *compdef* ]]; }"] * ("zsh" in example), example)
        assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
