from __future__ import annotations

import gc
import importlib
import os
import py_compile
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from ftkit.train import launcher
from ftkit.train.launcher import faster_imports

if TYPE_CHECKING:
    from pathlib import Path

IMPORTS_TORCH = """
import subprocess, sys
from ftkit.data.imports import keep_bytecode
keep_bytecode()
import torch
subprocess.run([sys.executable, "-c", "import torch.part"], check=True)
"""


def test_unused_packages_seem_missing_only_while_the_libraries_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costly_package").mkdir()
    (tmp_path / "costly_package" / "__init__.py").write_text("")
    (tmp_path / "costly_package" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launcher, "UNUSED", ("costly_package", "pathlib"))
    with faster_imports():
        assert find_spec("costly_package") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("costly_package.part")
        assert importlib.import_module("pathlib"), "it was imported before"
        assert not gc.isenabled()
    gc.unfreeze()
    assert gc.isenabled()
    assert importlib.import_module("costly_package.part")


def test_packages_can_be_imported_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "UNUSED", ("another_package",))
    with pytest.raises(ImportError, match="broken"), faster_imports():
        raise ImportError("broken")
    gc.unfreeze()
    assert "another_package" not in sys.modules


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_ranks_keep_bytecode_of_packages_that_have_none(tmp_path: Path, *, has_bytecode: bool) -> None:
    package, cache = tmp_path / "site" / "torch", tmp_path / "cache"
    package.mkdir(parents=True)
    for name in ("__init__.py", "part.py"):
        (package / name).write_text("")
    if has_bytecode:
        py_compile.compile(str(package / "__init__.py"))
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["FTKIT_CACHE_DIR"] = str(cache)
    environment.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", IMPORTS_TORCH], check=True, env=environment)
    kept = {path.name.partition(".")[0] for path in cache.rglob("torch/*.pyc")}
    assert kept == (set() if has_bytecode else {"__init__", "part"})
