from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.cluster import format_time_limit, parse_time_limit, recognize_gpu
from ftkit.config.context import Context, list_names
from ftkit.config.load import load_cluster
from ftkit.health.site import (
    Site,
    parse_accounts,
    parse_gres,
    parse_mounts,
    parse_partitions,
    propose_cluster,
)

if TYPE_CHECKING:
    from ftkit.health.site import ProposedCluster

SHIPPED = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
PROFILES = [load_cluster(name, SHIPPED) for name in list_names("cluster", SHIPPED)]


def site(sinfo: str = "", **found: object) -> Site:
    nothing = {
        "slurm_version": "24.11.1" if sinfo else "",
        "cluster_name": "ours",
        "partitions": parse_partitions(sinfo),
        "accounts": (),
        "has_pyxis": bool(sinfo),
        "enroot": "",
        "apptainer": "",
        "docker": "",
        "shared_folders": (),
        "local_folder": "",
        "num_gpus": 0,
        "unknown": (),
    }
    return Site(**(nothing | found))  # type: ignore[arg-type]


def propose(sinfo: str = "", root: Path = Path("/nowhere"), **found: object) -> ProposedCluster:
    return propose_cluster(site(sinfo, **found), PROFILES, root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:h100:8(S:0-1)", ("h100", 8)),
        ("gpu:8", ("", 8)),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:64", ("nvidia_h100_80gb_hbm3", 8)),
        ("gpu:a100:2,gpu:l4:1", ("", 3)),
        ("tmpdisk:900G", ("", 0)),
        ("(null)", ("", 0)),
    ],
)
def test_gpus_are_read_from_generic_resources(text: str, expected: tuple[str, int]) -> None:
    assert parse_gres(text) == expected


@given(st.integers(min_value=0, max_value=10**8))
def test_a_formatted_time_limit_is_parsed_back(seconds: int) -> None:
    assert parse_time_limit(format_time_limit(seconds)) == seconds


@given(st.text())
def test_arbitrary_text_does_not_break_the_parsers(text: str) -> None:
    parse_partitions(text, text)
    parse_accounts(text, "")
    parse_mounts(text)
    parse_gres(text)
    parse_time_limit(text)


def test_short_forms_of_time_limits_follow_slurm() -> None:
    forms = {"30": 1800, "30:00": 1800, "2:00:00": 7200, "1-0": 86400, "7-12:30": 649800, "infinite": None}
    assert {text: parse_time_limit(text) for text in forms} == forms


def test_shared_file_systems_are_distinguished_from_local_ones() -> None:
    mounts = "a:/b /home/our\\040data nfs4 rw 0 0\n/dev/sda1 / ext4 rw 0 0\nmgs@tcp:/fs /lustre lustre rw 0 0\n"
    assert parse_mounts(mounts) == ("/home/our data", "/lustre")


def test_a_known_cluster_gets_the_shipped_profile_with_its_differences() -> None:
    found = propose("debug*|up|4|2|(null)|infinite|1\na4high|up|2|224|gpu:8|12:00:00|1\nold|down|9|8|gpu:8|1:00|1\n")
    assert (found.name, found.extends) == ("ours", "a4-highgpu-8g")
    assert found.values.keys() == {"description", "max_nodes", "max_time_limit"}
    assert found.values["max_time_limit"] == "12:00:00"


def test_an_unknown_cluster_gets_its_own_profile(tmp_path: Path) -> None:
    sinfo = "gpu|up|3|96|gpu:nvidia_h200:4(S:0)|7-00:00:00|1031000+\ncpu*|up|9|64|(null)|1:00:00|64000\n"
    found = propose(sinfo, local_folder="/scratch/local", accounts=("a", "b"))
    expected = {"partition": "gpu", "max_nodes": 3, "gpus_per_node": 4, "gpu": "h200", "max_time_limit": "7-00:00:00"}
    expected |= {"memory_per_node_gib": 1006.0}
    assert found.extends == "slurm"
    assert expected.items() <= found.values.items()
    assert found.values["node_local_dir"] == "/scratch/local"
    assert "a, b" in found.unknown[0]
    (tmp_path / "opt/sagemaker_cluster").mkdir(parents=True)
    assert propose(sinfo, tmp_path).extends == "aws-p5"


