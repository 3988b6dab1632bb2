from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import click
import pytest

from ftkit import assets
from ftkit.cli.main import _SECTIONS, RENAMED, cli
from ftkit.cli.output import OUTPUT_OPTIONS
from ftkit.config.request import Settings
from ftkit.errors import EXIT_CODES, FtkitError, NotFoundError, PrerequisiteError
from ftkit.remote.remote_runs import Records
from ftkit.remote.ssh import Login

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import FakePrograms, Result, RunMaker

COMMANDS = [command for section in _SECTIONS.values() for command in section]
NAMES = [command.name for command in COMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_each_commands_help_has_examples_and_fits_80_columns(ftkit: Callable[..., Result], name: str) -> None:
    result = ftkit(name, "--help")
    assert result.code == 0
    assert re.search(rf"^Examples:\n(.*\n)*?.*ftkit .*{name}", result.out, re.MULTILINE)
    assert max(len(line) for line in result.out.splitlines()) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_the_command_list_shows_each_commands_short_help(name: str) -> None:
    command = cli.get_command(cli.make_context("ftkit", [], resilient_parsing=True), name)
    assert command is not None
    assert command.name == name
    assert command.short_help == next(lazy.help for lazy in COMMANDS if lazy.name == name)


def test_the_help_lists_every_exit_code_and_the_variable_of_every_setting(ftkit: Callable[..., Result]) -> None:
    result = ftkit("--help")
    for setting in Settings.model_fields:
        assert re.search(rf"^ +FTKIT_{setting.upper()} +\w", result.out, re.MULTILINE)
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^ +{code} +{re.escape(meaning)}$", result.out, re.MULTILINE)


def test_another_operating_system_than_linux_is_refused_with_what_to_use(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    result = ftkit("plan", "demo")
    assert (result.code, result.out) == (PrerequisiteError.exit_code, "")
    assert "this is darwin" in result.err
    assert ftkit("--version").code == 0


DRY_RUN = ("run", "--image", "olmo3:25.02", "--nodes", "2", "--cluster", "a4-highgpu-8g", "--dry-run")


def test_a_cluster_option_before_the_command_sets_the_settings_but_not_the_environment(
    ftkit: Callable[..., Result],
) -> None:
    result = ftkit("--cluster", "a4-highgpu-8g", "config", "--json")
    assert json.loads(result.out)["settings"]["cluster"] == {"value": "a4-highgpu-8g", "from": "--cluster"}
    assert "FTKIT_CLUSTER" not in os.environ
    assert "--cluster: cluster 'nowhere' not found" in ftkit("--cluster", "nowhere", "plan", "demo").err


def every_command(group: click.Group = cli) -> Iterator[click.Command]:
    ctx = click.Context(group, info_name="ftkit")
    for command in filter(None, (group.get_command(ctx, name) for name in group.list_commands(ctx))):
        yield command
        if isinstance(command, click.Group):
            yield from every_command(command)


def test_every_command_has_the_options_about_output() -> None:
    for command in (cli, *every_command()):
        ctx = click.Context(command)
        assert set(OUTPUT_OPTIONS) <= set(command.get_params(ctx)), command.name
        flags = [flag for parameter in command.get_params(ctx) for flag in (*parameter.opts, *parameter.secondary_opts)]
        assert len(flags) == len(set(flags)), command.name


PLAN = ("plan", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g", "--nodes", "2")


@pytest.mark.parametrize("words", [("-q", *DRY_RUN), (*DRY_RUN, "--quiet"), ("-q", *PLAN)])
def test_quiet_leaves_data_warnings_and_errors(ftkit: Callable[..., Result], words: tuple[str, ...]) -> None:
    result = ftkit(*words)
    assert result.code == 0
    assert result.out
    assert all(line.startswith("warning: ") for line in result.err.splitlines())
    assert bool(result.err) == (PLAN[0] in words)
    assert ftkit("-q", "plan", "nowhere").err.startswith("error: ")


def test_verbose_prints_what_is_read_and_run_without_secrets(
    ftkit: Callable[..., Result], programs: FakePrograms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs.answer("sinfo")
    result = ftkit("plan", "demo", "-v")
    assert f"read {assets.EXAMPLES / 'demo.yaml'}" in result.err.splitlines()
    assert re.search("^run .*sinfo --local --noheader", result.err, re.MULTILINE)
    monkeypatch.setenv("MY_TOKEN", "SECRET-c")
    (tmp_path / "project" / "SECRET-c.yaml").write_text("{}")
    read = ftkit("-v", "plan", "./SECRET-c.yaml").err
    assert re.search(r"^read .*/\*\*\*\.yaml$", read, re.MULTILINE)
    assert "SECRET" not in read
    assert "read" not in ftkit("plan", "demo").err


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ((), {}, False),
        ((), {"FORCE_COLOR": "1"}, True),
        ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (("--color",), {"NO_COLOR": "1"}, True),
        (("--no-color",), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_an_option_decides_about_color_then_the_environment(
    ftkit: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    variables: dict[str, str],
    expected: bool,
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in ftkit("config", "recipes", *words).out) is expected
    assert ("\x1b[" in ftkit(*words, "plan", "nowhere").err) is expected


def test_a_run_here_whose_name_is_given_is_chosen_before_a_run_elsewhere_whose_id_begins_so(
    ftkit: Callable[..., Result], make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr("ftkit.cli.forward.forward", lambda *_: called.append("there") or 0)
    run, project = make_run("demo", scheduler="local"), Path.cwd()
    Records.of(os.environ).add(["demo-big-20270101T000000Z-beef"], Login("mine", "login", (), "/work"), project)
    for reference, place in (("demo", []), (run.id, []), (run.job_id, []), ("demo-b", ["there"]), ("last", ["there"])):
        called.clear()
        ftkit("logs", reference)
        assert called == place, reference


def test_a_forwarded_command_takes_the_options_about_output_along(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("ftkit.cli.forwarded.find_login_node", lambda _: (Mock(), Mock()))
    monkeypatch.setattr("ftkit.cli.forward.forward", lambda _, __, path, typed, ___: calls.append((path, typed)) or 0)
    ftkit("-q", "--no-color", "status", "demo")
    ftkit("runs", "--json")
    ftkit("runs", "checkpoints", "demo")
    ftkit("eval", "demo", "--data", "/of/the/cluster.jsonl")  # paths in options are the cluster's
    assert calls == [
        (["status"], ["--quiet", "--no-color", "demo"]),
        (["runs", "list"], ["--json"]),
        (["runs", "checkpoints"], ["demo"]),
        (["eval"], ["demo", "--data", "/of/the/cluster.jsonl"]),
    ]
    assert ftkit("run", "--script", "nowhere.py").code == 2


@pytest.mark.parametrize(
    "words",
    [
        "report last --live --output page.html",
        "report last --port 8000",
        "rm demo --with-checkpoints",
        "eval last --as-job --json",
        "verify demo:1 --sign --key key",
        "verify demo:1 --engine vllm",
        "verify . --deep",
        "verify . --gpus 2",
        "verify . --as-job --engine vllm --url http://a:1",
        "verify . --as-job --engine sglang",
        "verify . --as-job --engine-python python3",
    ],
)
def test_an_option_that_would_have_no_effect_is_a_usage_error(ftkit: Callable[..., Result], words: str) -> None:
    Path("key").touch()
    result = ftkit(*words.split())
    assert (result.code, result.out) == (2, "")
    assert "usage:" in result.err


@pytest.mark.parametrize(("former", "now"), RENAMED.items())
def test_a_former_name_or_that_of_another_tool_answers_with_the_command_to_type(
    ftkit: Callable[..., Result], former: str, now: str
) -> None:
    result = ftkit(former)
    assert (result.code, result.out) == (2, "")
    assert f"'ftkit {now}'" in result.err
    assert ftkit(*now.split(), "--help").code == 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("plan", "demo", "--learning_rate", "1e-4"), "training.learning_rate"),
        (("run", "demo", "--lora-r", "8"), "training.lora.rank"),
        (("plan", "demo", "--nonsense"), None),
        (("runs", "list", "--learning_rate", "1e-4"), None),
    ],
)
def test_an_option_of_another_tool_is_answered_with_the_key_of_a_recipe(
    ftkit: Callable[..., Result], words: tuple[str, ...], key: str | None
) -> None:
    result = ftkit(*words)
    assert result.code == 2
    assert ("=VALUE" in result.err.partition("usage:")[0]) == (key is not None)
    assert key is None or key in result.err


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(ftkit: Callable[..., Result]) -> None:
    result = ftkit("sttus")
    assert (result.code, result.out) == (2, "")
    assert "'status'?" in result.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", "demo", "other"), 2),
        (("run", "demo", "--nodes", "0"), 2),
        (("run",), 3),
        (("plan", "demo", "training.lerning_rate=1"), 3),
        (("plan", "demo", "training.learning_rate="), 3),
        (("run", "nothing"), 4),
        (("status", "last"), 4),
        (("plan", "demo", "--cluster", "nowhere"), 4),
    ],
)
def test_user_mistakes_have_an_exit_code_and_no_traceback(
    ftkit: Callable[..., Result], words: tuple[str, ...], code: int
) -> None:
    result = ftkit(*words)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert "\x1b" not in result.err


def test_an_error_has_a_cause_and_a_fix(ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FtkitError("it failed", meaning="the moon is full", fix="wait a day")

    monkeypatch.setattr("ftkit.cli.config.list_names", fail)
    assert ftkit("config", "recipes").err == "error: it failed\n  the moon is full\n  wait a day\n"


def test_a_bug_prints_one_line_and_keeps_the_traceback_in_a_file(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh no\nand more")

    monkeypatch.setattr("ftkit.cli.config.list_names", fail)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    result = ftkit("config", "recipes")
    assert result.code == 1
    assert result.err.startswith("error: a bug in ftkit: ZeroDivisionError: oh no\n")
    assert "Traceback" not in result.err
    (report,) = (tmp_path / "state" / "ftkit").iterdir()
    assert str(report) in result.err
    assert "Traceback" in report.read_text()
    monkeypatch.setenv("FTKIT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        ftkit("config", "recipes")


def test_secrets_are_redacted_in_a_crash_report_and_its_message(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("https://SECRET-a@host, me:SECRET-b@host, AKIA0123456789SECRET and SECRET-c")

    monkeypatch.setattr("ftkit.launch.resolve.resolve", fail)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MY_API_KEY", "SECRET-c")
    result = ftkit("plan", "demo", "model.weights=https://SECRET-d@host/x", "tracker.token=SECRET-e")
    (report,) = (tmp_path / "state" / "ftkit").iterdir()
    assert "ZeroDivisionError: https://***@host, ***@host, *** and ***" in result.err
    assert "SECRET-" not in result.err + report.read_text()
    assert "plan demo" in report.read_text()


def test_an_interrupt_exits_with_130(ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ftkit.cli.config.list_names", interrupt)
    assert ftkit("config", "recipes").code == 130


def test_an_interrupt_that_an_exception_of_torch_hides_exits_with_130(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise Hiding from None

    class Hiding(BaseException):
        """Like torch's CheckpointException."""

    monkeypatch.setattr("ftkit.cli.config.list_names", interrupt)
    result = ftkit("config", "recipes")
    assert (result.code, result.err) == (130, "")


def test_a_user_without_home_and_account_has_the_home_of_a_container(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31)
    result = ftkit("config")
    assert (result.code, os.environ["HOME"]) == (0, "/")
    assert "/.config/ftkit/config.yaml" in result.out
    assert "~" not in result.out


def test_settings_that_can_not_be_read_are_an_error_and_links_to_nowhere_are_not_listed(
    ftkit: Callable[..., Result],
) -> None:
    Path("recipes").mkdir()
    Path("recipes/gone.yaml").symlink_to("nowhere")
    result = ftkit("plan", "gone")
    assert result.code == 4
    assert "did you mean" not in result.err
    settings = Path("ftkit.yaml")
    settings.symlink_to("nowhere")
    assert "can't read" in ftkit("config").err
    settings.unlink()
    os.mkfifo(settings)
    result = ftkit("runs")
    assert result.code == NotFoundError.exit_code
    assert str(settings.absolute()) in result.err


def test_a_copy_that_needs_a_missing_package_says_what_to_install(
    ftkit: Callable[..., Result], make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    result = ftkit("runs", "sync", "last", "s3://bucket/runs")
    assert result.code == 5
    assert "'ftkit[storage]'" in result.err


def test_the_copy_of_a_scripts_run_is_said_to_have_no_checkpoints(
    ftkit: Callable[..., Result], make_run: RunMaker, tmp_path: Path
) -> None:
    run = make_run()
    assert "were not copied" not in ftkit("runs", "sync", run.id, str(tmp_path / "copies")).err
    (run.layout.code / "script").mkdir(parents=True)
    copied = ftkit("runs", "sync", run.id, str(tmp_path / "copies"))
    assert copied.code == 0
    assert f"checkpoints of {run.id} were not copied" in " ".join(copied.err.split())


def test_a_removed_current_folder_is_an_error_with_a_fix(ftkit: Callable[..., Result]) -> None:
    Path.cwd().rmdir()
    result = ftkit("config", "recipes")
    assert (result.code, result.out) == (NotFoundError.exit_code, "")
    assert re.search(r"^  cd ", result.err, re.MULTILINE)


@pytest.mark.parametrize(
    "words", [("config", "recipes"), ("cluster", "list"), ("config",), ("plan", "demo"), ("runs",)]
)
def test_data_goes_to_stdout_without_escape_codes_or_trailing_spaces(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, words: tuple[str, ...]
) -> None:
    make_run()
    programs.answer("squeue")
    result = ftkit(*words)
    assert result.code == 0
    assert result.out
    assert "\x1b" not in result.out + result.err
    assert not [line for line in result.out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    "words",
    [
        ("config", "recipes", "--json"),
        ("cluster", "list", "--json"),
        ("config", "--json"),
        ("plan", "demo", "--json"),
        ("runs", "--json"),
        ("config", "schema", "recipe"),
        ("config", "schema", "cluster"),
        ("config", "schema", "image"),
    ],
)
def test_json_output_contains_only_json(ftkit: Callable[..., Result], words: tuple[str, ...]) -> None:
    result = ftkit(*words)
    assert (result.code, result.err) == (0, "")
    json.loads(result.out)


def test_the_configuration_shows_the_origin_of_each_value(
    ftkit: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "ftkit.yaml").write_text("cluster: slurm\n")
    monkeypatch.setenv("FTKIT_IMAGE", "olmo3:25.02")
    monkeypatch.delenv("FTKIT_WORKSPACE")
    settings = json.loads(ftkit("config", "--json").out)["settings"]
    assert settings["cluster"] == {"value": "slurm", "from": f"{tmp_path}/project/ftkit.yaml:1"}
    assert settings["image"]["from"] == "FTKIT_IMAGE"
    assert settings["workspace"] == {"value": str(tmp_path / "project"), "from": "default"}


def test_images_without_a_definition_are_listed(
    ftkit: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    monkeypatch.setenv("FTKIT_WORKSPACE", str(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "theirs+1.sqsh").write_bytes(b"hsqs")
    assert "theirs:1" in ftkit("images").out
    *_, last = json.loads(ftkit("images", "--json").out)
    assert (last["reference"], last["is_pinned"], last["imported"][0]["size"]) == ("theirs:1", None, 4)


DAMAGE = (
    b"name: [", b"a: \x07", b"\xff", b"a: !!int x", b"a: &a {<<: *a}", b"a: " + b"[" * 1000, b"a: " + b"9" * 5000,
    b"- a",
)  # fmt: skip
LISTINGS = {
    "config recipes": ("recipes/mine.yaml", "demo"),
    "cluster list": ("clusters/mine.yaml", "a4-highgpu-8g"),
    "images": ("containers/mine/1/image.yaml", "olmo3:25.02"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", LISTINGS)
def test_a_damaged_file_does_not_hide_the_others(
    ftkit: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, damage: bytes
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    file, other = LISTINGS[command]
    path = tmp_path / "project" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    result = ftkit(*command.split())
    assert result.code == 0
    assert other in result.out
    assert "skipped mine" in result.err
    assert f"{path}:1" in result.err


def test_the_schema_allows_all_keys_of_recipe_files(ftkit: Callable[..., Result]) -> None:
    schema: dict[str, Any] = json.loads(ftkit("config", "schema", "recipe").out)
    assert "extends" in schema["properties"]
    names, _ = schema["$defs"]["ModelSpec"]["properties"]["architecture"]["anyOf"]
    assert "olmo3-7b" in names["enum"]
    assert '"required"' not in json.dumps(schema)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_ftkit(ftkit: Callable[..., Result], shell: str) -> None:
    script = ftkit("config", "completion", shell).out
    assert f"_FTKIT_COMPLETE={shell}_complete" in script
    assert "*[.=]" in script or shell == "fish"  # no space follows a part of an override
    assert "COMP_LINE" in script or shell != "bash"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ftkit st", "status"),
        ("ftkit run de", "demo"),
        ("ftkit run --cluster a4", "a4-highgpu-8g"),
        ("ftkit run --image olmo3:2", "25.02"),
        ("ftkit status mi", "mine"),
        ("ftkit cancel la", "last"),
        ("ftkit run demo tra", "training."),
        ("ftkit run demo training.le", "training.learning_rate="),
        ("ftkit plan training.lora.al", "training.lora.alpha="),
        ("ftkit run demo training.method=q", "qlora"),
        ("ftkit run demo training.method=", "full"),
        ("ftkit run 'demo' --name 'a b' training.seed=1 profile.enabled=t", "true"),
        ("ftkit run --cluster=a4", "a4-highgpu-8g"),
        ("ftkit chat mine@", "@best"),
        ("ftkit export mine@2", "@20"),
    ],
)
def test_the_shell_completes_names(
    ftkit: Callable[..., Result],
    make_run: RunMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    offered: str,
) -> None:
    make_run("mine").layout.checkpoint(20).mkdir(parents=True)
    monkeypatch.setenv("_FTKIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'@><=;|&(:")
    with pytest.raises(SystemExit):
        ftkit()
    assert f"plain,{offered}" in capsys.readouterr().out.splitlines()


def test_a_command_that_takes_a_run_completes_no_steps(
    ftkit: Callable[..., Result],
    make_run: RunMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("mine")
    monkeypatch.setenv("_FTKIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "ftkit rm mine@")
    with pytest.raises(SystemExit):
        ftkit()
    assert "best" not in capsys.readouterr().out
