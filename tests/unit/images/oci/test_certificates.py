from __future__ import annotations

import pytest

from ftkit.config.image_reference import parse_reference
from ftkit.errors import PrerequisiteError
from ftkit.images.events import ignore_progress
from ftkit.images.oci.connection import explain_tls
from ftkit.images.oci.registry import Registry
from ftkit.images.transfer import explain_transfer

REFERENCE = parse_reference("registry.example:5000/team/x:1")


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", "plain HTTP"),
        ("certificate verify failed: Hostname mismatch, certificate is not valid for 'x'", "another host name"),
        ("certificate verify failed: self-signed certificate", "does not trust it"),
        ("certificate verify failed: unable to get local issuer certificate", "does not trust it"),
    ],
)
def test_a_failed_tls_connection_is_explained_by_its_reason(reason: str, meaning: str) -> None:
    error = explain_tls("registry.example:5000", reason)
    assert reason in error.what
    assert meaning in error.meaning


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ('Get "https://registry.example:5000/v2/": http: server gave HTTP response to HTTPS client', "plain HTTP"),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "does not trust it"),
    ],
)
def test_a_tls_failure_of_the_docker_engine_is_explained_alike(message: str, meaning: str) -> None:
    error = explain_transfer(message, REFERENCE, None)
    assert meaning in error.meaning


def test_a_missing_file_of_trusted_certificates_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent/ca.crt")
    with Registry(REFERENCE, None, ignore_progress) as registry, pytest.raises(PrerequisiteError) as refused:
        registry.resolve()
    assert "REQUESTS_CA_BUNDLE" in refused.value.fix
