from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.train.memory.usage import available_bytes, reset_peak, resident_bytes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    (folder / "self" / "cgroup").write_text("4:memory:/old\n0::/job/step\n")
    (folder / "self" / "status").write_text("Name:\tpython\nVmHWM:\t  200 kB\nVmRSS:\t  100 kB\n")
    return folder


def limit(folder: Path, most: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 0\n")


def test_without_limits_the_machines_available_memory_is_used(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "groups") == 3000 * 1024
    limit(tmp_path / "groups" / "job" / "step", "max", 10)
    assert available_bytes(proc, tmp_path / "groups") == 3000 * 1024


def test_the_tightest_cgroup_applies_and_its_page_cache_counts_as_free(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "groups" / "job", "1000", used=900, cached=300)
    limit(tmp_path / "groups" / "job" / "step", "2000", used=900)
    assert available_bytes(proc, tmp_path / "groups") == 400


def test_limits_of_cgroups_version_1_apply(proc: Path, tmp_path: Path) -> None:
    folder = tmp_path / "groups" / "memory" / "old"
    folder.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 1000), ("usage_in_bytes", 900)):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 50\n")
    assert available_bytes(proc, tmp_path / "groups") == 250


def test_a_cgroup_over_its_limit_has_nothing_available(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "groups", "1000", used=1200)
    assert available_bytes(proc, tmp_path / "groups") == 0


def test_unknown_system_values_count_as_zero(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) == 0
    assert resident_bytes(tmp_path) == (0, 0)
    reset_peak(tmp_path)


def test_process_memory_is_read_from_its_status(proc: Path) -> None:
    assert resident_bytes(proc) == (100 * 1024, 200 * 1024)
    reset_peak(proc)
    assert (proc / "self" / "clear_refs").read_text() == "5"
