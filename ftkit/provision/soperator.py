"""Slurm on Kubernetes at Nebius: Soperator, with the Terraform modules of Nebius's solutions library."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from ftkit.provision.steps import FOLDER, Check, Provision, Step

if TYPE_CHECKING:
    from ftkit.provision.spec import SoperatorSpec, WorkersSpec

_LIBRARY = "https://github.com/nebius/nebius-solutions-library"
_INSTALLATION = "library/soperator/installations/example"
_PRESETS = {
    ("h100", 1): "1gpu-16vcpu-200gb",
    ("h100", 8): "8gpu-128vcpu-1600gb",
    ("h200", 1): "1gpu-16vcpu-200gb",
    ("h200", 8): "8gpu-128vcpu-1600gb",
    ("b200", 8): "8gpu-160vcpu-1792gb",
}
"""The provider's names of machine sizes, by GPU model and number of GPUs."""

_CLAIM = """#!/usr/bin/env bash
# Fails if resources are recorded under this cluster's name, such as those of another user's cluster.
set -eo pipefail
cd "$(dirname "$0")"
bash terraform.sh state pull | jq --slurp --exit-status 'all(.[]; .resources == [])' >/dev/null || {
  echo "Terraform's state of this name can't be read, or has another cluster's resources: use another name" >&2
  exit 1
}
"""


def plan_soperator(name: str, spec: SoperatorSpec) -> Provision:
    """Describe a Soperator cluster: Terraform's variables, and a script that sets up its environment."""
    terraform = ("bash", "terraform.sh")
    return Provision(
        name=name,
        kind="soperator",
        files={
            "ftkit.tfvars.json": json.dumps(_variables(name, spec), indent=2) + "\n",
            "terraform.sh": _script(spec),
            "claim.sh": _CLAIM,
        },
        checks=(
            *_backup_checks(spec),
            Check("a Nebius account is active", ("nebius", "iam", "whoami"), "log in with: nebius profile create"),
            Check("Terraform is installed", ("terraform", "version"), "install it: developer.hashicorp.com/terraform"),
            Check("jq is installed, for .envrc", ("jq", "--version"), "install it with the system's package manager"),
        ),
        steps=(
            Step(
                "library", f"Nebius's solutions library {spec.release}",
                ("git", "clone", "--quiet", "--depth=1", f"--branch={spec.release}", _LIBRARY, "library"),
            ),
            Step(
                "example", "the installation without the example's own variables",
                ("rm", "-f", f"{_INSTALLATION}/terraform.tfvars"),
            ),
            Step(
                "init", "Terraform's providers and state",
                # .envrc names one state for all clusters of the project
                (*terraform, "init", "-input=false", f"-backend-config=key=ftkit/{name}.tfstate"), minutes=2,
            ),
            Step("state", "this cluster's Terraform state, still empty", ("bash", "claim.sh")),
            Step(
                "cluster", f"Kubernetes, file systems and {sum(each.num_nodes for each in spec.workers)} GPU nodes",
                (*terraform, "apply", "-input=false", "-auto-approve", f"-var-file={FOLDER}/ftkit.tfvars.json"),
                undo=((*terraform, "destroy", "-input=false", "-auto-approve",
                       f"-var-file={FOLDER}/ftkit.tfvars.json"),),
                minutes=40,
            ),
        ),
        status=((*terraform, "output"),),
        cost="nodes and file systems cost money until 'ftkit cluster destroy', even when idle",
        advice={
            "quota|limit exceeded|ResourceExhausted": "ask for more quota in Nebius's console, or use fewer nodes",
            "NotEnoughResources|no capacity": "the fabric is full: use another one, or another region",
            "Unauthenticated|token": "log in again: nebius iam get-access-token",
        },
        next_steps=(
            "bash terraform.sh output slurm_login_ip   # in the cluster's folder",
            ("ssh root@ADDRESS, then: ftkit run --cluster soperator --image olmo3:25.02 "
            f"--nodes {spec.workers[0].num_nodes}"),
        ),
    )  # fmt: skip


def _backup_checks(spec: SoperatorSpec) -> tuple[Check, ...]:
    if not spec.backups:
        return ()
    advice = "export TF_VAR_backups_password with a password of your own, which ftkit does not store"
    return (Check("TF_VAR_backups_password is set", ("printenv", "TF_VAR_backups_password"), advice),)


def _variables(name: str, spec: SoperatorSpec) -> dict[str, Any]:
    return {
        "company_name": name,
        "slurm_operator_version": spec.release.removeprefix("soperator-v").partition("-")[0],
        "filestore_jail": {"spec": _file_system(spec.jail_gib)},
        "filestore_jail_submounts": [
            {"name": each.name, "mount_path": each.mount_path, "spec": _file_system(each.size_gib)}
            for each in spec.submounts
        ],
        "filestore_controller_spool": {"spec": _file_system(128)},
        "slurm_nodeset_workers": [_workers(each) for each in spec.workers],
        "slurm_login_ssh_root_public_keys": list(spec.ssh_public_keys),
        "backups_enabled": "auto" if spec.backups else "force_disable",
        "backups_schedule": "@daily-random",
        "backups_prune_schedule": "@daily-random",
        "backups_retention": {"keepDaily": 7},
    }


def _file_system(size_gib: int) -> dict[str, int]:
    return {"size_gibibytes": size_gib, "block_size_kibibytes": 4}


def _workers(spec: WorkersSpec) -> dict[str, Any]:
    platform = f"gpu-{spec.gpu}-sxm"
    cluster = {} if spec.fabric is None else {"gpu_cluster": {"infiniband_fabric": spec.fabric}}
    return {
        "size": spec.num_nodes,
        "nodes_per_nodegroup": next(size for size in (4, 3, 2, 1) if spec.num_nodes % size == 0),
        "max_unavailable_percent": 50,
        "resource": {"platform": platform, "preset": _PRESETS[spec.gpu, spec.gpus_per_node]},
        "boot_disk": {"type": "NETWORK_SSD", "size_gibibytes": 512, "block_size_kibibytes": 4},
    } | cluster


def _script(spec: SoperatorSpec) -> str:
    """Return a script that runs Terraform in the environment of the library's `.envrc`: token, subnet, state bucket.

    The token stays in the environment of that process.
    """
    values = {
        "NEBIUS_TENANT_ID": spec.tenant_id,
        "NEBIUS_PROJECT_ID": spec.project_id,
        "NEBIUS_REGION": spec.region,
    }
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
    return f"""#!/usr/bin/env bash
# Runs Terraform in the installation's folder, with the environment that its .envrc sets up.
set -eo pipefail
{exports}
export TF_VAR_backups_password="${{TF_VAR_backups_password:-}}"
cd "$(dirname "$0")/{_INSTALLATION}"
source .envrc >&2
exec terraform "$@"
"""
