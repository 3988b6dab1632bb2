"""Make a run's folder: there as a whole or not at all."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from ftkit.errors import PrerequisiteError
from ftkit.files import write_json
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import plan_to_json

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan


def create_run_folder(plan: RunPlan, script: str, manifest: dict[str, Any]) -> None:
    """Write plan, script and manifest under a temporary name, then give the folder its own.

    Raises:
        PrerequisiteError: the workspace can't be written to.
    """
    final = plan.layout.root
    unfinished = RunLayout(final.with_name(f".unfinished-{plan.id}"))
    try:
        unfinished.logs.mkdir(parents=True)
        unfinished.plan.write_text(plan_to_json(plan), encoding="utf-8")
        unfinished.script.write_text(script, encoding="utf-8")
        write_json(unfinished.manifest, manifest)
        unfinished.root.rename(final)
    except OSError as error:
        shutil.rmtree(unfinished.root, ignore_errors=True)
        raise PrerequisiteError(
            f"can't make the run's folder: {error}",
            meaning="the workspace is not writable, is full, or is not mounted on this machine",
            fix="see with 'ftkit config' where the workspace is; set FTKIT_WORKSPACE or 'workspace:' in ftkit.yaml",
        ) from error
