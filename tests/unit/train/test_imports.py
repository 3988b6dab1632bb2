from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from ftkit.train import imports
from ftkit.train.imports import faster_imports

if TYPE_CHECKING:
    from pathlib import Path


def test_unused_packages_seem_missing_only_while_the_libraries_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costly_package").mkdir()
    (tmp_path / "costly_package" / "__init__.py").write_text("")
    (tmp_path / "costly_package" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "UNUSED", ("costly_package", "pathlib"))
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
    monkeypatch.setattr(imports, "UNUSED", ("another_package",))
    with pytest.raises(ImportError, match="broken"), faster_imports():
        raise ImportError("broken")
    gc.unfreeze()
    assert "another_package" not in sys.modules
