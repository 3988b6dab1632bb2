"""A docker engine, registries and tiny base images that are started for the tests and removed afterwards."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.config.image import ImageSpec
from ftkit.config.problems import validate
from ftkit.config.yaml_files import read_yaml
from ftkit.images.build_context import inputs_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from docker import APIClient

PROGRAMS = {
    "dockerd": "docker.io",
    "docker-registry": "docker-registry",
    "htpasswd": "apache2-utils",
    "skopeo": "skopeo",
    "tar2sqfs": "squashfs-tools-ng",
    "unsquashfs": "squashfs-tools",
    "busybox": "busybox-static",
}
SECRET = "correct-horse-4711"  # noqa: S105 - password of a temporary registry
USER = "alice"

STAND_IN_PYTHON = """#!/bin/sh
case "$*" in
*"pip list"*) echo torch==2.7.0a0 ;;
*"pip install"*"--requirement"*)
    if [ -e /slow ]; then sleep 60; fi
    if [ -e /broken ]; then echo "collecting"; echo "ERROR: no such package: left-pad"; exit 1; fi ;;
*"pip install"*) true ;;
*"inside --sbom"*) echo '{"bomFormat": "CycloneDX", "components": []}' >"$4" ;;
*images.inside*)
    if [ -e /replaced ]; then echo "torch of the base was replaced"; exit 1; fi
    if [ ! -e /silent ]; then echo "ftkit: the image is as its definition says"; fi ;;
esac
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker("images")


@pytest.fixture(scope="session")
def programs() -> None:
    """Debian packages, installed if possible."""
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"needs {', '.join(missing)}, and this is not root on Debian")
    for _ in range(20):
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        done = subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode == 0 or "Could not get lock" not in done.stderr:
            break
        time.sleep(15)  # other tests install packages at the same time
    if done.returncode != 0:
        pytest.skip(f"apt-get could not install {', '.join(missing)}: {done.stderr[-300:]}")


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ftkit-images-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


STOP_SECONDS = 20
"""What a service gets to end by itself, before it is killed: no test looks which of the two it was."""


