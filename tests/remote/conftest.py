"""A real sshd on loopback, and a laptop with its own home and an `ssh` whose connections can be dropped."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
FTKIT = Path(sys.executable).with_name("ftkit")

_SSHD = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
SetEnv HOME={folder}/home
"""
_CUTTING_SSH = """\
#!/bin/bash
# {folder}/cut holds a pattern of files: a connection is cut once there is one, or a number of bytes.
cut=$(cat {folder}/cut 2>/dev/null)
case "$cut" in
"") exec {ssh} "$@" ;;
*[!0-9]*)
  {ssh} "$@" <&0 & pid=$!
  until compgen -G "$cut" >/dev/null; do
    kill -0 $pid 2>/dev/null || {{ wait $pid; exit $?; }}
    sleep 0.05
  done
  rm {folder}/cut
  kill -KILL $pid ;;
*)
  script=$(grep -o '[A-Za-z0-9+/=]\\{{40,\\}}' <<<"${{*: -1}}" | base64 -d)
  [[ "$script" == *--from-byte=* ]] || exec {ssh} "$@"
  rm {folder}/cut
  {ssh} "$@" | head -c "$cut" ;;
esac
exit 255
"""


@dataclass(frozen=True)
class Laptop:
    """A machine that reaches a login node over ssh.

    Attributes:
       folder: the test's folder.
        project: a project with a profile `far`.
        there: ftkit's folder on the login node.
    """

    folder: Path
    project: Path
    there: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("FTKIT_", "XDG_", "HF_"))}
        path = f"{self.folder / 'bin'}:{kept['PATH']}"
        return kept | {"HOME": str(self.folder / "laptop"), "PATH": path, "HF_TOKEN": "hf_secretsecret"}

    def ftkit(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(FTKIT), *words], cwd=self.project, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    def cut_when(self, condition: str) -> None:
        """Drop the next connection once a file matches a pattern, or one that copies a log, after a number of bytes."""
        (self.folder / "cut").write_text(condition)


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    sshd, ssh = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), shutil.which("ssh")
    if sshd is None or ssh is None:
        pytest.skip("needs openssh-server and openssh-client")
    folder = tmp_path_factory.mktemp("remote")
    laptop = Laptop(folder, folder / "project", folder / "there")
    for name in ("home", "laptop", "bin", "project/clusters", "there"):
        (folder / name).mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in (".bash_profile", ".bashrc"):  # as the sites of many clusters have it
        (folder / "home" / name).write_text("echo Welcome to the cluster\n")
    (folder / "sshd_config").write_text(_SSHD.format(port=port, folder=folder))
    (folder / "bin/ssh").write_text(_CUTTING_SSH.format(folder=folder, ssh=ssh))
    (folder / "bin/ssh").chmod(0o755)
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    options = ["-F", "none", "-p", str(port), "-i", str(folder / "user"), "-o", f"UserKnownHostsFile={folder}/known"]
    (laptop.project / "ftkit.yaml").write_text("workspace: work\n")
    (laptop.project / "clusters/far.yaml").write_text(
        f"extends: local\nname: far\ndescription: elsewhere\nlogin: {getpass.getuser()}@127.0.0.1\n"
        f"ssh_options: {options}\nlogin_folder: {laptop.there}\nsend_limit_gib: 0.002\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # required by sshd
    with subprocess.Popen([sshd, "-D", "-f", folder / "sshd_config", "-E", folder / "sshd.log"]) as server:
        wait_until(lambda: "listening" in _read(folder / "sshd.log"), lambda: _read(folder / "sshd.log"))
        try:
            yield laptop
        finally:
            server.send_signal(signal.SIGTERM)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def ready(laptop: Laptop) -> Laptop:
    """The laptop after `ftkit cluster connect`; the login node has the libraries, since there is no network."""
    venv = laptop.there / "venv"
    subprocess.run(["/usr/bin/env", "python3", "-m", "venv", venv], check=True, cwd="/")
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    laptop.ftkit("cluster", "connect", "far")
    return laptop
