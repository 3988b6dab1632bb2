"""Tests with a real enroot, if installed: imports match its own files, and it runs them."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.config.image_reference import parse_reference
from ftkit.errors import ImageError
from ftkit.images.events import ignore_progress
from ftkit.images.image_store import ImageStore
from ftkit.images.import_image import by_enroot, import_image, registry_source
from ftkit.images.oci.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Project
    from docker import APIClient

IMAGE_ERROR = 10

ODD = """
RUN echo 'exit 0' >/etc/rc.local && echo '/dev/sda1 / ext4 defaults 0 0' >/etc/fstab && echo A=wrong >/etc/environment
RUN mkdir -p /a/deep /b /closed /fixed && echo one >/a/deep/one && echo two >/a/two && ln /a/two /a/link && echo x >/b/x
RUN rm -r /a/deep && mkdir /a/deep && echo new >/a/deep/new && rm /b/x && echo changed >/a/two
RUN rm -r /b && echo now-a-file >/b && ln -s /a/two /to-two && ln -s /nowhere /to-nothing
RUN echo secret >/closed/file && /bin/busybox chmod 0 /closed/file && /bin/busybox chmod 500 /closed
RUN /bin/busybox chmod 555 /fixed && echo run >/a/program && /bin/busybox chmod 4711 /a/program
ENV GREETING="hello you"
LABEL org.example.odd="a label"
VOLUME ["/vol/ume", "/a"]
WORKDIR "/work here/deep"
ENTRYPOINT ["/usr/bin/env", "FROM_ENTRYPOINT=it's"]
"""
VOLUME_FOLDERS = {"vol", "vol/ume"}
"""enroot makes them only when a container starts, with no rights for anyone."""


class Entry(NamedTuple):
    """An entry of a file tree."""

    kind: int
    mode: int
    target: str
    links: int
    sha256: str


def tree_of(file: Path, folder: Path) -> dict[str, Entry]:
    """Unpack a file and list its entries; enroot's scripts are compared by behavior."""
    subprocess.run(["unsquashfs", "-q", "-n", "-d", str(folder), str(file)], check=True, capture_output=True)
    tree = {}
    for path in folder.rglob("*"):
        found = path.lstat()
        is_file = stat.S_ISREG(found.st_mode)
        name = str(path.relative_to(folder))
        is_ours = name in ("etc/rc", "etc/rc.local")
        tree[name] = Entry(
            stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), str(path.readlink()) if path.is_symlink() else "",
            found.st_nlink if is_file else 0,
            hashlib.sha256(path.read_bytes()).hexdigest() if is_file and not is_ours else "",
        )  # fmt: skip
    return tree


@pytest.fixture
def enroot(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """enroot with temporary folders; return its folder for temporary files."""
    if not shutil.which("enroot"):
        pytest.skip("enroot is not on this machine")
    for name in ("DATA", "CACHE", "TEMP", "RUNTIME", "CONFIG"):
        folder = tmp_path / "enroot" / name.lower()
        folder.mkdir(parents=True)
        project.environment[f"ENROOT_{name}_PATH"] = str(folder)
        monkeypatch.setenv(f"ENROOT_{name}_PATH", str(folder))
    monkeypatch.delenv("ENROOT_ALLOW_HTTP", raising=False)
    return tmp_path / "enroot" / "temp"


def build(client: APIClient, name: str, steps: str, base: str = "fake:1") -> None:
    events = client.build(fileobj=io.BytesIO(f"FROM {base}\n{steps}".encode()), tag=name, rm=True, decode=True)
    assert not [event for event in events if "error" in event]


def push(client: APIClient, name: str) -> None:
    assert not [event for event in client.push(name, stream=True, decode=True) if "error" in event]


@pytest.fixture
def started(enroot: Path) -> Iterator[object]:
    """A function that runs a file as a temporary container."""
    del enroot

    def start(file: Path, *command: str) -> subprocess.CompletedProcess[str]:
        subprocess.run(["enroot", "create", "--name", "ftkit-test", str(file)], check=True, capture_output=True)
        try:
            return subprocess.run(
                ["enroot", "start", "ftkit-test", *command], capture_output=True, text=True, check=False
            )
        finally:
            subprocess.run(["enroot", "remove", "--force", "ftkit-test"], check=True)

    return start


@pytest.mark.parametrize("scheme", ["docker", "dockerd"])
def test_an_unusual_image_has_the_same_files_as_with_enroot_import(
    project: Project, bases: APIClient, registry: str, tmp_path: Path, enroot: Path, scheme: str
) -> None:
    build(bases, f"{registry}/odd:1", ODD)
    push(bases, f"{registry}/odd:1")
    uri = f"docker://{registry}#odd:1" if scheme == "docker" else f"dockerd://{registry}/odd:1"
    theirs = Path(project.ok("import", uri, "--with", "enroot").stdout.strip())
    project.environment["FTKIT_WORKSPACE"] = str(tmp_path / "elsewhere")
    ours = Path(project.ok("import", uri, "--with", "ftkit").stdout.strip())
    assert theirs.resolve().name == ours.resolve().name
    expected, found = tree_of(theirs, tmp_path / "theirs"), tree_of(ours, tmp_path / "ours")
    assert set(found) - set(expected) <= VOLUME_FOLDERS
    assert {name: entry for name, entry in found.items() if name in expected} == expected
    assert set(found) > VOLUME_FOLDERS
    assert list(enroot.iterdir()) == []


@pytest.mark.parametrize("method", ["enroot", "ftkit"])
def test_an_unusual_image_starts_with_its_entrypoint_variables_and_folders(
    project: Project, bases: APIClient, registry: str, started: object, method: str
) -> None:
    build(bases, f"{registry}/odd:1", ODD)
    push(bases, f"{registry}/odd:1")
    link = Path(project.ok("import", f"docker://{registry}#odd:1", "--with", method).stdout.strip())
    assert callable(started)
    done = started(
        link, "sh", "-c", 'echo "$GREETING, $FROM_ENTRYPOINT"; busybox pwd; ls -d /vol/ume; cat /closed/file'
    )
    assert done.stdout.splitlines() == ["hello you, it's", "/work here/deep", "/vol/ume", "secret"], done.stderr


def test_a_tag_that_moves_before_enroot_reads_it_changes_nothing(
    bases: APIClient, registry: str, tmp_path: Path, enroot: Path
) -> None:
    name = f"{registry}/moving:1"
    build(bases, name, "RUN echo first >/which")
    push(bases, name)
    reference = parse_reference(f"docker://{registry}#moving:1")
    source = by_enroot(registry_source(reference, Registry(reference, None, ignore_progress)))
    build(bases, name, "RUN echo second >/which")
    push(bases, name)
    imported = import_image("moving:1", source, ImageStore(tmp_path / "images"))
    shown = subprocess.run(["unsquashfs", "-cat", str(imported.file), "which"], capture_output=True, check=True)
    assert shown.stdout == b"first\n"
    assert imported.manifest.registry_digest in imported.manifest.source
    assert list(enroot.iterdir()) == []


def test_layers_that_do_not_match_the_configuration_are_rejected(
    bases: APIClient, registry: str, tmp_path: Path, enroot: Path
) -> None:
    build(bases, f"{registry}/forged:1", "RUN echo one >/which")
    push(bases, f"{registry}/forged:1")
    reference = parse_reference(f"docker://{registry}#forged:1")
    source = by_enroot(registry_source(reference, Registry(reference, None, ignore_progress)))
    (blob, _), *others = source._address.layers
    assert others
    source._address = replace(source._address, layers=((blob, others[0][1]), *others))
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageError, match=r"layers of docker"):
        import_image("forged:1", source, store)
    source._address = replace(source._address, layers=tuple(others))
    with pytest.raises(ImageError, match="another image"):
        import_image("forged:1", source, store)
    assert not list(store.root.glob("*.sqsh"))
    assert list(enroot.iterdir()) == []


