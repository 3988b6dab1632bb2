"""`python -m ftkit.evaluate PLAN SETTINGS`: the job that evaluates a run's checkpoints; SETTINGS are JSON."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from ftkit.data.imports import import_transformers
from ftkit.errors import FtkitError, redact
from ftkit.files import parse_json
from ftkit.planning.layout import RunLayout


def main(plan_path: Path, settings: str) -> int:
    """Evaluate until the run is over; report errors."""
    rank = int(os.environ.get("RANK", "0"))

    def report(text: str) -> None:
        if rank == 0:
            sys.stderr.write(f"evaluate: {redact(text, os.environ)}\n")

    try:
        import_transformers()  # before modules that import more of it
        from ftkit.evaluate.job import CheckpointEvaluations, is_training_over  # noqa: PLC0415
        from ftkit.evaluate.measure import MeasureSettings  # noqa: PLC0415
        from ftkit.evaluate.ranks import joined_ranks  # noqa: PLC0415

        with joined_ranks() as ranks:
            parsed = parse_json(settings, MeasureSettings)
            CheckpointEvaluations(RunLayout(plan_path.parent), parsed, ranks, report).follow(is_training_over)
    except Exception as error:  # noqa: BLE001 - any error is the reason why the job ends
        text = str(error) if isinstance(error, FtkitError) else traceback.format_exc()
        sys.stderr.write(f"evaluate: error: {redact(text, os.environ)}\n")
        return error.exit_code if isinstance(error, FtkitError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
