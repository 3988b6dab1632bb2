"""HTTP with one registry: login, redirects, and errors that ftkit can report.

A password goes only to the registry and to its token service, over TLS; plain HTTP is only for registries on this
machine. Redirects to other hosts carry no authorization. Of the OCI clients on PyPI, oras (0.2.43) resumes no download,
compares no content with its digest, has no time limits, and sends a password to any token service.
"""

from __future__ import annotations

import base64
import logging
import re
from contextlib import ExitStack, contextmanager
from http.client import responses
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from pydantic import BaseModel

from ftkit.config.image_reference import is_loopback, shortened
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, one_line
from ftkit.images.oci.access import access_denied, explain_tls, trusting_adapter
from ftkit.images.oci.documents import parse_json
from ftkit.images.progress import DeadlineError, StalledError, TransientError, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import requests

    from ftkit.config.image_reference import RegistryImage
    from ftkit.images.oci.access import Credentials

log = logging.getLogger(__name__)

_TIMEOUT: Final = (10, 60)
DOCUMENT_SECONDS: Final = 300.0
"""Time limit of a whole document of up to 16 MiB: enough at half a megabit per second."""
CHUNK_SECONDS: Final = 120.0
"""Time limit of each MiB of a layer, and of a response's first byte: a slower connection counts as lost."""
_CHUNK: Final = 1 << 20
_MAX_REDIRECTS: Final = 5
_MAX_TOKEN_BYTES: Final = 1 << 20
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_READ_STATUSES: Final = (200, 206)
_WRITE_STATUSES: Final = (200, 201, 202, 204)
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')
_TOKEN: Final = re.compile(r"[!-~]{1,65536}")

ResultT = TypeVar("ResultT")


class TokenResponse(BaseModel):
    """The response of a token service; older services set `token`, newer ones `access_token`."""

    token: str | None = None
    access_token: str | None = None


