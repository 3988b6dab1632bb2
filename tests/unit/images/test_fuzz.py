"""Registry answers, layers and image files that were damaged at random, and those on which ftkit once fell.

Whatever they are, an import gives the image that was pushed or an error with an exit code of its own; it writes nowhere
but in its folder. Each case is a function of its seed. The corpus is in tests/corpus/images.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.errors import ImageError, NotFoundError
from ftkit.images import sources, squashfs
from ftkit.images.credentials import Credentials
from ftkit.images.flatten import Layer, flatten
from ftkit.images.importing import import_image
from ftkit.images.packing import Made
from ftkit.images.progress import say_nothing
from ftkit.images.registry import Registry
from ftkit.images.root_filesystem import ImageConfig, write_root
from ftkit.images.sources import RegistrySource
from ftkit.images.store import ImageStore, manifest_file, read_manifest
from ftkit.images.verify import looks_whole
from ftkit.specs.digest import Digest
from ftkit.specs.image_reference import parse_reference

if TYPE_CHECKING:
    from conftest import Internet

CORPUS = Path(__file__).parents[2] / "corpus" / "images"
HOST = "https://registry.example.com"
SQUASHFS = b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(200)
SECRET = "correct-horse"  # noqa: S105 - a password of nobody
SEEDS = range(int(os.environ.get("FTKIT_FUZZ_SEEDS", "3")))
"""More by hand: FTKIT_FUZZ_SEEDS=200 pytest tests/unit/images/test_fuzz.py"""

CASES = 40
"""Cases of one seed."""

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63), 1e308, "", "x", "sha256:", "../../../etc/passwd",
    "sha256:" + "0" * 64, "sha256:" + "A" * 64, "sha256:" + "a" * 63 + "\n", "sha512:" + "a" * 128, "\0", "\u2028",
    "a" * 5000, [], [[]], {}, {"": None}, {"digest": "x"}, "application/vnd.oci.image.index.v1+json", "linux", "amd64",
    "https://evil.example.net/", "\x1b[2J",
]  # fmt: skip
NASTY_NUMBERS = (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-1\0" * 4)
HERE = {"os": "linux", "architecture": "amd64"}
LOCATIONS = ("", "/", "https://evil.example.net/", "http://evil.example.net", "//", "file:///etc/passwd")
LOGINS = (
    "",
    "Basic",
    "Digest",
    'Bearer realm="http://evil.example.net/"',
    'Bearer realm="https://evil.example.net/"',
)


def digest_of(data: bytes) -> Digest:
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def damaged_value(rng: random.Random, value: Any) -> Any:
    """Replace, drop, repeat or bury one part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {other: part for other, part in value.items() if other != key}
        return value | {key: damaged_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((0, 2, 50))
        return [*value[:place], damaged_value(rng, value[place]), *value[place + 1 :]]
    return [value] if rng.random() < 0.1 else rng.choice(NASTY)


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Cut, flip, insert, repeat or replace some bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(result) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del result[place:]
        elif kind == 1 and place < len(result):
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            result[place:place] = rng.randbytes(rng.choice((1, 4, 512)))
        elif kind == 3:
            result[place : place + rng.choice((1, 12, 512))] = b""
        elif kind == 4:
            result[place : place + 12] = rng.choice(
                (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-1\0" * 4)
            )
        else:
            result += result[place : place + 1024]
    return bytes(result)


@pytest.fixture(autouse=True)
def no_packer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed is written as it is, behind a head of squashfs."""

    def pack(entries: Any, config: ImageConfig, partial: Path, **_: Any) -> Made:
        sink = io.BytesIO()
        contents = write_root(entries, config, sink)
        partial.write_bytes(SQUASHFS + sink.getvalue())
        return Made(contents, "a test")

    monkeypatch.setattr(sources, "pack_entries", pack)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def check_message(error: ImageError | NotFoundError) -> None:
    assert error.exit_code in (4, 10)
    assert len(str(error)) < 2000
    assert str(error).replace("\n", "").isprintable()
    assert SECRET not in str(error)


def outcome(folder: Path, digest: str = "") -> bytes | None:
    """Import from the internet of the test; return the file, or nothing where it was refused as it should be."""
    reference = parse_reference("registry.example.com/team/x:1" + digest)
    store = ImageStore(folder / "workspace" / "images")
    try:
        with Registry(reference, Credentials("alice", SECRET), say_nothing) as registry:
            found = import_image("x:1", RegistrySource(reference, registry), store)
    except (ImageError, NotFoundError) as error:
        check_message(error)
        found = None
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.parent == store.root for path in names), names
    return found.file.read_bytes() if found else None


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_answers_give_the_image_or_an_error(internet: Internet, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole = internet.image()
    good = outcome(tmp_path / "good")
    assert good is not None
    num_imported = 0
    for case in range(CASES):
        internet.answers.clear()
        pushed = internet.image()
        part = rng.randrange(5)
        if part == 0:
            pushed.manifest = damaged_value(rng, pushed.manifest)
        elif part == 1:
            pushed.config = damaged_value(rng, pushed.config)
            pushed.manifest["config"] = pushed.add(json.dumps(pushed.config).encode())
        elif part == 2:
            entry = {
                "digest": pushed.digest,
                "size": len(pushed.body),
                "platform": {"os": "linux", "architecture": "amd64"},
            }
            pushed.manifest = damaged_value(rng, {"schemaVersion": 2, "manifests": [entry]})
        internet.serve(pushed)
        if part >= 3:
            url = rng.choice(list(internet.answers))
            body = pushed.body if "manifests" in url else pushed.blobs[url.rpartition("/")[2]]
            internet.answers[url] = damaged_answer(rng, body)
        found = outcome(tmp_path / str(case))
        assert found is None or part == 1 or found == good
        num_imported += found is not None
        pinned = outcome(tmp_path / f"{case}-pinned", f"@{whole.digest}")
        assert pinned in (None, good), "a digest was given"
    assert 0 < num_imported < CASES


def damaged_answer(rng: random.Random, body: bytes) -> tuple[int, dict[str, str], bytes]:
    code = rng.choice((200, 200, 200, 206, 301, 307, 401, 403, 404, 416, 429, 500, 204, 304, 418))
    headers = {
        "Location": rng.choice(
            ("", "/", "https://evil.example.net/", "http://evil.example.net", "//", "file:///etc/passwd")
        ),
        "WWW-Authenticate": rng.choice(LOGINS),
        "Content-Range": rng.choice(("", "bytes 0-", "bytes 99999999999999999999-", "x")),
        "Content-Encoding": rng.choice(("", "", "", "gzip", "deflate", "x")),
    }
    present = {key: value for key, value in headers.items() if value and rng.random() < 0.7}
    return code, present, damaged_bytes(rng, body) if rng.random() < 0.7 else body


def odd_tar() -> bytes:
    """A layer with one of everything."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, target, data in (
            ("etc", tarfile.DIRTYPE, "", b""), ("etc/issue", tarfile.REGTYPE, "", b"hello\n"),
            ("etc/link", tarfile.LNKTYPE, "etc/issue", b""), ("etc/again", tarfile.LNKTYPE, "etc/link", b""),
            ("etc/symlink", tarfile.SYMTYPE, "../x", b""), ("d" * 150 + "/ä", tarfile.REGTYPE, "", bytes(700)),
            ("etc/.wh.gone", tarfile.REGTYPE, "", b""), ("etc/pipe", tarfile.FIFOTYPE, "", b""),
        ):  # fmt: skip
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, len(data)
            tar.addfile(entry, io.BytesIO(data))
    return output.getvalue()


def flattened(folder: Path, *blobs: bytes, diff_ids: tuple[Digest, ...] = ()) -> bytes | None:
    """Lay layers over each other; return the stream that is packed, nothing where they were refused."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = []
    for number, blob in enumerate(blobs):
        (folder / str(number)).write_bytes(blob)
        unpacked = diff_ids[number] if diff_ids else digest_of(blob)
        layers.append(Layer(folder / str(number), unpacked))
    sink = io.BytesIO()
    try:
        write_root(flatten(layers), ImageConfig(created=1), sink)
    except ImageError as error:
        check_message(error)
        return None
    return sink.getvalue()


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_layers_give_a_valid_stream_or_an_error(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole = odd_tar()
    num_accepted = 0
    for case in range(CASES):
        lower, upper = damaged_bytes(rng, whole), damaged_bytes(rng, whole)
        made = flattened(tmp_path / str(case), lower, upper)
        if made is not None:
            num_accepted += 1
            with tarfile.open(fileobj=io.BytesIO(made)) as tar:
                assert not [entry.name for entry in tar if entry.name.startswith("/") or ".." in entry.name.split("/")]
        zipped = damaged_bytes(rng, gzip.compress(whole, mtime=0))
        again = flattened(tmp_path / f"{case}-zipped", zipped, diff_ids=(digest_of(whole),))
        assert again is None or again == flattened(tmp_path / "whole", whole)
    assert num_accepted > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_and_manifests_are_none(tmp_path: Path, internet: Internet, seed: int) -> None:
    rng = random.Random(seed)
    internet.image()
    outcome(tmp_path)
    (file,) = (tmp_path / "workspace" / "images").glob("sha256-*.sqsh")
    data, manifest = file.read_bytes(), json.loads(manifest_file(file).read_bytes())
    for _ in range(CASES):
        file.write_bytes(damaged_bytes(rng, data[:256]))
        try:
            squashfs.check_whole(file)
        except ImageError as error:
            check_message(error)
        manifest_file(file).write_text(json.dumps(damaged_value(rng, manifest)))
        found = read_manifest(file)
        assert found is None or (isinstance(found.image_id, Digest) and found.block_size > 0)
        looks_whole(file)
        manifest_file(file).write_bytes(damaged_bytes(rng, json.dumps(manifest).encode()))
        read_manifest(file)


# --- The corpus -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((CORPUS / "registry").glob("*.json")), ids=lambda file: file.stem)
def test_registry_answers_of_the_corpus(internet: Internet, tmp_path: Path, file: Path) -> None:
    case = json.loads(file.read_text())
    for path, answer in case["answers"].items():
        body = base64.b64decode(answer["base64"]) if "base64" in answer else answer.get("body", "").encode()
        url = path if "://" in path else HOST + path
        internet.answers[url] = (answer.get("status", 200), answer.get("headers", {}), body)
    keys = tmp_path / "workspace" / "secret"
    found = outcome(tmp_path, case.get("digest", ""))
    assert (found is not None) == case["is_imported"]
    assert not keys.exists()


@pytest.mark.parametrize("folder", sorted((CORPUS / "layers").iterdir()), ids=lambda folder: folder.name)
def test_layers_of_the_corpus(tmp_path: Path, folder: Path) -> None:
    blobs = [path.read_bytes() for path in sorted(folder.glob("layer-*"))]
    expected = json.loads((folder / "expected.json").read_text())
    unpacked = tuple(Digest(text) for text in expected["diff_ids"])
    made = flattened(tmp_path / "layers", *blobs, diff_ids=unpacked)
    files = None
    if made is not None:
        with tarfile.open(fileobj=io.BytesIO(made)) as tar:
            files = {
                entry.name: entry.linkname or read(tar, entry) for entry in tar if not entry.name.startswith("etc")
            }
    assert files == expected["files"]


def read(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    content = tar.extractfile(entry)
    return content.read().decode() if content else ""
