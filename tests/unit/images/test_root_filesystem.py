"""From an image's members to the stream that is packed."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import ImageError
from ftkit.images.root_filesystem import Contents, ImageConfig, environment_file, rc_file, write_root
from ftkit.images.sources import members_of
from ftkit.images.tar_members import FILE, FOLDER, Member, TarReader

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = ImageConfig(created=1000, environment=("A=b c",), working_directory="/work here")


def written(members: list[tuple[Member, bytes]], config: ImageConfig = CONFIG) -> tuple[dict[str, Member], Contents]:
    stream = io.BytesIO()
    contents = write_root([(member, iter((data,))) for member, data in members], config, stream)
    stream.seek(0)
    return {member.path.decode(): member for member, _ in members_of(TarReader(stream))}, contents


def test_what_docker_adds_to_an_export_is_left_out() -> None:
    found, _ = written([(Member(path, FILE), b"") for path in (b".dockerenv", b"dev/console", b"etc/issue")])
    assert set(found) == {"etc", "etc/issue", "etc/environment", "etc/rc"}


def test_nothing_is_newer_than_the_image() -> None:
    found, _ = written([(Member(b"old", FILE, mtime=10), b""), (Member(b"new", FILE, mtime=5000), b"")])
    assert (found["old"].mtime, found["new"].mtime) == (10, 1000)


def test_devices_are_left_out_and_named() -> None:
    found, contents = written([(Member(b"opt/null", b"3"), b"")])
    assert "opt/null" not in found
    assert contents.left_out == ["opt/null"]


def test_an_unknown_kind_of_file_is_refused() -> None:
    with pytest.raises(ImageError, match="does not know"):
        written([(Member(b"sparse", b"S"), b"")])


def test_the_image_s_own_environment_file_is_replaced() -> None:
    found, _ = written([(Member(b"etc", FOLDER, 0o755), b""), (Member(b"etc/environment", FILE, size=3), b"X=1")])
    assert found["etc/environment"].size == len("A=b c\n")


def test_the_list_of_packages_is_kept() -> None:
    _, contents = written([(Member(b"opt/ftkit/sbom.cdx.json", FILE, size=2), b"{}")])
    assert contents.sbom == b"{}"


def test_a_variable_with_a_line_break_is_left_out() -> None:
    assert environment_file(ImageConfig(environment=("A=1", "B=x\ny", "C=2"))) == "A=1\nC=2\n"


@pytest.mark.parametrize(
    ("entrypoint", "command", "words", "expected"),
    [
        ((), ("echo", "a  b"), (), "a  b"),
        ((), ("echo", "default"), ("echo", "given"), "given"),
        (("echo", "entry"), ("default",), (), "entry default"),
        (("echo", "entry"), ("default",), ("given  twice",), "entry given  twice"),
        (("echo", "it's $HOME; `id`"), (), (), "it's $HOME; `id`"),
    ],
)
def test_the_start_script_does_as_docker_would(
    entrypoint: tuple[str, ...], command: tuple[str, ...], words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    config = ImageConfig(entrypoint=entrypoint, command=command, working_directory=str(tmp_path / "w d"))
    done = subprocess.run(["sh", "-c", rc_file(config), "sh", *words], capture_output=True, text=True, check=True)
    assert done.stdout == expected + "\n"
    assert (tmp_path / "w d").is_dir()
