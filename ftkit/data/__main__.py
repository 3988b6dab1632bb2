"""`python -m ftkit.data PLAN`: the first stage of a job, which prepares the data of a plan."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from ftkit.data.prepare import prepare
from ftkit.data.staging import export_weights, fetch_weights
from ftkit.errors import FtkitError, as_user_error, redact
from ftkit.hub.readiness import check_data, check_weights
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs.failure import record_rank_error
from ftkit.runs.metrics_file import append_record
from ftkit.runs.records import StageRecord


def main(plan_path: Path) -> int:
    """Prepare the data; record an error as a rank of the trainer does. Missing weights end the job here."""
    layout = RunLayout(plan_path.parent)

    def report(text: str) -> None:
        text = redact(text, os.environ)
        sys.stderr.write(f"prepare: {text}\n")
        append_record(layout.metrics, StageRecord(time.time(), text))

    layout.disk_full.unlink(missing_ok=True)  # left by an earlier start
    try:
        plan = read_plan(layout)
        home = Workspace(plan.workspace).hub_home
        export_weights(plan, report)
        warnings = [check_weights(plan.recipe.model, os.environ, home)]
        if not plan.data.is_prepared:
            warnings += [check_data(source, os.environ, home) for source in plan.recipe.data.sources]
        for warning in filter(None, warnings):
            report(f"warning: {warning}")
        prepare(plan, report)
        fetch_weights(plan, os.environ, report)
    except Exception as error:  # noqa: BLE001 - any error is the reason why the run ends
        reason = as_user_error(error)
        text = str(reason) if isinstance(reason, FtkitError) else traceback.format_exc()
        sys.stderr.write(f"prepare: error: {redact(text, os.environ)}\n")
        return record_rank_error(reason, layout.rank_error(0), layout.disk_full, rank=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
