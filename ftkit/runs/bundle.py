"""One file that holds what a run was and what came of it, without weights and data: to hand over, and to repeat.

It is a tar archive of plain files. The same run folder gives the same bytes: members are sorted, and have neither owner
nor time. A signature is a file beside it, by a program that is there: minisign, cosign, or ssh-keygen.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from ftkit import process
from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, one_line
from ftkit.files import DamagedFileError, atomic_file, read_json, to_json
from ftkit.planning.layout import DataLayout, RunLayout, Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Signer = Literal["minisign", "ssh-keygen", "cosign"]
SIGNERS: tuple[Signer, ...] = ("minisign", "ssh-keygen", "cosign")
NAMESPACE = "ftkit-bundle"
"""Of signatures by ssh-keygen: one for another purpose is not valid for a bundle."""
PRINCIPAL = "ftkit"
"""Who signs, by a file of allowed signers."""
_SUFFIXES: dict[Signer, str] = {"minisign": ".minisig", "ssh-keygen": ".sig", "cosign": ".sigstore.json"}
_MAX_MEMBER_BYTES = 2**30
_DATA_MANIFEST = "data-manifest.json"
_RECIPE = "recipe.json"
_LOCK = "requirements.lock"


class SignatureError(FtkitError):
    """A signature does not fit the file that it is beside, or the key."""

    exit_code = PrerequisiteError.exit_code


def bundled_files(layout: RunLayout) -> list[Path]:
    """Return the files of a run's folder that go into its bundle, as far as they are there."""
    wanted = (
        layout.manifest, layout.plan, layout.script, layout.preparation_script, layout.submission, layout.metrics,
        layout.report, layout.code_changes, layout.original,
    )  # fmt: skip
    return [path for path in wanted if path.is_file()]


def write_bundle(layout: RunLayout, path: Path, lock: Path | None = None) -> list[str]:
    """Write a run's bundle and return the names of its members.

    Args:
        layout: the run's folder.
        path: of the bundle.
        lock: of the image's packages, where it is here.

    Raises:
        NotFoundError: the run has no manifest.
        PrerequisiteError: the bundle can't be written.
    """
    manifest = read_json(layout.manifest, dict[str, Any])
    if manifest is None:
        raise NotFoundError(f"{layout.root.name} has no manifest.json", meaning="nobody could repeat it from a bundle")
    data = DataLayout(Workspace(layout.root.parents[1]).data / str(manifest.get("data_fingerprint")))
    try:
        contents = {file.name: file.read_bytes() for file in bundled_files(layout)}
        contents[_RECIPE] = to_json(manifest.get("resolved_recipe", {})).encode()
        for name, file in ((_DATA_MANIFEST, data.manifest), (_LOCK, lock)):
            if file and file.is_file():
                contents[name] = file.read_bytes()
        with atomic_file(path) as temporary, tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(contents):
                member = tarfile.TarInfo(f"{layout.root.name}/{name}")
                member.size, member.mode = len(contents[name]), 0o644
                archive.addfile(member, io.BytesIO(contents[name]))
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {one_line(error)}",
            meaning="the folder does not exist, is full, or belongs to somebody else",
            fix="write the bundle somewhere else: --output FILE",
        ) from error
    return sorted(contents)


def is_bundle(path: Path) -> bool:
    """Whether a file is a tar archive."""
    try:
        return tarfile.is_tarfile(path)
    except OSError:
        return False


def unpack(path: Path, folder: Path) -> None:
    """Write the files of a bundle to a folder. Only plain files with the names of a run folder's are taken.

    Raises:
        DamagedFileError: it is no bundle, or damaged.
    """
    layout = RunLayout(folder)
    known = {layout.manifest.name, layout.plan.name, layout.metrics.name, layout.original.name, layout.report.name}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or name not in known:
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise DamagedFileError(path, f"{name} has {member.size:,} bytes")
                source = archive.extractfile(member)
                if source is not None:
                    with source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DamagedFileError(path, str(error)) from error
    if not layout.manifest.is_file():
        raise DamagedFileError(path, "it has no manifest.json")


def find_signer(names: Sequence[Signer] | None = None) -> Signer:
    """Return the first of some programs, or of all that sign, that is here.

    Raises:
        PrerequisiteError: none is.
    """
    names = names or SIGNERS
    for name in names:
        if shutil.which(name):
            return name
    raise PrerequisiteError(
        f"nothing here can sign: {', '.join(names)}",
        meaning="signatures are made by one of these programs",
        fix="install one; on Debian and Ubuntu: apt-get install openssh-client",
    )


def sign(path: Path, key: Path, signer: Signer) -> Path:
    """Sign a file with a private key and return the signature's file. The program asks for the key's passphrase.

    Raises:
        PrerequisiteError: the program is missing, or refused.
    """
    signature = path.with_name(path.name + _SUFFIXES[signer])
    signature.unlink(missing_ok=True)
    commands = {
        "minisign": ["minisign", "-S", "-s", str(key), "-m", str(path), "-x", str(signature)],
        "ssh-keygen": ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)],
        "cosign": ["cosign", "sign-blob", "--yes", "--key", str(key), "--bundle", str(signature), str(path)],
    }
    done = process.run(commands[signer])
    if done.returncode != 0 or not signature.is_file():
        raise PrerequisiteError(
            f"{signer} did not sign {path.name}: {done.stderr.strip() or f'exit code {done.returncode}'}",
            meaning=f"{key} is no private key of {signer}, or needs a passphrase that nobody could type",
            fix="give another key: --key FILE; or load it into an agent",
        )
    return signature


def verify_signature(path: Path, key: Path) -> Signer:
    """Check a bundle's signature with a public key and return the program that did.

    Args:
        path: the bundle; its signature is beside it.
        key: the public key; of ssh-keygen, a file of allowed signers (`ssh-keygen(1)`) with `PRINCIPAL`, or `*`.

    Raises:
        NotFoundError: there is no signature.
        SignatureError: it does not fit.
    """
    signer, signature = next(_signatures(path), (None, None))
    if signer is None or signature is None:
        raise NotFoundError(
            f"{path} has no signature beside it",
            meaning="it was not signed, or the signature was not copied along",
            fix=f"get the file {path.name}{_SUFFIXES['ssh-keygen']}, or leave --require-signature out",
        )
    commands = {
        "minisign": ["minisign", "-V", "-p", str(key), "-m", str(path), "-x", str(signature)],
        "cosign": ["cosign", "verify-blob", "--key", str(key), "--bundle", str(signature), str(path)],
        "ssh-keygen": [
            "ssh-keygen", "-Y", "verify", "-f", str(key), "-I", PRINCIPAL, "-n", NAMESPACE, "-s", str(signature),
        ],
    }  # fmt: skip

    def feed(stdin: IO[bytes]) -> None:
        if signer == "ssh-keygen":  # which reads what was signed
            with path.open("rb") as file:
                shutil.copyfileobj(file, stdin)

    done = process.run_with_input(commands[signer], feed)
    if done.returncode != 0:
        raise SignatureError(
            f"{path.name} is not as its signer left it: {one_line(done.stderr)}",
            meaning=f"the file or its signature was changed, or somebody else signed it than {key} says",
            fix="get both files again from who made them",
        )
    return signer


def _signatures(path: Path) -> Iterator[tuple[Signer, Path]]:
    for signer in SIGNERS:
        signature = path.with_name(path.name + _SUFFIXES[signer])
        if signature.is_file():
            yield signer, signature
