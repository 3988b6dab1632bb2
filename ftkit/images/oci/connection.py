"""HTTP with one registry: login, redirects, time limits, and errors that ftkit can report.

A password goes only to the registry and to its token service, over TLS; plain HTTP is only for registries on this
machine. Redirects to other hosts carry no authorization. Of the OCI clients on PyPI, oras (0.2.43) resumes no download,
compares no content with its digest, has no time limits, and sends a password to any token service.
"""

from __future__ import annotations

import base64
import logging
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import responses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from ftkit.config.image_reference import DOCKER_HUB, RegistryImage, is_loopback, shortened
from ftkit.errors import ImageError, NotFoundError, PrerequisiteError, missing_package_error, one_line
from ftkit.images.docker_engine import docker_sdk
from ftkit.images.events import TransientError
from ftkit.images.oci.documents import TokenResponse, parse_json
from ftkit.process import in_thread

if TYPE_CHECKING:
    import requests
    from requests.adapters import HTTPAdapter

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

CHUNK_SECONDS: Final = 120.0
"""Time limit of each MiB, and of a response's first byte: a slower connection counts as lost."""
_CHUNK: Final = 1 << 20
_TIMEOUT: Final = (10, 60)
_MAX_TOKEN: Final = 1 << 20
_MAX_REDIRECTS: Final = 5
_BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 400, 401, 403, 404
_ACCEPTED: Final = (200, 201, 202, 206)
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)


class StalledError(TransientError):
    """A registry sends too slowly, or has stopped sending."""


