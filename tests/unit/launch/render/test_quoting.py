"""Any value stays one word in bash, sbatch and pyxis."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from ftkit.errors import ConfigError
from ftkit.launch import templates
from ftkit.launch.render import render_job
from ftkit.launch.templates import quote_directive, quote_log_path, quote_word

if TYPE_CHECKING:
    from job_scripts import Machine, PlanMaker

HOSTILE = """it's "q" $(touch pwned) `touch pwned`;& | <x> *? ~ !a {b} #c %j ünï"""

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
LINES = st.text(st.characters(codec="utf-8", exclude_characters="\x7f", min_codepoint=32))


@given(st.lists(WORDS, min_size=1, max_size=20))
@settings(max_examples=30)
def test_bash_reads_quoted_words_unchanged(words: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(map(quote_word, words))
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode("utf-8").split("\0")[:-1] == words


@given(LINES)
def test_sbatch_reads_a_quoted_value_unchanged(text: str) -> None:
    assert _read_by_old_slurm(quote_directive(text)) == text
    assert _read_by_new_slurm(quote_directive(text)) == text


@given(LINES.filter(lambda text: "\\" not in text))
def test_slurm_reads_a_log_path_unchanged(text: str) -> None:
    assert _read_by_new_slurm(quote_log_path(text)).replace("%%", "%") == text


def _read_by_old_slurm(line: str) -> str:
    """Double quotes group; a backslash escapes the next character; `#` ends the line even in quotes."""
    result, quoted, escaped = "", False, False
    for character in line:
        if not quoted and character.isspace() and character.isascii():
            break
        if escaped:
            result, escaped = result + character, False
        elif character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif character == "#":
            break
        else:
            result += character
    return result


def _read_by_new_slurm(line: str) -> str:
    """Single quotes group as well; either kind of quote is literal inside the other."""
    result, quote, escaped = "", "", False
    for character in line:
        if not quote and character.isspace() and character.isascii():
            break
        if escaped:
            result, escaped = result + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            quote, result = ("", result) if character == quote else (quote, result + character)
        elif character in "\"'":
            quote = character
        elif character == "#":
            break
        else:
            result += character
    return result


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "\x7f", "\x1b[0m"])
def test_control_characters_in_directives_are_rejected(bad: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        quote_directive(bad)


def test_a_nul_byte_is_rejected() -> None:
    with pytest.raises(ConfigError, match="NUL byte"):
        quote_word("a\0b")


def test_a_backslash_in_a_log_path_is_rejected_because_slurm_drops_it() -> None:
    with pytest.raises(ConfigError, match="backslash"):
        quote_log_path("/a\\b/job.log")


def test_a_template_without_the_quoting_filter_is_rejected() -> None:
    with pytest.raises(TemplateError, match="without a filter"):
        templates._environment(None).from_string("{{ value }}").render(value="x")


def test_every_line_of_a_value_in_a_comment_stays_a_comment() -> None:
    assert templates.show_in_comment("a\nb\r\nc") == "a b c"


@pytest.mark.parametrize("cluster", ["slurm", "dev", "local"])
def test_hostile_values_stay_one_word_when_the_script_runs(
    cluster: str, make_plan: PlanMaker, machine: Machine
) -> None:
    make_plan.workspace = machine.root / HOSTILE
    make_plan.python = _hostile_path_to_python(machine)
    value = HOSTILE + "\\\n-x\n$(touch pwned)"
    plan = make_plan(cluster, 1, environment={"VALUE": value}, node_local_dir=machine.local_disk)

    code, said = machine.run(plan)

    assert (code, list(machine.root.rglob("pwned"))) == (0, []), said
    prepare, train = machine.calls("python3")
    assert prepare.words == ["-m", "ftkit.data", str(plan.layout.plan)]
    assert train.words[-4:] == ["-m", "ftkit.train", str(plan.layout.plan), "0"]
    assert train.environment["VALUE"] == prepare.environment["VALUE"] == value
    assert train.environment["HF_HOME"] == f"{plan.workspace}/huggingface"
    assert machine.exit_code(plan) == 0


def _hostile_path_to_python(machine: Machine) -> str:
    folder = machine.root / f"bin {HOSTILE}"
    folder.symlink_to(machine.root / "bin")
    return f"{folder}/python3"


def test_hostile_values_stay_one_word_for_pyxis(make_plan: PlanMaker, machine: Machine) -> None:
    make_plan.workspace = machine.root / HOSTILE
    option = f"--comment={HOSTILE}\n-x"
    plan = make_plan("slurm", mounts=("/$(x) y",), srun_options=(option,), node_local_dir=machine.local_disk)

    machine.run(plan)

    mounts = [f"{folder}:{folder}" for folder in ("/$(x) y", plan.workspace, machine.local_disk)]
    for call in machine.calls("srun"):
        assert f"--container-image={plan.container_image}" in call.words
        assert f"--container-workdir={plan.layout.root}" in call.words
        assert f"--container-mounts={','.join(mounts)}" in call.words
        assert option in call.words


def test_hostile_values_stay_one_word_in_directives(make_plan: PlanMaker) -> None:
    make_plan.workspace = f"/w/{HOSTILE}"
    plan = make_plan("slurm", partition=HOSTILE, account="--x #y\\")

    lines = [line.removeprefix("#SBATCH ") for line in render_job(plan).splitlines() if line.startswith("#S")]

    read = [_read_by_new_slurm(line) for line in lines]
    assert f"--partition={HOSTILE}" in read
    assert "--account=--x #y\\" in read
    assert f"--output={plan.layout.job_log}".replace("%", "%%") in read
