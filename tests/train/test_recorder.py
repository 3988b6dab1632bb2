"""Records that can't be written immediately."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.planning.layout import RunLayout
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import EndRecord, StageRecord
from ftkit.train.components.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable


def test_records_are_buffered_while_the_disk_is_full_and_then_written_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    world: Any = SimpleNamespace(is_first=True)
    sent: list[Any] = []
    recorder = Recorder(RunLayout(tmp_path), world, sent.append)
    records = [StageRecord(float(number), f"stage {number}") for number in range(4)]
    recorder.write(records[0])

    open_file: Callable[..., Any] = Path.open

    def open_full(self: Path, *_: Any, **__: Any) -> Any:
        with open_file(self, "a", encoding="utf-8") as file:
            file.write('{"event": "st')  # the part that still fits on the disk
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_full)
        recorder.write(records[1])
        recorder.write(records[2])
        with pytest.raises(OSError, match="No space left"):
            recorder.write(EndRecord(9.0, "stopped", 1, 1.0, None))
    recorder.write(records[3])
    assert [record.time for record in read_records(path)] == [0.0, 1.0, 2.0, 9.0, 3.0]
    assert [record.time for record in sent] == [0.0, 1.0, 2.0, 3.0]
    assert caplog.text.count("kept in memory") == 1
