"""Install the running ftkit on a login node: a wheel of its code, in a virtual environment there."""

from __future__ import annotations

import base64
import shlex
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.errors import PrerequisiteError
from ftkit.wheel import WHEEL_NAME, make_wheel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.remote.login import Login

_OLDEST_PYTHON: Final = 11
"""Minor version; as `requires-python`."""

_SCRIPT: Final = """\
set -eu
exec >&2
folder={folder}
mkdir -p "$folder" && cd "$folder" && chmod 700 .
rm -rf venv.new ftkit-*.whl tmp
mkdir tmp
export TMPDIR=$PWD/tmp  # /tmp is often small or full
trap 'rm -rf "$TMPDIR"' EXIT
base64 -d >{wheel} <<'END'
{content}
END
python=
for each in python3.13 python3.12 python3.11 python3; do
  if "$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, {minor}))' 2>/dev/null; then
    python=$each
    break
  fi
done
if command -v uv >/dev/null; then
  uv venv --quiet --allow-existing --python '>=3.{minor}' venv
  uv pip install --quiet --python venv/bin/python --reinstall-package ftkit {requirements}
elif [ -n "$python" ]; then
  [ -x venv/bin/python ] || "$python" -m venv venv
  venv/bin/python -m pip install --quiet --disable-pip-version-check {requirements}
  venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./{wheel}
else
  echo "neither uv nor Python 3.{minor} or later (with venv) is on PATH there"
  exit {no_python}
fi
rm -f {wheel}
"""
_NO_PYTHON: Final = 93


def install(login: Login, extras: Sequence[str] = ()) -> None:
    """Install this ftkit in the virtual environment on the login node, replacing an existing ftkit.

    Raises:
        PrerequisiteError: the login node can't be reached, or has no Python that is new enough.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    script = _SCRIPT.format(
        folder=shlex.quote(login.folder),
        wheel=WHEEL_NAME,
        content=base64.encodebytes(make_wheel()).decode().strip(),
        requirements=shlex.quote(f"./{WHEEL_NAME}{chosen}"),
        minor=_OLDEST_PYTHON,
        no_python=_NO_PYTHON,
    )
    code = process.run_passing(login.ssh("bash -ls"), script.encode(), lambda _: None)
    if code:
        raise PrerequisiteError(
            f"ftkit could not be installed on {login.address}",
            meaning="ssh can't reach it, or the installation failed there: the lines above say which",
            fix=f"try the connection with: {shlex.join(login.ssh('true'))}"
            if code != _NO_PYTHON
            else "install uv there (which can install Python), or load a module with Python 3.11",
        )
