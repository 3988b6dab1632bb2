"""Import an image with enroot, on this machine or on a compute node through Slurm."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import assets, process
from ftkit.config.image_reference import Digest, RegistryImage, is_loopback
from ftkit.errors import ImageError
from ftkit.images import squashfs
from ftkit.images.oci.documents import untrusted

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile

_TIMEOUT_SECONDS: Final = 4 * 3600
_CLEAN_UP_SECONDS: Final = 120
_WRONG_IMAGE, _WRONG_LAYERS, _HAS_DEVICES = 65, 66, 67  # exit codes of enroot-import.sh
_ENDED: Final = "ftkit-import-ended"  # the last line of enroot-on-node.sh, unless it was killed


@dataclass(frozen=True)
class Address:
    """An enroot address that identifies exactly one image: by digest, or by the engine's id."""

    uri: str
    by_tag: str  # for enroot before 4.0, which does not support digests in registries
    config: Digest | None = None  # required of the imported image; None if `by_tag` is exact too
    layers: tuple[tuple[Digest, Digest], ...] = ()  # digests of each layer's blob, and of its uncompressed content
    host: str = ""


@dataclass(frozen=True)
class ComputeNode:
    """A compute node to import on: sbatch's options, and a folder on the node's local disk."""

    options: tuple[str, ...]
    local_folder: str


def address_in_registry(
    reference: RegistryImage, digest: Digest, image_id: Digest, layers: Iterable[tuple[Digest, Digest]]
) -> Address:
    """Return the address of an image in a registry; `layers` are as in `Address`."""
    exact, by_tag = (replace(reference, digest=given).enroot_uri for given in (digest, None))
    return Address(exact, by_tag, image_id, tuple(layers), reference.host)


def compute_node(cluster: ClusterProfile) -> ComputeNode:
    named = {
        "partition": cluster.partition, "account": cluster.account, "qos": cluster.qos,
        "reservation": cluster.reservation, "cpus-per-task": cluster.cpus_per_node,
    }  # fmt: skip
    options = [f"--{key}={value}" for key, value in named.items() if value]
    options += ["--exclusive"] if cluster.exclusive else []
    return ComputeNode(("--nodes=1", "--ntasks=1", "--export=ALL", *options), cluster.node_local_dir)


