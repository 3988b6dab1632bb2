"""Install the running ftkit on a login node: a wheel of its code, in a virtual environment there."""

from __future__ import annotations

import base64
import hashlib
import shlex
import zipfile
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import __version__, assets, process
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.remote.login import Login

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_ASSETS: Final = "_assets"
_WHEEL: Final = f"ftkit-{__version__}-py3-none-any.whl"
_INFO: Final = f"ftkit-{__version__}.dist-info"
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)
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


def shipped_files() -> dict[str, Path]:
    """Return the files of ftkit by their names in a wheel: code, recipes, profiles, templates, images."""
    tops = {
        "ftkit": _PACKAGE,
        f"ftkit/{_ASSETS}/containers": assets.CONTAINERS,
        f"ftkit/{_ASSETS}/sbatch": assets.JOB_TEMPLATES,
    }
    files = {f"ftkit/{_ASSETS}/Dockerfile": assets.DOCKERFILE}
    for name, top in tops.items():
        for path in sorted(top.rglob("*")):
            parts = path.relative_to(top).parts
            is_ours = parts[0] != _ASSETS and not any(part == "__pycache__" or part.startswith(".") for part in parts)
            if is_ours and path.is_file():
                files["/".join((name, *parts))] = path
    return dict(sorted(files.items()))


@cache
def code_identity() -> str:
    """Return the version with a digest of all files: it is equal on two machines if they run the same code."""
    digest = hashlib.sha256()
    for name, path in shipped_files().items():
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def build_wheel() -> bytes:
    """Return a wheel of the running ftkit, uncommitted changes included.

    The format is PEP 427's, which needs no build tool for a package without compiled code.

    Raises:
        PrerequisiteError: ftkit was never installed here, so its dependencies are unknown.
    """
    try:
        about = metadata.distribution("ftkit").read_text("METADATA")
    except metadata.PackageNotFoundError:
        about = None
    if about is None:
        raise PrerequisiteError(
            "this ftkit is not installed, so its dependencies are not known",
            fix="install it: pip install -e . in its checkout",
        )
    contents = {name: path.read_bytes() for name, path in shipped_files().items()} | {
        f"{_INFO}/METADATA": about.encode(),
        f"{_INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: ftkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{_INFO}/entry_points.txt": b"[console_scripts]\nftkit = ftkit.__main__:main\n",
    }
    record = [f"{name},sha256={_record_digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{_INFO}/RECORD"] = "\n".join([*record, f"{_INFO}/RECORD,,", ""]).encode()
    wheel = BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return wheel.getvalue()


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def install(login: Login, extras: Sequence[str] = ()) -> None:
    """Install this ftkit in the virtual environment on the login node, replacing an existing ftkit.

    Raises:
        PrerequisiteError: the login node can't be reached, or has no Python that is new enough.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    script = _SCRIPT.format(
        folder=shlex.quote(login.folder),
        wheel=_WHEEL,
        content=base64.encodebytes(build_wheel()).decode().strip(),
        requirements=shlex.quote(f"./{_WHEEL}{chosen}"),
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
