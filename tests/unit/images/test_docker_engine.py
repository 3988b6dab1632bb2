"""The selection of the docker engine, without an engine."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import PrerequisiteError
from ftkit.images import docker_engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration, with the current context `rootless`."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"currentContext": "rootless"}')
    folder = tmp_path / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest()
    folder.mkdir(parents=True)
    endpoints = {"docker": {"Host": f"unix://{tmp_path}/rootless.sock", "SkipTLSVerify": False}}
    (folder / "meta.json").write_text(json.dumps({"Name": "rootless", "Metadata": {}, "Endpoints": endpoints}))
    return tmp_path


def failure() -> PrerequisiteError:
    with pytest.raises(PrerequisiteError) as caught, docker_engine.connect():
        pass
    return caught.value


def test_dockers_current_context_selects_the_engine(configuration: Path) -> None:
    assert f"unix://{configuration}/rootless.sock" in failure().what


def test_docker_host_takes_precedence_over_the_context(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{configuration}/other.sock")
    assert "/other.sock" in failure().what


def test_a_context_that_can_not_be_read_is_reported(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (meta,) = configuration.glob("contexts/meta/*/meta.json")
    meta.write_text("{")
    assert "context 'rootless'" in failure().what
    monkeypatch.setenv("DOCKER_CONTEXT", "nope")
    assert "context 'nope'" in failure().what


def test_an_engine_behind_ssh_needs_a_package(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    pytest.importorskip("docker")
    try:
        import paramiko  # noqa: F401
    except ImportError:
        monkeypatch.setenv("DOCKER_HOST", "ssh://me@builder")
        assert "docker[ssh]" in failure().fix
    else:
        pytest.skip("paramiko is installed")
