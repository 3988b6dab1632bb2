"""Send a run's files to the login node: the project's files, its recipe as one file, and local data and weights.

A local file is stored there in `files/` under its path on this machine, so that it is sent only once. Paths on the
cluster, which do not exist here, don't change.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ftkit import assets, process
from ftkit.config.context import PROJECT_FILE, Context, list_names, search_folders
from ftkit.config.load import Loaded, read_cluster, read_recipe
from ftkit.config.yaml_files import parse_override, to_yaml
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, one_line
from ftkit.files import files_in
from ftkit.paths import absolute_path, fixed_folder, is_path
from ftkit.remote.ssh import Login, call, is_lost, unreachable

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipeSpec

_OF_THIS_MACHINE: Final = ("login", "ssh_options", "login_folder", "send_limit_gib")
"""Keys of a profile that are removed for the login node, where the cluster is local."""
_NO_RSYNC: Final = (2, 127)
"""Exit status of rsync if there is none on the other side, or the login shell's files print into its protocol."""
_MAX_PROJECT_BYTES: Final = 2**20
_WITH_PATHS: Final = ("data", "model", "image", "training")  # keys of a recipe with paths


def project_name(project: Path) -> str:
    digest = hashlib.sha256(str(project).encode()).hexdigest()[:8]
    return f"{''.join(each if each.isalnum() else '-' for each in project.name) or 'project'}-{digest}"


def project_files(ctx: Context) -> dict[str, bytes]:
    """Return the files of a project by path; all profiles are in one piece each, without the keys about ssh."""
    files: dict[str, bytes] = {}
    listed = [ctx.project / PROJECT_FILE]
    listed += sorted((ctx.project / "recipes").glob("*.yaml"))
    listed += files_in(ctx.project / "containers")
    listed += sorted((ctx.project / "sbatch").rglob("*.j2"))
    for path in listed:
        if path.is_file() and path.stat().st_size <= _MAX_PROJECT_BYTES:
            files[str(path.relative_to(ctx.project))] = path.read_bytes()
    for name in list_names("cluster", ctx):
        if any((folder / f"{name}.yaml").is_file() for folder in search_folders("cluster", ctx)[:-1]):
            values = read_cluster(name, ctx).layers.values
            kept = {key: value for key, value in values.items() if key not in _OF_THIS_MACHINE}
            files[f"clusters/{name}.yaml"] = to_yaml(kept).encode()
    return files


def pack_run(
    recipe: str | None, trials: Sequence[Sequence[str]], words: Sequence[str], login: Login, ctx: Context
) -> tuple[list[str], dict[str, bytes], list[str]]:
    """Find a run's local files, and rewrite its arguments, typed as `words`, with paths on the login node.

    Returns the arguments there; the recipe as a file of the project by its path, unless ftkit ships it; and the paths
    of the local files.
    """
    if recipe is None:
        return [*words], {}, []
    roots: dict[str, list[Path]] = {}
    for overrides in trials:
        for key, path in _paths(read_recipe(recipe, ctx, overrides)):
            if found := _local_files(key, os.path.normpath(path)):
                roots[path] = found
    folder = login.folder if login.folder.startswith("/") else f"~/{login.folder}"
    moved = {path: f"{folder}/files{os.path.normpath(path)}" for path in roots}
    overrides = [_moved_override(word, moved) for word in words if "=" in word]
    plain = read_recipe(recipe, ctx)
    origins = (Path(origin.rpartition(":")[0]) for origin in plain.layers.origins.values())
    is_shipped = all(origin.parent in (assets.EXAMPLES, assets.RECIPES) for origin in origins)
    local_files = list(dict.fromkeys(str(file) for files in roots.values() for file in files))
    if is_shipped:
        return [recipe, *overrides], {}, local_files
    values = plain.layers.values.items()
    text = to_yaml({key: _replace_paths(value, (key,), plain.layers.folder, moved) for key, value in values})
    name = f"sent/{plain.spec.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
    return [name, *overrides], {name: text.encode()}, local_files


def _paths(loaded: Loaded[RecipeSpec]) -> Iterator[tuple[str, str]]:
    recipe, layers = loaded.spec, loaded.layers
    yield from recipe.paths
    if recipe.data.task:
        yield "data.task", recipe.data.task.file
    template = ("data", "chat_template")
    if is_path(value := str(layers.value(template) or "")):
        yield "data.chat_template", str(absolute_path(value, layers.folder(template)))


