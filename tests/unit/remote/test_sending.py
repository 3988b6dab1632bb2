"""Files of a project that a login node gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit import assets
from ftkit.config.context import Context
from ftkit.remote.sending import project_files
from ftkit.wheel import shipped_files

if TYPE_CHECKING:
    from pathlib import Path


def test_parts_of_job_scripts_are_sent_with_the_project(tmp_path: Path) -> None:
    part = tmp_path / "sbatch" / "parts" / "directives.j2"
    part.parent.mkdir(parents=True)
    part.write_text("#SBATCH --comment=ours\n")
    (tmp_path / "sbatch" / "other.sh").touch()
    assert project_files(Context(tmp_path, tmp_path / "user", {})) == {
        "sbatch/parts/directives.j2": b"#SBATCH --comment=ours\n"
    }


def test_everything_shipped_is_in_the_wheel_for_a_login_node() -> None:
    shipped = [path for name, path in vars(assets).items() if name.isupper() and not name.startswith("_")]
    files = shipped_files().values()
    assert all(any(file.is_relative_to(path) for file in files) for path in shipped)
    assert len(shipped) > 5
