"""Derive a cluster profile and settings from the detected site."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from ftkit.config.cluster import ClusterProfile, GpuModel, format_time_limit, recognize_gpu
from ftkit.errors import FtkitError, plural

if TYPE_CHECKING:
    from ftkit.health.site import Partition, Site

_ANY_SLURM: Final = "slurm"
_LONGEST_NAME: Final = 63

Value = str | int | float


@dataclass(frozen=True)
class ProposedCluster:
    """A known profile, or `values` of a new one that `extends` it; `unknown` are those that the user must set."""

    name: str
    extends: str
    values: dict[str, Value]
    reason: str
    unknown: tuple[str, ...] = ()


def propose_cluster(site: Site, profiles: Iterable[ClusterProfile], root: Path = Path("/")) -> ProposedCluster:
    """Choose the profile that recognizes the site, or values that extend one; profiles' paths are below `root`."""
    known = {profile.name: profile for profile in profiles}
    if not site.has_slurm:
        gpus = plural(site.num_gpus, "GPU") if site.num_gpus else "no GPU"
        if site.docker:
            return ProposedCluster("docker", "", {}, f"no Slurm, docker {site.docker}, {gpus}")
        reason = f"no Slurm, no docker, {gpus}: runs use this Python, without a container"
        return ProposedCluster("local", "", {}, reason)
    base, reason = _recognize(site, known, root)
    partition = _choose_partition(site, base)
    values, unknown = _differences(site, partition, base)
    if not values:
        return ProposedCluster(base.name, "", {}, reason, unknown)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", site.cluster_name).strip("._-")[:_LONGEST_NAME] or "site"
    if name in known:
        name = f"{name[: _LONGEST_NAME - len('-site')]}-site"
    described = f"{site.cluster_name or 'This cluster'}: {_describe(partition)}"
    return ProposedCluster(name, base.name, {"description": described, **values}, reason, unknown)


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
    num_gpus: Counter[str] = Counter()
    for each in site.partitions:
        num_gpus[each.name] += each.num_nodes * each.gpus_per_node

    def rank(kind: Partition) -> tuple[int, ...]:
        own = kind.num_nodes * kind.gpus_per_node  # of several kinds of nodes, the one with the most GPUs
        return kind.gpus_per_node > 0, kind.is_default, num_gpus[kind.name], own

    return max(named or open_to_user, key=rank)


def _accounts_for(site: Site, partition: Partition) -> list[str]:
    """Return the user's accounts that may submit to a partition; the default one is unnamed if they are unknown."""
    return [each for each in site.accounts or ("",) if not (each and partition.accounts) or each in partition.accounts]


def _differences(site: Site, partition: Partition, base: ClusterProfile) -> tuple[dict[str, Value], tuple[str, ...]]:
    kinds: Counter[tuple[int, str]] = Counter()
    for each in site.partitions:
        if each.name == partition.name:
            kinds[each.gpus_per_node, each.gpu_type] += each.num_nodes
    runtime = base.runtime if base.name != _ANY_SLURM else "none"
    if site.has_pyxis or site.apptainer:
        runtime = "pyxis" if site.has_pyxis else "apptainer"
    accounts = _accounts_for(site, partition)
    gpu = base.gpu or recognize_gpu(partition.gpu_type)
    values: dict[str, Value | None] = {
        "partition": partition.name,
        "runtime": runtime,
        "max_nodes": kinds[partition.gpus_per_node, partition.gpu_type],
        "gpus_per_node": partition.gpus_per_node or None,
        "gpu_request": None if partition.gpus_per_node else "none",
        "memory_per_node_gib": float(partition.memory_gib) or None,
        "gpu": gpu,
        "max_time_limit": None if partition.max_seconds is None else format_time_limit(partition.max_seconds),
        "node_local_dir": site.local_folder if base.node_local_dir == "/tmp" else None,  # noqa: S108 - the default
        "account": accounts[0] if len(accounts) == 1 and len(site.accounts) > 1 else None,
        "qos": partition.qos[0] if len(partition.qos) == 1 else None,
    }
    kind = f" (Slurm calls it '{partition.gpu_type}')" if partition.gpu_type else ""
    unknown = {
        f"the model of the GPUs{kind}: set 'gpu:', one of {', '.join(get_args(GpuModel))}": gpu is None,
        f"partition {partition.name} has several kinds of nodes; the profile is for {_describe(partition)}":
            len(kinds) > 1,
        f"partition {partition.name} is only for the accounts {', '.join(partition.accounts)}": not accounts,
        f"the account: set 'account:' to one of {', '.join(accounts)}, or use the default one": len(accounts) > 1,
        f"the QOS: set 'qos:' to one of {', '.join(partition.qos)}, unless your default is one of them":
            len(partition.qos) > 1,
        "containers: srun has no --container-image (pyxis) and there is no Apptainer on this machine":
            runtime == "none",
    }  # fmt: skip
    differing = {key: value for key, value in values.items() if value and value != getattr(base, key)}
    return differing, tuple(text for text, is_so in unknown.items() if is_so)


def _describe(partition: Partition) -> str:
    gpus = f"{partition.gpus_per_node} x {partition.gpu_type or 'GPU'} per node"
    return f"{plural(partition.num_nodes, 'node')}, {gpus if partition.gpus_per_node else 'no GRES'}"
