"""Checks on the machine from which runs are submitted: they take a few seconds, and write only one small file."""

from __future__ import annotations

import os
import platform
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import AnyImage, ImageFile, NamedImage, RegistryImage
from ftkit.errors import FtkitError, one_line, plural
from ftkit.files import mode_of_new_files
from ftkit.health.findings import Finding, start_all
from ftkit.health.site import Site
from ftkit.hub.client import DEFAULT_ENDPOINT, read_token
from ftkit.planning.layout import Workspace

_TIMEOUT_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 3.0
"""Time for all checks together; a name server or a file system may respond much later, or never."""
_FEW_GIB: Final = 100
"""Free space for checkpoints, prepared data and an export; less is a warning."""
_CLOCK_SECONDS: Final = 5.0
"""Largest difference of clocks: a larger one makes leases, file times and certificates unreliable."""
_PROXIED: Final = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True)
class LoginNode:
    """Inputs of the checks."""

    site: Site
    cluster: ClusterProfile
    workspace: Workspace
    image: AnyImage | None
    registry: str | None
    environment: Mapping[str, str]


def check_login_node(node: LoginNode) -> list[Finding]:
    """Run all checks concurrently; one that takes longer than `CHECK_SECONDS` is reported as a warning."""
    deadline = time.monotonic() + CHECK_SECONDS
    results = start_all([partial(check, node) for check in _CHECKS.values()])
    findings: list[Finding] = []
    for (subject, fix), result in zip(_CHECKS, results, strict=True):
        try:
            findings += result.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            findings.append(Finding(subject, "warning", f"no answer within {CHECK_SECONDS:g} s", fix))
    return findings


# --- Programs ------------------------------------------------------------------------------------


def _check_slurm(node: LoginNode) -> list[Finding]:
    findings = [Finding("python", "ok", platform.python_version())]
    if node.cluster.scheduler != "slurm":
        return findings
    if not node.site.has_slurm:
        fix = "log in to the cluster's login node; or choose another cluster with 'ftkit init'"
        return [*findings, Finding("slurm", "failed", "sinfo does not answer on this machine", fix)]
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol", "scancel") if not _which(name, node)]
    if missing:
        fix = "install Slurm's client programs, or put them on PATH"
        return [*findings, Finding("slurm", "failed", f"not on PATH: {', '.join(missing)}", fix)]
    findings.append(Finding("slurm", "ok", node.site.slurm_version))
    if not _which("sacct", node):
        fix = "ftkit then reads the final state of a run from its folder only"
        findings.append(Finding("accounting", "warning", "sacct is not on PATH", fix))
    return findings


def _check_partition(node: LoginNode) -> list[Finding]:
    """Compare the profile's requests with Slurm's resources."""
    cluster = node.cluster
    if cluster.scheduler != "slurm" or not node.site.has_slurm:
        return []
    partitions = node.site.partitions
    chosen = [
        each for each in partitions if each.name == cluster.partition or (not cluster.partition and each.is_default)
    ]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.name for each in partitions))
        fix = f"set 'partition:' in the profile '{cluster.name}' to one of {known}"
        return [
            Finding("partition", "failed", f"{cluster.partition or 'no default partition'}: not up, or unknown", fix)
        ]
    findings = [
        Finding("partition", "ok", f"{chosen[0].name}, {plural(sum(each.num_nodes for each in chosen), 'node')}")
    ]
    most = max(each.gpus_per_node for each in chosen)
    if cluster.gpu_request != "none" and cluster.gpus_per_node > most and cluster.device != "cpu":
        fix = "set 'gpus_per_node:' in the profile; 'gpu_request: none' if Slurm does not know about the GPUs"
        value = f"the profile has {cluster.gpus_per_node} per node, Slurm {most}"
        findings.append(Finding("GPUs", "failed", value, fix))
    if cluster.account and node.site.accounts and cluster.account not in node.site.accounts:
        fix = f"set 'account:' to one of {', '.join(node.site.accounts)}"
        findings.append(Finding("account", "failed", f"'{cluster.account}' is not yours", fix))
    elif node.site.accounts:
        findings.append(Finding("account", "ok", cluster.account or f"the default of {', '.join(node.site.accounts)}"))
    return findings


def _check_runtime(node: LoginNode) -> list[Finding]:
    """Check that the container runtime is installed."""
    site = node.site
    found, missing, fix = {
        "none": ("none: runs use this Python", "", ""),
        "pyxis": (
            f"pyxis{f', enroot {site.enroot}' if site.enroot else ''}" if site.has_pyxis else "",
            "srun has no --container-image: pyxis is not set up",
            "ask the site to install pyxis, or set 'runtime: apptainer' in the profile",
        ),
        "apptainer": (
            f"Apptainer {site.apptainer}" if site.apptainer else "",
            "neither apptainer nor singularity is on PATH",
            "load its module here, and in the profile's 'setup:' for jobs",
        ),
        "docker": (
            f"docker {site.docker}" if site.docker else "",
            "no docker engine answers",
            "start docker, or join the group 'docker'",
        ),
    }[node.cluster.runtime]
    return [Finding("containers", "ok", found) if found else Finding("containers", "failed", missing, fix)]


def _which(program: str, node: LoginNode) -> str | None:
    return shutil.which(program, path=node.environment.get("PATH", os.defpath))


# --- Files ---------------------------------------------------------------------------------------


