"""Exports on the Hugging Face Hub, against a local server with the API that huggingface_hub uses."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from ftkit.errors import PrerequisiteError
from ftkit.hub.push import push_to_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Raised by httpx when called from huggingface_hub.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """In-memory repositories; `asked` lists requests, `damages` is a file whose content the hub alters."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.large: dict[str, bytes] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.created: dict[str, Any] = {}
        self.damages = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer good":
            self._answer({"error": "Invalid user token."}, 401)
        else:
            self._answer({"name": "me", "type": "user"})

    def do_PUT(self) -> None:
        self.server.asked.append("PUT")
        self.server.large[self.path.removeprefix("/large/")] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        body, hub = self._body(), self.server
        if self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self._answer({"url": f"{hub.address}/org/model", "name": "org/model", "id": "1"})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "lfs" if "safetensors" in each["path"] else "regular",
                 "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]  # fmt: skip
            self._answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._answer({"objects": [self._upload(each) for each in json.loads(body)["objects"]]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                self._commit(json.loads(line))
            self._answer({"commitUrl": f"{hub.address}/org/model/commit/{COMMIT}", "commitOid": COMMIT})
        elif "/paths-info/" in self.path:
            self._answer([hub.files[name] for name in parse_qs(body.decode())["paths"]])
        else:
            self._answer({"errors": [], "warnings": []})

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        oid = wanted["oid"]
        if oid in self.server.large:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.server.address}/large/{oid}"}}}

    def _commit(self, line: dict[str, Any]) -> None:
        kind, value, files = line["key"], line["value"], self.server.files
        if kind == "file":
            content = base64.b64decode(value["content"])
            if value["path"] == self.server.damages:
                content = content[:-1] + b"?"
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            files[value["path"]] = {"type": "file", "path": value["path"], "size": len(content), "oid": blob}
        elif kind == "lfsFile":
            size = len(self.server.large[value["oid"]])
            large = {"oid": value["oid"], "size": size, "pointerSize": 134}
            files[value["path"]] = {"type": "file", "path": value["path"], "size": size, "oid": "b" * 40, "lfs": large}

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "good")
        monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_DURATION", "")  # so that it is restored
        monkeypatch.delenv("HF_XET_CLIENT_RETRY_MAX_DURATION")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield server
        server.shutdown()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("# demo\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def quiet(_: object) -> None:
    pass


def test_an_export_is_uploaded_in_one_commit_to_a_private_repository_and_compared(hub: Hub, export: Path) -> None:
    assert push_to_hub(export, "hf://org/model", quiet) == f"{hub.address}/org/model/commit/{COMMIT}"
    assert sorted(hub.files) == ["README.md", "model.safetensors"]
    assert list(hub.large.values()) == [b"weights" * 1000]
    assert hub.created.get("private") or hub.created["visibility"] == "private"
    assert hub.created["organization"] == "org"
    hub.asked.clear()
    push_to_hub(export, "hf://org/model", quiet)
    assert "PUT" not in hub.asked  # the weights exist already


def test_other_content_on_the_hub_is_an_error(hub: Hub, export: Path) -> None:
    hub.damages = "README.md"
    with pytest.raises(PrerequisiteError, match="README"):
        push_to_hub(export, "hf://org/model", quiet)


def test_an_upload_through_xet_that_fails_is_given_up(hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hf_xet", reason="huggingface_hub has no Xet client on this machine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)  # the stand-in has no Xet
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    with pytest.raises(PrerequisiteError, match="HF_HUB_DISABLE_XET=1"):
        push_to_hub(export, "hf://org/model", quiet)
    assert os.environ["HF_XET_CLIENT_RETRY_MAX_DURATION"] == "60s"
    assert hub.files == {}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    push_to_hub(export, "hf://org/model", quiet)


@pytest.mark.parametrize(("token", "message"), [("bad", "can't write to"), (None, "there is no token")])
def test_without_a_valid_token_nothing_is_uploaded(
    token: str | None, message: str, hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PrerequisiteError, match=message):
        push_to_hub(export, "hf://org/model", quiet)
    assert hub.asked == []
