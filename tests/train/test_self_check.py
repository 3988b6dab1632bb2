from __future__ import annotations

import subprocess
import sys

from waiting import PATIENCE_SECONDS

from ftkit.models.families import MEASURED


def test_the_self_check_trains_a_model_of_each_family() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftkit.train.self_check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"{family} (loss 5." in done.stdout for family in MEASURED)
