"""`python -m ftkit.evaluate PLAN SETTINGS`: a job beside training that evaluates a run's checkpoints.

SETTINGS are `MeasureSettings` as JSON. The job ends when the run ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from ftkit.data.imports import import_transformers
from ftkit.errors import FtkitError, redact
from ftkit.planning.layout import RunLayout


def main(plan_path: Path, settings: str) -> int:
    """Evaluate until the job script has detected the end of training; report errors."""
    is_over = Path(os.environ["FTKIT_STOP_FILE"]).exists

    def report(text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"evaluate: {redact(text, os.environ)}\n")

    try:
        import_transformers()  # before modules that import more of it
        from ftkit.evaluate.checkpoint_scores import evaluate_checkpoints  # noqa: PLC0415

        evaluate_checkpoints(RunLayout(plan_path.parent), settings, is_over, report)
    except Exception as error:  # noqa: BLE001 - any error ends the job and is reported
        text = str(error) if isinstance(error, FtkitError) else traceback.format_exc()
        sys.stderr.write(f"evaluate: error: {redact(text, os.environ)}\n")
        return error.exit_code if isinstance(error, FtkitError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
