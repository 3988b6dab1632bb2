"""Names of GPUs in profiles: those that people use, and those of GPUs that the planner has no figures for."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from ftkit.config.cluster import ClusterProfile, profile_of_gpu
from ftkit.config.layers import Layers
from ftkit.config.problems import validate
from ftkit.errors import ConfigError
from ftkit.planning.training_setup import GPUS

FIELD = ClusterProfile.model_fields["gpu"]
GPU = TypeAdapter[str](FIELD.rebuild_annotation())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "h100-80gb"), ("H100", "h100-80gb"), ("h100-sxm", "h100-80gb"), ("NVIDIA H100 SXM", "h100-80gb"),
        ("H100_SXM5", "h100-80gb"), ("a100-80gb", "a100-80gb"), ("A100-SXM4-40GB", "a100-40gb"), ("h200", "h200"),
        ("B200", "b200"), ("nvidia-l4", "l4"),
    ],
)  # fmt: skip
def test_the_names_that_people_use_are_accepted(written: str, meant: str) -> None:
    assert GPU.validate_python(written) == meant


@pytest.mark.parametrize("written", ["h100-pcie", "h100-nvl", "gb200", "l40s", "v100", "rtx-4090", "a10g", "", 100])
def test_a_gpu_without_figures_is_not_taken_for_another(written: object) -> None:
    with pytest.raises(ValidationError):
        GPU.validate_python(written)


@pytest.mark.parametrize("written", ["h800x", "gb200", "h100-pcie", "200", 200, "b20", "rtx-4090", ""])
def test_a_refused_gpu_lists_the_known_ones_and_suggests_no_other(written: object) -> None:
    layers = Layers({"name": "ours", "gpu": written}, {("gpu",): "ours.yaml"})
    with pytest.raises(ConfigError) as caught:
        validate(ClusterProfile, layers)
    (text,) = [str(problem) for problem in caught.value.problems if problem.key == "gpu"]
    assert ", ".join(GPUS) in text
    assert "Did you mean" not in text


def test_a_gpu_as_device_is_not_taken_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cuda'"):
        validate(ClusterProfile, Layers({"name": "ours", "device": "gpu"}, {("device",): "ours.yaml"}))


def test_an_a100_without_its_memory_is_asked_for() -> None:
    with pytest.raises(ValidationError, match="a100-40gb or a100-80gb"):
        GPU.validate_python("a100")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("a100", "a100-40gb or a100-80gb"), ("hh100", "h100-80gb"), ("h20o", "h200"), ("rtx-4090", None)],
)
def test_a_preview_on_an_unclear_gpu_asks_for_the_closest(typed: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_of_gpu(typed, None)
    (problem,) = caught.value.problems
    assert problem.fix == (f"Did you mean {meant}?" if meant else "Give one of these.")
