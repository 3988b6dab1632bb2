"""Detect the site (Slurm and its partitions, container programs, file systems), and derive a profile from it.

All information comes from programs that any user may run, and files that any user may read. It stays unknown if a
program is missing, or does not respond within two seconds. Programs run concurrently: `ftkit init` takes seconds.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

from ftkit import process
from ftkit.config.cluster import ClusterProfile, GpuModel, format_time_limit, parse_time_limit, recognize_gpu
from ftkit.errors import FtkitError, plural
from ftkit.health.findings import run_all
from ftkit.spec import as_name

_LIST_PARTITIONS: Final = ("sinfo", "--local", "--noheader", "--format=%P|%a|%D|%c|%G|%l|%m")
"""This excludes partitions of other clusters in a federation, which this cluster's jobs can't use."""
_TIMEOUT_SECONDS: Final = 2.0
_SITE_SECONDS: Final = 2.5
_SHARED_TYPES: Final = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|wekafs|ceph|glusterfs|panfs|pvfs2|orangefs|virtiofs|9p|cifs|smb3|fuse\.(juicefs|sshfs|ceph.*)"
)
"""Types of network file systems in /proc/mounts."""
_LOCAL_CANDIDATES: Final = ("/mnt/localssd", "/mnt/scratch", "/local_scratch", "/scratch/local", "/localscratch")


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind in a Slurm partition. A partition with several kinds of nodes has several entries."""

    name: str
    is_default: bool
    num_nodes: int
    gpus_per_node: int  # in Slurm's generic resources (GRES)
    gpu_type: str  # empty if they have none
    cpus_per_node: int
    memory_gib: int
    max_seconds: int | None  # None if jobs are unlimited
    accounts: tuple[str, ...] = ()  # empty if any may be used
    qos: tuple[str, ...] = ()  # as accounts


@dataclass(frozen=True)
class Site:
    """The detected site. Empty text or 0 means absent; a program's text is its version."""

    slurm_version: str
    cluster_name: str
    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]  # the user's
    has_pyxis: bool
    enroot: str
    apptainer: str
    docker: str
    shared_folders: tuple[str, ...]  # mount points of network file systems
    local_folder: str  # probably on each node's own disk
    num_gpus: int
    unknown: tuple[str, ...]  # undetected properties, with the reason
    is_slurm_silent: bool = False  # Slurm is installed, but its controller does not respond

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm responds and has a partition."""
        return bool(self.partitions)


def detect_site(environment: Mapping[str, str], root: Path) -> Site:
    """Inspect this machine and its Slurm; `root` holds its /dev, /proc and /sys."""
    user = environment.get("USER") or environment.get("LOGNAME") or str(os.getuid())
    commands = {
        "sinfo": _LIST_PARTITIONS,
        "version": ("sinfo", "--version"),
        "config": ("scontrol", "show", "config"),
        "limits": ("scontrol", "show", "partitions", "--oneliner"),
        "accounts": ("sacctmgr", "-nP", "show", "associations", f"user={user}", "format=Cluster,Account"),
        "srun": ("srun", "--help"),
        "enroot": ("enroot", "version"),
        "apptainer": ("apptainer", "--version"),
        "singularity": ("singularity", "--version"),
        "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    }
    answers = run_all([partial(_ask, words, environment) for words in commands.values()], _SITE_SECONDS)
    found = dict(zip(commands, answers, strict=True))  # a program on a dead file system can't be killed
    outputs = {name: output or "" for name, output in found.items()}
    partitions = parse_partitions(outputs["sinfo"], outputs["limits"])
    settings = dict(re.findall(r"(?m)^(\w+)\s*= (.*)$", outputs["config"]))
    accounts = parse_accounts(outputs["accounts"], settings.get("ClusterName", ""))
    unknown = {
        "Slurm is installed, but no partition is up: sinfo failed, or all of them are down":
            outputs["version"] and not partitions,
        "the configuration of Slurm can't be read with scontrol": partitions and not settings,
        "your Slurm accounts: sacctmgr lists none, so jobs use the default one": partitions and not accounts,
        "the GPUs of the nodes: Slurm lists none as generic resources (GRES)":
            partitions and not any(each.gpus_per_node for each in partitions),
    }  # fmt: skip
    # A folder that is probably on each node's own disk: one of the common names, else Slurm's TmpFS.
    local = next((path for path in _LOCAL_CANDIDATES if (root / path.lstrip("/")).is_dir()), "")
    slurm_tmp = settings.get("TmpFS", "")
    try:
        mounts = (root / "proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mounts = ""
    return Site(
        slurm_version=_version(outputs["version"]) if partitions else "",
        cluster_name=settings.get("ClusterName", ""),
        partitions=partitions,
        accounts=accounts,
        has_pyxis="--container-image" in outputs["srun"],
        enroot=_version(outputs["enroot"]),
        apptainer=_version(outputs["apptainer"] or outputs["singularity"]),
        docker=_version(outputs["docker"]),
        shared_folders=parse_mounts(mounts),
        local_folder=local or (slurm_tmp if re.match("/(?!tmp$).", slurm_tmp) else ""),
        num_gpus=len(list(root.glob("dev/nvidia[0-9]*"))),
        unknown=tuple(text for text, is_so in unknown.items() if is_so),
        is_slurm_silent=found["sinfo"] is None,
    )


def list_partitions(environment: Mapping[str, str]) -> tuple[Partition, ...] | None:
    """Return Slurm's partitions; empty if there is no Slurm here, None if it is installed but does not respond."""
    output = _ask(_LIST_PARTITIONS, environment)
    return None if output is None else parse_partitions(output)


