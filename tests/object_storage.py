"""Servers that speak S3 and Google's storage, on this machine."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

BUCKET = "team"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def s3_server() -> Iterator[tuple[str, Any]]:
    """Give a server's address, and a client of it, with the bucket `team`."""
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
    """Start an emulator with the bucket `team`, have programs find it, and give its address."""
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
    """Have programs find the server and its keys where they look for them."""
    import s3fs

    variables = {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()
