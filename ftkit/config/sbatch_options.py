"""Validate the user's options for sbatch and srun in profiles and recipes; refuse options that ftkit sets itself."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

from pydantic import AfterValidator

from ftkit.spec import OneLine

_SET_BY_FTKIT: Final = {
    name: instead
    for instead, names in {
        "'account' in the profile": "account",
        "ftkit run with several values, a sweep": "array",
        "the workspace in the settings": "chdir",
        "a profile for each cluster, whose login node submits to it": "clusters",
        "'runtime' in the profile, and --image": "container",
        "'cpus_per_node' in the profile": "cpus-per-gpu cpus-per-task",
        "'scontrol update' after submitting": "dependency kill-on-invalid-dep",
        "the logs in the run's folder": "error input open-mode output",
        "'exclusive' in the profile": "exclusive",
        "'environment' in the profile": "export export-file",
        "resources.gpus_per_node": (
            "gpus gpus-per-node gpus-per-socket gpus-per-task "
            "ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket"
        ),
        "--name": "job-name",
        "resources.spare_nodes": "no-kill",
        "resources.max_restarts": "no-requeue requeue",
        "resources.num_nodes": "nodes",
        "ftkit run --no-follow, which prints the run's id": "parsable",
        "'partition' in the profile": "partition",
        "'qos' in the profile": "qos",
        "'stop_signal_seconds' in the profile": "signal",
        "ftkit run --dry-run": "test-only",
        "resources.time_limit": "time",
        "ftkit run, which follows the run": "wait",
        "ftkit run --script": "wrap",
    }.items()
    for name in names.split()
}
"""Options that job scripts set or depend on, with the key or option to use instead."""
_SHORT: Final = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "S": "core-spec", "W": "wait", "a": "array",
    "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input", "m": "distribution",
    "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""sbatch's short options: those with a value, and flags."""
_SHORT_FLAGS: Final = {"H": "hold", "O": "overcommit", "k": "no-kill", "s": "oversubscribe"}
_MEMORY: Final = ("mem", "mem-per-cpu", "mem-per-gpu")


def _spell(text: str) -> str:
    """Return an option as `name` or `name=value`; ValueError if it is invalid, or if ftkit sets it itself."""
    match = re.fullmatch(r"\s*(?:-([A-Za-z])(?:[ =]*(.*))|(?:--)?([A-Za-z][A-Za-z0-9-]+)(?:(?: *=| ) *(.*))?)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no option of sbatch: write 'name=value', as in 'constraint=h200'")
    letter, short_value, name, value = match.groups()
    if letter:
        name, value = (_SHORT | _SHORT_FLAGS).get(letter, ""), short_value or None
        if not name or (value is None) != (letter in _SHORT_FLAGS):
            raise ValueError(f"{text!r} is not understood: write sbatch's long name of it, as in 'constraint=h200'")
    own = [each for each in _SET_BY_FTKIT if each == name] or [
        each for each in sorted(_SET_BY_FTKIT) if each.startswith(name) and name not in _MEMORY
    ]  # getopt also accepts prefixes of names
    own += ["container"] if name.startswith("container-") else []
    if own:
        raise ValueError(f"ftkit sets --{own[0]} itself: use {_SET_BY_FTKIT[own[0]]}, not {text.strip()!r}")
    return name if value is None else f"{name}={value.strip()}"


SbatchOption = Annotated[OneLine, AfterValidator(_spell)]
"""An option of sbatch as `name=value` or `name`. The command line's long and short forms with dashes are accepted."""


_SET_FOR_STEPS: Final = {
    **{name: _SET_BY_FTKIT[name] for name in ("chdir", "cpus-per-task", "error", "export", "input", "nodes", "output")},
    **{name: _SET_BY_FTKIT[name] for name in ("ntasks", "ntasks-per-node")},
    "container-env": "'environment' in the profile",
    "container-image": "--image",
    "container-mounts": "'mounts' in the profile",
    "container-workdir": "'mounts' in the profile",
    "mpi": "'mpi' in the profile",
    "nodelist": "'sbatch_options' in the profile",
}


def _check_step_option(text: str) -> str:
    """Return an argument of srun; ValueError if it would override an option that job scripts set."""
    dashes, name = re.match("(-*)([^=]*)", text).groups()  # type: ignore[union-attr] # it matches any text
    name = _SHORT.get(name[:1], "") if dashes == "-" else name
    own = [each for each in sorted(_SET_FOR_STEPS) if dashes and name and each.startswith(name)]
    if own:
        raise ValueError(f"ftkit sets --{own[0]} itself: use {_SET_FOR_STEPS[own[0]]}, not {text!r}")
    return text


SrunOption = Annotated[str, AfterValidator(_check_step_option)]


def find_conflicts(options: Iterable[str], *, is_exclusive: bool, has_gres: bool) -> Iterator[str]:
    """Yield options that conflict with the job script of a profile: memory of whole nodes, or GPUs as GRES."""
    for option in options:
        name, _, value = option.partition("=")
        if is_exclusive and name in _MEMORY:
            yield f"'{option}': a job gets all memory of its nodes, because the profile has 'exclusive: true'"
        elif name == "gres" and (has_gres or "gpu" in value):
            yield f"'{option}': ftkit requests GPUs itself ('gpu_request' in the profile)"