def _check_workspace(node: LoginNode) -> list[Finding]:
    """Check that the workspace is writable, shared, has free space, and that its clock agrees with this machine's."""
    root = node.workspace.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = time.time()
        mode_of_new_files(root)
        stamp = root.stat().st_mtime  # of the file that was just created and removed
        free_gib = shutil.disk_usage(root).free / 2**30
    except OSError as error:
        fix = "set 'workspace:' in ftkit.yaml to a folder that you can write to"
        return [Finding("workspace", "failed", f"{root}: {one_line(error)}", fix)]
    findings = [Finding("workspace", "ok", str(root))]
    if node.cluster.scheduler == "slurm" and not any(root.is_relative_to(mount) for mount in node.site.shared_folders):
        fix = "nodes must have it at the same path; 'ftkit doctor --nodes all' checks this"
        findings.append(Finding("shared", "unknown", f"{root} is not on a network file system known to ftkit", fix))
    is_small = free_gib < _FEW_GIB
    fix = "a checkpoint of a 7B model in full training is about 90 GiB: free up space, or set another 'workspace:'"
    findings.append(
        Finding("disk", "warning" if is_small else "ok", f"{free_gib:,.0f} GiB free", fix if is_small else "")
    )
    skew = abs(stamp - before)
    if skew > _CLOCK_SECONDS:
        value = f"this machine and the file system of the workspace differ by {skew:.0f} s"
        findings.append(Finding("clock", "failed", value, "synchronize the clocks with NTP"))
    return findings


def _check_image(node: LoginNode) -> list[Finding]:
    """Check that the image of the settings exists."""
    image, cluster = node.image, node.cluster
    if cluster.runtime in ("none", "docker"):
        return []
    if image is None:
        fix = "set 'image:' in ftkit.yaml, or give --image; 'ftkit images' lists them"
        return [Finding("image", "unknown", "none is set", fix)]
    file = None
    if isinstance(image, NamedImage):
        file = node.workspace.image_file(image, cluster.image_format)
    elif isinstance(image, ImageFile):
        file = image.path
    if file is None:
        return [Finding("image", "ok", f"{image}, pulled by the nodes")]
    if file.is_file():
        return [Finding("image", "ok", f"{image}, {file.stat().st_size / 2**30:.1f} GiB")]
    return [Finding("image", "failed", f"{image}: {file} not found", f"ftkit import {image} --cluster {cluster.name}")]


# --- Networks ------------------------------------------------------------------------------------


def _check_registry(node: LoginNode) -> list[Finding]:
    """Check that the registry responds, and that enroot has credentials for it."""
    host = node.image.host if isinstance(node.image, RegistryImage) else (node.registry or "").partition("/")[0]
    if not host or node.cluster.runtime == "none":
        return []
    answer = _ask(f"https://{host}/v2/", node.environment)
    findings = [Finding("registry", "ok" if answer.is_there else "warning", f"{host}: {answer.text}")]
    if node.cluster.runtime == "pyxis":
        findings.append(_check_credentials(host.partition(":")[0], node.environment))
    return findings


def _check_credentials(host: str, environment: Mapping[str, str]) -> Finding:
    home = Path(environment.get("HOME") or "~").expanduser()
    named = environment.get("ENROOT_CONFIG_PATH")
    places = [Path(named)] if named else [home / ".config" / "enroot", home / ".enroot"]
    for path in (place / ".credentials" for place in places):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            is_open = bool(path.stat().st_mode & 0o077)
        except OSError:
            continue
        if any(line.split()[:2] == ["machine", host] for line in lines):
            if is_open:
                return Finding("credentials", "warning", f"{path} can be read by others", f"chmod 600 {path}")
            return Finding("credentials", "ok", f"{host} in {path}")
    fix = f"for a private image: 'machine {host} login USER password SECRET' in {places[0] / '.credentials'}"
    return Finding("credentials", "unknown", f"enroot has none for {host}", fix)


def _check_hub(node: LoginNode) -> list[Finding]:
    environment = node.environment
    endpoint = environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    answer = _ask(endpoint, environment)
    fix = "" if answer.is_there else "weights and data must be in the workspace or its cache (HF_HOME) before a run"
    findings = [Finding("hub", "ok" if answer.is_there else "warning", f"{endpoint}: {answer.text}", fix)]
    if answer.skew is not None and abs(answer.skew) > _CLOCK_SECONDS:
        value = f"{abs(answer.skew):.0f} s {'behind' if answer.skew > 0 else 'ahead of'} the hub"
        findings.append(Finding("clock", "warning", value, "synchronize this machine's clock with NTP"))
    try:
        token = read_token(environment)
    except FtkitError as error:
        return [*findings, Finding("hub token", "failed", error.what, error.fix)]
    if token:
        return [*findings, Finding("hub token", "ok", "found")]
    fix = "gated models need one: HF_TOKEN in the environment or in .env, or 'hf auth login'"
    return [*findings, Finding("hub token", "unknown", "none", fix)]


@dataclass(frozen=True)
class _Answer:
    """Whether a server responded, with a description, and how many seconds its clock is ahead."""

    is_there: bool
    text: str
    skew: float | None = None


def _ask(url: str, environment: Mapping[str, str]) -> _Answer:
    """Send a request to a server; a refusal counts as a response."""
    if urlsplit(url).scheme not in ("http", "https"):
        return _Answer(is_there=False, text="not an HTTP address")
    proxy = next((environment[name] for name in _PROXIED if environment.get(name)), None)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"https": proxy} if proxy else {}))
    try:
        with opener.open(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
            headers = response.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return _Answer(is_there=False, text=f"no answer ({one_line(str(reason))})")
    stamp = headers.get("Date")
    try:
        skew = parsedate_to_datetime(stamp).timestamp() - time.time() if stamp else None
    except ValueError:
        skew = None
    return _Answer(is_there=True, text="answers", skew=skew)


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
"""The checks, by subject and advice if a check does not end in time."""
