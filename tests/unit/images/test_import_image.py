"""An import yields the requested image whatever a registry returns, and secrets go only to that registry."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ftkit.config.image_reference import Digest, is_loopback, parse_reference
from ftkit.errors import ImageError, NotFoundError
from ftkit.images import import_image as importing
from ftkit.images.events import ignore_progress
from ftkit.images.image_store import ImageStore, manifest_file, read_manifest, undefined_statuses
from ftkit.images.import_image import ImportResult, import_image, registry_source
from ftkit.images.oci.connection import Credentials
from ftkit.images.oci.registry import Registry
from ftkit.images.squashfs import MadeFile
from ftkit.images.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from fuzzing.internet import Internet, Pushed

SQUASHFS = b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(200)
NAME = "registry.example.com/team/x:1"
ROOT = "https://registry.example.com/v2/team/x"
ALICE = Credentials("alice", "correct-horse")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def no_packer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a fake squashfs file with the members, without mksquashfs."""

    def pack(entries: Any, config: Any, partial: Path, **_: Any) -> MadeFile:
        del config
        shown = "".join(f"{member.path}: {b''.join(content)!r}\n" for member, content in entries)
        partial.write_bytes(SQUASHFS + shown.encode())
        return MadeFile("a test")

    monkeypatch.setattr(importing, "build_squashfs", pack)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def fetch(
    store: ImageStore, reference: str = "registry.example.com/team/x:1", known: Credentials | None = None
) -> ImportResult:
    parsed = parse_reference(reference)
    with Registry(parsed, known, ignore_progress) as registry:
        return import_image("x:1", registry_source(parsed, registry), store)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "home" / "images")


# --- From the reference to the file ---------------------------------------------------------------


def test_a_good_image_is_imported_and_found_again(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    first = fetch(store, f"registry.example.com/team/x:1@{pushed.digest}")
    assert first.is_new
    assert b"etc/issue': b'hello\\n'" in first.file.read_bytes()
    assert first.manifest.image_id == pushed.manifest["config"]["digest"]
    assert first.manifest.registry_digest == pushed.digest
    assert verify(first.link) == first.manifest
    internet.asked.clear()
    assert not fetch(store).is_new
    assert not [url for url, _ in internet.asked if str(pushed.manifest["layers"][0]["digest"]) in url]


def test_an_image_that_was_imported_by_its_address_is_listed_without_a_definition(
    internet: Internet, store: ImageStore
) -> None:
    internet.image()
    fetch(store)
    (status,) = undefined_statuses((), store)
    assert (status.reference, status.sources) == ("x:1", {"registry, registry.example.com/team/x:1"})
    assert undefined_statuses(("x:1",), store) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o002, 0o664)])
def test_an_imported_file_follows_the_umask(internet: Internet, store: ImageStore, mask: int, mode: int) -> None:
    internet.image()
    before = os.umask(mask)
    try:
        imported = fetch(store)
    finally:
        os.umask(before)
    files = [path for path in store.root.iterdir() if path.name.startswith("sha256-")]
    assert imported.file in files
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: mode for path in files}


@pytest.mark.parametrize(
    "digest",
    [
        "../../.ssh/authorized_keys",
        "/etc/cron.d/ftkit",
        "sha256:../../.bashrc",
        "sha256:" + "a" * 63 + "\n",
        "sha512:" + "a" * 128,
        "",
        None,
        7,
        ["sha256:" + "a" * 64],
    ],
)
@pytest.mark.parametrize("part", ["layer", "config", "diff_id", "index"])
def test_an_invalid_digest_is_never_used(
    internet: Internet, store: ImageStore, tmp_path: Path, digest: object, part: str
) -> None:
    keys = tmp_path / "home" / ".ssh" / "authorized_keys"
    keys.parent.mkdir(parents=True)
    keys.write_text("mine\n")
    pushed = internet.image()
    if part == "layer":
        pushed.manifest["layers"][0]["digest"] = digest
    elif part == "config":
        pushed.manifest["config"]["digest"] = digest
    elif part == "diff_id":
        pushed.config["rootfs"]["diff_ids"] = [digest]
        pushed.manifest["config"] = pushed.add(json.dumps(pushed.config).encode())
    else:
        entry = {"digest": digest, "size": 9, "platform": {"os": "linux", "architecture": "amd64"}}
        pushed.manifest = {"manifests": [entry]}
    internet.serve(pushed)
    internet.answers[f"{ROOT}/blobs/{digest}"] = (206, {}, b"ssh-rsa evil\n")
    with pytest.raises(ImageError, match=r"digest|diff_ids"):
        fetch(store)
    assert keys.read_text() == "mine\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["authorized_keys"]
    assert not [url for url, _ in internet.asked if "authorized" in url or "evil" in url or "cron" in url]


