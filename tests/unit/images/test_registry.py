"""A registry that misbehaves: cut connections, busy answers, other bytes than asked for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

import pytest

from ftkit.errors import ImageError, NotFoundError
from ftkit.images import retries
from ftkit.images.credentials import Credentials
from ftkit.images.progress import say_nothing
from ftkit.images.registry import Registry
from ftkit.images.sources import RegistrySource
from ftkit.specs.image_reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOB = bytes(range(256)) * (4 << 12)
DIGEST = "sha256:" + hashlib.sha256(BLOB).hexdigest()


@dataclass
class Faults:
    """What the stand-in does wrong, and what it was asked."""

    cut_after: list[int] = field(default_factory=list)
    busy: int = 0
    blob: bytes = BLOB
    ignores_ranges: bool = False
    ranges: list[str] = field(default_factory=list)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)


class StandIn(BaseHTTPRequestHandler):
    faults: Faults

    def do_GET(self) -> None:
        if self.faults.busy:
            self.faults.busy -= 1
            self.send_error(503)
            return
        if "/manifests/" in self.path:
            self._manifest(self.path.rpartition("/")[2])
            return
        wanted = self.headers.get("Range", "")
        self.faults.ranges.append(wanted)
        found = re.fullmatch(r"bytes=(\d+)-", wanted)
        start = int(found[1]) if found and not self.faults.ignores_ranges else 0
        data = self.faults.blob[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.faults.cut_after.pop(0)] if self.faults.cut_after else data)
        self.close_connection = True

    def _manifest(self, name: str) -> None:
        if name not in self.faults.manifests:
            self.send_error(404)
            return
        data = json.dumps(self.faults.manifests[name]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        del words


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(retries, "WAITS_SECONDS", (0.01, 0.01, 0.01))
    return Faults()


@pytest.fixture
def registry(faults: Faults) -> Iterator[Registry]:
    handler = type("Handler", (StandIn,), {"faults": faults})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with Registry(parse_reference(f"127.0.0.1:{server.server_port}/team/x:1"), None, say_nothing) as made:
            yield made
        server.shutdown()
        thread.join()


def test_a_download_goes_on_where_it_broke_off(registry: Registry, faults: Faults, tmp_path: Path) -> None:
    faults.cut_after = [1_500_000, 2_200_000]
    registry.download(DIGEST, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB
    assert faults.ranges == ["", "bytes=1048576-", "bytes=3145728-"]


def test_a_download_begins_anew_where_ranges_are_not_known(registry: Registry, faults: Faults, tmp_path: Path) -> None:
    faults.cut_after, faults.ignores_ranges = [100_000], True
    registry.download(DIGEST, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_registry_that_is_gone_for_good_is_said(registry: Registry, faults: Faults, tmp_path: Path) -> None:
    faults.cut_after = [1000] * 9
    with pytest.raises(ImageError, match=r"lost the connection to 127\.0\.0\.1"):
        registry.download(DIGEST, tmp_path / "blob", lambda _: None)
    assert len(faults.ranges) == 4


def test_other_bytes_than_asked_for_are_refused(registry: Registry, faults: Faults, tmp_path: Path) -> None:
    faults.blob = BLOB[:-1] + b"!"
    with pytest.raises(ImageError, match="sent something else"):
        registry.download(DIGEST, tmp_path / "blob", lambda _: None)


def test_when_one_layer_fails_the_others_stop(tmp_path: Path) -> None:
    class OneFails:
        stage = "downloading"
        has_stopped = False

        def manifest(self, _: str) -> tuple[dict[str, Any], str]:
            layers = [{"digest": name, "size": 1} for name in ("endless", "broken")]
            return {"config": {"digest": "sha256:c"}, "layers": layers}, "sha256:m"

        def blob_bytes(self, _: str) -> bytes:
            return b"{}"

        def download(self, digest: str, _: Path, advance: Callable[[int], None]) -> None:
            if digest == "broken":
                raise ImageError("the registry went away")
            try:
                while True:
                    advance(1)
            finally:
                self.has_stopped = True

        def close(self) -> None: ...

    registry = OneFails()
    source = RegistrySource(parse_reference("r.io/x:1"), cast("Registry", registry))
    with pytest.raises(ImageError, match="went away"):
        source.make_file(tmp_path / "partial", say_nothing)
    assert registry.has_stopped


def test_a_lost_connection_is_said_in_the_system_s_words() -> None:
    with Registry(parse_reference("127.0.0.1:9/x:1"), None, say_nothing) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "WAITS_SECONDS", ())
        with pytest.raises(ImageError) as caught:
            made.manifest("1")
    assert caught.value.what == "lost the connection to 127.0.0.1:9: Connection refused"


def test_a_busy_registry_is_asked_again(registry: Registry, faults: Faults) -> None:
    faults.busy, faults.manifests["1"] = 2, {"config": {}, "layers": []}
    assert registry.manifest("1")[0] == {"config": {}, "layers": []}


def test_of_an_index_the_image_for_this_machine_is_taken(
    registry: Registry, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    platforms = [{"os": "linux", "architecture": name} for name in ("arm64", "amd64")]
    entries = [{"digest": f"d{number}", "platform": platform} for number, platform in enumerate(platforms)]
    faults.manifests = {"1": {"manifests": entries}, "d1": {"config": {"digest": "mine"}}}
    assert registry.manifest("1")[0]["config"]["digest"] == "mine"


def test_an_index_without_this_machine_is_said(
    registry: Registry, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    faults.manifests = {"1": {"manifests": [{"digest": "d", "platform": {"os": "windows", "architecture": "amd64"}}]}}
    with pytest.raises(NotFoundError, match="linux/amd64"):
        registry.manifest("1")


def test_a_password_is_in_no_text() -> None:
    assert "hush" not in repr(Credentials("alice", "hush"))
