"""A fake internet: every address responds as a test defines, without a socket."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import requests
from urllib3 import HTTPHeaderDict, HTTPResponse

from ftkit.config.image_reference import Digest
from ftkit.images import events
from ftkit.images.oci import connection

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "registry.example.com"


def digest_of(data: bytes) -> Digest:
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def tar_of(files: dict[str, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return output.getvalue()


@dataclass
class Pushed:
    """An image in a registry, with parts that tests can replace."""

    files: dict[str, bytes] = field(default_factory=lambda: {"etc/issue": b"hello\n"})
    run: dict[str, Any] = field(default_factory=lambda: {"Env": ["A=b"]})

    def __post_init__(self) -> None:
        layer = tar_of(self.files)
        self.blobs: dict[str, bytes] = {}
        self.config = {
            "created": "2026-01-01T00:00:00Z",
            "architecture": "amd64",
            "os": "linux",
            "config": self.run,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
        }
        self.manifest = {
            "schemaVersion": 2,
            "config": self.add(json.dumps(self.config).encode()),
            "layers": [self.add(gzip.compress(layer, mtime=0))],
        }

    def add(self, data: bytes) -> dict[str, Any]:
        """Add a blob; return its descriptor."""
        self.blobs[digest_of(data)] = data
        return {"digest": str(digest_of(data)), "size": len(data)}

    @property
    def body(self) -> bytes:
        return json.dumps(self.manifest).encode()

    @property
    def digest(self) -> Digest:
        return digest_of(self.body)


Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Internet:
    """Responses by address, 404 by default. `asked` and `proxies` record each request."""

    answers: dict[str, Answer | Callable[[requests.PreparedRequest], Answer]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    proxies: list[dict[str, str]] = field(default_factory=list)

    def image(self, tag: str = "1", **parts: Any) -> Pushed:
        """Push an image."""
        made = Pushed(**parts)
        self.serve(made, tag)
        return made

    def answer(self, request: requests.PreparedRequest) -> Answer:
        url = str(request.url)
        self.asked.append((url, dict(request.headers)))
        found = self.answers.get(url, self.answers.get(url.partition("?")[0], (404, {}, b"")))
        return found(request) if callable(found) else found

    def serve(self, pushed: Pushed, tag: str = "1", host: str = HOST, path: str = "team/x") -> None:
        """Serve an image at the addresses of a registry."""
        scheme = "http" if host.startswith("127.") else "https"
        root = f"{scheme}://{host}/v2/{path}"
        self.answers[f"{root}/manifests/{tag}"] = (200, {}, pushed.body)
        self.answers[f"{root}/manifests/{pushed.digest}"] = (200, {}, pushed.body)
        for digest, data in pushed.blobs.items():
            self.answers[f"{root}/blobs/{digest}"] = (200, {}, data)

    def headers_to(self, host: str) -> list[dict[str, str]]:
        """Return the headers of every request to a host."""
        return [headers for url, headers in self.asked if url.split("/")[2].partition(":")[0] == host]


class Adapter(requests.adapters.HTTPAdapter):
    """Sends requests to the fake internet of a test."""

    def __init__(self, internet: Internet) -> None:
        super().__init__()
        self._internet = internet

    def send(self, request: requests.PreparedRequest, *_: Any, **options: Any) -> requests.Response:
        self._internet.proxies.append(dict(options["proxies"] or {}))
        code, headers, body = self._internet.answer(request)
        raw = HTTPResponse(io.BytesIO(body), HTTPHeaderDict(headers), code, preload_content=False)
        return self.build_response(request, raw)


@contextmanager
def connected_to(internet: Internet) -> Iterator[None]:
    """Send every request to a fake internet; retries do not wait."""
    adapter = Adapter(internet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.Session, "get_adapter", lambda *_, **__: adapter)
        patch.setattr(connection, "trusting_adapter", lambda _: adapter)  # each reads all certificates of the system
        patch.setattr(events, "RETRY_SECONDS", (0.0, 0.0, 0.0))
        yield
    adapter.close()
