"""What only a process of its own shows: which modules a command imports, and streams that are closed or full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ftkit.cli import groups as groups_of_commands
from ftkit.cli.main import _SECTIONS

if TYPE_CHECKING:
    from pathlib import Path

LIST_MODULES = """
import atexit, gc, json, os, sys
from ftkit.cli.main import main
atexit.register(lambda: print(json.dumps([gc.get_freeze_count(), *sorted(sys.modules)]), file=sys.stderr))
main(sys.argv[1:])
"""
INTERRUPT = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
import ftkit.__main__
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
# Libraries that are slow to import. Startup and the completion of commands' names need none of them.
HEAVY = {"rich", "pydantic", "ruamel.yaml", "jinja2"}
# Libraries that take seconds, or connect to other machines: only a command that runs imports them.
HEAVIEST = {"accelerate", "datasets", "docker", "fsspec", "huggingface_hub", "numpy", "torch", "transformers"}
DRY_RUN = ("run", "--image", "olmo3:25.02", "--nodes", "2", "--cluster", "a4-highgpu-8g", "--dry-run")


@pytest.mark.parametrize(
    ("words", "completes", "expected"),
    [
        (("--help",), "", set()),
        (("--version",), "", set()),
        ((), "ftkit ru", set()),
        ((), "ftkit runs ", set()),
        ((), "ftkit status mi", set()),
        (DRY_RUN, "", HEAVY),
    ],
)
def test_a_command_imports_only_the_heavy_modules_that_it_needs(
    words: tuple[str, ...], completes: str, expected: set[str], tmp_path: Path
) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "FTKIT_WORKSPACE": str(tmp_path)}
    if completes:
        environment |= {"_FTKIT_COMPLETE": "bash_complete", "COMP_WORDS": completes}
    arguments = [sys.executable, "-c", LIST_MODULES, *words]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    num_frozen, *modules = json.loads(done.stderr.splitlines()[-1])
    assert (HEAVY | HEAVIEST) & set(modules) == expected
    assert num_frozen > len(modules), "the interpreter would scan all of them when it exits"


def test_no_module_of_commands_imports_what_takes_seconds() -> None:
    """The shell completes the options and arguments of a command by importing the module of its group."""
    groups = [
        getattr(groups_of_commands, f"{name}_command") for name in ("runs", "images", "data", "config", "cluster")
    ]
    commands = [command for section in _SECTIONS.values() for command in section]
    nested = [lazy for group in groups for section in group.sections.values() for lazy in section]
    modules = sorted({lazy.module for lazy in (*commands, *nested)})
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVIEST & set(done.stdout.split()) == set()


def test_importing_the_specs_builds_no_validator() -> None:
    code = (
        "import ftkit.planning.planner; from ftkit.spec import Spec\n"
        "def below(spec): return [one for child in spec.__subclasses__() for one in (child, *below(child))]\n"
        "print([spec.__name__ for spec in below(Spec) if spec.__pydantic_complete__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", ["click", "none"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPT, module], capture_output=True, text=True, check=False)
    expected = (-signal.SIGINT, "", "") if module == "click" else (0, "True\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    script = f'set -o pipefail; "{sys.executable}" -m ftkit config schema recipe | head -c 1 >/dev/null'
    environment = {**os.environ, "FTKIT_WORKSPACE": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_are_not_an_error_and_files_do_not_get_their_descriptors(tmp_path: Path) -> None:
    code = "import sys; from ftkit.cli.main import main; sys.exit(main() or open('/dev/null').fileno() <= 2)"
    script = f'exec "{sys.executable}" -c "{code}" cluster list <&- >&- 2>&-'
    environment = {**os.environ, "FTKIT_WORKSPACE": str(tmp_path)}
    assert subprocess.run(["bash", "-c", script], env=environment, check=False).returncode == 0


def test_messages_that_stderr_can_not_take_are_dropped_and_the_command_completes(tmp_path: Path) -> None:
    environment = {**os.environ, "FTKIT_WORKSPACE": str(tmp_path)}
    command = f'"{sys.executable}" -m ftkit run demo --dry-run --cluster slurm --image x.sqsh'
    for redirected in ("2>/dev/full", "2> >(exec true)", "2</dev/null"):
        script = f"exec {command} {redirected}"
        done = subprocess.run(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, redirected
        assert done.stdout.startswith("#!/"), redirected


def test_completion_and_help_of_run_import_no_library_for_specs_and_no_part_of_a_launch() -> None:
    code = "import sys; import ftkit.cli.run; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in found if name.split(".")[0] in {"pydantic", "jinja2"} or "ftkit.launch." in name}