class Connection:
    def __init__(self, reference: RegistryImage, credentials: Credentials | None) -> None:
        try:
            import requests as library  # noqa: PLC0415 - comes with the extra
        except ImportError as error:
            raise missing_package_error(["requests"]) from error
        self._errors = library.exceptions
        self.session = library.Session()
        self.session.mount("https://", trusting_adapter(reference.host))
        self._reference = reference
        self._credentials = credentials
        self._authorization = ""
        self._root = urlsplit(f"{'http' if is_loopback(reference.host) else 'https'}://{reference.host}")
        self._repository = f"{self._root.geturl()}/v2/{reference.path}/"

    @contextmanager
    def open(self, path: str, headers: Mapping[str, str], *, has_digest: bool) -> Iterator[requests.Response]:
        """Get a document or blob; with `has_digest`, the caller compares the content, so that redirects need no TLS."""
        response = self._exchange(lambda: self._get(self._repository + path, headers, has_digest=has_digest))
        with _closing(response):
            self._explain(response)
            yield response

    def send(self, method: str, address: str, content: bytes, media_type: str) -> Mapping[str, str]:
        url = self._redirect_target(self._repository, address, has_digest=False)
        with self._exchange(lambda: self._request(method, url, {"Content-Type": media_type}, data=content)) as response:
            self._explain(response)
            sent: Mapping[str, str] = response.headers
            return sent

    def _exchange(self, request: Callable[[], requests.Response]) -> requests.Response:
        """Return the response to a request; if the registry requires it, log in and repeat the request."""
        response = self._in_time(request)
        if response.status_code == _UNAUTHORIZED and self._is_registry_url(response.url):
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            self._log_in(challenge)
            response = self._in_time(request)
        return response

    def chunks(self, response: requests.Response) -> Iterator[bytes]:
        """Yield a response a MiB at a time; a TransientError if the connection is lost, or too slow."""
        content = response.iter_content(_CHUNK)
        try:
            while chunk := self._in_time(lambda: next(content, b"")):
                yield chunk
        except self._errors.RequestException as error:
            raise self.connection_lost(_last_reason(error)) from error

    def _in_time(self, fetch: Callable[[], ResultT]) -> ResultT:
        """Run `fetch` in a thread that is abandoned after `CHUNK_SECONDS`: a blocked read can't be interrupted."""
        result = in_thread(fetch)
        try:
            return result.result(CHUNK_SECONDS)
        except TimeoutError as error:
            if result.done():  # just now, or `fetch` itself raised it
                return result.result()
            raise StalledError(
                f"{self._reference.host} sent less than 1 MiB in {CHUNK_SECONDS:g} s",
                meaning="the registry or the network in between has stalled, or is too slow",
                fix="try again; from a slow network, import on a machine with a better connection",
            ) from error

    def read(self, response: requests.Response, limit: int) -> bytes:
        """Return a response's content, of at most `limit` bytes."""
        data = b""
        for chunk in self.chunks(response):
            data += chunk
            if len(data) > limit:
                raise self.protocol_error(f"sent more than the {limit} bytes that are allowed")
        return data

    def connection_lost(self, reason: str) -> TransientError:
        return TransientError(
            f"lost the connection to {self._reference.host}: {reason}",
            meaning="the registry or the network in between is down, or the host's name is wrong",
            fix=f"try again; check that 'curl -I {self._root.geturl()}/v2/' gets a response",
        )

    def protocol_error(self, what: str) -> ImageError:
        return ImageError(
            f"{self._reference.host} {what}",
            meaning="this is not a registry, a proxy responds in its place, or it can't be trusted",
            fix="check the registry's address and its log",
        )

    def _get(self, url: str, headers: Mapping[str, str], *, has_digest: bool) -> requests.Response:
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._request("GET", url, headers)
            if response.status_code not in _REDIRECTS:
                return response
            response.close()
            url = self._redirect_target(url, response.headers.get("Location", ""), has_digest=has_digest)
        raise self.protocol_error(f"redirects more than {_MAX_REDIRECTS} times")

    def _is_registry_url(self, url: str) -> bool:
        return _origin(urlsplit(url)) == _origin(self._root)

    def _redirect_target(self, url: str, location: str, *, has_digest: bool) -> str:
        """Return the target of a redirect, unless it is not an address, is this machine, or has no TLS."""
        target = _parse_address(location, url) if location else None
        if target is None:
            raise self.protocol_error(f"redirects to {shortened(location)}, which is not an address")
        host = str(target.hostname)
        if is_loopback(host) and not is_loopback(self._reference.host):
            raise self.protocol_error(f"redirects to {shortened(host)}, which is this machine")
        if target.scheme == "http" and self._root.scheme == "https" and not has_digest:
            raise self.protocol_error(f"redirects to {shortened(host)} without TLS: anyone could change the content")
        return target.geturl()

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], authorization: str | None = None, **options: object
    ) -> requests.Response:
        """Send one request, to the registry itself with its authorization; convert the errors of requests."""
        if authorization is None:
            authorization = self._authorization if self._is_registry_url(url) else ""

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if authorization:
                request.headers["Authorization"] = authorization
            return request

        direct = {"http": None, "all": None} if url.startswith("http:") and is_loopback(urlsplit(url).netloc) else None
        log.debug("%s %s", method, url.partition("?")[0])  # a redirect's query may be a signature
        try:
            return self.session.request(
                method, url, headers={"Accept-Encoding": "identity", **headers},
                auth=authorize,  # with any, requests does not read ~/.netrc
                stream=True, timeout=_TIMEOUT, allow_redirects=False, proxies=direct, **options,
            )  # fmt: skip
        except self._errors.SSLError as error:
            raise explain_tls(urlsplit(url).netloc, _last_reason(error)) from error
        except (self._errors.ConnectionError, self._errors.Timeout) as error:
            raise self.connection_lost(_last_reason(error)) from error
        except (self._errors.RequestException, ValueError) as error:
            raise self.protocol_error(f"can't be queried: {_last_reason(error)}") from error
        except OSError as error:  # of requests itself, which is not one of its exceptions
            what = f"can't read the trusted certificates: {one_line(error)}"
            raise PrerequisiteError(what, fix="correct REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE") from error

    def _explain(self, response: requests.Response, service: str = "") -> None:
        code = response.status_code
        status = f"responds with {code} {responses.get(code, '')}".rstrip()
        if code in (_UNAUTHORIZED, _FORBIDDEN) or (service and code == _BAD_REQUEST):
            raise access_denied(self._reference, self._credentials)
        if code == _NOT_FOUND and not service:
            raise NotFoundError(
                f"{self._reference.host} has no {self._reference.path}:{self._reference.wanted}",
                meaning="it was not pushed there, or the name or tag is wrong",
                fix="push it: ftkit push NAME:TAG --registry HOST/PATH",
            )
        if code in _TRANSIENT:
            raise TransientError(f"{service or self._reference.host} {status}", fix="try again later")
        if code not in _ACCEPTED:
            raise self.protocol_error(f"names the token service {service}, which {status}" if service else status)

    def _log_in(self, challenge: str) -> None:
        kind, _, rest = challenge.partition(" ")
        known = self._credentials
        basic = f"Basic {base64.b64encode(f'{known.username}:{known.password}'.encode()).decode()}" if known else ""
        if kind.lower() == "basic":
            if known is None:
                raise access_denied(self._reference, None)
            self._authorization = basic
        elif kind.lower() == "bearer":
            parameters = re.findall(r'(\w+)=(?:"([^"]*)"|([^\s",]+))', rest)
            token = self._fetch_token({name: quoted or bare for name, quoted, bare in parameters}, basic)
            self._authorization = f"Bearer {token}"
        else:
            raise self.protocol_error(f"requires an unsupported kind of login: {shortened(kind)}")

    def _fetch_token(self, challenge: Mapping[str, str], authorization: str) -> str:
        """Return a token of the registry's token service, unless the password would be sent there without TLS."""
        realm = challenge.get("realm", "")
        target = _parse_address(realm)
        if target is None:
            raise self.protocol_error(f"names a token service with an invalid address: {shortened(realm)}")
        host = str(target.hostname)
        if target.scheme == "http" and not (is_loopback(host) and is_loopback(self._reference.host)):
            raise self.protocol_error(f"requires the login at {shortened(host)} without TLS: anyone could read it")
        query = {"scope": challenge.get("scope") or f"repository:{self._reference.path}:pull"}
        if challenge.get("service"):
            query["service"] = challenge["service"]
        with _closing(self._in_time(lambda: self._request("GET", realm, {}, authorization, params=query))) as response:
            self._explain(response, shortened(target.netloc))
            body = self.read(response, _MAX_TOKEN)
        found = parse_json(TokenResponse, body, f"{self._reference.host} names a token service whose response")
        token = found.token or found.access_token
        if not token:
            raise self.protocol_error("names a token service that returns no token")
        return token


