"""`scripts/setup`, with fakes of pip and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("scripts/setup", "pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    return tmp_path


def set_up(
    copy: Path, *extras: str, uv: str = "exit 1", pip: str = "exit 1", config: str = ""
) -> subprocess.CompletedProcess[str]:
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    (copy / "pip-config").write_text(config)
    commands = f"""
case "$*" in
  "-m uv pip install "*) {uv} ;;
  *" config list") cat {copy}/pip-config ;;
  *" -q -c constraints-cpu.txt uv>=0.8") ;;
  "-m pip install "*) {pip} ;;
esac
"""
    python.write_text("#!/bin/sh" + commands)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": sys.executable}
    command = [copy / "scripts" / "setup", *(extras or ("train",))]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_an_installation_without_a_terminal_prints_only_its_downloads(copy: Path) -> None:
    done = set_up(
        copy,
        "train",
        "dev",
        uv='echo "Resolved 2 packages"; echo "Downloading torch (800MiB)"; echo " + torch==2.13.0"',
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[1:] == ["Downloading torch (800MiB)"]
    for extras in (("train", "dev"), ("dev",)):  # nothing changed, so nothing is installed
        again = set_up(copy, *extras)
        assert (again.returncode, again.stderr) == (0, "")
    assert set_up(copy, "dev", "docs").returncode == 1


def test_uv_gets_the_settings_of_pip(copy: Path) -> None:
    config = """\
:env:.disable-pip-version-check='1'
:env:.index-url='https://mirror.test/simple/?a=b'
global.constraint='/etc/constraints.txt'
global.extra-index-url='\\nhttps://one.test/simple\\nhttps://two.test/simple'
global.find-links='/wheels /more'
global.index-url='https://overridden.test/simple'
install.trusted-host='mirror.test'
"""
    done = set_up(copy, uv='echo "Downloading $(env | grep ^UV_ | sort | paste -sd,)"', config=config)
    (line,) = done.stderr.splitlines()[1:]
    assert line.removeprefix("Downloading ").split(",UV_") == [
        "UV_CONSTRAINT=/etc/constraints.txt",
        "DEFAULT_INDEX=https://mirror.test/simple/?a=b",
        "FIND_LINKS=/wheels,/more",
        "INDEX=https://one.test/simple https://two.test/simple",
        "INDEX_STRATEGY=unsafe-best-match",
        "INSECURE_HOST=mirror.test",
    ]


@pytest.mark.parametrize(("uv", "config"), [("exit 2", ""), ("exit 0", "global.proxy='http://proxy.test'\n")])
def test_pip_installs_if_uv_fails_or_does_not_have_a_setting(copy: Path, uv: str, config: str) -> None:
    for _ in range(2):
        done = set_up(copy, uv=uv, config=config, pip='echo "ERROR: no space" >&2; exit 3')
        assert done.returncode == 3  # and the next time it is tried again
        assert "ERROR: no space" in done.stderr.splitlines()[-1]
    downloads = 'echo "Collecting torch"; echo "  Downloading torch.whl (800 MB)"; echo "Successfully installed"'
    done = set_up(copy, uv=uv, config=config, pip=downloads)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-2:] == ["  Downloading torch.whl (800 MB)", "Successfully installed"]
