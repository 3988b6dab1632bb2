"""Derive a cluster profile and settings from the detected site."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from ftkit.config.cluster import GpuModel, format_time_limit, recognize_gpu
from ftkit.errors import FtkitError, plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftkit.config.cluster import ClusterProfile
    from ftkit.health.site import Partition, Site

_ANY_SLURM: Final = "slurm"
_LONGEST_NAME: Final = 63


@dataclass(frozen=True)
class ProposedCluster:
    """The proposed profile of a site.

    Attributes:
        name: name of the profile.
        extends: the profile that a new one extends; empty if `name` is a known profile that matches.
        values: the keys of the new profile, except `name` and `extends`.
        reason: why it was chosen.
        unknown: values that could not be detected, which the user must set.
    """

    name: str
    extends: str
    values: dict[str, Any]
    reason: str
    unknown: tuple[str, ...] = field(default=())


def propose_cluster(site: Site, profiles: Iterable[ClusterProfile], root: Path = Path("/")) -> ProposedCluster:
    """Choose the profile of a site, or the values of one that extends it.

    Args:
        site: the detected site.
        profiles: all known profiles; the first one that recognizes the site is chosen.
        root: base of the profiles' paths.
    """
    known = {profile.name: profile for profile in profiles}
    if not site.has_slurm:
        return _without_slurm(site)
    base, reason = _recognize(site, known, root)
    partition = _choose_partition(site, base)
    values, unknown = _differences(site, partition, base)
    if not values:
        return ProposedCluster(base.name, "", {}, reason, unknown)
    name = _as_name(site.cluster_name)
    if name in known:
        name = f"{name[: _LONGEST_NAME - len('-site')]}-site"
    described = f"{site.cluster_name or 'This cluster'}: {_describe(partition)}"
    return ProposedCluster(name, base.name, {"description": described, **values}, reason, unknown)


def _without_slurm(site: Site) -> ProposedCluster:
    gpus = plural(site.num_gpus, "GPU") if site.num_gpus else "no GPU"
    if site.docker:
        return ProposedCluster("docker", "", {}, f"no Slurm, docker {site.docker}, {gpus}")
    return ProposedCluster("local", "", {}, f"no Slurm, no docker, {gpus}: runs use this Python, without a container")


def _recognize(site: Site, known: dict[str, ClusterProfile], root: Path) -> tuple[ClusterProfile, str]:
    names = {partition.name for partition in site.partitions}
    for profile in known.values():
        signs = profile.recognized_by
        partition = next((name for name in signs.partitions if name in names), None)
        path = next((path for path in signs.paths if (root / path.lstrip("/")).exists()), None)
        if partition or path:
            sign = f"partition {partition}" if partition else path
            return profile, f"{sign} is that of profile '{profile.name}'"
    if _ANY_SLURM not in known:
        raise FtkitError(f"the profile '{_ANY_SLURM}' can't be read", fix="'ftkit cluster list' shows why")
    return known[_ANY_SLURM], f"Slurm {site.slurm_version}, which no other shipped profile matches"


def _choose_partition(site: Site, base: ClusterProfile) -> Partition:
    """Choose the partition of the profile, else the one with the most GPUs, preferring the default one."""
    open_to_user = [each for each in site.partitions if _accounts_for(site, each)] or site.partitions
    named = [each for each in open_to_user if each.name in (base.partition, *base.recognized_by.partitions)]
    return max(
        named or open_to_user,
        key=lambda each: (
            each.gpus_per_node > 0,
            each.is_default,
            _num_gpus(site, each),
            each.num_nodes * each.gpus_per_node,  # of several kinds of nodes, the one with the most GPUs
        ),
    )


def _accounts_for(site: Site, partition: Partition) -> list[str]:
    """Return the user's accounts that may submit to a partition; the default one is unnamed if they are unknown."""
    return [each for each in site.accounts or ("",) if not (each and partition.accounts) or each in partition.accounts]


def _num_gpus(site: Site, partition: Partition) -> int:
    return sum(each.num_nodes * each.gpus_per_node for each in site.partitions if each.name == partition.name)


def _differences(site: Site, partition: Partition, base: ClusterProfile) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys and values in which the site differs from a profile, and what can't be detected here."""
    unknown = []
    values: dict[str, Any] = {"partition": partition.name, "runtime": _runtime(site, base)}
    kinds = [each for each in site.partitions if each.name == partition.name]
    values["max_nodes"] = sum(
        each.num_nodes
        for each in kinds
        if (each.gpus_per_node, each.gpu_type) == (partition.gpus_per_node, partition.gpu_type)
    )
    if partition.gpus_per_node:
        values["gpus_per_node"] = partition.gpus_per_node
    elif base.gpu_request != "none":
        values["gpu_request"] = "none"
    if partition.memory_gib:
        values["memory_per_node_gib"] = float(partition.memory_gib)
    gpu = base.gpu or recognize_gpu(partition.gpu_type)
    if gpu:
        values["gpu"] = gpu
    else:
        kind = f" (Slurm calls it '{partition.gpu_type}')" if partition.gpu_type else ""
        unknown.append(f"the model of the GPUs{kind}: set 'gpu:', one of {', '.join(get_args(GpuModel))}")
    if partition.max_seconds is not None:
        values["max_time_limit"] = format_time_limit(partition.max_seconds)
    if site.local_folder and base.node_local_dir == "/tmp":  # noqa: S108 - the default
        values["node_local_dir"] = site.local_folder
    if len({(each.gpus_per_node, each.gpu_type) for each in kinds}) > 1:
        unknown.append(
            f"partition {partition.name} has several kinds of nodes; the profile is for {_describe(partition)}"
        )
    access, unknown_access = _access(site, partition)
    values |= access
    unknown += unknown_access
    if values["runtime"] == "none":
        unknown.append("containers: srun has no --container-image (pyxis) and there is no Apptainer on this machine")
    return {key: value for key, value in values.items() if value != getattr(base, key)}, tuple(unknown)


def _access(site: Site, partition: Partition) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that a partition's lists of accounts and QOS require, and what the user has to choose."""
    values: dict[str, Any] = {}
    unknown = []
    accounts = _accounts_for(site, partition)
    if not accounts:
        unknown.append(f"partition {partition.name} is only for the accounts {', '.join(partition.accounts)}")
    elif len(accounts) == 1 and len(site.accounts) > 1:
        values["account"] = accounts[0]
    elif len(accounts) > 1:
        unknown.append(f"the account: set 'account:' to one of {', '.join(accounts)}, or use the default one")
    if len(partition.qos) == 1:
        values["qos"] = partition.qos[0]
    elif partition.qos:
        unknown.append(f"the QOS: set 'qos:' to one of {', '.join(partition.qos)}, unless your default is one of them")
    return values, unknown


def _runtime(site: Site, base: ClusterProfile) -> str:
    if site.has_pyxis:
        return "pyxis"
    if site.apptainer:
        return "apptainer"
    return "none" if base.name == _ANY_SLURM else base.runtime


def _describe(partition: Partition) -> str:
    gpus = f"{partition.gpus_per_node} x {partition.gpu_type or 'GPU'} per node"
    return f"{plural(partition.num_nodes, 'node')}, {gpus if partition.gpus_per_node else 'no GRES'}"


def _as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")
    return name[:_LONGEST_NAME] or "site"
