"""Data and copies of runs in Google Cloud Storage: an emulator, accessed through gcsfs like a user's bucket."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from object_storage import BUCKET, gcs_server

from ftkit.config.data import DataSpec
from ftkit.data.source_files import find_files, read_file, stamp
from ftkit.data.upload import upload_data
from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.layout import Workspace
from ftkit.runs.checkpoints import find_damage, read_marker
from ftkit.runs.storage import Store, push
from ftkit.runs.sync import RunCopy, fetch_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Run

pytestmark = pytest.mark.train
pytest.importorskip("gcp_storage_emulator", reason="needs the extra dev-storage")
pytest.importorskip("gcsfs", reason="needs the extra dev-storage")

ROWS = [{"prompt": f"{number} + 1", "completion": str(number + 1)} for number in range(600)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
REFUSAL = {"error": {"code": 401, "message": "Anonymous caller does not have storage.objects.list access"}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, gcs_server(patch) as server:
        files = {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), ".hidden.jsonl": b"no row", "README.md": b"#"}
        for name, content in files.items():
            upload(server, f"chats/{name}", content)
        upload(server, "cut/a.jsonl.gz", gzip.compress(LINES)[:-20])
        yield server


def upload(server: str, name: str, content: bytes) -> None:
    place = f"{server}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
    with urlopen(Request(place, content, method="POST")) as answer:  # noqa: S310 - the emulator
        assert answer.status == 200


def rows_of(place: str) -> list[dict[str, Any]]:
    return [row.columns for file in find_files(place, "k") for raw in read_file(file) if (row := raw.parse())]


@pytest.mark.usefixtures("address")
def test_folders_and_globs_yield_the_rows_of_their_data_files() -> None:
    files = ["gs://team/chats/a.jsonl", "gs://team/chats/b.jsonl.gz"]
    for place in ("gs://team/chats", "gs://team/chats/", "gs://team/chats/*.jsonl*"):
        assert find_files(place, "k") == files
    assert rows_of("gs://team/chats") == ROWS * 2


@pytest.mark.usefixtures("address")
def test_uploaded_data_is_read_from_its_address(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    data = DataSpec.model_validate({"source": {"kind": "files", "train": str(tmp_path / "rows.jsonl")}})
    copied = upload_data(data, "gs://team/uploads", lambda _: None)
    assert copied == {"data.source": {"kind": "files", "train": "gs://team/uploads/rows.jsonl"}}
    assert rows_of("gs://team/uploads/rows.jsonl") == ROWS


def test_the_stamp_changes_with_the_content(address: str) -> None:
    import gcsfs

    before = stamp("gs://team/chats/a.jsonl", "k")
    upload(address, "chats/a.jsonl", LINES[:-1])
    gcsfs.GCSFileSystem.clear_instance_cache()
    assert stamp("gs://team/chats/a.jsonl", "k") != before
    upload(address, "chats/a.jsonl", LINES)


@pytest.mark.usefixtures("address")
def test_missing_objects_and_truncated_files_are_reported_without_driver_warnings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as outside of pytest: warnings reach stderr
    for place in ("gs://team/none.jsonl", "gs://team/none/*.jsonl", "gs://nobody/a.jsonl", "gs://nobody"):
        with pytest.raises(NotFoundError, match=rf"data\.source: .* {place[:9]}"):
            find_files(place, "data.source")
    with pytest.raises(Exception, match=r"gs://team/cut/a\.jsonl\.gz"):
        rows_of("gs://team/cut/a.jsonl.gz")
    err = capfd.readouterr().err
    assert not [line for line in err.splitlines() if "credentials" in line or "gcsfs" in line]


@pytest.mark.usefixtures("address")
def test_files_are_uploaded_and_downloaded(tmp_path: Path) -> None:
    store, file = Store("gs://team/runs/one"), tmp_path / "tokens.bin"
    file.write_bytes(LINES)
    store.check_writable()
    store.put(file, "data/tokens.bin")
    assert store.sizes() == {"data/tokens.bin": len(LINES)}
    assert store.holds("data/tokens.bin", file)
    store.get("data/tokens.bin", tmp_path / "back" / "tokens.bin")
    assert (tmp_path / "back" / "tokens.bin").read_bytes() == LINES
    file.write_bytes(LINES[:-1] + b" ")
    assert not store.holds("data/tokens.bin", file)


@pytest.mark.usefixtures("address")
def test_pushed_exports_and_copied_runs_are_complete(finished_run: Run, tmp_path: Path) -> None:
    export, copied = finished_run.layout.export, []
    push(export, "gs://team/models/one", EXPORT_RECORD, copied.append)
    assert Store("gs://team/models/one").sizes() == {
        path.relative_to(export).as_posix(): path.stat().st_size for path in export.rglob("*") if path.is_file()
    }
    assert copied[-1] == f"copying {EXPORT_RECORD}"
    push(export, "gs://team/models/one", EXPORT_RECORD, pytest.fail)
    status = RunCopy(finished_run.layout, "gs://team/runs", lambda _: None).update()
    assert (status.error, status.waiting) == (None, ())
    plan = fetch_run(status.destination, Workspace(tmp_path), lambda _: None)
    marker = read_marker(plan.layout.checkpoint(20), 20)
    assert find_damage(plan.layout.checkpoint(20), marker, marker.files) == []


@pytest.mark.usefixtures("address")
def test_missing_credentials_are_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import gcsfs

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(REFUSAL).encode()
            self.send_response(401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        gcsfs.GCSFileSystem.clear_instance_cache()
        with pytest.raises(PrerequisiteError, match=r"gs://team/chats: .*Anonymous caller") as caught:
            find_files("gs://team/chats", "data.source")
        server.shutdown()
    gcsfs.GCSFileSystem.clear_instance_cache()
    assert "gcloud auth application-default" in caught.value.fix


def test_a_machine_without_network_fails_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("STORAGE_EMULATOR_HOST", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", find_nothing)
    with pytest.raises(PrerequisiteError, match=r"data\.source: .* gs://team/chats: .*googleapis"):
        find_files("gs://team/chats", "data.source")
