"""A registry whose certificate is signed by an authority of the site's own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
import requests
from waiting import PATIENCE_SECONDS

from ftkit.images.oci.connection import trusting_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        del words


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    names = ("-subj", "/CN=site", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.crt"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *names], check=True)
    return tmp_path / "ca.crt"


@pytest.fixture
def address(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def get(host: str) -> int:
    with requests.Session() as session:
        session.mount("https://", trusting_adapter(host))
        return session.get(f"https://{host}/v2/", timeout=PATIENCE_SECONDS).status_code


@pytest.mark.parametrize("where", ["SSL_CERT_FILE", "certs.d"])
def test_a_certificate_that_the_machine_or_docker_trusts_is_trusted(
    where: str, address: str, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(requests.exceptions.SSLError):
        get(address)
    if where == "SSL_CERT_FILE":
        monkeypatch.setenv(where, str(certificate))
    else:
        folder = tmp_path / ".config/docker/certs.d" / address
        folder.mkdir(parents=True)
        shutil.copy(certificate, folder)
    assert get(address) == 204
