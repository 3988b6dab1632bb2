"""Checks of the login node: one that hangs is reported and does not block the others."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from ftkit.config.context import Context
from ftkit.config.image_reference import ImageFile
from ftkit.config.load import load_cluster
from ftkit.health import login_node
from ftkit.health.login_node import LoginNode, check_login_node
from ftkit.health.site import detect_site
from ftkit.planning.layout import Workspace

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_an_unresponsive_name_server_is_reported_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def never(*_: Any, **__: Any) -> None:
        is_over.wait()
        raise OSError("over")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(login_node, "CHECK_SECONDS", 0.2)
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    profile = load_cluster("slurm", Context(tmp_path, tmp_path, environment))
    site = detect_site(environment, tmp_path)
    findings = {
        each.check: each
        for each in check_login_node(LoginNode(site, profile, Workspace(tmp_path), None, "example.com/x", environment))
    }
    is_over.set()
    assert findings["hub"].status == "warning"
    assert "0.2 s" in findings["hub"].value
    assert findings["slurm"].status == "failed"  # other results are reported as usual


def test_a_check_that_fails_with_an_error_of_the_system_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> bool:
        raise PermissionError(13, "Permission denied", "/private/image.sqsh")

    environment = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    profile = load_cluster("slurm", Context(tmp_path, tmp_path, environment)).model_copy(update={"runtime": "pyxis"})
    node = LoginNode(
        detect_site(environment, tmp_path),
        profile,
        Workspace(tmp_path),
        ImageFile(tmp_path / "i.sqsh"),
        None,
        environment,
    )
    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    found = {each.check: each for each in check_login_node(node)}
    assert found["image"].status == "failed"
    assert "/private/image.sqsh" in found["image"].value
    assert found["slurm"].status == "failed"
