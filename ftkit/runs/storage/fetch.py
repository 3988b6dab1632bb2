"""Download the copy of a run to continue it here."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.files import atomic_folder, write_file
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import plan_to_json, read_plan
from ftkit.runs.checkpoints import MARKER, DamagedCheckpointError, find_damage, read_marker
from ftkit.runs.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.planning.plan import RunPlan

_SMALL_FILES = ("manifest.json", "metrics.jsonl")


def fetch_run(address: str, workspace: Workspace, report: Callable[[str], None]) -> RunPlan:
    """Download a run with its newest complete checkpoint into a workspace; return its plan there.

    An existing checkpoint is not downloaded again.

    Raises:
        NotFoundError: there is no run.
        PrerequisiteError: it can't be read, or the copy is damaged.
        PlanError: its plan can't be read.
    """
    store = Store(address)
    names = store.sizes()
    if "plan.json" not in names:
        raise missing_copy(address)
    layout = RunLayout(workspace.runs / store.address.rpartition("/")[2])
    markers = (re.fullmatch(rf"checkpoints/step-(\d{{1,18}})/{MARKER}", name) for name in names)
    steps = [int(match[1]) for match in markers if match]
    layout.logs.mkdir(parents=True, exist_ok=True)
    newest = max(steps, default=0)
    local = max((step for step, _ in layout.list_checkpoints()), default=0)
    if local <= newest:
        for name in ("plan.json", *(name for name in _SMALL_FILES if name in names)):
            store.get(name, layout.root / name)
    if local < newest:
        report(f"copying the checkpoint of step {newest}")
        _fetch_checkpoint(store, newest, layout.checkpoint(newest), names)
    plan = read_plan(layout)
    plan = replace(plan, workspace=workspace.root, python=_python_here(plan))
    write_file(layout.plan, plan_to_json(plan).encode())
    return plan


def missing_copy(address: str) -> NotFoundError:
    """Return the error for an address without a copy of a run."""
    return NotFoundError(
        f"there is no copy of a run at {address}",
        meaning="a copy has a plan.json; it is written by 'ftkit runs sync', under the run's id",
        fix="give the address with the run's id: s3://bucket/runs/RUN",
    )


def _python_here(plan: RunPlan) -> str:
    return sys.executable if plan.cluster.runtime == "none" else plan.python


def _fetch_checkpoint(store: Store, step: int, folder: Path, names: dict[str, int]) -> None:
    prefix = f"checkpoints/{folder.name}/"
    with atomic_folder(folder) as temporary:
        for name in names:
            if name.startswith(prefix):
                store.get(name, temporary / name.removeprefix(prefix))
        try:
            marker = read_marker(temporary, step)
            damaged = find_damage(temporary, marker, marker.files)
        except DamagedCheckpointError as error:
            damaged = [str(error)]
        if damaged:
            raise PrerequisiteError(
                f"the copy of the checkpoint of step {step} at {store.address} is damaged: {', '.join(damaged[:3])}",
                meaning="files there were changed or removed",
                fix="repeat the command; or copy an older checkpoint manually",
            )
