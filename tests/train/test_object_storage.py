"""Data in object storage: a local S3 server, accessed through s3fs like a user's bucket."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest
from object_storage import KEYS, found_by_programs, s3_server

from ftkit.config.data import DataSpec
from ftkit.data.selection import read_rows
from ftkit.data.source_files import count_rows, find_files, read_file, stamp
from ftkit.data.upload import upload_data
from ftkit.errors import NotFoundError, PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.train
pytest.importorskip("moto", reason="needs the extra dev-storage")

ROWS = [{"prompt": f"{number} + 1", "completion": str(number + 1)} for number in range(600)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address of an S3 server with files in the bucket `team`."""
    with s3_server() as (server, client):
        files = {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), ".hidden.jsonl": b"no row", "README.md": b"#"}
        for name, content in files.items():
            client.put_object(Bucket="team", Key=f"chats/{name}", Body=content)
        client.put_object(Bucket="team", Key="cut/a.jsonl.gz", Body=gzip.compress(LINES)[:-20])
        yield server


@pytest.fixture(autouse=True)
def _bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with found_by_programs(address, monkeypatch):
        yield


def rows_of(place: str) -> list[dict[str, Any]]:
    return [row.columns for file in find_files(place, "k") for raw in read_file(file) if (row := raw.parse())]


@pytest.mark.parametrize(
    "place", ["s3://team/chats", "s3://team/chats/", "s3://team/chats/*.jsonl*", "s3://team/*/[ab]*"]
)
def test_folders_and_globs_expand_to_their_data_files(place: str) -> None:
    files = find_files(place, "k")
    assert [file for file in files if "cut" not in file] == ["s3://team/chats/a.jsonl", "s3://team/chats/b.jsonl.gz"]


def test_compressed_and_plain_files_yield_the_same_rows() -> None:
    assert rows_of("s3://team/chats") == ROWS * 2
    assert count_rows("s3://team/chats/b.jsonl.gz") == len(ROWS)
    spec = DataSpec.model_validate(
        {
            "source": [
                {"source": "s3://team/chats/a.jsonl", "weight": 2},
                {"source": "s3://team/chats/b.jsonl.gz", "weight": 1},
            ]
        }
    )
    taken = [row.source for row in read_rows(spec)]
    assert (taken.count(0), taken.count(1)) == (600, 300)


def test_uploaded_data_is_read_from_its_address(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    data = DataSpec.model_validate({"source": {"kind": "files", "train": str(tmp_path / "rows.jsonl")}})
    copied = upload_data(data, "s3://team/uploads", lambda _: None)
    assert copied == {"data.source": {"kind": "files", "train": "s3://team/uploads/rows.jsonl"}}
    assert rows_of("s3://team/uploads/rows.jsonl") == ROWS


def test_the_stamp_changes_with_the_content(address: str) -> None:
    import boto3
    import s3fs

    before = stamp("s3://team/chats", "k")
    client = boto3.client("s3", endpoint_url=address)
    client.put_object(Bucket="team", Key="chats/c.jsonl", Body=LINES)
    s3fs.S3FileSystem.clear_instance_cache()
    assert stamp("s3://team/chats", "k") != before
    client.delete_object(Bucket="team", Key="chats/c.jsonl")
    client.close()


@pytest.mark.parametrize(
    "place", ["s3://team/none.jsonl", "s3://team/none/*.jsonl", "s3://nobody/a.jsonl", "s3://nobody"]
)
def test_a_missing_object_is_reported_with_its_address(place: str) -> None:
    with pytest.raises(NotFoundError, match=r"data\.source: .* s3://"):
        find_files(place, "data.source")


def test_a_truncated_file_is_reported() -> None:
    with pytest.raises(Exception, match=r"s3://team/cut/a\.jsonl\.gz"):
        rows_of("s3://team/cut/a.jsonl.gz")


def test_missing_credentials_are_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    assert "AWS_PROFILE" not in os.environ
    with pytest.raises(PrerequisiteError, match="credentials") as caught:
        find_files("s3://team/chats", "data.source")
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix


def test_keys_without_permission_are_reported(address: str) -> None:
    def requests_without_rights(number: str) -> None:
        with closing(HTTPConnection(address.removeprefix("http://"))) as connection:
            connection.request("POST", "/moto-api/reset-auth", number, {"Content-Type": "text/plain"})
            assert connection.getresponse().status == 200

    requests_without_rights("0")
    try:
        for place in ("s3://team/chats", "s3://team/chats/a.jsonl"):
            with pytest.raises(PrerequisiteError, match=f"data.source: can't read {place}: "):
                find_files(place, "data.source")
    finally:
        requests_without_rights("inf")
