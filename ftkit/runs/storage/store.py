"""Files under an address: a folder, or a prefix in an object store that fsspec has a driver for."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
import socket
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, UnreachableError, one_line
from ftkit.files import open_regular
from ftkit.paths import is_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ResultT = TypeVar("ResultT")

ADVICE: Final[Mapping[str, str]] = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'",
    "gs": "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run 'hf auth login', or set HF_TOKEN",
}
"""What to do about missing credentials, by scheme."""
_LOGGERS = ("gcsfs", "google.auth", "s3fs")
"""Libraries that log a warning or a traceback for each attempt, and then raise the error."""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_HOSTS: Final = {
    "gs": ("storage.googleapis.com", (*_PROXIES, "STORAGE_EMULATOR_HOST")),
    "s3": ("s3.amazonaws.com", (*_PROXIES, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")),
}
"""Hosts of stores; and variables that reach a store by another one, so that its name need not be resolved here."""

_PART_BYTES = 64 * 2**20
"""Part size of multipart uploads. S3's ETag of a file is a digest of its parts, so their size must be known."""
_PARTS_AT_ONCE = 4
"""Parts that s3fs uploads at the same time; it reports none before all of them are there."""
_READ_BYTES = 2**24
_PROBE = ".ftkit-write-test"
_LEFTOVER_SECONDS = 3600.0
"""Age of a partial file that a killed copy left: a living one writes to it at least every minute."""
_PATIENCE_SECONDS = 60.0
"""Maximum time without progress: drivers wait long, some forever, for a store that does not answer."""
_MIN_BYTES_PER_SECOND = 2**20
"""Minimum transfer rate of a store that works."""


class Progress:
    """Records when a call last made progress."""

    def __init__(self) -> None:
        """Begin now."""
        self.last = time.monotonic()

    def note(self, *_: object, **__: object) -> None:
        """Note that bytes were copied."""
        self.last = time.monotonic()

    def callback(self) -> Any:
        """Return the callback for fsspec's drivers."""
        from fsspec.callbacks import Callback  # noqa: PLC0415 - heavy, and 'ftkit status' does without

        return Callback(hooks={"progress": self.note})


def call_patiently(call: Callable[[Progress], ResultT], unseen_bytes: int = 0) -> ResultT:
    """Return what a call returns; it runs in a thread, which is left behind if it hangs.

    Args:
        call: receives the function to report progress to.
        unseen_bytes: maximum number of bytes that are copied between two reports.

    Raises:
        TimeoutError: the call made no progress.
    """
    progress, future = Progress(), Future[ResultT]()
    patience = _PATIENCE_SECONDS + unseen_bytes / _MIN_BYTES_PER_SECOND

    def run() -> None:
        try:
            future.set_result(call(progress))
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    while (left := progress.last + patience - time.monotonic()) > 0:
        try:
            return future.result(left)
        except TimeoutError:
            if future.done():  # the call itself raised it
                raise
    raise TimeoutError(f"no answer for {patience:.0f} s")


