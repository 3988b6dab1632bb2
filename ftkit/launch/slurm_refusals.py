"""What sbatch means when it refuses a job."""

from __future__ import annotations

import re

from ftkit.errors import SubmitError

_REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "accounting/qos policy|submit.*limit|maxsubmit",
        "a limit of your account or its quality of service is reached: jobs, nodes, GPUs or hours",
        "wait until other jobs end, or ask the site's administrators",
    ),
    (
        "invalid partition",
        "the cluster has no partition of that name",
        "list them with 'sinfo -s' and set 'partition:' in the cluster's profile",
    ),
    (
        "invalid account",
        "the account is unknown, is not yours, or may not use this partition",
        "list yours with 'sacctmgr show associations user=$USER' and set 'account:' in the cluster's profile",
    ),
    (
        "invalid qos",
        "the quality of service is unknown, or not allowed for your account or partition",
        "set 'qos:' in the cluster's profile",
    ),
    (
        "reservation",
        "the reservation is over, not yet begun, or not open to you",
        "look at 'scontrol show reservation' and set 'reservation:' in the cluster's profile",
    ),
    (
        "time limit",
        "the time limit is longer than the partition allows",
        "look at 'sinfo -o \"%P %l\"' and set resources.time_limit",
    ),
    (
        "generic resource|gres",
        "the cluster does not name its GPUs as the profile asks for them",
        "look at 'sinfo -o \"%N %G\"' and set 'gpu_request:' in the cluster's profile (gres, gpus-per-node or none)",
    ),
    (
        "node configuration is not available",
        "no node has what a node of this job needs: GPUs, processors or memory",
        "look at 'sinfo -o \"%N %c %m %G\"'; set 'gpus_per_node:' and 'cpus_per_node:' in the cluster's profile",
    ),
    (
        "node count|partition configuration|more processors",
        "more nodes than the partition has or allows",
        "look at 'sinfo -s' and take fewer --nodes",
    ),
    (
        "group not permitted|access.*denied|permission denied",
        "you may not use this partition or account",
        "ask the site's administrators",
    ),
    (
        "unrecognized option|invalid option",
        "this Slurm does not know an option that the job script uses",
        "look at the script with --dry-run; take the option out of the cluster's profile",
    ),
)

_NO_ANSWER = "contact slurm controller|timed out|connection refused|unable to connect"


class UncertainSubmitError(SubmitError):
    """Slurm gave no clear answer: there may be a job, or not."""


def explain_refusal(stderr: str) -> SubmitError:
    """Turn sbatch's message into an error that says what it usually means."""
    message = said(stderr) or "sbatch gave no job id and no reason"
    if re.search(_NO_ANSWER, message, re.IGNORECASE):
        return UncertainSubmitError(
            f"Slurm did not answer: {message}", meaning="its controller is down, restarting or overloaded"
        )
    for pattern, meaning, fix in _REFUSALS:
        if re.search(pattern, message, re.IGNORECASE):
            return SubmitError(f"Slurm refused the job: {message}", meaning=meaning, fix=fix)
    return SubmitError(f"Slurm refused the job: {message}", fix="look at the script with --dry-run")


def said(stderr: str) -> str:
    """Return what a Slurm program said, without its own name before each line."""
    lines = [re.sub(r"^\w+: (error: |fatal: |lua: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