def test_a_manifest_other_than_the_pinned_one_is_rejected(internet: Internet, store: ImageStore) -> None:
    pinned = internet.image()
    other = internet.image(files={"etc/issue": b"evil\n"})
    internet.answers[f"{ROOT}/manifests/{pinned.digest}"] = (200, {}, other.body)
    with pytest.raises(ImageError, match=f"other content than {pinned.digest}"):
        fetch(store, f"registry.example.com/team/x:1@{pinned.digest}")


def test_a_manifest_other_than_the_one_in_the_index_is_rejected(internet: Internet, store: ImageStore) -> None:
    listed, other = internet.image(), internet.image(files={"etc/issue": b"evil\n"})
    put_index(internet, listed)
    internet.answers[f"{ROOT}/manifests/{listed.digest}"] = (200, {}, other.body)
    with pytest.raises(ImageError, match="other content"):
        fetch(store)


def put_index(internet: Internet, *pushed: Pushed, architectures: tuple[str, ...] = ("amd64",)) -> str:
    entries = [
        {"digest": image.digest, "size": len(image.body), "platform": {"os": "linux", "architecture": name}}
        for image, name in zip(pushed, architectures, strict=True)
    ]
    body = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    internet.answers[f"{ROOT}/manifests/1"] = internet.answers[f"{ROOT}/manifests/{digest_of(body)}"] = (200, {}, body)
    return digest_of(body)


def test_the_image_for_this_platform_is_selected_from_an_index(internet: Internet, store: ImageStore) -> None:
    arm, amd = internet.image(files={"a": b"arm"}), internet.image(files={"a": b"amd"})
    index = put_index(internet, arm, amd, architectures=("arm64", "amd64"))
    assert fetch(store, f"registry.example.com/team/x:1@{index}").manifest.registry_digest == amd.digest
    with Registry(parse_reference("registry.example.com/team/x:1"), None, ignore_progress) as registry:
        assert registry.resolve() == index


def test_an_index_without_this_platform_is_reported(internet: Internet, store: ImageStore) -> None:
    put_index(internet, internet.image(), architectures=("arm64",))
    with pytest.raises(NotFoundError, match="linux/amd64"):
        fetch(store)


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("change", [{"architecture": "arm64"}, {"os": "windows"}])
def test_an_image_whose_configuration_names_another_platform_is_rejected(
    internet: Internet, store: ImageStore, change: dict[str, str], *, is_listed: bool
) -> None:
    pushed = internet.image()
    pushed.manifest["config"] = pushed.add(json.dumps(pushed.config | change).encode())
    internet.serve(pushed)
    if is_listed:
        put_index(internet, pushed)  # as one for amd64
    with pytest.raises(NotFoundError, match="no image for linux/amd64") as caught:
        fetch(store)
    wanted = {"os": "linux", "architecture": "amd64"} | change
    assert caught.value.meaning == f"it was built for {wanted['os']}/{wanted['architecture']}"
    parsed = parse_reference("registry.example.com/team/x:1")
    with Registry(parsed, None, ignore_progress) as registry:
        assert registry_source(parsed, registry, is_for_nodes=True).image_id == pushed.manifest["config"]["digest"]


