#!/usr/bin/env bash
# Install ftkit in a virtual environment: with uv, else with pip. ftkit.remote.ssh sets the variables FTKIT_*;
# FTKIT_CONTENT is the wheel in base64.
set -eu
exec >&2
mkdir -p "$FTKIT_FOLDER" && cd "$FTKIT_FOLDER" && chmod 700 .
rm -rf venv/identity ftkit-*.whl tmp
mkdir tmp
export TMPDIR=$PWD/tmp # /tmp is often small or full
trap 'rm -rf "$TMPDIR"' EXIT
base64 -d >"$FTKIT_WHEEL" <<<"$FTKIT_CONTENT"
python=''
for each in python3.13 python3.12 python3.11 python3; do
  if "$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$each
    break
  fi
done
if command -v uv >/dev/null; then
  uv venv --quiet --allow-existing --python '>=3.11' venv
  uv pip install --quiet --python venv/bin/python --reinstall-package ftkit "$FTKIT_REQUIREMENT"
elif [ -n "$python" ]; then
  [ -x venv/bin/python ] || "$python" -m venv venv
  venv/bin/python -m pip install --quiet --disable-pip-version-check "$FTKIT_REQUIREMENT"
  venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "./$FTKIT_WHEEL"
else
  echo "neither uv nor Python 3.11 or later (with venv) is on PATH there"
  exit 93
fi
rm -f "$FTKIT_WHEEL"
echo "$FTKIT_IDENTITY" >venv/identity
