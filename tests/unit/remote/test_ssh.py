"""Scripts on a login node whose login shell prints, or whose ftkit is another one."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit import process
from ftkit.errors import PrerequisiteError
from ftkit.remote.ssh import Login, call, install

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOGIN = Login("far", "me@login", (), "ftkit")


def answer_with(monkeypatch: pytest.MonkeyPatch, *chunks: bytes, code: int = 0) -> None:
    def run(_: list[str], __: bytes | None, on_output: Callable[[bytes], None]) -> int:
        for chunk in chunks:
            on_output(chunk)
        return code

    monkeypatch.setattr(process, "run_passing", run)


@pytest.mark.parametrize(
    "chunks",
    [
        (b"Welcome\nftkit-output-begins-here\n\xffdata\n",),
        (b"Wel", b"come\nftkit-output-beg", b"ins-here\n\xffda", b"ta\n"),
        (b"Welcomeftkit-output-begins-here\n", b"\xffdata\n"),
    ],
)
def test_what_startup_files_print_goes_to_stderr_and_the_rest_is_unchanged(
    chunks: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_with(monkeypatch, *chunks, code=3)
    output = bytearray()
    assert call(LOGIN, "true", output.extend) == 3
    assert output == b"\xffdata\n"
    assert capsys.readouterr().err == "Welcome\n"


def test_a_refusal_before_the_output_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_with(monkeypatch, b"This account is currently not available.\n", code=1)
    assert call(LOGIN, "true", bytearray().extend) == 1
    assert "not available" in capsys.readouterr().err


def test_another_ftkit_is_refused_with_the_command_that_installs_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, code=191)
    with pytest.raises(PrerequisiteError) as caught:
        call(LOGIN, "true", bytearray().extend)
    assert caught.value.fix.endswith("ftkit cluster connect far")


def test_a_login_node_without_uv_and_python_is_told_from_one_that_ssh_cannot_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_: list[str], script: bytes, __: object) -> int:
        return subprocess.run(["bash", "-s"], input=script, check=False).returncode

    monkeypatch.setattr(process, "run_passing", run)
    folder = tmp_path / "it's here"
    with pytest.raises(PrerequisiteError) as caught:
        install(replace(LOGIN, folder=str(folder)))
    assert caught.value.fix.startswith("install uv there")
    assert "neither uv nor Python" in capfd.readouterr().err
    assert [path.suffix for path in folder.iterdir()] == [".whl"]