@contextmanager
def _closing(response: requests.Response) -> Iterator[requests.Response]:
    """Close a response, unless it stalled: that would wait for the thread that still reads it."""
    try:
        yield response
    except StalledError:
        raise
    except BaseException:
        response.close()
        raise
    response.close()


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


def _last_reason(error: BaseException) -> str:
    """Return the innermost cause of an error of requests, which wraps it several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return "".join(character if character.isprintable() else " " for character in one_line(error))


# --- Credentials and trusted certificates, and what a refusal means -------------------------------


_NGC_HOST = "nvcr.io"
_NGC_USER = "$oauthtoken"
_CERTIFICATES: Final = ("/etc/docker/certs.d", "~/.config/docker/certs.d")
"""Where docker's engine looks for a registry's certificates, in a folder named `HOST:PORT`; the second is rootless."""


@dataclass(frozen=True)
class Credentials:
    username: str
    password: str = field(repr=False)


def from_user(host: str, username: str | None, password: str) -> Credentials:
    """Return credentials from the command line; NGC has one user name for everybody."""
    name = username or (_NGC_USER if host == _NGC_HOST else "")
    if not name or not password:
        what = "a password on standard input" if name else "a user name (--username)"
        raise ImageError(f"{host} needs {what}", fix='printf %s "$TOKEN" | ftkit push … --username U --password-stdin')
    return Credentials(name, password)


def find_credentials(host: str) -> Credentials | None:
    """Return the credentials for a registry from docker's configuration; None if it has none."""
    try:
        docker = docker_sdk()
    except PrerequisiteError:
        return None
    try:
        found = docker.auth.load_config().resolve_authconfig("docker.io" if host == DOCKER_HUB else host) or {}
    except docker.errors.DockerException as error:
        raise PrerequisiteError(
            f"docker's credential helper for {host} failed: {one_line(error)}",
            meaning="docker's config.json lists a helper that is not installed or not logged in",
            fix=f"see 'credsStore' and 'credHelpers' in ~/.docker/config.json, or run 'docker login {host}'",
        ) from error
    values = {key.lower(): value for key, value in found.items()}  # a helper's keys are capitalized
    return Credentials(values["username"], values.get("password") or "") if values.get("username") else None


