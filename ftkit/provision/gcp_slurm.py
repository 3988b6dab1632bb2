"""Slurm on Google Cloud with the Cluster Toolkit: A3 Mega, A3 Ultra and A4."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftkit.files import to_json
from ftkit.provision.steps import ACCOUNT_CHECK, FOLDER, OUT_OF_QUOTA, OUT_OF_STOCK, Check, Provision, Step

if TYPE_CHECKING:
    from ftkit.provision.spec import GcpSlurmKind, GcpSlurmSpec
    from ftkit.provision.steps import Command

_TOOLKIT = "https://github.com/GoogleCloudPlatform/cluster-toolkit"
_BLUEPRINT = "blueprint.yaml"
_ROLES = (
    "compute.instanceAdmin.v1", "compute.networkAdmin", "compute.securityAdmin", "file.editor",
    "iam.serviceAccountUser", "iap.tunnelResourceAccessor", "logging.logWriter", "monitoring.metricWriter",
    "storage.objectAdmin",
)  # fmt: skip
"""Required roles of the nodes' service account."""
_SERVICES = (
    "cloudresourcemanager", "compute", "file", "iam", "iap", "logging", "lustre", "monitoring", "secretmanager",
    "servicenetworking", "storage",
)  # fmt: skip
_FILESTORE_QUOTA = "HighScaleSSDStorageGibPerRegion"


@dataclass(frozen=True)
class _Blueprint:
    """Differences between the toolkit's blueprints.

    Attributes:
        path: path in the toolkit.
        prefix: prefix of the variables for reservation, flex start and spot.
        image_group: the deployment group that builds the operating system's image.
        first_groups: deployment groups of the first phase, up to the image.
        nodeset, home: ids of the modules of the GPU nodes and of /home.
        network: id of the module with /home's network.
        has_lustre: whether /home is Managed Lustre, not Filestore.
    """

    path: str
    prefix: str
    image_group: str
    first_groups: tuple[str, ...]
    nodeset: str
    network: str
    home: str = "homefs"
    has_lustre: bool = False


_EXAMPLES = "examples/machine-learning"
_BLUEPRINTS: dict[GcpSlurmKind, _Blueprint] = {
    "a3-megagpu-8g": _Blueprint(
        f"{_EXAMPLES}/a3-megagpu-8g/a3mega-slurm-blueprint.yaml", "a3mega", "slurm-build",
        ("primary", "build_script", "slurm-build"), "a3mega_nodeset", "sysnet",
        has_lustre=True,
    ),
    "a3-ultragpu-8g": _Blueprint(
        f"{_EXAMPLES}/a3-ultragpu-8g/a3ultra-slurm-blueprint.yaml", "a3u", "image", ("image-env", "image"),
        "a3_ultra_nodeset", "a3ultra-slurm-net-0", has_lustre=True,
    ),
    "a4-highgpu-8g": _Blueprint(
        f"{_EXAMPLES}/a4-highgpu-8g/a4high-slurm-blueprint.yaml", "a4h", "image", ("image-env", "image"),
        "a4high_nodeset", "a4high-slurm-net-0",
    ),
}  # fmt: skip


def plan_gcp_slurm(name: str, kind: GcpSlurmKind, spec: GcpSlurmSpec) -> Provision:
    """Describe a Slurm cluster: an image once, then the cluster, each by the toolkit's `gcluster deploy`."""
    blueprint = _BLUEPRINTS[kind]
    changes = _changes(blueprint, spec)
    return Provision(
        name=name,
        kind=kind,
        files={
            "deployment.yaml": _deployment(name, kind, spec, blueprint),
            "changes.json": to_json(changes),
        },
        checks=_checks(spec),
        steps=(*_project_steps(name, spec), *_toolkit_steps(name, spec, blueprint)),
        status=(
            ("gcloud", "compute", "instances", "list", f"--project={spec.project}",
             f"--filter=labels.ghpc_deployment={name}", "--format=table(name,zone.basename(),status)"),
        ),
        cost="GPU nodes, login node, controller and /home cost money until 'ftkit cluster destroy', even when idle",
        advice={
            OUT_OF_STOCK: f"{spec.zone} is out of {kind}: use "
            "another zone, a reservation, or flex_start=true, which waits for nodes",
            OUT_OF_QUOTA: "ask for more quota in the console, under IAM & Admin, Quotas; then "
            "repeat the command",
            "oauth2|reauth|could not find default credentials": "log in with: gcloud auth application-default login",
        },
        next_steps=(
            (f"gcloud compute ssh --project={spec.project} --zone={spec.zone} --tunnel-through-iap "
            f"$(gcloud compute instances list --project={spec.project} --filter='name~login' --format='value(name)')"),
            f"ftkit run --cluster {kind} --image olmo3:25.02 --nodes {spec.num_nodes}",
        ),
    )  # fmt: skip