@contextmanager
def running(command: list[str], log: Path, is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_until(
                lambda: process.poll() is not None or is_ready(), lambda: f"{command[0]} did not start: see {log}"
            )
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def docker_host(programs: None, short_folder: Path) -> Iterator[str]:  # noqa: ARG001
    """The address of an engine that does not change the machine's network."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a docker engine")
    address = f"unix://{short_folder}/docker.sock"
    command = [
        "dockerd", "--data-root", f"{short_folder}/data", "--exec-root", f"{short_folder}/exec", "-H", address,
        "-p", f"{short_folder}/docker.pid", "--bridge=none", "--iptables=false", "--ip-forward=false",
        "--ip-masq=false",
    ]  # fmt: skip

    def is_ready() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(f"{short_folder}/docker.sock") == 0

    with running(command, short_folder / "dockerd.log", is_ready):
        yield address
    for mount in Path("/proc/mounts").read_text().splitlines():
        if str(short_folder) in mount:
            subprocess.run(["umount", "--lazy", mount.split()[1]], check=False)


@pytest.fixture(scope="session")
def client(docker_host: str) -> Iterator[APIClient]:
    import docker

    made = docker.APIClient(base_url=docker_host)
    yield made
    made.close()


@dataclass
class RunningRegistry:
    """A registry on this machine."""

    config: Path
    port: int
    log: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        with running(["docker-registry", "serve", str(self.config)], self.log, lambda: answers(self.port)):
            yield


def make_registry(folder: Path, more: str = "") -> RunningRegistry:
    folder.mkdir()
    port = free_port()
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{more}"
    )
    return RunningRegistry(config, port, folder / "log")


@pytest.fixture(scope="session")
def registry(programs: None, short_folder: Path) -> Iterator[str]:  # noqa: ARG001
    """The host and port of a registry without authentication."""
    made = make_registry(short_folder / "registry")
    with made.serving():
        yield made.host


@pytest.fixture(scope="session")
def private_registry(programs: None, short_folder: Path) -> Iterator[str]:  # noqa: ARG001
    """The host and port of a registry with a password."""
    passwords = short_folder / "htpasswd"
    done = subprocess.run(["htpasswd", "-Bbn", USER, SECRET], capture_output=True, check=True)
    passwords.write_bytes(done.stdout)
    made = make_registry(short_folder / "private", f"auth: {{htpasswd: {{realm: tests, path: {passwords}}}}}\n")
    with made.serving():
        yield made.host


@pytest.fixture
def own_registry(programs: None, short_folder: Path) -> RunningRegistry:  # noqa: ARG001
    """A registry that is started and stopped by the test."""
    return make_registry(short_folder / f"own-{secrets.token_hex(4)}")


def import_base(client: APIClient, name: str, files: dict[str, bytes]) -> None:
    """Make an image from busybox, a fake Python, and some files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def add(path: str, data: bytes, mode: int = 0o755) -> None:
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(data), mode, 1_700_000_000
            tar.addfile(entry, io.BytesIO(data))

        add("bin/busybox", Path(shutil.which("busybox") or "").read_bytes())
        for applet in ("sh", "cat", "echo", "ls", "mkdir", "rm", "sleep", "true", "ln"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname, link.mtime = tarfile.SYMTYPE, "busybox", 1_700_000_000
            tar.addfile(link)
        env = tarfile.TarInfo("usr/bin/env")
        env.type, env.linkname, env.mtime = tarfile.SYMTYPE, "/bin/busybox", 1_700_000_000
        tar.addfile(env)
        add("usr/bin/python3", STAND_IN_PYTHON.encode())
        for path, data in files.items():
            add(path, data, 0o644)
    client.import_image_from_data(archive.getvalue(), repository=name.partition(":")[0], tag=name.partition(":")[2])


@pytest.fixture(scope="session")
def bases(client: APIClient) -> APIClient:
    """Bases: one that works, one with a slow build, one with a failing build, one that fails the self-check, and one
    whose Python prints nothing."""
    import_base(client, "fake:1", {"etc/issue": b"fake\n"})
    import_base(client, "slow:1", {"slow": b""})
    import_base(client, "broken:1", {"broken": b""})
    import_base(client, "replaced:1", {"replaced": b""})
    import_base(client, "silent:1", {"silent": b""})
    import_base(client, "large:1", {"large": secrets.token_bytes(60 << 20)})
    return client


IMAGE = """name: {name}
tag: "{tag}"
description: MadeFile for a test
base:
  reference: {base}
provided: {{torch: ""}}
families: [qwen3]
default_recipe: demo
"""


@dataclass
class Project:
    """A project with one image, in which ftkit is called."""

    root: Path
    workspace: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def images(self) -> Path:
        return self.workspace / "images"

    def define(self, name: str = "tiny", tag: str = "1", base: str = "fake:1", more: str = "") -> Path:
        """Define an image, with a lock that adds nothing."""
        folder = self.root / "containers" / name / tag
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "image.yaml"
        file.write_text(IMAGE.format(name=name, tag=tag, base=base) + more)
        spec = validate(ImageSpec, read_yaml(file))
        (folder / "image.lock").write_text(f"# inputs: sha256:{inputs_digest(spec)}\n")
        return file

    def start(self, *words: str, given: str | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ftkit", *words],
            cwd=self.root,
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        with self.start(*words, given=given) as process:
            out, err = process.communicate(given, timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def ok(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        done = self.call(*words, given=given)
        assert done.returncode == 0, done.stderr
        return done

    def kill_when(self, is_time: Callable[[], bool], *words: str) -> None:
        """Start ftkit, and kill it as soon as a condition holds."""
        with self.start(*words) as process:
            wait_until(lambda: process.poll() is not None or is_time())
            assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def unfinished(self) -> list[str]:
        """Names of unfinished files in the image folder."""
        return sorted(path.name for path in self.images.glob(".*") if not path.name.endswith(".lock"))


@pytest.fixture
def project(tmp_path: Path, docker_host: str, bases: APIClient, registry: str) -> Iterator[Project]:
    """A project with the image tiny:1, and an engine without ftkit images."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "ftkit.yaml").write_text(f"workspace: {tmp_path}/workspace\nregistry: {registry}/team\n")
    (tmp_path / "docker-config").mkdir()
    environment = {"DOCKER_HOST": docker_host, "DOCKER_CONFIG": str(tmp_path / "docker-config"), "HOME": str(tmp_path)}
    made = Project(root, tmp_path / "workspace", environment)
    made.define()
    yield made
    for image in bases.images():
        for name in image.get("RepoTags") or ():
            if name.startswith(("ftkit/", "127.0.0.1:")):
                bases.remove_image(name, force=True)
