"""Checks on the machine that submits runs. They take a few seconds, and write only one small file."""

from __future__ import annotations

import os
import platform
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import AnyImage, ImageFile, NamedImage, RegistryImage
from ftkit.errors import FtkitError, one_line, plural
from ftkit.files import mode_of_new_files
from ftkit.health.findings import Finding, run_all
from ftkit.health.site import Site
from ftkit.hub.client import DEFAULT_ENDPOINT, read_token
from ftkit.planning.layout import Workspace

_TIMEOUT_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 3.0
"""Time for all checks together: a name server or a file system may respond much later, or never."""
_FEW_GIB: Final = 100  # free space for checkpoints, prepared data and an export; less is a warning
_CLOCK_SECONDS: Final = 5.0
"""Largest clock difference. A larger one makes leases, file times and certificates unreliable."""


@dataclass(frozen=True)
class LoginNode:
    site: Site
    cluster: ClusterProfile
    workspace: Workspace
    image: AnyImage | None
    registry: str | None
    environment: Mapping[str, str]


def check_login_node(node: LoginNode) -> list[Finding]:
    """Run all checks concurrently; one that takes longer than `CHECK_SECONDS` is reported as a warning."""
    results = run_all([partial(_run, check, subject, node) for (subject, _), check in _CHECKS.items()], CHECK_SECONDS)
    findings: list[Finding] = []
    for (subject, fix), result in zip(_CHECKS, results, strict=True):
        late = [Finding(subject, "warning", f"no answer within {CHECK_SECONDS:g} s", fix)]
        findings += late if result is None else result
    return findings


def _run(check: Callable[[LoginNode], list[Finding]], subject: str, node: LoginNode) -> list[Finding]:
    try:
        return check(node)
    except OSError as error:  # a file that may not be read, a file system that is gone
        return [Finding(subject, "failed", str(error), "check the path and its permissions")]


def _check_slurm(node: LoginNode) -> list[Finding]:
    python = Finding("python", "ok", platform.python_version())
    if node.cluster.scheduler != "slurm":
        return [python]
    if not node.site.has_slurm:
        fix = "log in to the cluster's login node; or choose another cluster with 'ftkit init'"
        return [python, Finding("slurm", "failed", "sinfo does not answer on this machine", fix)]
    path = node.environment.get("PATH", os.defpath)
    programs = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sacct")
    missing = [name for name in programs if not shutil.which(name, path=path)]
    slurm = Finding("slurm", "ok", node.site.slurm_version)
    if missing == ["sacct"]:
        fix = "ftkit then reads the final state of a run from its folder only"
        return [python, slurm, Finding("accounting", "warning", "sacct is not on PATH", fix)]
    if missing:
        fix = "install Slurm's client programs, or put them on PATH"
        slurm = Finding("slurm", "failed", f"not on PATH: {', '.join(missing)}", fix)
    return [python, slurm]


def _check_partition(node: LoginNode) -> list[Finding]:
    cluster, site = node.cluster, node.site
    if cluster.scheduler != "slurm" or not site.has_slurm:
        return []
    chosen = [
        each for each in site.partitions if (each.name == cluster.partition if cluster.partition else each.is_default)
    ]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.name for each in site.partitions))
        value = f"{cluster.partition or 'no default partition'}: not up, or unknown"
        fix = f"set 'partition:' in the profile '{cluster.name}' to one of {known}"
        return [Finding("partition", "failed", value, fix)]
    num_nodes = plural(sum(each.num_nodes for each in chosen), "node")
    findings = [Finding("partition", "ok", f"{chosen[0].name}, {num_nodes}")]
    most = max(each.gpus_per_node for each in chosen)
    if cluster.gpu_request != "none" and cluster.max_processes > most and cluster.device != "cpu":
        fix = "set 'gpus_per_node:' in the profile; 'gpu_request: none' if Slurm does not know about the GPUs"
        value = f"the profile has {cluster.max_processes} per node, Slurm {most}"
        findings.append(Finding("GPUs", "failed", value, fix))
    accounts = ", ".join(site.accounts)
    if accounts and cluster.account and cluster.account not in site.accounts:
        fix = f"set 'account:' to one of {accounts}"
        findings.append(Finding("account", "failed", f"'{cluster.account}' is not yours", fix))
    elif accounts:
        findings.append(Finding("account", "ok", cluster.account or f"the default of {accounts}"))
    return findings


def _check_runtime(node: LoginNode) -> list[Finding]:
    site = node.site
    pyxis = f"pyxis, enroot {site.enroot}" if site.enroot else "pyxis"
    found, missing, fix = {
        "none": ("none: runs use this Python", "", ""),
        "pyxis": (site.has_pyxis and pyxis, "srun has no --container-image: pyxis is not set up",
                  "ask the site to install pyxis, or set 'runtime: apptainer' in the profile"),
        "apptainer": (site.apptainer and f"Apptainer {site.apptainer}", "neither apptainer nor singularity is on PATH",
                      "load its module here, and in the profile's 'setup:' for jobs"),
        "docker": (site.docker and f"docker {site.docker}", "no docker engine answers",
                   "start docker, or join the group 'docker'"),
    }[node.cluster.runtime]  # fmt: skip
    return [Finding("containers", "ok", str(found)) if found else Finding("containers", "failed", missing, fix)]