def test_device_files_that_only_root_can_unpack_are_reported(
    project: Project, bases: APIClient, registry: str, enroot: Path
) -> None:
    build(bases, f"{registry}/devices:1", "RUN mkdir /opt && /bin/busybox mknod /opt/null c 1 3")
    push(bases, f"{registry}/devices:1")
    done = project.call("import", f"docker://{registry}#devices:1", "--with", "enroot")
    assert done.returncode == IMAGE_ERROR
    assert "has device files (opt/null)" in done.stderr
    assert not list(project.images.glob("*.sqsh"))
    assert list(enroot.iterdir()) == []
    project.ok("import", f"docker://{registry}#devices:1")


def test_an_engine_image_without_a_command_needs_no_enroot(project: Project, enroot: Path) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    done = project.call("import", "tiny:1", "--with", "enroot")
    assert done.returncode == IMAGE_ERROR
    assert "neither CMD nor ENTRYPOINT" in done.stderr
    assert "--with ftkit" in done.stderr
    project.ok("import", "tiny:1")
    assert list(enroot.iterdir()) == []


def test_files_keep_their_times_so_that_compiled_python_stays_valid(
    project: Project, bases: APIClient, registry: str, tmp_path: Path, enroot: Path
) -> None:
    build(bases, f"{registry}/times:1", "RUN true")
    push(bases, f"{registry}/times:1")
    project.environment["SOURCE_DATE_EPOCH"] = "86400"
    link = project.ok("import", f"docker://{registry}#times:1", "--with", "enroot").stdout.strip()
    subprocess.run(["unsquashfs", "-q", "-n", "-d", str(tmp_path / "root"), link], check=True, capture_output=True)
    assert (tmp_path / "root/usr/bin/python3").stat().st_mtime == 1_700_000_000
    assert list(enroot.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_import_leaves_no_files(
    project: Project, bases: APIClient, registry: str, enroot: Path, number: signal.Signals
) -> None:
    bases.tag("large:1", f"{registry}/large", "1")
    push(bases, f"{registry}/large:1")
    with project.start("import", f"docker://{registry}#large:1", "--with", "enroot") as process:
        wait_until(
            lambda: process.poll() is not None or any(path.stat().st_size > 1 << 20 for path in enroot.rglob("large"))
        )
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + number
    assert list(enroot.iterdir()) == []
    assert project.unfinished() == []


@pytest.mark.parametrize(
    ("python", "reason"), [("rm /usr/bin/python3", "did not start"), ("echo >/silent", "no output"), ("", "")]
)
def test_the_deep_check_passes_only_if_the_self_check_ran(
    project: Project, bases: APIClient, registry: str, enroot: Path, python: str, reason: str
) -> None:
    build(bases, f"{registry}/checked:1", f"RUN echo 'exit 0' >/etc/rc.local; {python or 'true'}")
    push(bases, f"{registry}/checked:1")
    project.ok("import", f"docker://{registry}#checked:1")
    done = project.call("verify", "checked:1", "--deep")
    assert (done.returncode, reason in done.stderr) == (IMAGE_ERROR if reason else 0, True), done.stderr
    assert list(Path(os.environ["ENROOT_DATA_PATH"]).iterdir()) == []
    assert list(enroot.iterdir()) == []