@pytest.mark.parametrize("absent", [None, ""])
def test_a_configuration_without_a_platform_is_valid(internet: Internet, store: ImageStore, absent: str | None) -> None:
    pushed = internet.image()
    without = pushed.config | {"os": absent, "architecture": absent}
    pushed.manifest["config"] = pushed.add(json.dumps(without).encode())
    internet.serve(pushed)
    assert fetch(store).is_new


def test_a_configuration_other_than_the_one_in_the_manifest_is_rejected(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    internet.answers[f"{ROOT}/blobs/{pushed.manifest['config']['digest']}"] = (
        200, {}, json.dumps(pushed.config | {"x": 1}).encode()[: pushed.manifest["config"]["size"]],
    )  # fmt: skip
    with pytest.raises(ImageError, match="other content"):
        fetch(store)


def test_a_layer_other_than_the_one_in_the_manifest_is_rejected(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    layer = pushed.manifest["layers"][0]
    internet.answers[f"{ROOT}/blobs/{layer['digest']}"] = (200, {}, bytes(layer["size"]))
    with pytest.raises(ImageError, match="other content"):
        fetch(store)
    assert list(store.root.glob("[!.]*")) == []


def test_other_layers_under_the_same_configuration_are_rejected_even_if_the_image_exists(
    internet: Internet, store: ImageStore
) -> None:
    good = internet.image()
    fetch(store)
    evil = internet.image(files={"etc/issue": b"evil\n"})
    evil.manifest["config"] = good.manifest["config"]
    evil.blobs |= good.blobs
    internet.serve(evil)
    with pytest.raises(ImageError, match=r"unpacks to sha256:"):
        fetch(store)
    with pytest.raises(ImageError, match=r"unpacks to sha256:"):
        fetch(ImageStore(store.root / "elsewhere"))


def test_more_or_fewer_layers_than_in_the_configuration_are_rejected(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    pushed.manifest["layers"] *= 2
    internet.serve(pushed)
    with pytest.raises(ImageError, match="2 layers"):
        fetch(store)


def test_an_image_of_ten_thousand_layers_is_rejected_before_any_download(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    pushed.manifest["layers"] *= 10_000
    internet.serve(pushed)
    with pytest.raises(ImageError, match="at most 1000 items"):
        fetch(store)
    assert len(internet.asked) == 1


def test_the_same_layers_with_other_compression_are_the_same_image(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    first = fetch(store)
    layer = gzip.decompress(next(data for data in pushed.blobs.values() if data.startswith(b"\x1f\x8b")))
    pushed.manifest["layers"] = [pushed.add(layer)]
    internet.serve(pushed)
    inode = first.file.stat().st_ino
    again = fetch(store)
    assert (again.is_new, again.file, again.file.stat().st_ino) == (False, first.file, inode)
    recorded = read_manifest(first.file)
    assert recorded is not None
    assert (recorded.registry_digest, recorded.sha256) == (pushed.digest, first.manifest.sha256)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"image_id": "../x"},
        {"registry_digest": 7},
        {"block_size": 0},
        {"blocks": 3},
        {"size": "x"},
        {"labels": []},
    ],
)
def test_an_invalid_manifest_of_a_file_is_ignored(
    internet: Internet, store: ImageStore, change: dict[str, Any]
) -> None:
    internet.image()
    file = fetch(store).file
    manifest_file(file).write_text(json.dumps(json.loads(manifest_file(file).read_text()) | change))
    assert read_manifest(file) is None


# --- Malformed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"7", b'"x"', b"{", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"manifests": null}',
        b'{"manifests": {}}', b'{"manifests": [1]}', b'{"manifests": [{}]}', b'{"config": {}, "layers": []}',
        b'{"config": [], "layers": {}}', b'{"layers": []}', b'{"schemaVersion": 1}', b'{"schemaVersion": "2"}',
        b'{"manifests": [], "config": {}, "layers": []}', b"<html>log in</html>", b"x" * (5 << 20),
        b'{"config": {"digest": "sha256:%s", "size": -1}, "layers": []}' % (b"a" * 64),
        b'{"config": {"digest": "sha256:%s", "size": 1e99}, "layers": []}' % (b"a" * 64),
        b'{"config": {"digest": "sha256:%s", "size": "9"}, "layers": []}' % (b"a" * 64),
        b'{"config": {"digest": "sha256:%s", "size": true}, "layers": []}' % (b"a" * 64),
        b'{"config": {"digest": "sha256:%s", "size": %s}, "layers": []}' % (b"a" * 64, b"9" * 5000),
    ],
)  # fmt: skip
def test_a_manifest_with_another_schema_is_an_error(internet: Internet, store: ImageStore, body: bytes) -> None:
    internet.answers[f"{ROOT}/manifests/1"] = (200, {}, body)
    with pytest.raises(ImageError) as caught:
        fetch(store)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "change",
    [
        {"rootfs": None}, {"rootfs": {}}, {"rootfs": {"diff_ids": "x"}}, {"config": []}, {"config": {"Env": "A=b"}},
        {"config": {"Env": [1]}}, {"config": {"Labels": []}}, {"config": {"Labels": {"a": 1}}}, {"created": 7},
        {"config": {"WorkingDir": ["/"]}}, {"config": {"Env": ["A=\0"]}}, {"config": {"Env": ["A=\ud800"]}},
    ],
)  # fmt: skip
def test_a_configuration_with_another_schema_is_an_error(
    internet: Internet, store: ImageStore, change: dict[str, Any]
) -> None:
    pushed = internet.image()
    pushed.manifest["config"] = pushed.add(json.dumps(pushed.config | change).encode())
    internet.serve(pushed)
    with pytest.raises(ImageError, match="a configuration"):
        fetch(store)


