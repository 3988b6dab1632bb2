"""Files under an address: a folder, or a prefix in an object store with an fsspec driver."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, UnreachableError, one_line
from ftkit.files import atomic_file, files_in, open_regular
from ftkit.paths import is_address
from ftkit.process import in_thread

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

ResultT = TypeVar("ResultT")
Progress = Callable[..., None]  # called when bytes were copied; arguments are ignored

ADVICE: Final[Mapping[str, str]] = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'",
    "gs": "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run 'hf auth login', or set HF_TOKEN",
}
"""Fixes for missing credentials, by scheme."""
_LOGGERS = ("gcsfs", "google.auth", "s3fs")
"""Libraries that log a warning or a traceback for each attempt, and then raise the error."""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_HOSTS: Final = {
    "gs": ("storage.googleapis.com", (*_PROXIES, "STORAGE_EMULATOR_HOST")),
    "s3": ("s3.amazonaws.com", (*_PROXIES, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")),
}
"""Hosts of stores, and variables that select another host or a proxy, so that the name need not resolve here."""

_PART_BYTES = 64 * 2**20
"""Part size of multipart uploads. S3's ETag of a file is a digest of its parts, so their size must be known."""
_PARTS_AT_ONCE = 4  # parts that s3fs uploads in parallel; it reports progress only after all of them
_READ_BYTES = 2**24
_PROBE = ".ftkit-write-test"
_PATIENCE_SECONDS = 60.0
"""Maximum time without progress: drivers wait a long time, or forever, for a store that does not answer."""
_MIN_BYTES_PER_SECOND = 2**20  # minimum transfer rate of a working store


def call_patiently(call: Callable[[Progress], ResultT], unseen_bytes: int = 0) -> ResultT:
    """Return the result of a call that runs in a thread, which is abandoned if it hangs.

    The call gets a progress function, to be called at least once per `unseen_bytes` bytes. Raises `TimeoutError` if
    the call makes no progress.
    """
    last = [time.monotonic()]
    patience = _PATIENCE_SECONDS + unseen_bytes / _MIN_BYTES_PER_SECOND
    future = in_thread(lambda: call(lambda *_, **__: last.__setitem__(0, time.monotonic())))
    while (left := last[0] + patience - time.monotonic()) > 0:
        try:
            return future.result(left)
        except TimeoutError:
            if future.done():  # just now, or the call itself raised it
                return future.result()
    raise TimeoutError(f"no answer for {patience:.0f} s")


class Store:
    """A folder or a bucket's prefix for files. All methods raise PrerequisiteError if it can't be accessed."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._scheme, _, root = address.partition("://") if is_address(address) else ("file", "", "")
        options: dict[str, object] = {} if self._scheme == "file" else {"use_listings_cache": False}
        if self._scheme == "s3":
            options["max_concurrency"] = _PARTS_AT_ONCE
        self._system = open_driver(self._scheme, **options)
        self._root = root.rstrip("/") or str(Path(address).absolute())

    def check_writable(self) -> None:
        """Check write access: write a small file, and remove it again."""

        def write(_: Progress) -> None:
            if self._scheme == "file":
                self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(f"{self._root}/{_PROBE}", b"ftkit")
            with suppress(Exception):  # some accounts may write but not delete
                self._system.rm_file(f"{self._root}/{_PROBE}")

        self._call("write to", write)

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the files, by name below the address."""
        start = len(self._root) + 1
        try:
            found = self._call("list", lambda _: self._system.find(self._root, detail=True))
        except NotFoundError:
            return {}
        return {path[start:]: info["size"] for path, info in found.items() if path[start:]}

    def put(self, path: Path, name: str) -> None:
        """Upload a file; it appears under its name once it is complete. FileNotFoundError if the local file is gone."""
        place = f"{self._root}/{name}"

        def write(progress: Progress) -> None:
            if self._scheme == "file":
                Path(place).parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(Path(place)) as temporary:
                    _copy(path, temporary, progress)
            else:
                self._system.put_file(str(path), place, chunksize=_PART_BYTES, callback=_callback(progress))

        self._call("write to", write, min(path.stat().st_size, _PARTS_AT_ONCE * _PART_BYTES), path)

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = f"{self._root}/{name}"

        def read(progress: Progress) -> None:
            if self._scheme == "file":
                _copy(Path(place), path, progress)
            else:
                self._system.get_file(place, str(path), callback=_callback(progress))

        self._call("read", read, _PARTS_AT_ONCE * _PART_BYTES)

    def holds(self, name: str, path: Path) -> bool:
        """Return whether the stored file has the content of a local file.

        Compares the store's digest if it can be computed here; otherwise reads the file back. Raises
        `FileNotFoundError` if the local file no longer exists.
        """
        place, size = f"{self._root}/{name}", path.stat().st_size

        def compare(progress: Progress) -> bool:
            try:
                info = self._system.info(place)
            except FileNotFoundError:
                return False
            progress()
            if info["size"] != size:
                return False
            if stored_md5 := info.get("md5Hash"):
                return bool(stored_md5 == base64.b64encode(_digest(path, "md5", progress)).decode())
            if str(info.get("ETag", "")).strip('"') == _etag(path, progress):
                return True  # a different ETag proves nothing: it may be that of encrypted content
            stored = hashlib.sha256()
            with self._system.open(place, "rb", block_size=_READ_BYTES) as file:
                while chunk := file.read(_READ_BYTES):
                    stored.update(chunk)
                    progress()
            return stored.digest() == _digest(path, "sha256", progress)

        return self._call("read", compare, local=path)

    def _call(
        self, verb: str, call: Callable[[Progress], ResultT], unseen_bytes: int = 0, local: Path | None = None
    ) -> ResultT:
        with driver_errors(self.address, verb, local=local):
            return call_patiently(call, unseen_bytes)


