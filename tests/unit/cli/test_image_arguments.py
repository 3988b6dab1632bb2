"""Shared arguments of image commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.cli.arguments import required_registry
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_push_without_a_registry_suggests_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FTKIT_REGISTRY", raising=False)
    with pytest.raises(ConfigError) as caught:
        required_registry(None, "olmo3:25.02")
    for word in ("--registry HOST/PATH", "registry: HOST/PATH", "ftkit.yaml", f"{tmp_path}/config/ftkit/config.yaml"):
        assert word in str(caught.value)
    assert required_registry("ghcr.io/me", "olmo3:25.02") == "ghcr.io/me"
    (tmp_path / "config" / "ftkit").mkdir(parents=True)
    (tmp_path / "config" / "ftkit" / "config.yaml").write_text("registry: ghcr.io/me\n")
    assert required_registry(None, "olmo3:25.02") == "ghcr.io/me"