@pytest.mark.parametrize("run", [None, {}, {"Env": None, "Labels": None, "Cmd": None, "Entrypoint": None}])
def test_a_minimal_configuration_is_valid(internet: Internet, store: ImageStore, run: dict[str, Any] | None) -> None:
    internet.image(run=run)
    assert fetch(store).is_new


def test_an_index_that_refers_to_itself_or_nests_without_end_is_an_error(internet: Internet, store: ImageStore) -> None:
    platform = {"os": "linux", "architecture": "amd64"}
    body = b'{"manifests": []}'
    for _ in range(9):
        internet.answers[f"{ROOT}/manifests/{digest_of(body)}"] = (200, {}, body)
        entry = {"digest": digest_of(body), "size": len(body), "platform": platform}
        body = json.dumps({"manifests": [entry]}).encode()
    internet.answers[f"{ROOT}/manifests/1"] = (200, {}, body)
    with pytest.raises(ImageError, match="index of indexes"):
        fetch(store)
    assert len(internet.asked) < 6


def test_a_disk_too_small_for_the_layers_is_reported_before_the_download(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    pushed.manifest["layers"][0]["size"] = 1 << 50
    internet.serve(pushed)
    with pytest.raises(ImageError, match="disk is full"):
        fetch(store)
    assert not [url for url, _ in internet.asked if str(pushed.manifest["layers"][0]["digest"]) in url]


@pytest.mark.parametrize("code", [100, 204, 300, 304, 400, 402, 410, 451, 501, 999])
def test_a_response_with_an_unexpected_status_is_an_error(internet: Internet, store: ImageStore, code: int) -> None:
    internet.answers[f"{ROOT}/manifests/1"] = (code, {}, b"{}")
    with pytest.raises(ImageError, match=str(code)):
        fetch(store)


# --- Redirects and credentials --------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    [
        "", "https://", "ftp://example.com/x", "file:///etc/passwd", "https://[::1/x", "https://example.com:99999/x",
        "https://user:secret@example.com/x", "//", "javascript:1", "http://example.com/x", "https://127.0.0.1/x",
        "http://localhost:8080/stop", "https://registry.example.com/v2/team/x/manifests/1", "https://\x00/", "http://\x1b[2Jx/",
    ],
)  # fmt: skip
def test_an_invalid_or_circular_redirect_is_an_error(internet: Internet, store: ImageStore, location: str) -> None:
    internet.answers[f"{ROOT}/manifests/1"] = (307, {"Location": location}, b"")
    with pytest.raises(ImageError, match=r"redirects|can't be queried") as caught:
        fetch(store)
    assert caught.value.what.isprintable()
    assert {url.split("/")[2] for url, _ in internet.asked} == {"registry.example.com"}