def access_denied(
    reference: RegistryImage, credentials: Credentials | None, message: str = "", *, pushes: bool = False
) -> ImageError:
    """Return the error for a refused login; only `ftkit push` has options for credentials."""
    host = "docker.io" if reference.host == DOCKER_HUB else reference.host
    if credentials is None:
        what = f"{host} requires a login for {reference.path}, and there are no credentials for it"
        meaning = "the repository is private, or does not exist: registries don't distinguish these"
    else:
        what = f"{host} refused the credentials of user '{credentials.username}' for {reference.path}"
        meaning = "the password or token is wrong or has expired, or this user lacks permission"
    login = f"docker login {host}"
    if host == _NGC_HOST:
        login += f" --username '{_NGC_USER}', with an NGC API key as the password"
    other = "do so on another machine and copy its ~/.docker/config.json to this one"
    if pushes:
        other = "give ftkit push --username and --password-stdin"
    return ImageError(what + (f": {message}" if message else ""), meaning=meaning, fix=f"{login}; or {other}")


def trusting_adapter(host: str) -> HTTPAdapter:
    """Return an adapter that trusts the system's certificates, and docker's for this registry, as docker does."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - comes with the extra

    context = ssl.create_default_context()
    for folder in _CERTIFICATES:
        for file in sorted(Path(folder).expanduser().joinpath(host).glob("*.crt")):
            try:
                context.load_verify_locations(file)
            except OSError as error:  # also of ssl
                raise PrerequisiteError(f"can't read docker's certificate {file}: {one_line(error)}") from error

    class Adapter(HTTPAdapter):  # type: ignore[misc] # requests has no types
        def init_poolmanager(self, *words: object, **options: object) -> None:
            super().init_poolmanager(*words, ssl_context=context, **options)

        def proxy_manager_for(self, *words: object, **options: object) -> Any:
            return super().proxy_manager_for(*words, ssl_context=context, **options)

    return Adapter()


def explain_tls(host: str, reason: str) -> ImageError:
    """Return the error for a failed TLS connection, with the reason of OpenSSL or the docker engine."""
    meaning = "the site's own authority has signed its certificate, and this machine does not trust it"
    fix = f"put that authority's certificate into {_CERTIFICATES[0]}/{host}/ca.crt, or set SSL_CERT_FILE to it"
    if "WRONG_VERSION_NUMBER" in reason or "server gave HTTP response" in reason:
        meaning = "the registry speaks plain HTTP, which is used only for registries on this machine"
        fix = f"correct the port, or forward one of this machine: ssh -L 5000:{host} LOGIN, and use localhost:5000"
    elif "mismatch" in reason or "certificate is valid for" in reason:
        meaning = "its certificate is for another host name, or another server answers at this address"
        fix = "use the name that is in the certificate"
    elif "expired" in reason or "not yet valid" in reason:
        meaning = ""
        fix = "renew the registry's certificate; check this machine's clock: date"
    return ImageError(f"the TLS connection to {shortened(host)} failed: {reason}", meaning=meaning, fix=fix)
