"""A registry, read over HTTP: manifests and blobs, with digests checked and broken downloads taken up again."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from ftkit.errors import ImageError, NotFoundError, PrerequisiteError
from ftkit.images import credentials as who
from ftkit.images.retries import TransientError, with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import requests

    from ftkit.images.credentials import Credentials
    from ftkit.images.progress import Report
    from ftkit.specs.image_reference import RegistryImage

_INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_TIMEOUT: Final = (10, 60)
_CHUNK: Final = 1 << 20
_UNAUTHORISED, _FORBIDDEN, _NOT_FOUND, _PARTIAL = 401, 403, 404, 206
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)


class Registry:
    """One repository of a registry."""

    def __init__(self, reference: RegistryImage, credentials: Credentials | None, report: Report) -> None:
        try:
            import requests as library  # noqa: PLC0415 - comes with the extra
        except ImportError as error:
            raise PrerequisiteError(
                "the Python package 'requests' is not installed", fix="pip install 'ftkit[images]'"
            ) from error
        self._library = library
        self._session = library.Session()
        self._session.trust_env = True
        self._reference = reference
        self._credentials = credentials
        self._report = report
        self._token = ""
        self._scheme = "http" if reference.is_loopback else "https"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def manifest(self, wanted: str) -> tuple[dict[str, Any], str]:
        """Return a manifest for this machine's architecture, and its digest.

        Raises:
            NotFoundError: the registry has no such image.
            ImageError: it does not let us in, or answers with nothing sensible.
        """
        body = with_retries(lambda: self._get_manifest(wanted), self._report, self.stage)
        values = json.loads(body)
        if values.get("mediaType") in _INDEXES or "manifests" in values:
            architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
            for entry in values["manifests"]:
                described = entry.get("platform") or {}
                if described.get("os") == "linux" and described.get("architecture") == architecture:
                    return self.manifest(entry["digest"])
            raise NotFoundError(f"{self._reference} has no image for linux/{architecture}")
        if "config" not in values:
            raise ImageError(f"{self._reference} is in a format of 2015 that ftkit can't read", fix="push it again")
        return values, "sha256:" + hashlib.sha256(body).hexdigest()

    def blob_bytes(self, digest: str) -> bytes:
        """Return a small blob, its digest checked."""

        def fetch() -> bytes:
            with self._open(f"blobs/{digest}") as answer:
                return b"".join(self._chunks(answer))

        data = with_retries(fetch, self._report, self.stage)
        _check(digest, hashlib.sha256(data).hexdigest(), self._reference)
        return data

    def download(self, digest: str, path: Path, advance: Callable[[int], None]) -> None:
        """Download a blob into `path`, going on where a connection broke off.

        Raises:
            ImageError: the registry went away for good, or sent something else.
        """
        running = hashlib.sha256()

        def attempt() -> None:
            nonlocal running
            start = path.stat().st_size if path.exists() else 0
            headers = {"Range": f"bytes={start}-"} if start else {}
            with self._open(f"blobs/{digest}", headers) as answer, path.open("ab") as file:
                if start and answer.status_code != _PARTIAL:
                    file.truncate(0)
                    running = hashlib.sha256()
                for chunk in self._chunks(answer):
                    file.write(chunk)
                    file.flush()
                    running.update(chunk)
                    advance(len(chunk))

        with_retries(attempt, self._report, self.stage)
        _check(digest, running.hexdigest(), self._reference)

    @property
    def stage(self) -> str:
        """What is being done, for those who watch."""
        return f"downloading {self._reference}"

    def _get_manifest(self, wanted: str) -> bytes:
        with self._open(f"manifests/{wanted}", {"Accept": ", ".join((*_INDEXES, *_MANIFESTS))}) as answer:
            return b"".join(self._chunks(answer))

    @contextmanager
    def _open(self, path: str, headers: dict[str, str] | None = None) -> Iterator[requests.Response]:
        url = f"{self._scheme}://{self._reference.host}/v2/{self._reference.path}/{path}"
        answer = self._request(url, headers or {})
        if answer.status_code == _UNAUTHORISED:
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.close()
            self._log_in(challenge)
            answer = self._request(url, headers or {})
        with answer:
            self._explain(answer)
            yield answer

    def _request(self, url: str, headers: dict[str, str]) -> requests.Response:
        authorisation = {"Authorization": self._token} if self._token else {}
        try:
            return self._session.get(url, headers={**headers, **authorisation}, stream=True, timeout=_TIMEOUT)
        except self._library.exceptions.SSLError as error:
            raise ImageError(
                f"{self._reference.host} does not speak TLS as it should: {_last_reason(error)}",
                meaning="the registry speaks plain HTTP, or its certificate is not trusted here",
                fix="REQUESTS_CA_BUNDLE names the file of certificates to trust",
            ) from error
        except self._library.exceptions.RequestException as error:
            raise self._lost(error) from error

    def _chunks(self, answer: requests.Response) -> Iterator[bytes]:
        try:
            yield from answer.iter_content(_CHUNK)
        except self._library.exceptions.RequestException as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> TransientError:
        return TransientError(
            f"lost the connection to {self._reference.host}: {_last_reason(error)}",
            meaning="the registry or the network between is down, or the host's name is wrong",
            fix=f"try again; see whether 'curl -I {self._scheme}://{self._reference.host}/v2/' answers",
        )

    def _explain(self, answer: requests.Response) -> None:
        code = answer.status_code
        if code in (_UNAUTHORISED, _FORBIDDEN):
            raise who.refused(self._reference, self._credentials)
        if code == _NOT_FOUND:
            raise NotFoundError(
                f"{self._reference.host} has no {self._reference.path}:{self._reference.wanted}",
                meaning="it was not pushed there, or the name or tag is wrong",
                fix="push it: ftkit push NAME:TAG --registry HOST/PATH",
            )
        if code in _TRANSIENT:
            raise TransientError(f"{self._reference.host} answers {code} {answer.reason}", fix="try again later")
        if not answer.ok:
            raise ImageError(f"{self._reference.host} answers {code} {answer.reason}", fix="see the registry's log")

    def _log_in(self, challenge: str) -> None:
        """Do what the registry asks for: Basic, or a token from where it says."""
        kind, _, rest = challenge.partition(" ")
        basic = (self._credentials.username, self._credentials.password) if self._credentials else None
        if kind.lower() == "basic":
            if basic is None:
                raise who.refused(self._reference, None)
            import base64  # noqa: PLC0415

            self._token = "Basic " + base64.b64encode(":".join(basic).encode()).decode()
            return
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if "realm" not in asked:
            raise who.refused(self._reference, self._credentials)
        scope = asked.get("scope") or f"repository:{self._reference.path}:pull"
        try:
            answer = self._session.get(
                asked["realm"], params={"service": asked.get("service", ""), "scope": scope}, auth=basic,
                timeout=_TIMEOUT,
            )  # fmt: skip
        except self._library.exceptions.RequestException as error:
            raise self._lost(error) from error
        if not answer.ok:
            raise who.refused(self._reference, self._credentials)
        values = answer.json()
        self._token = f"Bearer {values.get('token') or values.get('access_token')}"


def _check(digest: str, found: str, reference: RegistryImage) -> None:
    if digest != f"sha256:{found}":
        raise ImageError(
            f"{reference.host} sent something else than {digest} of {reference.path}",
            meaning="the download was damaged on its way, or the registry's disk is",
            fix="try again",
        )


def _last_reason(error: BaseException) -> str:
    """Return the innermost reason of an error of the HTTP library, which wraps it several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    said = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return said.splitlines()[0][:200]