def challenge(realm: str) -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="{realm}",service="registry",scope="repository:team/x:pull"'}


def ask_for_token(internet: Internet, realm: str) -> None:
    """Make the registry require a token for everything."""
    for url, answer in list(internet.answers.items()):

        def answer_if_known(request: Any, answer: Any = answer) -> Any:
            is_known = request.headers.get("Authorization") == "Bearer opaque"
            return answer if is_known else (401, challenge(realm), b"")

        internet.answers[url] = answer_if_known


def test_a_token_service_on_another_host_is_accessed_over_tls(internet: Internet, store: ImageStore) -> None:
    internet.image()
    ask_for_token(internet, "https://auth.example.org/token")
    internet.answers["https://auth.example.org/token"] = (200, {}, b'{"token": "opaque"}')
    assert fetch(store, known=ALICE).is_new
    assert internet.headers_to("auth.example.org")[0]["Authorization"].startswith("Basic ")


def test_no_service_parameter_is_sent_if_the_challenge_has_none(internet: Internet, store: ImageStore) -> None:
    internet.image()
    url = f"{ROOT}/manifests/1"
    internet.answers[url] = (401, {"WWW-Authenticate": 'Bearer realm="https://auth.example.org/token"'}, b"")
    internet.answers["https://auth.example.org/token"] = (200, {}, b'{"access_token": "opaque"}')
    with pytest.raises(ImageError):
        fetch(store)
    assert [url for url, _ in internet.asked if "auth" in url] == [
        "https://auth.example.org/token?scope=repository%3Ateam%2Fx%3Apull"
    ]
    assert internet.asked[-1][1]["Authorization"] == "Bearer opaque"


@pytest.mark.parametrize("service", ["registry", '"a, b"'])
def test_parameters_of_a_challenge_need_no_quotes(internet: Internet, store: ImageStore, service: str) -> None:
    internet.image()
    words = f"Bearer realm=https://auth.example.org/token, service={service},scope=repository:team/x:pull"
    internet.answers[f"{ROOT}/manifests/1"] = (401, {"WWW-Authenticate": words}, b"")
    internet.answers["https://auth.example.org/token"] = (200, {}, b'{"token": "opaque"}')
    with pytest.raises(ImageError, match="requires a login"):
        fetch(store)
    (asked,) = (parse_qs(urlsplit(url).query) for url, _ in internet.asked if "auth" in url)
    assert asked == {"scope": ["repository:team/x:pull"], "service": [service.strip('"')]}


@pytest.mark.parametrize(
    "realm",
    [
        "http://auth.example.org/token", "http://registry.example.com/token", "http://127.0.0.1/token", "ftp://x/",
        "https://", "https://[/", "", "token", "https://a:b@auth.example.org/token",
    ],
)  # fmt: skip
def test_passwords_are_not_sent_unencrypted_or_to_other_hosts(
    internet: Internet, store: ImageStore, realm: str
) -> None:
    internet.image()
    ask_for_token(internet, realm)
    internet.answers[realm] = (200, {}, b'{"token": "opaque"}')
    with pytest.raises(ImageError, match=r"without TLS|invalid address"):
        fetch(store, known=ALICE)
    assert not [headers for _, headers in internet.asked if "Authorization" in headers]


