from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from ftkit.train.__main__ import silence_training

if TYPE_CHECKING:
    import pytest

COMPILER = "torch._higher_order_ops.wrap"
REMINDER = """
Detected that context_fn is passed to torch.utils.checkpoint under torch.compile.
Please make sure the checkpointed region does not contain in-place ops (e.g. torch.relu_).
"""
MISSING = "Flash Attention is not installed. Please install it via `pip install flash-attn`"


def test_only_the_compilers_reminder_of_in_place_operations_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(COMPILER)
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", True)  # torch changes it if it is imported
    caplog.set_level(logging.WARNING, COMPILER)
    with warnings.catch_warnings():
        silence_training()
    logger.warning(REMINDER)
    logger.warning("another warning")
    logging.getLogger("torch").warning(REMINDER)
    assert [record.name for record in caplog.records if record.getMessage() == REMINDER] == ["torch"]
    assert "another warning" in caplog.text


def test_only_flas_warning_of_flash_attention_is_dropped() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_training()
        for category, text, module in (
            (ImportWarning, MISSING, "fla.ops.nsa.naive"),
            (ImportWarning, "something else", "fla.ops.nsa.naive"),
            (UserWarning, MISSING, "fla.ops.nsa.naive"),
            (ImportWarning, MISSING, "another.module"),
        ):
            warnings.warn_explicit(text, category, "file.py", 1, module)
    assert [str(warning.message) for warning in caught] == ["something else", MISSING, MISSING]
