"""The context of one call of ftkit: its environment, and the settings, recipes, profiles and images that it finds.

Names are looked up in the project, then in the user's configuration, then among the files that ftkit ships. This
module imports no pydantic, because shell completion must be fast.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ftkit import assets
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.errors import ConfigError, NotFoundError, Problem, one_line
from ftkit.files import read_small
from ftkit.paths import absolute_path

PROJECT_FILE = "ftkit.yaml"
ROOT = Path("/")  # the folder with the machine's /dev, /proc and /sys; only tests change it


@dataclass(frozen=True)
class Context:
    """The context of this call: the project's folder, the user's configuration, the environment, the machine's root."""

    project: Path
    user: Path
    environment: Mapping[str, str]
    root: Path = field(default_factory=lambda: ROOT)
    cluster: str | None = None  # of `ftkit --cluster NAME COMMAND`

    @classmethod
    def here(cls) -> Context:
        try:
            current = Path.cwd()
        except FileNotFoundError as error:
            raise NotFoundError(
                "the current folder no longer exists", meaning="it was removed or moved", fix="cd to another folder"
            ) from error
        inside = [folder for folder in (current, *current.parents) if os.path.lexists(folder / PROJECT_FILE)]
        user = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "ftkit"
        return cls(inside[0] if inside else current, user, os.environ)


def set_home(environment: MutableMapping[str, str]) -> None:
    """Set HOME if it is unset or empty: to the account's home folder, or without an account to `/`, as containers do.

    Python and libraries fail if neither HOME nor an account provides a home folder.
    """
    if not environment.get("HOME"):
        environment["HOME"] = "/"
        with suppress(KeyError):
            environment["HOME"] = pwd.getpwuid(os.getuid()).pw_dir or "/"


def state_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's folder for ftkit's records, which, unlike a cache, must be kept."""
    return Path(environment.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "ftkit"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return ftkit's cache folder, in `$XDG_CACHE_HOME` or `~/.cache`."""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    return Path(home, "ftkit")


def list_names(kind: str, ctx: Context) -> list[str]:
    """Return the names of all recipes or clusters (`kind`), the project's first."""
    return list(dict.fromkeys(path.stem for folder in search_folders(kind, ctx) for path in _files(folder, "*.yaml")))


def list_images(ctx: Context) -> list[str]:
    """Return `NAME:TAG` of every defined image."""
    paths = [path for folder in search_folders("image", ctx) for path in _files(folder, "*/*/image.yaml")]
    return list(dict.fromkeys(f"{path.parts[-3]}:{path.parts[-2]}" for path in paths))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, without broken links."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file()]


def search_folders(kind: str, ctx: Context) -> list[Path]:
    """Return the folders in which `kind` is looked up, first match first."""
    folder, *shipped = {
        "recipe": (Path("recipes"), assets.EXAMPLES, assets.RECIPES),
        "cluster": (Path("clusters"), assets.CLUSTERS),
        "image": (Path("containers"), assets.CONTAINERS),
    }[kind]
    return list(dict.fromkeys([ctx.project / folder, ctx.user / folder, *shipped]))


def settings_files(ctx: Context) -> list[Path]:
    """Return the settings files: the user's, then the project's."""
    return [ctx.user / "config.yaml", ctx.project / PROJECT_FILE]


def read_settings_layers(ctx: Context, keys: Iterable[str], options: Layers | None = None) -> Layers:
    """Read the user's file, the project's, `FTKIT_*` variables of `keys` and options, unvalidated; later wins."""
    layers = Layers()
    for path in settings_files(ctx):
        if os.path.lexists(path):
            from ftkit.config.yaml_files import read_yaml  # noqa: PLC0415 - slow to import for shell completion, and few users have such a file

            layers = read_yaml(path).over(layers)
    given = {key: value for key in keys if (value := ctx.environment.get(f"FTKIT_{key.upper()}"))}
    layers = Layers(dict(given), {(key,): f"FTKIT_{key.upper()}" for key in given}).over(layers)
    if ctx.cluster:
        layers = Layers({"cluster": ctx.cluster}, {("cluster",): COMMAND_LINE}).over(layers)
    return options.over(layers) if options else layers


def workspace_folder(layers: Layers, ctx: Context) -> Path:
    """Return the workspace's folder; a relative path is relative to the project."""
    key = ("workspace",)
    return absolute_path(layers.value(key) or ".", ctx.project, layers.origin(key), "workspace")


# --- The project's .env: variables such as HF_TOKEN for every command and the jobs that it starts ------
#
# The syntax is the subset that python-dotenv and shells read alike: `NAME=value`, `export NAME=value`, comments, both
# kinds of quotes, no escapes and no expansion. Messages contain lines and variables, never values.

DOTENV: Final = ".env"
_LINE: Final = re.compile(
    r"""(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*"""
    r"""(?:'(?P<single>[^'\0]*)'|"(?P<double>[^"$\\\0]*)"|(?P<bare>(?:(?!\s\#)[^'"$\\\0])*))\s*(?:\#.*)?"""
)
ALLOWED: Final = frozenset([
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET",
    "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_DATASETS_OFFLINE", "WANDB_API_KEY", "WANDB_ENTITY",
    "WANDB_JOB_TYPE", "WANDB_MODE", "WANDB_NAME", "WANDB_NOTES", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS",
    "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_EXPERIMENT_NAME",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "FTKIT_DEBUG", "FTKIT_REPORT", "NO_COLOR",
])  # fmt: skip
"""Allowed variables: credentials and settings that start no program, read no other file, and contact no other server.

Other variables could do so, and the file may come with a project that the user has only cloned.
"""
_ELSEWHERE: Final = {
    **{
        f"FTKIT_{key.upper()}": f"set '{key}' in {PROJECT_FILE}"
        for key in ("cluster", "image", "registry", "workspace")
    },
    "MLFLOW_TRACKING_URI": "set 'tracking.mlflow_uri' in the recipe",
}
_MAX_BYTES: Final = 2**16


def load_dotenv(project: Path, environment: MutableMapping[str, str]) -> None:
    """Add the variables of a project's `.env` to an environment; existing ones take precedence."""
    for name, value in read_dotenv(project).items():
        environment.setdefault(name, value)


def read_dotenv(project: Path) -> dict[str, str]:
    """Return the variables of a project's `.env`; none if there is no such file.

    Raises ConfigError with every line that can't be used.
    """
    path = project / DOTENV
    try:
        if not path.is_file():
            return {}
        text = read_small(path, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"can't be read: {one_line(error)}.")]) from error
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        name = match["name"] if match else ""
        if match and name in ALLOWED:
            variables[name] = match["single"] or match["double"] or (match["bare"] or "").strip()
            continue
        reason = "is not NAME=value. Put a value with quotes, '$' or backslashes in single quotes."
        if match:
            reason = (
                "is not among the tokens and settings that a project's .env may set (docs/reference/security.md): "
                "others can run programs or redirect connections. Remove the line; "
                f"{_ELSEWHERE.get(name, 'export it in your shell, or in its startup file, if you need it')}."
            )
        problems.append(Problem(f"{path}:{number}", name, reason))
    if problems:
        raise ConfigError(problems)
    return variables