def _ask(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return a program's output; empty if it is missing or fails, None if it or its server does not respond."""
    program = shutil.which(words[0], path=environment.get("PATH", os.defpath))
    if program is None:
        return ""
    try:
        done = process.run(
            [program, *words[1:]], timeout_seconds=_TIMEOUT_SECONDS, environment={**environment, "LC_ALL": "C"}
        )
    except process.ProgramTimeoutError:
        return None
    except FtkitError:
        return ""
    if done.returncode == 0:
        return done.stdout
    return None if re.search(process.SLURM_NO_ANSWER, done.stderr, re.IGNORECASE) else ""


def parse_partitions(text: str, limits: str = "") -> tuple[Partition, ...]:
    """Parse the output of sinfo (`_LIST_PARTITIONS`) and `scontrol show partitions --oneliner`; keep what is up."""
    partitions = []
    allowed = {
        match[1]: (_names_in(line, "AllowAccounts"), _names_in(line, "AllowQos"))
        for line in limits.splitlines()
        if (match := re.match(r"PartitionName=(\S+)", line))
    }
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len("PaDcGlm") or fields[1] != "up" or not fields[2].isdigit():
            continue
        name, _, num_nodes, cpus, resources, limit, memory = fields
        accounts, qos = allowed.get(name.removesuffix("*"), ((), ()))
        gpu_type, num_gpus = parse_gres(resources)
        partitions.append(Partition(
            name=name.removesuffix("*"), is_default=name.endswith("*"), num_nodes=int(num_nodes),
            gpus_per_node=num_gpus, gpu_type=gpu_type, cpus_per_node=_first_number(cpus),
            memory_gib=_first_number(memory) // 1024, max_seconds=parse_time_limit(limit), accounts=accounts, qos=qos,
        ))  # fmt: skip
    return tuple(partitions)


def _first_number(text: str) -> int:
    return int(re.match(r"\d*", text)[0] or 0)  # type: ignore[index] # it matches any text


def _names_in(line: str, key: str) -> tuple[str, ...]:
    """Return the names that a key of `scontrol show partitions` allows; none if it allows all."""
    match = re.search(rf"(?:^|\s){key}=(\S+)", line)
    return () if match is None or match[1] in ("ALL", "(null)", "N/A") else tuple(match[1].split(","))


def parse_accounts(text: str, cluster: str) -> tuple[str, ...]:
    """Parse `sacctmgr -nP show associations format=Cluster,Account`, which lists accounts of all clusters of a site."""
    pairs = [line.split("|") for line in text.splitlines() if line.count("|") == 1]
    return tuple(dict.fromkeys(account for name, account in pairs if account and name == (cluster or name)))


def parse_gres(text: str) -> tuple[str, int]:
    """Return type (empty if none or several) and number of GPUs: `gpu:h100:8(S:0-1)` is 8 GPUs of type h100."""
    found = re.findall(r"(?:^|,)gpu(?::([^:,()]*[^\d:,()][^:,()]*))?:(\d+)", text)
    types = {kind for kind, _ in found}
    return (types.pop() if len(types) == 1 else ""), sum(int(count) for _, count in found)


def parse_mounts(text: str) -> tuple[str, ...]:
    """Return the mount points of network file systems in /proc/mounts."""
    fields = [line.split() for line in text.splitlines()]
    shared = [each[1] for each in fields if len(each) > len("dp") and _SHARED_TYPES.fullmatch(each[2])]
    # proc(5): white space is octal
    return tuple(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path) for path in shared)


def _version(text: str) -> str:
    match = re.search(r"\d+\.\d+[\w.+-]*", text)
    return match[0] if match else ""


# --- The profile of a site ---------------------------------------------------------------------------

_ANY_SLURM: Final = "slurm"
_LONGEST_NAME: Final = 63

Value = str | int | float


@dataclass(frozen=True)
class ProposedCluster:
    """A known profile, or the `values` of a new one that `extends` it; the user must set the `unknown` ones."""

    name: str
    extends: str
    values: dict[str, Value]
    reason: str
    unknown: tuple[str, ...] = ()


def propose_cluster(site: Site, profiles: Iterable[ClusterProfile], root: Path = Path("/")) -> ProposedCluster:
    """Choose the profile that matches the site, or values that extend one; profiles' paths are below `root`."""
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
    name = as_name(site.cluster_name, "site", _LONGEST_NAME)
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
    """Choose the profile's partition, else the one with the most GPUs, preferring Slurm's default."""
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
        "gpu_type": partition.gpu_type if len(kinds) > 1 else None,
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