def _check_workspace(node: LoginNode) -> list[Finding]:
    root = node.workspace.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = time.time()
        mode_of_new_files(root)
        skew = abs(root.stat().st_mtime - before)  # by the file that was just created and removed
        free_gib = shutil.disk_usage(root).free / 2**30
    except OSError as error:
        fix = "set 'workspace:' in ftkit.yaml to a folder that you can write to"
        return [Finding("workspace", "failed", f"{root}: {one_line(error)}", fix)]
    findings = [Finding("workspace", "ok", str(root))]
    if node.cluster.scheduler == "slurm" and not any(root.is_relative_to(mount) for mount in node.site.shared_folders):
        fix = "nodes must have it at the same path; 'ftkit doctor --nodes all' checks this"
        findings.append(Finding("shared", "unknown", f"{root} is not on a network file system known to ftkit", fix))
    disk = Finding("disk", "ok", f"{free_gib:,.0f} GiB free")
    if free_gib < _FEW_GIB:
        fix = "a checkpoint of a 7B model in full training is about 90 GiB: free up space, or set another 'workspace:'"
        disk = Finding("disk", "warning", disk.value, fix)
    findings.append(disk)
    if skew > _CLOCK_SECONDS:
        value = f"this machine and the file system of the workspace differ by {skew:.0f} s"
        findings.append(Finding("clock", "failed", value, "synchronize the clocks with NTP"))
    return findings


def _check_image(node: LoginNode) -> list[Finding]:
    image, cluster = node.image, node.cluster
    if cluster.runtime in ("none", "docker"):
        return []
    if image is None:
        fix = "set 'image:' in ftkit.yaml, or give --image; 'ftkit images' lists them"
        return [Finding("image", "unknown", "none is set", fix)]
    if isinstance(image, NamedImage):
        file = node.workspace.image_file(image, cluster.image_format)
    elif isinstance(image, ImageFile):
        file = image.path
    else:
        return [Finding("image", "ok", f"{image}, pulled by the nodes")]
    if file.is_file():
        return [Finding("image", "ok", f"{image}, {file.stat().st_size / 2**30:.1f} GiB")]
    return [Finding("image", "failed", f"{image}: {file} not found", f"ftkit import {image} --cluster {cluster.name}")]


def _check_registry(node: LoginNode) -> list[Finding]:
    host = node.image.host if isinstance(node.image, RegistryImage) else (node.registry or "").partition("/")[0]
    if not host or node.cluster.runtime == "none":
        return []
    findings = [_ask("registry", f"https://{host}/v2/", host, "", node.environment)]
    if node.cluster.runtime == "pyxis":
        findings.append(_check_credentials(host.partition(":")[0], node.environment))
    return findings


def _check_credentials(host: str, environment: Mapping[str, str]) -> Finding:
    home = Path(environment.get("HOME") or "~").expanduser()
    named = environment.get("ENROOT_CONFIG_PATH")
    folders = [Path(named)] if named else [home / ".config" / "enroot", home / ".enroot"]
    for path in (folder / ".credentials" for folder in folders):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            is_open = bool(path.stat().st_mode & 0o077)
        except OSError:
            continue
        if any(line.split()[:2] == ["machine", host] for line in lines):
            if is_open:
                return Finding("credentials", "warning", f"{path} can be read by others", f"chmod 600 {path}")
            return Finding("credentials", "ok", f"{host} in {path}")
    fix = f"for a private image: 'machine {host} login USER password SECRET' in {folders[0] / '.credentials'}"
    return Finding("credentials", "unknown", f"enroot has none for {host}", fix)


def _check_hub(node: LoginNode) -> list[Finding]:
    environment = node.environment
    endpoint = environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    fix = "weights and data must be in the workspace or its cache (HF_HOME) before a run"
    hub = _ask("hub", endpoint, endpoint, fix, environment)
    try:
        if read_token(environment):
            return [hub, Finding("hub token", "ok", "found")]
    except FtkitError as error:
        return [hub, Finding("hub token", "failed", error.what, error.fix)]
    fix = "gated models need one: HF_TOKEN in the environment or in .env, or 'hf auth login'"
    return [hub, Finding("hub token", "unknown", "none", fix)]


def _ask(check: str, url: str, shown: str, fix: str, environment: Mapping[str, str]) -> Finding:
    """Check that a server responds; a refusal counts too."""
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((environment[name] for name in proxies if environment.get(name)), None)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"https": proxy} if proxy else {}))
    try:
        opener.open(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_SECONDS).close()  # noqa: S310
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError) as error:
        reason = one_line(str(error.reason if isinstance(error, urllib.error.URLError) else error))
        return Finding(check, "warning", f"{shown}: no answer ({reason})", fix)
    return Finding(check, "ok", f"{shown}: answers")


_NO_FILES: Final = "its file system does not respond: see 'df' and 'mount', or contact the site's support"
_NO_NETWORK: Final = "the network or the name server does not answer: set a proxy, or ask the site"
_CHECKS: Final[dict[tuple[str, str], Callable[[LoginNode], list[Finding]]]] = {
    ("slurm", _NO_FILES): _check_slurm,
    ("partition", _NO_FILES): _check_partition,
    ("containers", _NO_FILES): _check_runtime,
    ("workspace", _NO_FILES): _check_workspace,
    ("image", _NO_FILES): _check_image,
    ("registry", _NO_NETWORK): _check_registry,
    ("hub", _NO_NETWORK): _check_hub,
}
"""The checks, by subject, with the advice if a check times out."""