def _local_files(key: str, path: str) -> list[Path]:
    """A missing path whose parent folder exists here is treated as a typo; otherwise it is on the cluster."""
    place = Path(path)
    if place.is_dir():
        return files_in(place)
    found = [Path(each) for each in sorted(glob.glob(path, recursive=True))]  # noqa: PTH207 - an absolute pattern
    files = [each for each in found if each.is_file()]
    if not files and fixed_folder(path).is_dir():
        raise NotFoundError(
            f"{key}: there is no {path} on this machine",
            meaning=f"its folder {fixed_folder(path)} exists here, so it was not treated as a path on the cluster",
            fix="correct the path",
        )
    return files


def _replace_paths(
    value: object, key: tuple[str, ...], folder: Callable[[tuple[str, ...]], Path], moved: Mapping[str, str]
) -> object:
    if isinstance(value, dict):
        return {name: _replace_paths(each, (*key, name), folder, moved) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_paths(each, key, folder, moved) for each in value]
    if isinstance(value, str) and key and key[0] in _WITH_PATHS:
        with suppress(ConfigError):  # not a path
            return moved.get(str(absolute_path(value, folder(key))), value)
    return value


def _moved_override(word: str, moved: Mapping[str, str]) -> str:
    """Return `key.path=value` with paths of the login node; a value without local paths stays as typed."""
    key, _, value = word.partition("=")
    here: Callable[[tuple[str, ...]], Path] = lambda _: Path.cwd()  # noqa: E731
    path = tuple(key.split("."))
    parsed = parse_override(word).value(path)
    if (changed := _replace_paths(parsed, path, here, moved)) != parsed:
        return f"{key}={changed if isinstance(changed, str) else json.dumps(changed)}"
    if isinstance(parsed, str) and "," in parsed:  # a sweep
        return f"{key}={','.join(str(_replace_paths(part, path, here, moved)) for part in value.split(','))}"
    return word


def pack_files(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def find_missing(login: Login, paths: Sequence[str]) -> list[str]:
    """Return the local files that `files/` there lacks, or has with another size or time."""
    if not paths:
        return []
    output, names = bytearray(), "\0".join(path.lstrip("/") for path in paths)
    script = "mkdir -p files; cd files; xargs -0r stat --printf '%s %Y %n\\0' 2>/dev/null; exit 0"
    if is_lost(call(login, script, output.extend, os.fsencode(names))):
        raise unreachable(login)
    there, missing = set(bytes(output).split(b"\0")), []
    for path in paths:
        stat = Path(path).stat()
        if os.fsencode(f"{stat.st_size} {int(stat.st_mtime)} {path.lstrip('/')}") not in there:
            missing.append(path)
    return missing


def send_files(login: Login, paths: Sequence[str]) -> None:
    """Send local files into `files/` there: with rsync, which continues a partial file, if both sides have it."""
    target, done = f"{login.folder}/files", None
    if shutil.which("rsync"):
        with tempfile.NamedTemporaryFile() as listed:
            listed.write(os.fsencode("\0".join(paths)))
            listed.flush()
            ssh = shlex.join(["ssh", *login.options])
            options = ["--times", "--perms", "--copy-links", "--partial", "--from0", f"--files-from={listed.name}"]
            words = ["rsync", *options, "-e", ssh, "/", f"{login.address}:{target}/"]
            done = process.run_with_input(words, lambda _: None)

    def write_tar(stdin: IO[bytes]) -> None:
        with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
            for path in paths:
                archive.add(path, arcname=path.lstrip("/"), recursive=False)

    if done is None or done.returncode in _NO_RSYNC:
        done = process.run_with_input(login.ssh(f"tar -x -p -C {target} -f -"), write_tar)
    if done.returncode:
        reason = one_line(done.stderr) if done.stderr.strip() else done.returncode
        raise PrerequisiteError(
            f"the local files could not be sent to {login.address}: {reason}",
            meaning="the connection was lost, or there is no disk space there; nothing was submitted",
            fix="repeat the command: files that have arrived are not sent again",
        )
