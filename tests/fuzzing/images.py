"""Registry responses, layers, and image files.

For any input, an import yields the pushed image or an error, and writes only to its folder.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.config.image_reference import Digest, parse_reference
from ftkit.errors import ImageError, NotFoundError
from ftkit.images import import_image as importing
from ftkit.images import squashfs
from ftkit.images.events import ignore_progress
from ftkit.images.image_store import ImageStore, manifest_file, manifest_if_intact, read_manifest
from ftkit.images.import_image import import_image, registry_source
from ftkit.images.oci.connection import Credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.oci.tar import Layer, flatten
from ftkit.images.squashfs import ImageConfig, MadeFile, write_root
from fuzzing.area import Area, Case
from fuzzing.internet import Internet, Pushed, connected_to, digest_of
from fuzzing.mutate import damaged_bytes, damaged_json, damaged_value

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

HOST = "https://registry.example.com"
SQUASHFS = b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(200)
SECRET = "correct-horse"  # noqa: S105 - a fake password
_LOCATIONS = ("", "/", "https://evil.example.net/", "http://evil.example.net", "//", "file:///etc/passwd")
_LOGINS = ("", "Basic", "Digest", *(f'Bearer realm="{scheme}://evil.example.net/"' for scheme in ("http", "https")))
_CODES = (200, 200, 200, 206, 301, 307, 401, 403, 404, 416, 429, 500, 204, 304, 418)


@contextmanager
def _no_packer() -> Iterator[None]:
    """Replace mksquashfs: write members uncompressed after a squashfs header; fix the platform to x86_64."""

    def pack(entries: Any, config: ImageConfig, partial: Path, **_: Any) -> MadeFile:
        sink = io.BytesIO()
        contents = write_root(entries, config, sink)
        partial.write_bytes(SQUASHFS + sink.getvalue())
        return contents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "build_squashfs", pack)
        patch.setattr("platform.machine", lambda: "x86_64")
        yield


def _check_message(error: ImageError | NotFoundError) -> None:
    assert error.exit_code in (4, 10)
    assert len(str(error)) < 2000
    assert str(error).replace("\n", "").isprintable()
    assert SECRET not in str(error)


def _imported(folder: Path, digest: str = "") -> Path | None:
    """Import from the fake internet; return the file, or None if it was rejected correctly."""
    reference = parse_reference("registry.example.com/team/x:1" + digest)
    store = ImageStore(folder / "workspace" / "images")
    try:
        with _no_packer(), Registry(reference, Credentials("alice", SECRET), ignore_progress) as registry:
            found = import_image("x:1", registry_source(reference, registry), store).file
    except (ImageError, NotFoundError) as error:
        _check_message(error)
        found = None
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.parent == store.root for path in names), names
    return found


# --- Answers --------------------------------------------------------------------------------------


def _make_answers(rng: random.Random) -> Case:
    internet, pushed = Internet(), Pushed()
    values: dict[str, Any] = {"pinned": pushed.digest, "content": digest_of(_good().read_bytes())}
    part = rng.randrange(5)
    if part == 0:
        pushed.manifest = damaged_value(rng, pushed.manifest)
    elif part == 1:
        del values["content"]  # another configuration would be another image
        pushed.config = damaged_value(rng, pushed.config)
        pushed.manifest["config"] = pushed.add(json.dumps(pushed.config).encode())
    elif part == 2:
        platform = {"os": "linux", "architecture": "amd64"}
        entry = {"digest": pushed.digest, "size": len(pushed.body), "platform": platform}
        pushed.manifest = damaged_value(rng, {"schemaVersion": 2, "manifests": [entry]})
    internet.serve(Pushed())  # the pinned image always exists
    internet.serve(pushed)
    if part >= 3:
        url = rng.choice(list(internet.answers))
        body = pushed.body if "manifests" in url else pushed.blobs[url.rpartition("/")[2]]
        internet.answers[url] = _damaged_answer(rng, body)
    answers = {
        url.removeprefix(HOST): {"status": code, "headers": headers, "base64": base64.b64encode(body).decode()}
        for url, (code, headers, body) in internet.answers.items()
    }
    return {"answers.json": json.dumps(values | {"answers": answers}, indent=1).encode()}


def _damaged_answer(rng: random.Random, body: bytes) -> tuple[int, dict[str, str], bytes]:
    headers = {
        "Location": rng.choice(_LOCATIONS),
        "WWW-Authenticate": rng.choice(_LOGINS),
        "Content-Range": rng.choice(("", "bytes 0-", "bytes 99999999999999999999-", "x")),
        "Content-Encoding": rng.choice(("", "", "", "gzip", "deflate", "x")),
    }
    present = {key: value for key, value in headers.items() if value and rng.random() < 0.7}
    return rng.choice(_CODES), present, damaged_bytes(rng, body) if rng.random() < 0.7 else body


def _run_answers(case: Case, folder: Path) -> bool:
    values = json.loads(case["answers.json"])
    internet = Internet()
    for path, answer in values["answers"].items():
        body = base64.b64decode(answer["base64"]) if "base64" in answer else answer.get("body", "").encode()
        url = path if "://" in path else HOST + path
        internet.answers[url] = (answer.get("status", 200), answer.get("headers", {}), body)
    with connected_to(internet):
        found = _imported(folder / "tag", values.get("digest", ""))
        pinned = _imported(folder / "digest", f"@{values['pinned']}") if "pinned" in values else None
    assert "is_imported" not in values or (found is not None) == values["is_imported"]
    if "content" in values:
        assert all(digest_of(each.read_bytes()) == values["content"] for each in (found, pinned) if each)
    return found is not None


@cache
def _good() -> Path:
    """Return the file of the unmodified image."""
    internet = Internet()
    internet.image()
    with connected_to(internet):
        found = _imported(Path(tempfile.mkdtemp()))
    assert found is not None
    return found


# --- Layers ---------------------------------------------------------------------------------------


_ENTRIES = (
    ("etc", tarfile.DIRTYPE, "", b""), ("etc/issue", tarfile.REGTYPE, "", b"hello\n"),
    ("etc/link", tarfile.LNKTYPE, "etc/issue", b""), ("etc/again", tarfile.LNKTYPE, "etc/link", b""),
    ("etc/symlink", tarfile.SYMTYPE, "../x", b""), ("d" * 150 + "/\u00e4", tarfile.REGTYPE, "", bytes(700)),
    ("etc/.wh.gone", tarfile.REGTYPE, "", b""), ("etc/pipe", tarfile.FIFOTYPE, "", b""),
)  # fmt: skip
_ODD_NAMES = (
    "", ".", "..", "../x", "/etc/passwd", "etc/../../x", "etc/issue/below", "etc/.wh.issue", "etc/.wh..wh..opq", ".wh.",
    "etc/.wh...", "d" * 300, "a/" * 3000, "\udcff", "x\ny", "\x1b[2J", "etc/link", "etc/again", "etc//issue/",
)  # fmt: skip
_ODD_TYPES = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.CONTTYPE, b"S", b"x", b"Z", tarfile.LNKTYPE, tarfile.SYMTYPE)


@cache
def _whole_tar() -> bytes:
    """Return a layer with one entry of each kind."""
    return _tar_of(_ENTRIES)


def _odd_tar(rng: random.Random) -> bytes:
    """Return a layer with valid headers that have unusual values."""
    entries = [rng.choice(_ENTRIES) for _ in range(rng.randrange(1, 12))]
    for _ in range(rng.choice((1, 1, 3))):
        place = rng.randrange(len(entries))
        name, kind, target, data = entries[place]
        entries[place] = rng.choice((
            (rng.choice(_ODD_NAMES), kind, target, data), (name, kind, rng.choice(_ODD_NAMES), data),
            (name, rng.choice(_ODD_TYPES), target, data),
        ))  # fmt: skip
    return _tar_of(entries)


def _tar_of(entries: Sequence[tuple[str, bytes, str, bytes]]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, kind, target, data in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, len(data)
            tar.addfile(entry, io.BytesIO(data))
    return output.getvalue()


def _make_layers(rng: random.Random) -> Case:
    whole = _whole_tar()
    kind = rng.randrange(3)
    if kind < 2:
        damaged = _odd_tar(rng) if kind else damaged_bytes(rng, whole)
        layers = rng.choice(([damaged, whole], [whole, damaged], [damaged, damaged]))
        unpacked = [digest_of(layer) for layer in layers]
    else:  # damaged after compression: only the intact layer is acceptable
        layers, unpacked = [damaged_bytes(rng, gzip.compress(whole, mtime=0))], [digest_of(whole)]
    case = {f"layer-{number}": layer for number, layer in enumerate(layers)}
    return case | {"expected.json": json.dumps({"diff_ids": unpacked}).encode()}


def _run_layers(case: Case, folder: Path) -> bool:
    expected = json.loads(case["expected.json"])
    layers = []
    for name, unpacked in zip(sorted(case.keys() - {"expected.json"}), expected["diff_ids"], strict=True):
        (folder / name).write_bytes(case[name])
        layers.append(Layer(folder / name, Digest(unpacked)))
    sink = io.BytesIO()
    files: dict[str, str] | None = None
    try:
        write_root(flatten(layers), ImageConfig(created=1), sink)
    except ImageError as error:
        _check_message(error)
    else:
        files = _read_stream(sink.getvalue())
    assert files == expected.get("files", files)
    return files is not None


def _read_stream(stream: bytes) -> dict[str, str]:
    """Read the packed stream: file name to content or target, without the files that ftkit adds in etc."""
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        entries = list(tar)
        assert not [entry.name for entry in entries if entry.name.startswith("/") or ".." in entry.name.split("/")]
        return {
            entry.name: entry.linkname
            or (content.read().decode("latin-1") if (content := tar.extractfile(entry)) else "")
            for entry in entries
            if not entry.name.startswith("etc")
        }


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    content = tar.extractfile(entry)
    return content.read().decode("latin-1") if content else ""


# --- Files ----------------------------------------------------------------------------------------


def _make_file(rng: random.Random) -> Case:
    file = _good()
    image, manifest = file.read_bytes()[:256], manifest_file(file).read_bytes()
    if rng.random() < 0.3:
        return {"image.sqsh": damaged_bytes(rng, image), "manifest.json": manifest}
    return {"image.sqsh": image, "manifest.json": damaged_json(rng, manifest)}


def _run_file(case: Case, folder: Path) -> bool:
    file = folder / _good().name
    file.write_bytes(case["image.sqsh"])
    manifest_file(file).write_bytes(case["manifest.json"])
    manifest = read_manifest(file)
    assert manifest is None or (isinstance(manifest.image_id, Digest) and manifest.block_size > 0)
    manifest_if_intact(file)
    try:
        squashfs.check_squashfs(file)
    except ImageError as error:
        _check_message(error)
        return False
    return manifest is not None


REGISTRY = Area("registry", _make_answers, _run_answers)
LAYERS = Area("layers", _make_layers, _run_layers)
IMAGE_FILES = Area("image-files", _make_file, _run_file)
