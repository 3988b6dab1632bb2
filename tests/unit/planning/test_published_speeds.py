"""Throughput published by others for configurations that a plan can express is predicted within 18 %."""

from __future__ import annotations

import pytest
from published import PUBLISHED, Published, predicted_speed


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.label} on {run.num_gpus} {run.gpu.device_name}")
def test_published_throughput_is_predicted_within_18_percent(run: Published) -> None:
    assert predicted_speed(run) == pytest.approx(run.speed, rel=0.18)