def import_to(output: Path, address: Address, node: ComputeNode | None = None) -> None:
    """Import an image into a file that does not exist yet."""
    layers = " ".join(f"{blob.hex}:{content.hex}" for blob, content in address.layers)
    config = address.config.hex if address.config else ""
    script = (assets.SHELL / "enroot-import.sh").read_text(encoding="utf-8")
    words = [script, "ftkit", str(output), address.uri, address.by_tag, config, layers]
    # SOURCE_DATE_EPOCH would change all times, and make .pyc files stale.
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    environment |= {"ENROOT_SQUASH_OPTIONS": squashfs.ENROOT_OPTIONS}
    environment |= {"ENROOT_ALLOW_HTTP": "yes"} if is_loopback(address.host) else {}
    if node:
        done = _on_node(words, node, output, environment)
    else:
        folder = output.with_name(f"{output.name}.enroot")
        environment["ENROOT_MAX_PROCESSORS"] = str(process.num_usable_cpus())
        command = ["bash", "-c", *words, str(folder)]
        try:
            done = process.run_stoppable(command, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if done.returncode != 0 or not output.is_file():
        raise _explain(address, done, output)
    squashfs.check_squashfs(output)


def _on_node(words: list[str], node: ComputeNode, output: Path, environment: dict[str, str]) -> process.ProgramOutput:
    """Run on a compute node as a batch job, because a job of srun would be killed immediately on cancellation."""
    job, log = f"ftkit-import-{secrets.token_hex(4)}", output.with_name(f"{output.name}.log")
    on_node = (assets.SHELL / "enroot-on-node.sh").read_text(encoding="utf-8")
    script = shlex.join(["exec", "bash", "-c", on_node, "ftkit", node.local_folder, *words])
    command = ["sbatch", "--wait", "--no-requeue", *node.options, f"--job-name={job}"]
    command += [f"--output={str(log).replace('%', '%%')}", f"--wrap={script}"]
    try:
        done = process.run_stoppable(
            command, timeout_seconds=_TIMEOUT_SECONDS, stop=partial(_cancel, job),
            environment=process.slurm_environment(environment),
        )  # fmt: skip
        job_output = log.read_text(errors="replace") if log.exists() else ""
        if done.returncode != 0 and job_output and _ENDED not in job_output:
            raise ImageError(
                "the job that imports the image on a compute node was ended before enroot",
                meaning="its node failed, it was canceled, or it reached the partition's time limit",
                fix=f"try again; 'sacct --name={job} --format=JobID,State,NodeList' shows which",
            )
        return process.ProgramOutput(done.returncode, job_output.replace(f"{_ENDED}\n", ""), done.stderr)
    finally:
        log.unlink(missing_ok=True)


def _cancel(job: str) -> None:
    """Cancel a job so that it can clean up: KillWait can be too short to remove an unpacked image."""
    name, environment = f"--name={job}", process.slurm_environment(os.environ)
    process.run(["scancel", "--state=PENDING", name], environment=environment)
    process.run(["scancel", "--full", "--signal=TERM", name], environment=environment)
    deadline = time.monotonic() + _CLEAN_UP_SECONDS
    while process.run(["squeue", "--noheader", name], environment=environment).stdout.strip():
        if time.monotonic() > deadline:
            process.run(["scancel", name], environment=environment)
            return
        time.sleep(1)


def _explain(address: Address, done: process.ProgramOutput, output: Path) -> ImageError:
    """Convert enroot's output to an error; with wrong credentials it prints no error."""
    text = done.stdout + done.stderr
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    meaning = ""
    if done.returncode == _WRONG_LAYERS:
        return untrusted(f"the layers of {address.uri} are not those that its configuration lists")
    if done.returncode == _WRONG_IMAGE:
        what = f"enroot imported another image than {address.uri}"
        meaning = f"this enroot does not support digests (4.0 does), and {address.by_tag} is another image now"
        fix = "import with --with ftkit and without --on-node, which imports by digest"
    elif done.returncode == _HAS_DEVICES or "Cannot mknod" in text:
        devices = re.findall(r"^[bc][-rwxsStT]{9} .*squashfs-root/(.+)$", done.stdout, re.MULTILINE)
        what = f"{address.uri} has device files ({', '.join(devices) or 'see tar above'}), which only root can unpack"
        meaning = "enroot keeps them, and then can't create a container from the file for a user"
        fix = "import with --with ftkit and without --on-node: ftkit leaves them out"
    elif "No command specified" in text:
        what = "enroot can't import an image from the docker engine that has neither CMD nor ENTRYPOINT"
        fix = "import with --with ftkit, which needs no command, or push the image and import it from the registry"
    elif "no space left" in text.lower():
        what = f"the disk is full: {last}"
        meaning = (
            "enroot unpacks the whole image in ENROOT_TEMP_PATH or TMPDIR, on a node in the cluster's 'node_local_dir',"
            f" before it writes the file to {output.parent}"
        )
        fix = "free space, set them to a larger local disk, or import with --with ftkit, which unpacks nothing"
    elif re.search("Authenticating with user|Using credentials from file|401|403", last):
        what = f"enroot could not log in to {address.host}"
        meaning = "the line for it in enroot's .credentials is missing, has a port, or its password is wrong"
        line = f"machine {address.host.partition(':')[0]} login USER password SECRET"
        fix = f"write '{line}' into ~/.config/enroot/.credentials; NGC requires a second line for authn.nvidia.com"
    else:
        return squashfs.explain_failure("enroot", text, output)
    return ImageError(what, meaning=meaning, fix=fix)
