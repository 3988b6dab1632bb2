"""Local servers for S3, Google Cloud Storage and the Hugging Face Hub."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

BUCKET = "team"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def s3_server() -> Iterator[tuple[str, Any]]:
    """Yield a server's address and a client for it, with the bucket `team`."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1",
        **{name.lower(): value for name, value in KEYS.items()},
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    yield f"http://{host}:{port}", client
    client.close()
    server.stop()


@contextmanager
def gcs_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start an emulator with the bucket `team`, configure programs to use it, and yield its address."""
    import gcsfs
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    address = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
    for name, value in {"STORAGE_EMULATOR_HOST": address, "NO_GCE_CHECK": "true", "HOME": "/nonexistent"}.items():
        patch.setenv(name, value)
    patch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield address
    gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


@contextmanager
def found_by_programs(address: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the variables through which programs find the server and its keys."""
    import s3fs

    variables = {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def hub_server(files: dict[str, bytes], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a hub with the dataset `org/chats` of these files, accessible with the token `good`."""
    from huggingface_hub import HfFileSystem

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, files)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setattr("huggingface_hub.constants.ENDPOINT", address)
        patch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        patch.setenv("HF_TOKEN", "good")
        HfFileSystem.clear_instance_cache()
        yield
        HfFileSystem.clear_instance_cache()
        server.shutdown()


class _Hub(BaseHTTPRequestHandler):
    """Serves the requests of `HfFileSystem`: a dataset's information, its tree, and its files."""

    protocol_version = "HTTP/1.1"

    def __init__(self, files: dict[str, bytes], *args: Any) -> None:
        self.files = files
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if not place.removeprefix("/api").startswith("/datasets/org/chats"):
            self._answer(404, b"{}")
        elif self.headers["Authorization"] != "Bearer good":
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in place:
            self._answer(200, json.dumps(self._tree()).encode())
        elif "/resolve/" in place:
            content = self.files[place.partition("/resolve/main/")[2]]
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self._answer(206, part, {"Content-Range": f"bytes {first}-{last}/{len(content)}"})
        else:
            self._answer(200, json.dumps({"id": "org/chats", "sha": "a" * 40}).encode())

    def _tree(self) -> list[dict[str, Any]]:
        folders = {str(PurePosixPath(name).parent) for name in self.files} - {"."}
        return [{"type": "directory", "path": name, "size": 0, "oid": "c" * 40} for name in sorted(folders)] + [
            {"type": "file", "path": name, "size": len(content), "oid": f"{hash(content):040x}"}
            for name, content in self.files.items()
        ]

    def _answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
