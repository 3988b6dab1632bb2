"""The project's `.env`: variables such as HF_TOKEN and WANDB_API_KEY, for every command and the jobs that it starts.

The syntax is the common subset of python-dotenv and shells: `NAME=value`, `export NAME=value`, comments, and both
kinds of quotes. Lines that these read differently are refused. Messages contain lines and variables, never values.
This module imports no pydantic, because `ftkit --help` also reads the file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ftkit.errors import ConfigError, Problem, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from pathlib import Path

FILE: Final = ".env"
_LINE: Final = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)")
_QUOTED: Final = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")\s*(?:\#.*)?""")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}
_ALLOWED: Final = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_HUB_OFFLINE HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_XET HF_HUB_DOWNLOAD_TIMEOUT
HF_HUB_ETAG_TIMEOUT HF_DATASETS_OFFLINE
WANDB_API_KEY WANDB_ENTITY WANDB_JOB_TYPE WANDB_MODE WANDB_NAME WANDB_NOTES WANDB_PROJECT WANDB_RUN_GROUP WANDB_TAGS
MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN MLFLOW_EXPERIMENT_NAME
AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
FTKIT_DEBUG FTKIT_REPORT NO_COLOR
"""
ALLOWED: Final = frozenset(_ALLOWED.split())
"""Credentials and settings that start no program, read no other file, and lead to no other server.

Others can: the file may come with a project that the user has only cloned.
"""
_ELSEWHERE: Final = {
    "FTKIT_CLUSTER": "set 'cluster' in ftkit.yaml",
    "FTKIT_IMAGE": "set 'image' in ftkit.yaml",
    "FTKIT_REGISTRY": "set 'registry' in ftkit.yaml",
    "FTKIT_WORKSPACE": "set 'workspace' in ftkit.yaml",
    "MLFLOW_TRACKING_URI": "set 'tracking.mlflow_uri' in the recipe",
}
_MAX_BYTES: Final = 2**16


def load_dotenv(project: Path, environment: MutableMapping[str, str]) -> None:
    """Add the variables of a project's `.env` to an environment; existing ones take precedence.

    Raises:
        ConfigError: with every line that can't be used.
    """
    for name, value in read_dotenv(project).items():
        environment.setdefault(name, value)


def read_dotenv(project: Path) -> dict[str, str]:
    """Return the variables of a project's `.env`; none if there is no such file. Raises as `load_dotenv`."""
    path = project / FILE
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"can't be read: {one_line(error)}.")]) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError([Problem(str(path), "", f"is larger than {_MAX_BYTES:,} bytes.")])
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for number, name, value, problem in _parse(text):
        if problem:
            problems.append(Problem(f"{path}:{number}", name, problem))
        else:
            variables[name] = value
    if problems:
        raise ConfigError(problems)
    return variables


def _parse(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line number, name, value, and the problem of the line: empty if there is none."""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            yield number, "", "", "is not NAME=value."
        elif match["name"] not in ALLOWED:
            yield number, match["name"], "", _refusal(match["name"])
        else:
            value, problem = _value(match["value"])
            yield number, match["name"], value, problem


def _refusal(name: str) -> str:
    fix = _ELSEWHERE.get(name, "export it in your shell, or in its startup file, if you need it")
    return (
        "is not among the tokens and settings that a project's .env may set (docs/reference/security.md): others can "
        f"run programs or redirect connections. Remove the line; {fix}."
    )


def _value(text: str) -> tuple[str, str]:
    """Return a value, and its problem."""
    quoted = _QUOTED.fullmatch(text)
    if quoted and quoted["single"] is not None:
        return quoted["single"], ""
    if text[:1] in ("'", '"') and not quoted:
        return "", "the quote does not end on its line, or is followed by other text."
    value = quoted["double"] if quoted else re.split(r"\s+#", f" {text}", maxsplit=1)[0].strip()
    if "\0" in value:
        return "", "a variable can't contain a NUL byte."
    if "$" in value.replace("\\$", ""):
        return "", "'$' is not expanded: put the value in single quotes."
    if quoted:
        value = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), value)
    return value, ""