def upload_folder(folder: Path, store: Store, last: str, report: Callable[[str], None]) -> None:
    """Copy the missing files of a folder. The file `last`, which marks the copy as complete, is copied last.

    Raises `PrerequisiteError` if the store can't be written to, or returns other content than was written;
    `FileNotFoundError` if a local file no longer exists.
    """
    existing = store.sizes()
    for path in sorted(files_in(folder), key=lambda path: (path == folder / last, path)):
        name = path.relative_to(folder).as_posix()
        if existing.get(name) == path.stat().st_size and store.holds(name, path):
            continue
        upload_file(path, store, name, report)


def upload_file(path: Path, store: Store, name: str, report: Callable[[str], None]) -> None:
    """Copy a file and verify the copy. Raises as `upload_folder` does."""
    report(f"copying {name}")
    store.put(path, name)
    if not store.holds(name, path):
        raise PrerequisiteError(
            f"{store.address}/{name} differs from what was written",
            meaning="the copy was damaged in transit, somebody else writes there, or the local file was changed",
            fix="repeat the command: existing files are not copied again",
        )


def push(folder: Path, address: str, last: str, report: Callable[[str], None]) -> None:
    """Copy an export to a folder or an object store, with the file `last`, which makes it an export, at the end."""
    store = Store(address)
    if last in store.sizes() and not store.holds(last, folder / last):
        raise PrerequisiteError(
            f"{address} already has another export",
            meaning="ftkit does not replace one export by another",
            fix="give another address, for example with the step in its name",
        )
    upload_folder(folder, store, last, report)


def _copy(source: Path, target: Path, progress: Progress) -> None:
    with open_regular(source) as read, target.open("wb") as written:
        while chunk := read.read(_READ_BYTES):
            written.write(chunk)
            progress()


def _digest(path: Path, algorithm: str, progress: Progress) -> bytes:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open_regular(path) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            progress()
    return digest.digest()


def _etag(path: Path, progress: Progress) -> str:
    """Return S3's ETag: the MD5 of a file, or for several parts, the MD5 of their MD5s with the number of parts."""
    if path.stat().st_size < 2 * _PART_BYTES:  # s3fs uploads these in one part
        return _digest(path, "md5", progress).hex()
    parts = []
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
            progress()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _callback(progress: Progress) -> object:
    return import_module("fsspec.callbacks").Callback(hooks={"progress": progress})


def open_driver(scheme: str, **options: object) -> AbstractFileSystem:
    """Return fsspec's file system of a scheme; nothing is read or written yet.

    Raises `PrerequisiteError` if the driver's package is missing; `UnreachableError` if the store can't be reached from
    this machine.
    """
    try:
        found = import_module("fsspec").get_filesystem_class(scheme)  # heavy, and only needed for addresses
    except (ImportError, ValueError) as error:
        what = f"{scheme}:// needs a package that is missing here: {one_line(error)}"
        raise PrerequisiteError(what, fix="pip install 'ftkit[storage]'") from error
    for name in _LOGGERS:
        if not (logger := logging.getLogger(name)).handlers:
            logger.addHandler(logging.NullHandler())
    if scheme == "gs" and (unreachable := _resolve_host(scheme)):  # gcsfs retries for minutes without a network
        raise unreachable
    return found(**options)


@contextmanager
def driver_errors(address: str, verb: str, about: str = "", local: Path | None = None) -> Iterator[None]:
    """Convert errors of a driver, which may be of any class, except that a local file no longer exists."""
    scheme = address.partition("://")[0] if is_address(address) else "file"
    try:
        yield
    except FtkitError:
        raise
    except FileNotFoundError as error:
        if local is not None and not local.exists():
            raise
        raise NotFoundError(f"{about}there is nothing at {address}", fix="check the address") from error
    except Exception as error:
        meaning, fix = "the disk is full, not mounted, or not writable", "check the folder"
        if isinstance(error, TimeoutError):
            meaning = "the store or a proxy accepts connections but does not answer, or the file system hangs"
            fix = "check whether other machines reach it; then repeat the command"
        elif scheme != "file":
            meaning = "there are no credentials, they lack access to this address, or there is no network"
            fix = ADVICE.get(scheme, "check the address")
        kind = UnreachableError if _is_unreachable(error, scheme) else PrerequisiteError
        what = f"{about}can't {verb} {address}: {one_line(error) or type(error).__name__}"
        raise kind(what, meaning=meaning, fix=fix) from error


def _is_unreachable(error: BaseException, scheme: str) -> bool:
    """Return whether an error of a driver is due to the network; without one, even credentials seem missing."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror | ConnectionError | TimeoutError):
            return True
        cause = cause.__cause__ or cause.__context__
    return _resolve_host(scheme) is not None


def _resolve_host(scheme: str) -> UnreachableError | None:
    """Return the error if the host of a store does not resolve here; None if it does or need not."""
    host, other_ways = _HOSTS.get(scheme, ("", ()))
    if not host or any(map(os.environ.get, other_ways)):
        return None
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        return UnreachableError(
            f"this machine can't find {host}: {error.strerror or one_line(error)}",
            meaning="it has no network, or reaches the internet only through a proxy",
            fix="set HTTPS_PROXY if there is a proxy, or use a machine with network",
        )
    return None
