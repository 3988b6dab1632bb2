"""Parts of job scripts that a project's `sbatch/` folder overrides."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from jinja2.bccache import bc_magic

from ftkit import assets
from ftkit.errors import ConfigError
from ftkit.launch import templates
from ftkit.launch.render import render_job
from ftkit.launch.templates import find_misnamed, find_overrides

if TYPE_CHECKING:
    from pathlib import Path

    from render.conftest import PlanMaker


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The folder of parts of a project, which is not the current folder."""
    folder = tmp_path / "project" / "sbatch" / "parts"
    folder.mkdir(parents=True)
    return folder


def _shipped(name: str) -> str:
    return (assets.JOB_TEMPLATES / "parts" / name).read_text(encoding="utf-8")


def test_a_projects_part_replaces_the_shipped_one_of_that_name(parts: Path, make_plan: PlanMaker) -> None:
    (parts / "directives.j2").write_text(_shipped("directives.j2") + "#SBATCH --comment=ours\n")
    assert "\n#SBATCH --comment=ours\n" in render_job(make_plan("slurm"), parts.parents[1])
    digest = hashlib.sha256((parts / "directives.j2").read_bytes()).hexdigest()
    assert find_overrides(parts.parents[1]) == {"parts/directives.j2": digest}
    assert "--comment=ours" not in render_job(make_plan("slurm"))
    (parts / "directives.j2").unlink()
    assert "--comment=ours" not in render_job(make_plan("slurm"), parts.parents[1])


@pytest.mark.parametrize("lost", ["layout.job_log", "placement.num_nodes", "placement.processes_per_node"])
def test_a_part_that_lost_a_placeholder_is_refused(lost: str, parts: Path, make_plan: PlanMaker) -> None:
    (parts / "directives.j2").write_text(_shipped("directives.j2").replace(lost, "plan.name"))
    with pytest.raises(ConfigError) as caught:
        render_job(make_plan("slurm"), parts.parents[1])
    assert lost in str(caught.value)


def test_a_part_may_omit_what_is_only_filled_in_if_it_is_set(parts: Path, make_plan: PlanMaker) -> None:
    text = _shipped("directives.j2").replace("{% if profile.reservation %}", "{% if false %}")
    (parts / "directives.j2").write_text(text.replace("profile.reservation", "plan.name"))
    assert "--reservation" not in render_job(make_plan("slurm", reservation="mine"), parts.parents[1])


def test_a_script_that_lost_a_part_is_refused(parts: Path, make_plan: PlanMaker) -> None:
    text = (assets.JOB_TEMPLATES / "slurm.sbatch.j2").read_text(encoding="utf-8")
    lost = '{% include "parts/restart.sh.j2" %}'
    (parts.parent / "slurm.sbatch.j2").write_text(text.replace(lost, ""))
    with pytest.raises(ConfigError, match=r"parts/restart\.sh\.j2"):
        render_job(make_plan("slurm"), parts.parents[1])


@pytest.mark.parametrize("line", ["{{ plan.name }}", "{{ nothing | sh }}", "{% if %}", "{{ plan.__class__ | sh }}",
                                  "{{ plan.name | unknown }}", "{{ plan.name() | sh }}"])  # fmt: skip
def test_a_mistake_in_a_projects_part_is_its_users_error(line: str, parts: Path, make_plan: PlanMaker) -> None:
    (parts / "cache.sh.j2").write_text(_shipped("cache.sh.j2") + line + "\n")
    with pytest.raises(ConfigError, match=r"sbatch/parts/cache\.sh\.j2, line \d+"):
        render_job(make_plan("slurm"), parts.parents[1])


def test_a_type_error_of_ftkit_is_not_blamed_on_a_projects_part(
    parts: Path, make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parts / "cache.sh.j2").write_text(_shipped("cache.sh.j2"))

    def fail(_: object) -> str:
        raise TypeError

    monkeypatch.setitem(templates._environment(parts.parents[1]).filters, "sh", fail)
    with pytest.raises(TypeError):
        render_job(make_plan("slurm"), parts.parents[1])


def test_a_part_that_is_no_file_is_refused(parts: Path, make_plan: PlanMaker) -> None:
    (parts / "cache.sh.j2").mkdir()
    with pytest.raises(ConfigError, match=r"cache\.sh\.j2"):
        render_job(make_plan("slurm"), parts.parents[1])


def test_the_shipped_folder_overrides_nothing() -> None:
    assert find_overrides(assets.JOB_TEMPLATES.parent) == {}
    assert find_misnamed(assets.JOB_TEMPLATES.parent) == []


def test_templates_with_the_name_of_no_shipped_one_are_found(parts: Path) -> None:
    for name in ("parts/directives.j2", "parts/directive.j2", "cache.sh.j2", "ours.sh"):
        (parts.parent / name).touch()
    assert find_misnamed(parts.parents[1]) == ["cache.sh.j2", "parts/directive.j2"]


def test_unchanged_copies_render_the_same_script(parts: Path, make_plan: PlanMaker) -> None:
    expected = render_job(make_plan("slurm"), parts.parents[1])
    shutil.copytree(assets.JOB_TEMPLATES, parts.parent, dirs_exist_ok=True)
    assert render_job(make_plan("slurm"), parts.parents[1]) == expected


def test_damaged_compiled_templates_are_compiled_again(make_plan: PlanMaker) -> None:
    templates._environment.cache_clear()
    script = render_job(make_plan("slurm"))
    compiled = [path for path in templates.cache_folder(os.environ).glob("templates-*/*") if path.is_file()]
    assert compiled
    for path in compiled:
        path.write_bytes(path.read_bytes()[:-40] if path == compiled[0] else bc_magic + b"\x80")
    templates._environment.cache_clear()
    assert render_job(make_plan("slurm")) == script