class Connection:
    """A connection to the registry of one image."""

    def __init__(self, reference: RegistryImage, credentials: Credentials | None) -> None:
        try:
            import requests as library  # noqa: PLC0415 - comes with the extra
        except ImportError as error:
            raise PrerequisiteError(
                "the Python package 'requests' is not installed", fix="pip install 'ftkit[images]'"
            ) from error
        self._library = library
        self._session = library.Session()
        self._session.mount("https://", trusting_adapter(reference.host))
        self._reference = reference
        self._credentials = credentials
        self._authorization = ""
        self._root = urlsplit(f"{'http' if reference.is_loopback else 'https'}://{reference.host}")

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    @contextmanager
    def open(self, path: str, headers: dict[str, str], *, has_digest: bool = False) -> Iterator[requests.Response]:
        """Get a document or blob of the repository.

        Args:
            path: its path in the repository.
            headers: headers of the request.
            has_digest: whether the caller compares the content with a digest, so that a redirect without TLS is safe.

        Raises:
            NotFoundError: the registry does not have it.
            TransientError: the registry can't be reached, or is busy.
            ImageError: access is denied, or the response violates the protocol.
        """
        url = f"{self._root.geturl()}/v2/{self._reference.path}/{path}"
        response = self._exchange(lambda: self._get(url, headers, has_digest=has_digest))
        with ExitStack() as stack:
            stack.callback(response.close)
            self._explain(response, _READ_STATUSES)
            try:
                yield response
            except StalledError:
                stack.pop_all()  # closing the response would wait for the thread that still reads it
                raise

    def send(self, method: str, address: str, content: bytes, media_type: str) -> dict[str, str]:
        """Write to the repository and return the response's headers, with lower-case names.

        Args:
            method: `POST` or `PUT`.
            address: a path in the repository, or an address that the registry gave for an upload.
            content: the body.
            media_type: type of the body.

        Raises:
            TransientError: the registry can't be reached, or is busy.
            ImageError: access is denied, or the response violates the protocol.
        """
        repository = f"{self._root.geturl()}/v2/{self._reference.path}/"
        url = self._redirect_target(repository, address, has_digest=False)
        headers = {"Content-Type": media_type}
        with self._exchange(lambda: self._request(method, url, headers, data=content)) as response:
            self._explain(response, _WRITE_STATUSES)
            return {name.lower(): value for name, value in response.headers.items()}

    def _exchange(self, request: Callable[[], requests.Response]) -> requests.Response:
        """Return the response to a request; if the registry requires it, log in and repeat the request."""
        response = self._within_chunk_time(request)
        if response.status_code == _UNAUTHORIZED and self._is_registry_url(response.url):
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            self._log_in(challenge)
            response = self._within_chunk_time(request)
        return response

    def chunks(self, response: requests.Response) -> Iterator[bytes]:
        """Yield the bytes of a response, a MiB at a time.

        Raises:
            StalledError: a MiB took longer than `CHUNK_SECONDS`.
            TransientError: the connection was lost.
        """
        content = response.iter_content(_CHUNK)
        try:
            while chunk := self._within_chunk_time(lambda: next(content, b"")):
                yield chunk
        except self._library.exceptions.RequestException as error:
            raise self.connection_lost(_last_reason(error)) from error

    def _within_chunk_time(self, fetch: Callable[[], ResultT]) -> ResultT:
        try:
            return within(CHUNK_SECONDS, fetch)
        except DeadlineError as error:
            raise StalledError(
                f"{self._reference.host} sent less than 1 MiB in {CHUNK_SECONDS:g} s",
                meaning="the registry or the network in between has stalled, or is too slow",
                fix="try again; from a slow network, import on a machine with a better connection",
            ) from error

    def document(self, path: str, headers: dict[str, str], limit: int, *, has_digest: bool) -> bytes:
        """Return a document of the repository, of at most `limit` bytes. Raises the same errors as `open`."""

        def fetch() -> bytes:
            with self.open(path, headers, has_digest=has_digest) as response:
                return self._read_all(response, limit)

        return self._in_time(self._reference.host, fetch)

    def _in_time(self, host: str, fetch: Callable[[], ResultT]) -> ResultT:
        try:
            return within(DOCUMENT_SECONDS, fetch)
        except DeadlineError as error:
            raise ImageError(
                f"{shortened(host)} did not send a small document within {DOCUMENT_SECONDS:g} s",
                meaning="the connection is very slow, or this is not a registry that should be trusted",
                fix="try again from a machine with a better connection, or check the registry's address",
            ) from error

    def _read_all(self, response: requests.Response, limit: int) -> bytes:
        data = b""
        for chunk in self.chunks(response):
            data += chunk
            if len(data) > limit:
                raise self.protocol_error(f"sent more than the {limit} bytes that are allowed")
        return data

    def connection_lost(self, reason: str) -> TransientError:
        """Return the error for a lost connection."""
        return TransientError(
            f"lost the connection to {self._reference.host}: {reason}",
            meaning="the registry or the network in between is down, or the host's name is wrong",
            fix=f"try again; check that 'curl -I {self._root.geturl()}/v2/' gets a response",
        )

    def protocol_error(self, what: str) -> ImageError:
        """Return the error for a response that violates the protocol."""
        return ImageError(
            f"{self._reference.host} {what}",
            meaning="this is not a registry, a proxy responds in its place, or it can't be trusted",
            fix="check the registry's address and its log",
        )

    def _get(self, url: str, headers: dict[str, str], *, has_digest: bool) -> requests.Response:
        """Get an address, and follow its redirects."""
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._request("GET", url, headers)
            if response.status_code not in _REDIRECTS:
                return response
            response.close()
            url = self._redirect_target(url, response.headers.get("Location", ""), has_digest=has_digest)
        raise self.protocol_error(f"redirects more than {_MAX_REDIRECTS} times")

    def _is_registry_url(self, url: str) -> bool:
        """Tell whether an address is the registry's own: scheme, host and port."""
        return _origin(urlsplit(url)) == _origin(self._root)

    def _redirect_target(self, url: str, location: str, *, has_digest: bool) -> str:
        """Return the target of a redirect, unless it is not an address, is this machine, or has no TLS."""
        target = _parse_address(location, url) if location else None
        if target is None:
            raise self.protocol_error(f"redirects to {shortened(location)}, which is not an address")
        host = str(target.hostname)
        if is_loopback(host) and not self._reference.is_loopback:
            raise self.protocol_error(f"redirects to {shortened(host)}, which is this machine")
        if target.scheme == "http" and self._root.scheme == "https" and not has_digest:
            raise self.protocol_error(
                f"redirects to {shortened(host)} without TLS, where anyone can change the content"
            )
        return target.geturl()

    def _request(
        self, method: str, url: str, headers: dict[str, str], authorization: str | None = None, **options: Any
    ) -> requests.Response:
        """Send one request, to the registry itself with its authorization; convert the errors of requests."""
        if authorization is None:
            authorization = self._authorization if self._is_registry_url(url) else ""
        direct = {"http": None, "all": None} if url.startswith("http:") and is_loopback(urlsplit(url).netloc) else None
        log.debug("%s %s", method, url.partition("?")[0])  # a redirect's query may be a signature
        try:
            return self._session.request(
                method, url, headers={"Accept-Encoding": "identity", **headers}, auth=_Header(authorization),
                stream=True, timeout=_TIMEOUT, allow_redirects=False, proxies=direct, **options,
            )  # fmt: skip
        except self._library.exceptions.SSLError as error:
            raise explain_tls(urlsplit(url).netloc, _last_reason(error)) from error
        except (self._library.exceptions.ConnectionError, self._library.exceptions.Timeout) as error:
            raise self.connection_lost(_last_reason(error)) from error
        except (self._library.exceptions.RequestException, ValueError) as error:
            raise self.protocol_error(f"can't be queried: {_last_reason(error)}") from error
        except OSError as error:  # of requests itself, which is not one of its exceptions
            what = f"can't read the trusted certificates: {one_line(error)}"
            raise PrerequisiteError(what, fix="correct REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE") from error

    def _explain(self, response: requests.Response, accepted: Sequence[int]) -> None:
        code, host = response.status_code, self._reference.host
        status = f"{code} {responses.get(code, '')}".rstrip()
        if code in (_UNAUTHORIZED, _FORBIDDEN):
            raise access_denied(self._reference, self._credentials)
        if code == _NOT_FOUND:
            raise NotFoundError(
                f"{host} has no {self._reference.path}:{self._reference.wanted}",
                meaning="it was not pushed there, or the name or tag is wrong",
                fix="push it: ftkit push NAME:TAG --registry HOST/PATH",
            )
        if code in _TRANSIENT:
            raise TransientError(f"{host} responds with {status}", fix="try again later")
        if code not in accepted:
            raise self.protocol_error(f"responds with {status}")

    def _log_in(self, challenge: str) -> None:
        """Log in as the registry requires: Basic, or a token of its token service."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            if self._credentials is None:
                raise access_denied(self._reference, None)
            self._authorization = _basic(self._credentials)
        elif kind.lower() == "bearer":
            self._authorization = f"Bearer {self._fetch_token(dict(_PARAMETER.findall(rest)))}"
        else:
            raise self.protocol_error(f"requires an unsupported kind of login: {shortened(kind)}")

    def _fetch_token(self, challenge: dict[str, str]) -> str:
        realm = self._token_service(challenge.get("realm", ""))
        scope = challenge.get("scope") or f"repository:{self._reference.path}:pull"
        authorization = _basic(self._credentials) if self._credentials else ""
        parameters = {"scope": scope} | ({"service": challenge["service"]} if challenge.get("service") else {})
        host = urlsplit(realm).netloc
        body = self._in_time(host, lambda: self._query_token_service(realm, authorization, parameters))
        response = parse_json(TokenResponse, body, f"{self._reference.host} names a token service whose response")
        token = response.token or response.access_token or ""
        if not _TOKEN.fullmatch(token):
            raise self.protocol_error("names a token service that returns no token")
        return token

    def _query_token_service(self, realm: str, authorization: str, parameters: dict[str, str]) -> bytes:
        with self._request("GET", realm, {}, authorization, params=parameters) as response:
            code = response.status_code
            if code in _TRANSIENT:
                raise TransientError(
                    f"the token service {urlsplit(realm).netloc} responds with {code}", fix="try again later"
                )
            if code in (400, _UNAUTHORIZED, _FORBIDDEN):
                raise access_denied(self._reference, self._credentials)
            if code != 200:  # noqa: PLR2004
                raise self.protocol_error(f"names a token service that responds with {code}: {shortened(realm)}")
            return self._read_all(response, _MAX_TOKEN_BYTES)

    def _token_service(self, realm: str) -> str:
        """Return the address of the token service, unless the password would be sent there without TLS."""
        target = _parse_address(realm)
        if target is None:
            raise self.protocol_error(f"names a token service with an invalid address: {shortened(realm)}")
        host = str(target.hostname)
        if target.scheme == "http" and not (is_loopback(host) and self._reference.is_loopback):
            raise self.protocol_error(
                f"requires sending the login to {shortened(host)} without TLS, where anyone could read it"
            )
        return realm


class _Header:
    """Set the Authorization header. With any `auth` object, requests does not read ~/.netrc."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __call__(self, request: Any) -> Any:
        if self._value:
            request.headers["Authorization"] = self._value
        return request


def _parse_address(text: str, base: str = "") -> SplitResult | None:
    """Parse an HTTP address, absolute or relative to another; return None if it is none, or has a user name."""
    try:
        address = urlsplit(urljoin(base, text))
        host, _ = address.hostname, address.port
    except ValueError:
        return None
    is_http = address.scheme in ("http", "https") and address.username is None
    return address if host and is_http else None


def _origin(address: SplitResult) -> tuple[str, str | None, int]:
    return address.scheme, address.hostname, address.port or {"http": 80, "https": 443}[address.scheme]


def _basic(known: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{known.username}:{known.password}".encode()).decode()


def _last_reason(error: BaseException) -> str:
    """Return the innermost cause of an error of requests, which wraps it several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return "".join(character if character.isprintable() else " " for character in one_line(error))
