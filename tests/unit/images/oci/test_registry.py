"""A faulty registry: dropped connections, busy responses, wrong content."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from ftkit.config.image_reference import Digest, parse_reference
from ftkit.errors import ImageError, NotFoundError
from ftkit.images import events
from ftkit.images.events import TransientError, ignore_progress
from ftkit.images.import_image import registry_source
from ftkit.images.oci import connection
from ftkit.images.oci.connection import Credentials, StalledError
from ftkit.images.oci.documents import Configuration, Descriptor, Index, Manifest, Platform
from ftkit.images.oci.registry import Registry, entry_for_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOB = bytes(range(256)) * (4 << 12)

PAUSE_SECONDS = 0.001
"""Between two bytes of a server that stalls."""


def digest_of(data: bytes) -> Digest:
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


LAYER = Descriptor(digest=digest_of(BLOB), size=len(BLOB))


@dataclass
class Behavior:
    """Faults of the fake registry, and its recorded requests."""

    cut_after: list[int] = field(default_factory=list)
    stops_after: list[int] = field(default_factory=list)
    """As `cut_after`, with the connection left open."""
    busy: int = 0
    blob: bytes = BLOB
    ignores_ranges: bool = False
    ranges: list[str] = field(default_factory=list)
    says_more: bool = False
    stalls: Literal["", "headers", "body", "token"] = ""
    """In the midst of what the answer never ends, though bytes keep coming."""
    is_over: threading.Event = field(default_factory=threading.Event)


class StandIn(BaseHTTPRequestHandler):
    behavior: Behavior

    def do_GET(self) -> None:
        if self.behavior.busy:
            self.behavior.busy -= 1
            self.send_error(503)
            return
        if self.behavior.stalls:
            self._stall()
            return
        wanted = self.headers.get("Range", "")
        self.behavior.ranges.append(wanted)
        found = re.fullmatch(r"bytes=(\d+)-", wanted)
        start = int(found[1]) if found and not self.behavior.ignores_ranges else 0
        data = self.behavior.blob[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) + self.behavior.says_more))
        self.end_headers()
        if self.behavior.stops_after:
            self.wfile.write(data[: self.behavior.stops_after.pop(0)])
            self.behavior.is_over.wait()
        self.wfile.write(data[: self.behavior.cut_after.pop(0)] if self.behavior.cut_after else data)
        self.close_connection = True

    def _stall(self) -> None:
        """Send one byte at a time, fast enough for the timeout of a single read, until the test ends."""
        if self.behavior.stalls == "token" and self.path.startswith("/v2/"):
            self.send_response(401)
            realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\nX-Long: ")
        if self.behavior.stalls != "headers":
            self.wfile.write(b"\r\n\r\n")
        while not self.behavior.is_over.wait(PAUSE_SECONDS):
            self.wfile.write(b" ")

    def log_message(self, *words: Any) -> None:
        del words


@pytest.fixture
def behavior(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behavior]:
    monkeypatch.setattr(events, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    return Behavior()


@pytest.fixture
def registry(behavior: Behavior) -> Iterator[Registry]:
    handler = type("Handler", (StandIn,), {"behavior": behavior})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with Registry(parse_reference(f"127.0.0.1:{server.server_port}/team/x:1"), None, ignore_progress) as made:
            yield made
        behavior.is_over.set()
        server.shutdown()
        thread.join()


def test_an_interrupted_download_is_resumed(registry: Registry, behavior: Behavior, tmp_path: Path) -> None:
    behavior.cut_after = [1_500_000, 2_200_000]
    registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB
    assert behavior.ranges == ["", "bytes=1048576-", "bytes=3145728-"]


def test_a_download_restarts_if_ranges_are_not_supported(
    registry: Registry, behavior: Behavior, tmp_path: Path
) -> None:
    behavior.cut_after, behavior.ignores_ranges = [100_000], True
    registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_permanently_unreachable_registry_is_reported(registry: Registry, behavior: Behavior, tmp_path: Path) -> None:
    behavior.cut_after = [1000] * 9
    with pytest.raises(TransientError, match=r"127\.0\.0\.1"):
        registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert len(behavior.ranges) == 4


def test_content_with_another_digest_is_rejected(registry: Registry, behavior: Behavior, tmp_path: Path) -> None:
    behavior.blob = BLOB[:-1] + b"!"
    with pytest.raises(ImageError, match="sent other content"):
        registry.download(LAYER, tmp_path / "blob", lambda _: None)


def test_bytes_beyond_the_size_in_the_manifest_are_not_written(
    registry: Registry, behavior: Behavior, tmp_path: Path
) -> None:
    behavior.blob = BLOB * 3
    with pytest.raises(ImageError, match="sent more than"):
        registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").stat().st_size <= len(BLOB)


def test_a_download_interrupted_after_its_last_byte_is_complete(
    registry: Registry, behavior: Behavior, tmp_path: Path
) -> None:
    behavior.says_more, behavior.cut_after = True, [len(BLOB)]
    registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB
    assert behavior.ranges == [""]


def test_a_failed_layer_stops_the_other_downloads(tmp_path: Path) -> None:
    first, second = (Descriptor(digest=digest_of(data), size=1) for data in (b"endless", b"broken"))
    config = Descriptor(digest=digest_of(b"config"), size=1)

    class OneFails:
        stage = "downloading"
        has_stopped = False

        def manifest(self) -> tuple[Manifest, tuple[Digest, ...]]:
            return Manifest(config=config, layers=(first, second)), (digest_of(b"manifest"),)

        def configuration(self, manifest: Manifest, **_: bool) -> Configuration:
            return Configuration.model_validate({"rootfs": {"diff_ids": [layer.digest for layer in manifest.layers]}})

        def download(self, layer: Descriptor, _: Path, advance: Callable[[int], None]) -> None:
            if layer is second:
                raise ImageError("the registry went away")
            try:
                while True:
                    advance(1)
            finally:
                self.has_stopped = True

        def close(self) -> None: ...

    registry = OneFails()
    source = registry_source(parse_reference("r.io/x:1"), cast("Registry", registry))
    with pytest.raises(ImageError, match="went away"):
        source.make_file(tmp_path / "partial", ignore_progress)
    assert registry.has_stopped


def test_a_lost_connection_is_reported_with_the_systems_message() -> None:
    with (
        Registry(parse_reference("127.0.0.1:9/x:1"), None, ignore_progress) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(events, "RETRY_SECONDS", ())
        with pytest.raises(ImageError) as caught:
            made.manifest()
    assert {"127.0.0.1:9:", "refused"} <= set(caught.value.what.split())


def test_requests_to_a_busy_registry_are_retried(registry: Registry, behavior: Behavior, tmp_path: Path) -> None:
    behavior.busy = 2
    registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB


@pytest.mark.parametrize("part", ["headers", "body", "token"])
def test_a_document_that_arrives_byte_by_byte_times_out(
    registry: Registry, behavior: Behavior, part: Literal["headers", "body", "token"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CHUNK_SECONDS", 0.1)
    behavior.stalls = part
    with pytest.raises(StalledError):
        registry.manifest()


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_layer_that_arrives_too_slowly_times_out(
    registry: Registry,
    behavior: Behavior,
    part: Literal["headers", "body"],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(connection, "CHUNK_SECONDS", 0.1)
    behavior.stalls = part
    with pytest.raises(StalledError):
        registry.download(LAYER, tmp_path / "blob", lambda _: None)


def test_a_stalled_layer_download_is_resumed(
    registry: Registry, behavior: Behavior, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "CHUNK_SECONDS", 0.5)
    behavior.stops_after = [1_500_000]
    registry.download(LAYER, tmp_path / "blob", lambda _: None)
    assert (tmp_path / "blob").read_bytes() == BLOB
    assert behavior.ranges == ["", "bytes=1048576-"]


def test_a_password_is_not_in_any_repr() -> None:
    assert "hush" not in repr(Credentials("alice", "hush"))


@pytest.mark.parametrize(
    ("platforms", "found"),
    [
        ((("unknown", "unknown"), ("linux", "arm64"), ("linux", "amd64")), 2),  # an attestation comes first
        ((("unknown", "unknown"), None), 1),  # the platform of an entry is optional
        ((("unknown", "unknown"), ("linux", "arm64")), None),
    ],
)
def test_the_entry_of_an_index_is_chosen_by_platform(
    monkeypatch: pytest.MonkeyPatch,
    platforms: tuple[tuple[str, str] | None, ...],
    found: int | None,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    reference = parse_reference("r.io/x:1")
    named = [None if each is None else Platform(os=each[0], architecture=each[1]) for each in platforms]
    entries = tuple(Descriptor(digest=LAYER.digest, size=size, platform=each) for size, each in enumerate(named))
    if found is not None:
        assert entry_for_this_machine(Index(manifests=entries), reference).size == found
        return
    with pytest.raises(NotFoundError) as refused:
        entry_for_this_machine(Index(manifests=entries), reference)
    assert refused.value.meaning.split()[-1] == "linux/arm64"


@pytest.mark.parametrize(
    ("machine", "architecture", "variants", "found"),
    [
        ("x86_64", "amd64", ("v3", "v2", None), 2),
        ("x86_64", "amd64", ("v3", "v1"), 1),
        ("aarch64", "arm64", ("v9", "v8", ""), 1),
        ("aarch64", "arm64", ("v9.2", "v9"), 0),
    ],
)
def test_a_variant_that_every_machine_of_the_architecture_runs_is_preferred(
    monkeypatch: pytest.MonkeyPatch, machine: str, architecture: str, variants: tuple[str | None, ...], found: int
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    platforms = (Platform(os="linux", architecture=architecture, variant=each) for each in variants)
    entries = tuple(Descriptor(digest=LAYER.digest, size=size, platform=each) for size, each in enumerate(platforms))
    assert entry_for_this_machine(Index(manifests=entries), parse_reference("r.io/x:1")).size == found