class Store:
    """A place for files.

    Its methods raise PrerequisiteError if it can't be reached or access is denied.
    """

    def __init__(self, address: str) -> None:
        """Open a folder, `s3://bucket/prefix` or `gs://bucket/prefix`; nothing is read or written yet.

        Raises:
            PrerequisiteError: the package that reaches it is missing, or there is no network.
        """
        self.address = address.rstrip("/")
        self._scheme = address.partition("://")[0] if is_address(address) else "file"
        options: dict[str, Any] = {"use_listings_cache": False} if self._scheme != "file" else {}
        if self._scheme == "s3":
            options["max_concurrency"] = _PARTS_AT_ONCE
        self._system: Any = open_driver(self._scheme, **options)
        self._root = (
            str(Path(address).absolute()) if self._scheme == "file" else address.partition("://")[2].rstrip("/")
        )

    def check_writable(self) -> None:
        """Check write access: write a small file, and remove it again."""

        def write(_: Progress) -> None:
            if self._scheme == "file":
                self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._place(_PROBE), b"ftkit")
            with suppress(Exception):  # some accounts may write but not delete
                self._system.rm_file(self._place(_PROBE))

        with self._errors("write to"):
            call_patiently(write)

    def sizes(self) -> dict[str, int]:
        """Return the files by their names below the address, with their sizes in bytes."""
        with self._errors("list"):
            try:
                found: Mapping[str, Any] = call_patiently(lambda _: self._system.find(self._root, detail=True))
            except FileNotFoundError:
                return {}
        start = len(self._root) + 1
        return {str(path)[start:]: int(info["size"]) for path, info in found.items() if len(str(path)) > start}

    def put(self, path: Path, name: str) -> None:
        """Upload a file; it appears under its name once it is complete.

        Raises:
            FileNotFoundError: the local file no longer exists.
        """
        place = self._place(name)

        def write(progress: Progress) -> None:
            if self._scheme != "file":
                self._system.put_file(str(path), place, chunksize=_PART_BYTES, callback=progress.callback())
                return
            _copy_atomically(path, Path(place), progress)

        unseen = min(path.stat().st_size, _PARTS_AT_ONCE * _PART_BYTES)
        with self._errors("write to", path):
            call_patiently(write, unseen)

    def get(self, name: str, path: Path) -> None:
        """Download a file.

        Raises:
            NotFoundError: the store does not have it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors("read"):
            if self._scheme == "file":
                call_patiently(lambda progress: _copy(Path(self._place(name)), path, progress))
            else:
                call_patiently(
                    lambda progress: self._system.get_file(self._place(name), str(path), callback=progress.callback()),
                    _PARTS_AT_ONCE * _PART_BYTES,
                )

    def holds(self, name: str, path: Path) -> bool:
        """Return whether the stored file has the content of a local file.

        Compares the store's digest if it can be computed here; otherwise reads the file back.

        Raises:
            FileNotFoundError: the local file no longer exists.
        """
        with self._errors("read", path):
            try:
                info = call_patiently(lambda _: self._system.info(self._place(name)))
            except FileNotFoundError:
                return False
            if int(info["size"]) != path.stat().st_size:
                return False
            if stored_md5 := info.get("md5Hash"):
                return str(stored_md5) == base64.b64encode(_digest_of_file(path, hashlib.md5)).decode()
            if str(info.get("ETag", "")).strip('"') == _etag(path):
                return True  # a different ETag proves nothing: it may be that of encrypted content
            return call_patiently(lambda progress: self._read_digest(name, progress)) == _digest_of_file(
                path, hashlib.sha256
            )

    def _read_digest(self, name: str, progress: Progress) -> bytes:
        """Read a stored file, and return its SHA-256."""
        with self._system.open(self._place(name), "rb", block_size=_READ_BYTES) as file:
            stored = hashlib.sha256()
            while chunk := file.read(_READ_BYTES):
                stored.update(chunk)
                progress.note()
        return stored.digest()

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, verb: str, local: Path | None = None) -> Iterator[None]:
        """Convert an error of any driver, whose classes differ; but not that a local file no longer exists."""
        try:
            yield
        except FtkitError:
            raise
        except TimeoutError as error:
            raise PrerequisiteError(
                f"can't {verb} {self.address}: {one_line(error) or 'no answer'}",
                meaning="the store or a proxy accepts connections but does not answer, or the file system hangs",
                fix="check whether other machines reach it; then repeat the command: copied files are not copied again",
            ) from error
        except FileNotFoundError as error:
            if local is not None and not local.exists():
                raise
            raise NotFoundError(
                f"there is nothing at {self.address}: {one_line(error)}", fix="check the address"
            ) from error
        except Exception as error:
            raise PrerequisiteError(
                f"can't {verb} {self.address}: {one_line(error) or type(error).__name__}",
                meaning="there are no credentials, they lack access to this address, or there is no network"
                if self._scheme in ADVICE
                else "the disk is full, not mounted, or not writable",
                fix=ADVICE.get(self._scheme, "check the folder"),
            ) from error


def _copy_atomically(source: Path, target: Path, progress: Progress) -> None:
    """Copy a file under a name of this copy's own, and rename it: another process may copy it to the same place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{escape(target.name)}.*.partial"):
        with suppress(OSError):  # its copy has just ended
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        _copy(source, partial, progress)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _copy(source: Path, target: Path, progress: Progress) -> None:
    with open_regular(source) as read, target.open("wb") as written:
        while chunk := read.read(_READ_BYTES):
            written.write(chunk)
            progress.note()


def _digest_of_file(path: Path, algorithm: Callable[..., Any]) -> bytes:
    with open_regular(path) as file:
        digest: bytes = hashlib.file_digest(file, lambda: algorithm(usedforsecurity=False)).digest()
    return digest


def _etag(path: Path) -> str:
    """Return S3's ETag: the MD5 of a file, or of the MD5s of its parts with their number."""
    if path.stat().st_size < 2 * _PART_BYTES:  # s3fs uploads these in one part
        return _digest_of_file(path, hashlib.md5).hex()
    parts = []
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


# --- Drivers -------------------------------------------------------------------------------------


def open_driver(scheme: str, **options: Any) -> Any:
    """Return fsspec's file system of a scheme; nothing is read or written yet.

    Raises:
        PrerequisiteError: the driver's package is missing.
        UnreachableError: the store can't be reached from this machine.
    """
    try:
        import fsspec  # noqa: PLC0415 - heavy, and only needed for addresses

        found = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise PrerequisiteError(
            f"{scheme}:// needs a package that is missing here: {one_line(error)}",
            fix="pip install 'ftkit[storage]'",
        ) from error
    for name in _LOGGERS:
        if not (logger := logging.getLogger(name)).handlers:
            logger.addHandler(logging.NullHandler())
    if scheme == "gs":  # gcsfs retries for minutes without a network
        _check_name(scheme)
    return found(**options)


def is_unreachable(error: BaseException, scheme: str) -> bool:
    """Return whether an error of a driver is the network's, as that of missing credentials is without a network."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror | ConnectionError | TimeoutError):
            return True
        cause = cause.__cause__ or cause.__context__
    try:
        _check_name(scheme)
    except UnreachableError:
        return True
    return False


def _check_name(scheme: str) -> None:
    host, other_ways = _HOSTS.get(scheme, ("", ()))
    if not host or any(map(os.environ.get, other_ways)):
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise UnreachableError(
            f"this machine can't find {host}: {error.strerror or one_line(error)}",
            meaning="it has no network, or reaches the internet only through a proxy",
            fix="set HTTPS_PROXY if there is a proxy, or use a machine with network",
        ) from error
