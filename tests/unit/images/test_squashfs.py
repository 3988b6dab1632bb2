"""From the members of an image to the packed stream."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import ImageError
from ftkit.images.import_image import members_of
from ftkit.images.oci.tar import FILE, FOLDER, SYMLINK, Member, TarReader
from ftkit.images.squashfs import ImageConfig, MadeFile, environment_file, rc_file, write_root

if TYPE_CHECKING:
    from pathlib import Path

OF_ENROOT = {"etc/environment", "etc/rc", "etc/rc.local", "etc/fstab"}
CONFIG = ImageConfig(created=1000, environment=("A=b c",), working_directory="/work here")


def written(members: list[tuple[Member, bytes]], config: ImageConfig = CONFIG) -> tuple[dict[str, Member], MadeFile]:
    stream = io.BytesIO()
    contents = write_root([(member, iter((data,))) for member, data in members], config, stream)
    stream.seek(0)
    return {member.path.decode(): member for member, _ in members_of(TarReader(stream))}, contents


def test_files_that_docker_adds_to_an_export_are_dropped() -> None:
    found, _ = written([(Member(path, FILE), b"") for path in (b".dockerenv", b"dev/console", b"etc/issue")])
    assert set(found) == {"etc", "etc/issue", *OF_ENROOT, "work here"}


def test_nothing_is_newer_than_the_image() -> None:
    found, _ = written([(Member(b"old", FILE, mtime=10), b""), (Member(b"new", FILE, mtime=5000), b"")])
    assert (found["old"].mtime, found["new"].mtime) == (10, 1000)


def test_devices_are_skipped_and_reported() -> None:
    found, contents = written([(Member(b"opt/null", b"3"), b"")])
    assert "opt/null" not in found
    assert contents.left_out == ("opt/null",)


def test_an_unknown_kind_of_file_is_rejected() -> None:
    with pytest.raises(ImageError, match="does not support"):
        written([(Member(b"sparse", b"S"), b"")])


def test_the_images_environment_file_is_replaced() -> None:
    found, _ = written([(Member(b"etc", FOLDER, 0o755), b""), (Member(b"etc/environment", FILE, size=3), b"X=1")])
    assert found["etc/environment"].size == len("A=b c\n")


def contents_of(members: list[tuple[Member, bytes]], config: ImageConfig) -> dict[str, bytes]:
    stream = io.BytesIO()
    write_root([(member, iter((data,))) for member, data in members], config, stream)
    stream.seek(0)
    return {member.path.decode(): b"".join(chunks) for member, chunks in members_of(TarReader(stream))}


def test_image_files_that_enroot_would_run_or_mount_are_replaced() -> None:
    own = [
        (Member(b"etc/rc.local", FILE, 0o755, size=6), b"exit 0"),
        (Member(b"etc/fstab", FILE, size=9), b"/dev/sda1"),
    ]
    found = contents_of(own, ImageConfig(volumes=("/a b/c", "/data")))
    assert found["etc/rc.local"].startswith(b"#")
    assert found["etc/rc.local"].count(b"\n") == 1
    assert found["etc/fstab"].decode().splitlines() == [
        "${ENROOT_ROOTFS}/a\\040b/c /a\\040b/c none x-create=dir,bind,rw,nosuid,nodev",
        "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev",
    ]


def test_missing_volumes_and_working_directory_are_created() -> None:
    config = ImageConfig(working_directory="/w/d/", volumes=("/data/in", "/link/in", "/file", "/../out"))
    own = [
        (Member(b"data", FOLDER, 0o711), b""),
        (Member(b"link", SYMLINK, target=b"data"), b""),
        (Member(b"file", FILE), b""),
    ]
    found, _ = written(own, config)
    assert set(found) == {"data", "data/in", "link", "file", "w", "w/d", "etc", *OF_ENROOT}
    assert (found["data"].mode, found["data/in"].mode) == (0o711, 0o755)
    assert contents_of(own, config)["etc/fstab"].count(b"\n") == 3


@pytest.mark.parametrize(
    ("kind", "mode", "expected"),
    [
        (FOLDER, 0o000, 0o700), (FOLDER, 0o2555, 0o2755), (FILE, 0o000, 0o400), (FILE, 0o444, 0o444),
        (FILE, 0o011, 0o511), (FILE, 0o4711, 0o4711), (SYMLINK, 0o777, 0o777),
    ],
)  # fmt: skip
def test_a_non_root_owner_can_read_everything(kind: bytes, mode: int, expected: int) -> None:
    found, _ = written([(Member(b"it", kind, mode, target=b"x" if kind == SYMLINK else b""), b"")])
    assert found["it"].mode == expected


def test_the_package_list_is_kept() -> None:
    _, contents = written([(Member(b"opt/ftkit/sbom.cdx.json", FILE, size=2), b"{}")])
    assert contents.sbom == b"{}"


def test_a_variable_with_a_line_break_is_dropped() -> None:
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
def test_the_start_script_behaves_like_docker(
    entrypoint: tuple[str, ...], command: tuple[str, ...], words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    config = ImageConfig(entrypoint=entrypoint, command=command, working_directory=str(tmp_path / "w d"))
    done = subprocess.run(["sh", "-c", rc_file(config), "sh", *words], capture_output=True, text=True, check=True)
    assert done.stdout == expected + "\n"
    assert (tmp_path / "w d").is_dir()