@pytest.mark.parametrize(
    "answer",
    [
        (200, b""), (200, b"null"), (200, b"[]"), (200, b"{}"), (200, b'{"token": null}'), (200, b'{"token": ""}'),
        (200, b'{"token": 7}'), (200, b'{"token": {"a": 1}}'), (200, b'{"token": "a b"}'),
        (200, b'{"token": "a\\r\\nHost: evil"}'), (200, b'{"token": "' + b"x" * 100_000 + b'"}'),
        (200, b"x" * (2 << 20)), (204, b""), (302, b""), (404, b""), (401, b"{}"), (503, b""),
    ],
)  # fmt: skip
def test_an_invalid_response_of_a_token_service_is_an_error(
    internet: Internet, store: ImageStore, answer: tuple[int, bytes]
) -> None:
    internet.image()
    ask_for_token(internet, "https://auth.example.org/token")
    location = {"Location": "https://evil.example.net/"}
    internet.answers["https://auth.example.org/token"] = (answer[0], location, answer[1])
    with pytest.raises(ImageError) as caught:
        fetch(store, known=ALICE)
    assert internet.headers_to("evil.example.net") == []
    assert "correct-horse" not in str(caught.value)


@pytest.mark.parametrize("words", ["", "Negotiate", "Digest realm=x", "Bearer", "\x00"])
def test_an_unsupported_login_scheme_is_reported(internet: Internet, store: ImageStore, words: str) -> None:
    internet.answers[f"{ROOT}/manifests/1"] = (401, {"WWW-Authenticate": words}, b"")
    with pytest.raises(ImageError, match=r"kind of login|address"):
        fetch(store, known=ALICE)


@pytest.mark.parametrize("target", ["https://storage.example.net/blob", "http://storage.example.net/blob"])
def test_authorization_is_not_sent_to_a_redirected_blob_store(
    internet: Internet, store: ImageStore, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login alice password from-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    pushed = internet.image()
    layer = f"{ROOT}/blobs/{pushed.manifest['layers'][0]['digest']}"
    internet.answers[target] = internet.answers[layer]
    internet.answers[layer] = (307, {"Location": target}, b"")
    ask_for_token(internet, "https://auth.example.org/token")
    internet.answers["https://auth.example.org/token"] = (200, {}, b'{"token": "opaque"}')
    internet.answers[target] = (200, {}, pushed.blobs[pushed.manifest["layers"][0]["digest"]])
    assert fetch(store, known=ALICE).is_new
    (headers,) = internet.headers_to("storage.example.net")
    assert "Authorization" not in headers


def test_a_blob_store_that_requests_a_login_gets_no_credentials(internet: Internet, store: ImageStore) -> None:
    pushed = internet.image()
    layer = f"{ROOT}/blobs/{pushed.manifest['layers'][0]['digest']}"
    internet.answers[layer] = (307, {"Location": "https://storage.example.net/blob"}, b"")
    internet.answers["https://storage.example.net/blob"] = (401, {"WWW-Authenticate": "Basic realm=x"}, b"")
    with pytest.raises(ImageError, match="refused the credentials"):
        fetch(store, known=ALICE)
    assert not [headers for _, headers in internet.asked if "Authorization" in headers]


def test_credentials_of_netrc_are_never_sent(
    internet: Internet, store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login alice password from-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    internet.image()
    fetch(store)
    assert not [headers for _, headers in internet.asked if "Authorization" in headers]


def test_a_password_for_a_local_registry_does_not_go_through_a_proxy(
    internet: Internet, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://proxy.example.com:3128")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
    internet.serve(internet.image(), host="127.0.0.1:5000")
    fetch(store, "127.0.0.1:5000/team/x:1", known=ALICE)
    assert len(internet.proxies) == 3
    assert not [one for one in internet.proxies if one.keys() & {"http", "all"}]
    internet.proxies.clear()
    fetch(store)
    assert all(one["https"] == "http://proxy.example.com:3128" for one in internet.proxies)


@pytest.mark.parametrize("host", ["127.0.0.1:5000", "127.9.9.9", "localhost", "localhost:5000", "[::1]:5000"])
def test_loopback_hosts_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["127.evil.example.com:80", "127.0.0.1.example.com", "localhost.example.com", "127", ""]
)
def test_a_host_with_a_loopback_prefix_is_not_local(host: str) -> None:
    assert not is_loopback(host)


def test_a_digest_in_a_reference_is_parsed() -> None:
    assert isinstance(parse_reference("r.io/x@sha256:" + "a" * 64).digest, Digest)