def _deployment(name: str, kind: GcpSlurmKind, spec: GcpSlurmSpec, blueprint: _Blueprint) -> str:
    """Return the toolkit's deployment file. JSON is YAML too, and quotes every value."""
    prefix = blueprint.prefix
    values: dict[str, Any] = {
        "enable_slurm_auth": True,
        "deployment_name": name,
        "project_id": spec.project,
        "region": spec.region,
        "zone": spec.zone,
        f"{prefix}_cluster_size": spec.num_nodes,
        f"{prefix}_reservation_name": spec.reservation or "",
        f"{prefix}_dws_flex_enabled": spec.flex_start,
        f"{prefix}_enable_spot_vm": spec.spot,
    }
    if kind == "a3-megagpu-8g":
        values |= {
            "slurm_cluster_name": name,
            "network_name_system": f"{name}-sysnet",
            "subnetwork_name_system": f"{name}-sysnet-sub",
            "final_image_family": f"{name}-slurm",
            "enable_ops_agent": True,
            "enable_nvidia_dcgm": True,
            "enable_nvidia_persistenced": True,
            "disk_size_gb": 200,
        }
    backend = {"type": "gcs", "configuration": {"bucket": spec.bucket}}
    return json.dumps({"terraform_backend_defaults": backend, "vars": values}, indent=2) + "\n"


def _changes(blueprint: _Blueprint, spec: GcpSlurmSpec) -> dict[str, Any]:
    """Return the changes to the toolkit's blueprint: fields of modules, by module id."""
    changes: dict[str, Any] = {}
    if spec.reservation is None:  # nodes are allocated one by one: a compact placement would fail
        changes[blueprint.nodeset] = {"settings": {"enable_placement": False}}
    if spec.filestore_tier is not None:
        size = {"filestore_tier": spec.filestore_tier, "size_gb": spec.filestore_gib}
        changes[blueprint.home] = {"settings": size}
        if blueprint.has_lustre:
            protected = {"enabled": True, "reason": "ftkit cluster destroy disables it"}
            changes[blueprint.home] = {
                "source": "modules/file-system/filestore",
                "use": [blueprint.network],
                "settings": {**size, "local_mount": "/home", "deletion_protection": protected},
            }
    return changes


def _checks(spec: GcpSlurmSpec) -> tuple[Check, ...]:
    checks = [
        ACCOUNT_CHECK,
        Check(
            f"project {spec.project} is accessible",
            ("gcloud", "projects", "describe", spec.project, "--format=value(projectId)"),
            "check the project's id, and your account's permissions",
        ),
        Check("Terraform is installed", ("terraform", "version"), "install it: developer.hashicorp.com/terraform"),
        Check("Packer is installed", ("packer", "version"), "install it: developer.hashicorp.com/packer"),
        Check("Go is installed, to build gcluster", ("go", "version"), "install it: go.dev/doc/install"),
    ]
    if spec.filestore_tier == "HIGH_SCALE_SSD":
        checks.append(
            Check(
                f"quota {_FILESTORE_QUOTA} in {spec.region}",
                ("gcloud", "beta", "quotas", "info", "describe", _FILESTORE_QUOTA, "--service=file.googleapis.com",
                 f"--project={spec.project}", "--format=json(dimensionsInfos)"),
                "ask for more, or set filestore_tier=BASIC_SSD",
                lambda output: quota_problem(output, spec.region, spec.filestore_gib),
            )
        )  # fmt: skip
    return tuple(checks)


def quota_problem(output: str, region: str, wanted: int) -> str | None:
    """Return the shortfall of a quota, from the output of `gcloud beta quotas info describe`; None if it is enough."""
    try:
        infos = json.loads(output)["dimensionsInfos"]
        values = [
            int(info["details"]["value"]) for info in infos if region in info.get("applicableLocations", [region])
        ]
    except (ValueError, KeyError, TypeError):
        return "gcloud's answer can't be read"
    most = max(values, default=0)
    # -1: no limit
    return None if -1 in values or most >= wanted else f"{most} GiB of the required {wanted} GiB"


