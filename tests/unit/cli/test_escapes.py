"""Whatever data contains, what is printed can't control the terminal or reorder its text."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
import warnings
from typing import TYPE_CHECKING, Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import render
from rich.progress import Progress

from ftkit.cli.follow import LiveView
from ftkit.cli.output import log_output
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import printable
from ftkit.errors import FtkitError
from ftkit.runs.records import EvaluationRecord, Sample, StageRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cli.conftest import Result
    from conftest import FakePrograms, RunMaker

NASTY = "a\x1b[31mb\x1b[2J\x1b]0;title\x07c\u202ed\u2066e\u200f\u061c\u2028\u2029f\x9b0m\x7f\rg\x08"
ALLOWED_CONTROLS = "\n\t"


def unsafe(text: str) -> set[str]:
    """Return the characters that a terminal could obey, found by their Unicode categories and directions."""
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return {
        each
        for each in text
        if (unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") and each not in ALLOWED_CONTROLS)
        or unicodedata.bidirectional(each) in bidi
        or each in "\u061c\u200e\u200f"
    }


@pytest.fixture(params=["pipe", "terminal"])
def stdout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the standard streams are a pipe or a terminal; without colors, whose codes are ftkit's own."""
    if request.param == "terminal":
        as_terminal(monkeypatch)
    return str(request.param)


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("_pytest.capture.CaptureIO.isatty", lambda _: True)


@given(st.text() | st.text(st.sampled_from(NASTY + "\ud800\udcff\u202a\u2069\u200e\u0085\\n\n\t")))
def test_printable_text_has_nothing_that_a_terminal_obeys_and_stays_so(text: str) -> None:
    shown = printable(text)
    assert unsafe(shown) == set()
    assert printable(shown) == shown
    shown.encode()
    if not unsafe(text):
        assert shown == text


@given(st.dictionaries(st.text(st.sampled_from(NASTY)), st.text(st.sampled_from(NASTY)) | st.lists(st.text())))
def test_escaped_json_has_the_same_values(value: Any) -> None:
    assert json.loads(printable(json.dumps(value, ensure_ascii=False, indent=2))) == value


def test_every_unsafe_character_of_unicode_is_escaped_visibly() -> None:
    found = unsafe("".join(map(chr, range(sys.maxunicode + 1))))
    assert {"\x1b", "\x00", "\x7f", "\x9b", "\u202e", "\u2067", "\u2028", "\udfff"} <= found
    assert all(printable(each) in (f"\\x{ord(each):02x}", f"\\u{ord(each):04x}") for each in found)
    assert printable("é ш 漢 🙂 👩\u200d💻 עברית") == "é ш 漢 🙂 👩\u200d💻 עברית"


@pytest.mark.parametrize(
    "words",
    [
        (NASTY,),
        ("plan", NASTY),
        ("plan", "demo", f"--{NASTY}"),
        ("plan", "demo", f"training.{NASTY}=1"),
        ("plan", "demo", f"model={NASTY}"),
        ("plan", "demo", f"name={NASTY}"),
        ("plan", "demo", "--cluster", NASTY),
        ("plan", "demo", "--image", NASTY),
        ("run", "demo", "--dry-run", f"data.source={NASTY}.jsonl"),
        ("status", NASTY),
        ("logs", NASTY),
        ("compare", NASTY, NASTY),
        ("data", "check", "demo", f"data.source={NASTY}.jsonl"),
        ("images", NASTY),
    ],
)
def test_errors_escape_what_was_typed(ftkit: Callable[..., Result], stdout: str, words: tuple[str, ...]) -> None:
    del stdout
    result = ftkit(*words)
    assert result.code
    assert result.err
    assert unsafe(result.out + result.err) == set()


