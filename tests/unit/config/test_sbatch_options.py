"""More options for sbatch, in profiles and recipes."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from ftkit.config.cluster import ClusterProfile
from ftkit.config.sbatch_options import SbatchOption

READER: TypeAdapter[str] = TypeAdapter(SbatchOption)
MINIMAL = {
    "name": "ours", "description": "", "scheduler": "slurm", "runtime": "none", "gpus_per_node": 8, "exclusive": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("constraint=a&b", "constraint=a&b"),
        ("--constraint=a&b", "constraint=a&b"),
        ("--constraint a&b", "constraint=a&b"),
        ("-C a&b", "constraint=a&b"),
        ("-Ca&b", "constraint=a&b"),
        ("-x n[1-3,7]", "exclude=n[1-3,7]"),
        ("comment=two words", "comment=two words"),
        ("nice", "nice"),
        ("-H", "hold"),
        ("mem=64G", "mem=64G"),
        ("mem-bind=local", "mem-bind=local"),
        ("time-min=30", "time-min=30"),
        ("segment=4", "segment=4"),
        ("option-of-a-newer-slurm=1", "option-of-a-newer-slurm=1"),
    ],
)
def test_an_option_may_be_spelled_as_on_the_command_line(written: str, meant: str) -> None:
    assert READER.validate_python(written) == meant


@pytest.mark.parametrize(
    "written",
    ["-p gpu", "-pgpu", "-p=gpu", "--partition=gpu", "--partition gpu", "partition=gpu", "partition", "--part=gpu"],
)
def test_an_option_that_ftkit_sets_is_refused_in_all_spellings(written: str) -> None:
    with pytest.raises(ValidationError, match=r"ftkit sets --partition itself: use 'partition' in the profile"):
        READER.validate_python(written)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("-N 2", "nodes"),
        ("gpus=8", "gpus"),
        ("--container-image=x", "container"),
        ("-M other", "clusters"),
        ("-k", "no-kill"),
    ],
)
def test_options_on_which_the_job_script_depends_are_refused(written: str, name: str) -> None:
    with pytest.raises(ValidationError, match=f"ftkit sets --{name} itself"):
        READER.validate_python(written)


@pytest.mark.parametrize("written", ["", "--", "-", "-Hp gpu", "-Z 1", "a=1", "two words\n", "--constraint=\nx"])
def test_what_sbatch_would_misread_is_refused(written: str) -> None:
    with pytest.raises(ValidationError):
        READER.validate_python(written)


def test_memory_can_be_requested_only_if_a_job_does_not_get_whole_nodes() -> None:
    assert ClusterProfile.model_validate(MINIMAL | {"sbatch_options": ["mem=64G"]}).sbatch_options == ("mem=64G",)
    with pytest.raises(ValidationError, match="all memory of its nodes"):
        ClusterProfile.model_validate(MINIMAL | {"exclusive": True, "sbatch_options": ["mem=64G"]})


@pytest.mark.parametrize(
    "written", ["--mpi=pmix", "-N2", "--ntasks", "--container-mount=/a:/b", "--expor=NONE", "-c", "-wn1"]
)
def test_an_option_of_srun_that_ftkit_sets_itself_is_refused_with_what_to_use(written: str) -> None:
    with pytest.raises(ValidationError, match=r"ftkit sets --[a-z-]+ itself: use .*not '-"):
        ClusterProfile.model_validate(MINIMAL | {"srun_options": [written]})


@pytest.mark.parametrize(
    "written", ["--container-name=ftkit", "--auto-resume=1", "--cpu-bind=cores", "-v", "--network", "nodes"]
)
def test_other_options_of_srun_are_passed_on(written: str) -> None:
    assert ClusterProfile.model_validate(MINIMAL | {"srun_options": [written]}).srun_options == (written,)


def test_gres_can_be_requested_only_for_what_are_not_gpus() -> None:
    assert ClusterProfile.model_validate(MINIMAL | {"sbatch_options": ["gres=nvme:1"]})
    with pytest.raises(ValidationError, match="gpu_request"):
        ClusterProfile.model_validate(MINIMAL | {"sbatch_options": ["gres=gpu:1"]})
    with pytest.raises(ValidationError, match="gpu_request"):
        ClusterProfile.model_validate(MINIMAL | {"gpu_request": "gres", "sbatch_options": ["gres=nvme:1"]})