def test_a_partition_is_proposed_that_the_users_accounts_and_qos_may_use() -> None:
    sinfo = "".join(f"{kind}|gpu:h200:8|infinite|1\n" for kind in ("big*|up|9|96", "gpu|up|3|96", "gpu|up|2|64"))
    limits = (
        "PartitionName=big AllowGroups=ALL AllowAccounts=chemistry AllowQos=ALL AllocNodes=ALL\n"
        "PartitionName=gpu AllowGroups=ALL AllowAccounts=physics,biology AllowQos=high Default=NO\n"
    )
    found = propose(has_pyxis=True, partitions=parse_partitions(sinfo, limits), accounts=("physics", "teaching"))
    expected = {"partition": "gpu", "account": "physics", "qos": "high", "max_nodes": 5}
    assert expected.items() <= found.values.items()
    assert found.unknown == ()
    found = propose(has_pyxis=True, partitions=parse_partitions(sinfo, limits), accounts=("teaching",))
    assert found.values["partition"] == "big"
    assert [each.split()[-1] for each in found.unknown] == ["chemistry"]
    limits = "PartitionName=gpu AllowAccounts=physics,biology AllowQos=low,high\n"
    found = propose(has_pyxis=True, partitions=parse_partitions(sinfo.splitlines()[1], limits))
    assert found.values.keys() >= {"partition"}
    assert ["'qos:'" in each and "low, high" in each for each in found.unknown] == [True]


def test_of_several_kinds_of_nodes_the_one_with_the_most_gpus_is_proposed_and_requested() -> None:
    kinds = (
        "gpu*|up|1|32|gpu:t4:1",
        "gpu*|up|16|192|gpu:h100:8",
        "gpu*|up|2|96|gpu:h100:8",
        "gpu*|up|8|192|gpu:a100:8",
    )
    found = propose("".join(f"{kind}|infinite|1\n" for kind in kinds))
    assert (found.values["max_nodes"], found.values["gpu"], found.values["gpu_type"]) == (18, "h100-80gb", "h100")
    assert "gpus_per_node" not in found.values  # the base's 8
    assert any("several kinds" in each for each in found.unknown)


@pytest.mark.parametrize(("kind", "gpu"), [("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", "h100-80gb"), ("gpu:8", None)])
def test_a_soperator_profile_has_the_gpu_that_slurm_names(kind: str, gpu: str | None, tmp_path: Path) -> None:
    (tmp_path / "opt/soperator-outputs").mkdir(parents=True)
    found = propose(f"main*|up|4|128|{kind}|infinite|1600000\n", tmp_path, has_pyxis=True)
    assert (found.extends, found.values.get("gpu")) == ("soperator", gpu)
    assert any("set 'gpu:'" in each for each in found.unknown) == (gpu is None)


def test_only_accounts_of_this_cluster_count() -> None:
    text = "ours|physics\nours|physics\nother|chemistry\nours|\n"
    assert parse_accounts(text, "ours") == ("physics",)
    assert parse_accounts(text, "") == ("physics", "chemistry")


def test_a_machine_without_slurm_is_a_local_cluster() -> None:
    assert propose(docker="27.1").name == "docker"
    assert propose().name == "local"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("h100", "h100-80gb"),
        ("NVIDIA-A100-SXM4-80GB", "a100-80gb"),
        ("a100", None),
        ("l40s", None),
        ("nvidia_h100_80gb_hbm3_1g.10gb", None),
        ("h200_7g.141gb", None),
        ("nvidia_b200", "b200"),
        ("h100_pcie", None),
        ("nvidia_h100_nvl", None),
        ("gb200", None),
        ("", None),
    ],
)
def test_a_gpu_is_recognized_only_by_an_unambiguous_name(name: str, model: str | None) -> None:
    assert recognize_gpu(name) == model