def _project_steps(name: str, spec: GcpSlurmSpec) -> tuple[Step, ...]:
    project = f"--project={spec.project}"
    member = f"serviceAccount:{spec.service_account}"
    bucket = f"gs://{spec.bucket}"
    services = Step(
        "services", "the project's APIs, enabled",
        ("gcloud", "services", "enable", project, *(f"{name}.googleapis.com" for name in _SERVICES)),
    )  # fmt: skip
    roles = (
        Step(
            f"role-{role}", f"role {role} of the nodes' service account",
            ("gcloud", "projects", "add-iam-policy-binding", spec.project, f"--member={member}",
             f"--role=roles/{role}", "--condition=None", "--format=none"),
            existing=("gcloud", "projects", "get-iam-policy", spec.project, "--flatten=bindings[].members",
                      f"--filter=bindings.role=roles/{role} AND bindings.members={member}",
                      "--format=value(bindings.role)"),
            undo=(("gcloud", "projects", "remove-iam-policy-binding", spec.project, f"--member={member}",
                   f"--role=roles/{role}", "--condition=None", "--format=none"),),
            users=(
                ("gcloud", "compute", "instances", "list", project,
                 f"--filter=serviceAccounts.email={spec.service_account} AND NOT labels.ghpc_deployment={name}",
                 "--format=value(selfLink.basename())"),
                _state(name, spec, "clusters"),
            ),
        )
        for role in _ROLES
    )  # fmt: skip
    state = Step(
        "bucket", f"bucket {bucket} for Terraform's state",
        ("gcloud", "storage", "buckets", "create", bucket, project, f"--location={spec.region}",
         "--uniform-bucket-level-access"),
        existing=("gcloud", "storage", "buckets", "list", project, f"--filter=name={spec.bucket}",
                  "--format=value(name)"),
        undo=(("gcloud", "storage", "buckets", "delete", bucket, project, "--quiet"),),  # fails unless it is empty
        users=(_state(name, spec, "others"),),
    )  # fmt: skip
    return (services, *roles, state)


def _program(*words: str) -> Command:
    return (sys.executable, "-m", "ftkit.provision.gcp_programs", *words)


def _state(name: str, spec: GcpSlurmSpec, verb: str) -> Command:
    """Return a command on the cluster's Terraform state, of which the blueprint's name is a part of the path."""
    return _program("state", verb, spec.bucket, f"{FOLDER}/{_BLUEPRINT}", name)


def _toolkit_steps(name: str, spec: GcpSlurmSpec, blueprint: _Blueprint) -> tuple[Step, ...]:
    gcluster = f"{FOLDER}/toolkit/gcluster"
    deploy: Command = (gcluster, "deploy", "--deployment-file", "deployment.yaml", "--auto-approve",
                       "--overwrite-deployment", _BLUEPRINT)  # fmt: skip
    deployment = f"{FOLDER}/{name}"
    unprotect = _program("unprotect", spec.project, spec.zone, name)
    return (
        Step(
            "toolkit", f"Cluster Toolkit {spec.toolkit_version}",
            ("git", "clone", "--quiet", "--depth=1", f"--branch={spec.toolkit_version}", _TOOLKIT, "toolkit"),
        ),
        Step("gcluster", "the toolkit's program gcluster", ("make", "-C", "toolkit", "gcluster"), minutes=2),
        Step(
            "blueprint", "the blueprint, with the changes in changes.json",
            _program("blueprint", f"toolkit/{blueprint.path}", "changes.json",
             _BLUEPRINT),
        ),
        Step(
            "state", "a place for this cluster's Terraform state in the bucket",
            _state(name, spec, "claim"),  # nothing to undo: where it fails, the state is another cluster's
        ),
        Step(
            "image", "the nodes' operating system as an image",
            (*deploy, "--only", ",".join(blueprint.first_groups)),
            undo=((gcluster, "destroy", deployment, "--auto-approve"), _state(name, spec, "remove")),
            minutes=35, is_image=True,
        ),
        Step(
            "cluster", f"networks, /home, controller, login node and {spec.num_nodes} GPU nodes",
            (*deploy, "--skip", blueprint.image_group),
            undo=(unprotect, (gcluster, "destroy", deployment, "--auto-approve", "--skip", blueprint.image_group)),
            minutes=20,
        ),
    )  # fmt: skip
