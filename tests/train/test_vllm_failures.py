"""Failures of vLLM's engine, by a stand-in for the package that fails as vLLM does: in a process of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ftkit.cli.main import cli
from ftkit.evaluate.vllm import VllmError, start_engine

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Run

PACKAGE = '''
import subprocess, sys

class EngineDeadError(Exception):
    """As in vllm.v1.engine.exceptions."""

class SamplingParams:
    def __init__(self, **settings): pass

class LLM:
    def __init__(self, **options):
        if "REFUSED":
            raise ValueError("REFUSED")
        prefix = "(EngineCore_DP0 pid=7) ERROR 11-22 12:00:01 [core.py:842]"
        lines = [f"{prefix}   frame {number}" for number in range(30)]
        lines += [f"{prefix} torch.OutOfMemoryError: CUDA out of memory.", "(EngineCore_DP0 pid=7)"]
        lines += ["FatalError: the engine's process ends"]
        program = f"import sys; sys.stdin.read(1); sys.stderr.write({chr(10).join(lines)!r}); sys.exit(1)"
        self.core = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)

    def generate(self, prompts, params, use_tqdm, lora_request):
        self.core.communicate(b".")
        raise EngineDeadError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the stand-in; returns a function that sets why it can't load a model."""

    def install(refusal: str = "") -> None:
        for name, content in {
            "__init__": PACKAGE.replace("REFUSED", refusal),
            "lora/__init__": "",
            "lora/request": "LoRARequest = tuple",
        }.items():
            path = tmp_path / "packages" / "vllm" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_an_engine_that_dies_while_generating_is_reported_with_its_last_lines(
    finished_run: Run, stand_in: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in()
    done = CliRunner().invoke(
        cli, ["generate", str(finished_run.layout.export), "--input", "Hello", "--engine", "vllm"]
    )
    assert (done.exit_code, done.stdout) == (9, "")
    *_, fix, _, first, second, third, fourth, fifth, sixth, cause, last = map(str.strip, done.stderr.splitlines())
    assert "--engine transformers" in fix
    assert [first, second, third, fourth, fifth, sixth] == [f"frame {number}" for number in range(24, 30)]
    assert cause.startswith("torch.OutOfMemoryError")
    assert last.startswith("FatalError")
    assert "frame" not in capfd.readouterr().err  # nowhere else


def test_a_model_that_the_engine_does_not_load_is_reported(finished_run: Run, stand_in: Any) -> None:
    stand_in("Model architectures ['NoneForCausalLM'] are not supported for now.")
    folder = finished_run.layout.export
    with pytest.raises(VllmError, match="NoneForCausalLM"):
        start_engine(folder, folder)
