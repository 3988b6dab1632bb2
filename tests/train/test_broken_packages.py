"""Packages that transformers and peft import wherever they are installed, in versions that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.oldest

BROKEN = {
    "bitsandbytes": "RuntimeError('CUDA Setup failed despite GPU being available')",
    "soundfile": "OSError('sndfile library not found')",
    "torchaudio": "OSError('undefined symbol')",
    "torchvision": "RuntimeError('operator torchvision::nms does not exist')",
    "sklearn": "ValueError('numpy.dtype size changed, may indicate binary incompatibility')",
    "scipy": "ImportError('numpy.core.multiarray failed to import')",
    "transformer_engine": "OSError('libcuda.so.1: cannot open shared object file')",
    "torchao": None,  # can be imported, and is too old for peft
    "gptqmodel": None,
}

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
ADAPT = """
import json, sys
from ftkit.data.imports import import_transformers
import_transformers()
from transformers import AutoConfig, AutoModelForCausalLM
from ftkit.train.private_apis.libraries import import_peft
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(sys.argv[1])))
peft = import_peft()
print(type(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))).__name__)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a process with these packages."""
    for name, error in BROKEN.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(f"raise {error}\n" if error else "")
        distribution = {"sklearn": "scikit_learn"}.get(name, name)
        (tmp_path / "packages" / f"{distribution}-0.1.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n"
        (tmp_path / "packages" / f"{distribution}-0.1.dist-info" / "METADATA").write_text(metadata)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize(
    ("arguments", "expected"), [(("-m", "ftkit.train", "--count"), '"source": "model"'), (("-c", ADAPT), "PeftModel")]
)
def test_parameters_are_counted_and_models_adapted_beside_broken_packages(
    arguments: tuple[str, ...], expected: str, environment: dict[str, str]
) -> None:
    given = CONFIG if "-c" in arguments else {"config": CONFIG}
    command = [sys.executable, *arguments, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert expected in done.stdout, done.stderr


def test_python_without_docstrings_is_refused() -> None:
    command = [sys.executable, "-OO", "-c", "from ftkit.data.imports import *; import_transformers()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PrerequisiteError: " in done.stderr
    assert "PYTHONOPTIMIZE=2" in done.stderr
