"""What one call of `ftkit run` says, next to recipe and profile, and what was seen around it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ftkit.specs.image_reference import AnyImage


@dataclass(frozen=True)
class RunRequest:
    """The facts of one run that neither the recipe nor the profile holds.

    Args:
        name: name of the run; none: the recipe's.
        num_nodes: `--nodes`; none: the recipe's.
        gpus_per_node: `--gpus-per-node`; none: the recipe's, else the cluster's.
        image: the image to run in; none: nothing names one.
        image_is_explicit: whether `--image` named it, rather than a configuration file.
        workspace: absolute path of the workspace.
        python: the interpreter that ftkit runs in, for runtime `none`.
        created: when the run was asked for, in UTC.
        suffix: makes the run's id unique.
        data_stamp: changes when the files that a recipe names change.
        num_packs: packs of the training part, when the data is prepared already.
    """

    name: str | None
    num_nodes: int | None
    gpus_per_node: int | None
    image: AnyImage | None
    image_is_explicit: bool
    workspace: Path
    python: str
    created: datetime
    suffix: str
    data_stamp: str = ""
    num_packs: int | None = None
