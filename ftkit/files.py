"""Files and folders that are complete or absent, and JSON from dataclasses and back."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from ftkit.errors import PrerequisiteError, UnusableFileError, first_few, one_line

if TYPE_CHECKING:
    from io import BufferedReader

    from pydantic import TypeAdapter, ValidationError

ValueT = TypeVar("ValueT")
_MAX_BYTES = 2**24
MAX_JSON_BYTES = 2**28  # limit of the JSON files of models: vocabularies have tens of megabytes
_MAX_DETAILS = 3


# --- Atomic writes -------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see either the former content or all of the new one, even after a crash."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, which is renamed to `path` at the end of the block.

    If the block raises, the temporary file is removed.
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}-{path.name}")  # some libraries select the format by the suffix
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path like `atomic_file`, for a path that a user gave: links, pipes and devices are kept.

    A link's target is written, as a shell's `>` does. What is written to a pipe or a device, such as `/dev/stdout`, is
    copied there at the end of the block: renaming a file to its name would remove it.
    """
    target = path.resolve() if path.is_symlink() else path
    if not path.exists() or path.is_file():
        with atomic_file(target) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:
        temporary = Path(folder, path.name)
        yield temporary
        with temporary.open("rb") as content, path.open("wb") as device:
            shutil.copyfileobj(content, device)


@contextmanager
def atomic_folder(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder next to `path`, which is renamed to `path` at the end of the block.

    If the block raises, the temporary folder is removed. An existing folder `path` is replaced, missing parents are
    created. Several processes may agree on the name `temporary`; existing content of that folder is removed first.
    """
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        remove(temporary)


def publish(temporary: Path, path: Path) -> None:
    """Sync a finished file, or a folder with its content, to disk, and rename it to its final name.

    A former file or folder of that name is replaced.
    """
    for inner in temporary.rglob("*"):
        if not inner.is_symlink():
            sync(inner)
    sync(temporary)
    if temporary.is_dir() and path.exists():  # rename(2) only replaces empty folders
        former = path.with_name(f".{path.name}.{secrets.token_hex(4)}.deleted")
        path.rename(former)
        try:
            temporary.rename(path)
        except OSError:
            former.rename(path)
            raise
        remove(former)
    else:
        temporary.rename(path)
    sync(path.parent)


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold the exclusive lock of a file (flock), which is created; call `on_wait` before waiting for it.

    Raises OSError if the file can't be created, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def file_lock_if_supported(path: Path) -> Iterator[None]:
    """Hold the lock of a file like `file_lock`; without a lock where the file can't be created or locked."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(file_lock(path))
        yield


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk with `fsync` (POSIX), if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't sync folders
            raise
    finally:
        os.close(descriptor)


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder and of the folders in it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remove(path: Path) -> None:
    """Remove a file or a folder with its content, if it exists; parts of a folder that can't be removed stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def mode_of_new_files(folder: Path) -> int:
    """Return the permissions of a new file in a folder, according to this process's umask or an ACL.

    Some libraries and programs create files with other permissions.
    """
    probe = folder / f".mode-{secrets.token_hex(4)}"
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()


# --- JSON ----------------------------------------------------------------------------------------


def to_json(value: object) -> str:
    """Return a dataclass, or a dictionary of plain values, as indented JSON with a final line break."""
    # Not pydantic's `dump_json`, which refuses file names and arguments that are not UTF-8.
    return json.dumps(_adapter(type(value)).dump_python(value, mode="json"), indent=2) + "\n"


def parse_json(data: str | bytes, kind: type[ValueT]) -> ValueT:
    """Parse JSON as a dataclass or another type that pydantic supports.

    Raises InvalidJsonError: it is not JSON, or has another structure.
    """
    try:
        value: ValueT = _adapter(kind).validate_json(data)
    except ValueError as error:
        raise InvalidJsonError(cast("ValidationError", error)) from error
    return value


class InvalidJsonError(ValueError):
    """JSON is damaged, or has an unexpected structure; the message lists the first few wrong keys."""

    def __init__(self, error: ValidationError) -> None:
        details = error.errors(include_input=False, include_url=False)
        located = [(".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in details]
        super().__init__(first_few([f"{key}: {text}" if key else text for key, text in located], _MAX_DETAILS, "; "))


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}  # Pydantic's adapters by type: creating one takes milliseconds


def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - slow to import

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def write_json(path: Path, value: object) -> None:
    """Write a dataclass, or a dictionary of plain values, atomically as a JSON file."""
    write_file(path, to_json(value).encode())


def read_json(path: Path, kind: type[ValueT]) -> ValueT | None:
    """Read a small JSON file; None if there is no such file.

    Raises DamagedFileError: the file can't be read, or has other content; PrivateFileError: this user may not read it.
    """
    try:
        return parse_json(read_small(path), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PrivateFileError(path) from error
    except OSError as error:
        raise DamagedFileError(path, one_line(error)) from error
    except InvalidJsonError as error:
        raise DamagedFileError(path, str(error)) from error


def mapping(value: object) -> dict[str, object]:
    """Return a value of a JSON file if it is an object; else an empty one, since the file may be damaged."""
    return value if isinstance(value, dict) else {}


def read_json_if_valid(path: Path, kind: type[ValueT]) -> ValueT | None:
    """Read a small JSON file; None if there is no such file, or its content has another type."""
    try:
        return read_json(path, kind)
    except DamagedFileError:
        return None


class DamagedFileError(UnusableFileError):
    """A file can't be read, or has unexpected content, for a `reason` on one line."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path.name} can't be read: {reason}",
            meaning=f"{path} was edited manually or partially copied, or another version of ftkit wrote it",
            fix="use the ftkit that submitted the run, or submit the run again",
        )
        self.reason = reason


class PrivateFileError(DamagedFileError, exit_code=PrerequisiteError.exit_code):
    """This user may not read a file, or the folder that it is in."""

    def __init__(self, path: Path) -> None:
        owner = ""
        for each in (path.parent, path):
            with suppress(OSError, KeyError):
                owner = each.owner()
        super().__init__(path, "you have no permission" + (f"; it belongs to {owner}" if owner else ""))
        self.meaning = f"{path} was not shared with other users, or with your group"
        self.fix = f"ask {owner or 'its owner'} for read permission for it"


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(contents: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the names and contents of files, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{len(contents[name])}\0".encode())
        digest.update(contents[name])
    return digest.hexdigest()


def copy_new(path: Path, offset: int, output: IO[bytes]) -> int:
    """Copy the content of a file after `offset` to `output`; return the new offset, or the old one without a file."""
    try:
        with open_regular(path) as file:
            file.seek(offset)
            shutil.copyfileobj(file, output)
            output.flush()
            return file.tell()
    except FileNotFoundError:
        return offset


def read_small(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Read a file of at most `max_bytes`, 16 MiB unless given.

    Raises OSError: it can't be read, is larger, or is a pipe or device, which might never end.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, without waiting for the writer of a pipe.

    Raises OSError: it is something else, such as a pipe or device, which might never end; or it can't be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def load_json(content: str | bytes) -> Any:
    """Parse JSON of others.

    Raises ValueError: it is not JSON in UTF-8, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