@pytest.mark.parametrize("words", [("-q", "config", "recipes"), ("-v", "config", "recipes"), ("config", "recipes")])
def test_errors_and_what_libraries_print_are_escaped(
    ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, stdout: str, words: tuple[str, ...]
) -> None:
    def fail(*_: object) -> None:
        warnings.warn(NASTY, stacklevel=1)  # as matplotlib does for a glyph
        logging.getLogger("ftkit.somewhere").debug(NASTY)
        logging.lastResort.handle(logging.LogRecord("x", 40, "x", 1, NASTY, (), None))  # type: ignore[union-attr]
        sys.stderr.writelines([NASTY, "\n"])
        print(NASTY)  # noqa: T201
        click.echo(NASTY, err=True, color=True)
        Terminal().warn(NASTY)
        raise FtkitError(NASTY, meaning=NASTY, fix=NASTY)

    del stdout
    monkeypatch.setattr("ftkit.cli.config.list_names", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", _show_warning)
        result = ftkit(*words)
    assert result.err.count("c\\u202ed") >= 6
    assert unsafe(result.out + result.err) == set()


def _show_warning(message: object, *_: object, **__: object) -> None:
    """Print as Python does; pytest records warnings instead."""
    sys.stderr.write(f"warning: {message}\n")


def test_a_bug_is_reported_escaped(ftkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError(NASTY)

    del stdout
    monkeypatch.setattr("ftkit.cli.config.list_names", fail)
    result = ftkit("config", "recipes")
    assert result.code == 1
    assert unsafe(result.out + result.err) == set()


@pytest.fixture
def nasty_run(make_run: RunMaker, records: Any) -> str:
    """A failed run whose files have escapes wherever they have text; return its id."""
    run = make_run("odd", scheduler="local")
    sample = Sample(NASTY, NASTY, NASTY, True)
    records.write(
        run,
        StageRecord(1.0, NASTY),
        EvaluationRecord(2.0, 0, "before", 6.0, 812.5, (sample,)),
        records.step(1, 6.5),
        EvaluationRecord(3.0, 1, "after", 6.0, 812.5, (sample,)),
        records.end("failed", 1, NASTY),
    )
    layout = run.layout
    plan = json.loads(layout.plan.read_text())
    _set(plan, ("cluster", "description"), NASTY)
    _set(plan, ("recipe", "description"), NASTY)
    _set(plan, ("recipe", "data", "source"), NASTY)
    layout.plan.write_text(json.dumps(plan))
    manifest = {"run": run.id, "command": ["ftkit", NASTY], "code": {"branch": NASTY, "commit": NASTY}}
    (layout.root / "manifest.json").write_text(json.dumps(manifest))
    error = {"time": 2e9, "rank": 0, "host": NASTY, "type": NASTY, "message": NASTY, "traceback": NASTY, "step": 1}
    (layout.logs / "error-00000.json").write_text(json.dumps(error))
    layout.job_log.write_text(f"one\n{NASTY}\nError: {NASTY}\n")
    layout.job_exit_code(run.job_id).write_text("1\n")
    return run.id


def _set(content: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    *above, last = path
    for key in above:
        content = content[key]
    if last in content:
        content[last] = value


@pytest.mark.parametrize(
    "words",
    [
        ("runs",),
        ("status", "ID"),
        ("compare", "ID", "ID"),
        ("runs", "checkpoints", "ID"),
        ("plan", "demo"),
        ("rm", "ID"),
    ],
)
def test_a_hostile_run_is_shown_escaped(
    ftkit: Callable[..., Result],
    nasty_run: str,
    make_run: RunMaker,
    programs: FakePrograms,
    stdout: str,
    words: tuple[str, ...],
) -> None:
    del stdout
    make_run("fine", scheduler="local")
    programs.answer("squeue")
    result = ftkit(*(nasty_run if word == "ID" else word for word in words))
    assert result.out + result.err
    assert unsafe(result.out + result.err) == set()
    if words[0] == "status":
        assert "\\u202e" in result.out + result.err


def test_json_has_the_original_text(ftkit: Callable[..., Result], nasty_run: str, stdout: str) -> None:
    del stdout
    out = ftkit("status", nasty_run, "--json").out
    assert NASTY in "".join(_texts(json.loads(out)))
    assert unsafe(out) == set()


def test_a_damaged_run_with_hostile_names_is_shown_escaped(
    ftkit: Callable[..., Result], nasty_run: str, make_run: RunMaker, programs: FakePrograms, stdout: str
) -> None:
    del stdout, nasty_run
    programs.answer("squeue")
    layout = make_run("hurt").layout
    plan = json.loads(layout.plan.read_text())
    layout.plan.write_text(json.dumps(plan | {"name": NASTY, NASTY: 1, "device": NASTY}))
    layout.root.rename(layout.root.with_name(f"\u202e\x1b{layout.root.name}"))
    name = f"\u202e\x1b{layout.root.name}"
    for words in (("runs",), ("status", "last"), ("status", name), ("compare", "last", "odd")):
        result = ftkit(*words)
        assert unsafe(result.out + result.err) == set()


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [str(value)]


def test_a_log_on_a_terminal_is_escaped_without_colors_and_its_bars_are_redrawn(
    ftkit: Callable[..., Result], make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    text = f"\x1b[32mgreen\x1b[0m\r\n 10%\r 20%\r100%\n{NASTY}\n"
    run.layout.job_log.write_text(text, newline="")
    assert ftkit("logs", "last").out == text, "a pipe gets the bytes"
    as_terminal(monkeypatch)
    run.layout.job_log.write_bytes(text.encode() + b"\xff\xe2")
    out = ftkit("logs", "last").out
    assert out.startswith("green\r\n 10%\r 20%\r100%\nab\\x1b]0;title\\x07c\\u202ed\\u2066e")
    assert unsafe(out) == {"\r"}


def test_a_log_may_be_cut_within_a_character(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    as_terminal(monkeypatch)
    output = log_output()
    for byte in "é\u202e漢".encode():
        output.write(bytes([byte]))
    output.flush()
    assert capsys.readouterr().out == "é\\u202e漢"


def test_a_job_script_is_escaped_on_a_terminal_and_unchanged_in_a_pipe(
    ftkit: Callable[..., Result], tmp_path: Path, stdout: str
) -> None:
    (tmp_path / "project" / "clusters").mkdir()
    profile = 'extends: local\nname: odd\nenvironment: {PROMPT: "\\e[2J\\u202e"}\n'
    (tmp_path / "project" / "clusters" / "odd.yaml").write_text(profile)
    for words in (("run", "demo", "--dry-run"), ("plan", "demo"), ("cluster", "list"), ("config",)):
        result = ftkit(*words, "--cluster", "odd") if "demo" in words else ftkit(*words)
        is_script = "--dry-run" in words and stdout == "pipe"
        assert unsafe(result.err + ("" if is_script else result.out)) == set(), result
        if "--dry-run" in words:
            assert ("PROMPT='\x1b[2J\u202e'" if is_script else "PROMPT='\\x1b[2J\\u202e'") in result.out


@pytest.mark.parametrize("words", [("show",), ("check",), ("stats",)])
def test_rows_are_shown_escaped(
    ftkit: Callable[..., Result], tmp_path: Path, stdout: str, words: tuple[str, ...]
) -> None:
    del stdout
    rows = [{"text": f"{number} {NASTY}"} for number in range(30)]
    source = tmp_path / "rows\u202e\x1b.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jsonl").write_bytes(source.read_bytes())
    changes = ("data.format=text", "data.validation.count=9", "evaluation.generation=null")
    for path in (source, tmp_path / "plain.jsonl"):
        result = ftkit("data", *words, "demo", f"data.source={path}", *changes)
        assert unsafe(result.out + result.err) == set()
    if words == ("show",):
        assert "\\u202e" in result.out


def test_progress_bars_escape_their_texts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    as_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(Terminal())
    assert isinstance(view._progress, Progress)
    view.record(StageRecord(1.0, NASTY))
    view.note(NASTY)
    view._progress.refresh()
    view.record(StageRecord(9.0, "next"))
    view.close()
    err = capsys.readouterr().err
    assert "c\\u202ed" in err
    assert not {"\u202e", "\u2066", "\x07", "\x9b", "\x7f"} & set(err)
    assert "\x1b[2J" not in err
    assert "\x1b]0;" not in err


def test_rich_texts_that_nothing_escaped_before_are_escaped(capsys: Any) -> None:
    Terminal().talk.print(render("[bold]x[/bold]"), NASTY)
    assert unsafe(capsys.readouterr().err) == set()


def test_unpaired_surrogates_do_not_stop_a_command(capsys: Any) -> None:
    Terminal().data("a\ud800\n")
    Terminal().text("b\udcff", is_data=True)
    assert capsys.readouterr().out == "a\\ud800\nb\\udcff\n"
