"""`training.compile=layers` on CPUs, where torch calls a C++ compiler with paths that it does not quote."""

from __future__ import annotations

import pytest
import torch

from ftkit.config.training import TrainingPlan
from ftkit.errors import PrerequisiteError
from ftkit.train.memory.compile import compiles

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def training(compiled: str) -> TrainingPlan:
    return TrainingPlan.model_validate(
        {"sequence_length": 8, "global_batch_size": 1, "max_steps": 1, "learning_rate": 1e-3, "compile": compiled}
    )


@pytest.mark.parametrize("folder", ["/home/me/my environment", "/home/me/it's", "/home/me/$(HOME)\\x"])
def test_a_path_that_the_compiler_would_not_find_is_refused_before_step_1(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", f"{folder}/lib/torch/__init__.py")
    with pytest.raises(PrerequisiteError, match="a path has spaces or special characters") as caught:
        compiles(training("layers"), CPU)
    assert f"{folder}/lib/torch" in caught.value.what
    assert "move the virtual environment" in caught.value.fix
    assert not compiles(training("auto"), CPU)
    assert compiles(training("auto"), GPU)
    assert compiles(training("layers"), GPU)


def test_the_folder_of_the_compilers_cache_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/local disk/cache")
    with pytest.raises(PrerequisiteError, match="/local disk/cache") as caught:
        compiles(training("layers"), CPU)
    assert "set TORCHINDUCTOR_CACHE_DIR" in caught.value.fix
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/local-disk/cache")
    assert compiles(training("layers"), CPU)
