"""The steps that create clusters at each provider, as data: Google Cloud's Slurm and VMs, and Nebius's Soperator."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass, replace

from ftkit import assets
from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import ConfigError, Problem
from ftkit.files import to_json
from ftkit.provision.settings import AnySpec, GcpSlurmSpec, GcpVmSpec, Kind, SoperatorSpec
from ftkit.provision.steps import FOLDER, Check, Provision, Step

_ACCOUNT = Check(
    "a Google Cloud account is active",
    "gcloud auth list --filter=status:ACTIVE '--format=value(account)'",
    "log in with: gcloud auth login",
    lambda output: None if output.strip() else "none is",
)
_TERRAFORM = Check("Terraform is installed", "terraform version", "install it: developer.hashicorp.com/terraform")
_OUT_OF_STOCK = "ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources"
_OUT_OF_QUOTA = "Quota .* exceeded|QUOTA_EXCEEDED"
"""Patterns in the output of failed commands on Google Cloud."""
_IN_CONSOLE = "in the console, under IAM & Admin, Quotas; then repeat the command"


def plan_provision(name: str, kind: Kind, spec: AnySpec) -> Provision:
    if not re.fullmatch("[a-z][a-z0-9]{1,19}", name):
        fix = "Use 2 to 20 lowercase letters and digits, a letter first."
        raise ConfigError([Problem(COMMAND_LINE, "NAME", f"'{name}' can't be a cluster's name.", fix)])
    match spec:
        case GcpVmSpec():
            return _plan_gcp_vm(name, spec)
        case SoperatorSpec():
            return _plan_soperator(name, spec)
        case GcpSlurmSpec():
            return _plan_gcp_slurm(name, kind, spec)


# --- One VM on Google Cloud, accessible through Identity-Aware Proxy, without a public address ---------


def _plan_gcp_vm(name: str, spec: GcpVmSpec) -> Provision:
    """Describe a VM with its network; existing parts are used, and stay when it is destroyed."""
    project, region, zone = f"--project={spec.project}", f"--region={spec.region}", f"--zone={spec.zone}"
    network, router = f"{name}-net", f"{name}-router"
    gcloud = "gcloud compute"
    ssh = f"{gcloud} ssh {name} {project} {zone} --tunnel-through-iap"
    zones = f"{gcloud} machine-types list {project} --filter='name={spec.machine_type}' --format='value(zone)'"
    spot = " --provisioning-model=SPOT --instance-termination-action=STOP" if spec.spot else ""

    def step(title: str, kind: str, resource: str, options: str, place: str = "") -> Step:
        return Step(
            kind, title, f"{gcloud} {kind} create {resource} {project}{place} {options}",
            existing=f"{gcloud} {kind} list {project} --filter=name={resource} '--format=value(name)'",
            undo=(f"{gcloud} {kind} delete {resource} {project}{place} --quiet",),
        )  # fmt: skip

    nats = f"{gcloud} routers nats"
    of_router = f"{project} {region} --router={router}"
    vm = step(
        f"VM {name}, {spec.machine_type}", "instances", name,
        f"--machine-type={spec.machine_type} --image-family={spec.image_family} "
        f"--image-project=deeplearning-platform-release --boot-disk-size={spec.disk_gib}GB "
        f"--boot-disk-type=pd-balanced --network={network} --no-address --maintenance-policy=TERMINATE "
        f"--scopes=storage-full,cloud-platform --metadata=install-nvidia-driver=True{spot}", f" {zone}",
    )  # fmt: skip
    steps = (
        step(f"network {network}", "networks", network, "--subnet-mode=auto"),
        step("a rule that lets Identity-Aware Proxy reach SSH", "firewall-rules", f"{name}-iap",
             f"--network={network} --direction=INGRESS --allow=tcp:22 "
             "--source-ranges=35.235.240.0/20"),  # from which Identity-Aware Proxy connects
        step(f"router {router}", "routers", router, f"--network={network}", f" {region}"),
        Step("nat", "NAT, so that the VM reaches the internet",
             f"{nats} create {name}-nat {of_router} --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges",
             existing=f"{nats} list {of_router} --filter=name={name}-nat '--format=value(name)'",
             undo=(f"{nats} delete {name}-nat {of_router} --quiet",)),
        replace(vm, minutes=2),
        # The image installs its driver at the first start, which takes a few minutes.
        Step("gpu", "the GPU's driver", minutes=5,
             command=f"{ssh} '--command=for i in $(seq 60); do nvidia-smi && exit 0; sleep 10; done; exit 1'"),
    )  # fmt: skip
    return Provision(
        name, "gcp-vm-l4", files={}, steps=steps,
        checks=(
            _ACCOUNT,
            Check(f"zone {spec.zone} has {spec.machine_type}",
                  f"{gcloud} machine-types list {project} --zones={spec.zone} --filter=name={spec.machine_type} "
                  "'--format=value(name)'", f"choose another zone: {zones}",
                  lambda output: None if output.strip() else "not available there"),
        ),
        status=(f"{gcloud} instances list {project} --filter=name={name} "
                "'--format=table(name,zone.basename(),machineType.basename(),status)'"),
        cost=f"about {spec.price_per_hour:.2f} US dollars per hour, even idle, until 'ftkit cluster destroy {name}'",
        advice={
            _OUT_OF_STOCK: f"{spec.zone} is out of stock: destroy the cluster, and create it in another zone: {zones}",
            _OUT_OF_QUOTA: f"ask for more quota (GPUS_ALL_REGIONS and the GPU's own) {_IN_CONSOLE}",
            "SERVICE_DISABLED|has not been used in project": "gcloud services enable compute.googleapis.com "
            f"iap.googleapis.com {project}",
        },
        next_steps=(
            ssh,
            "python3 -m venv ~/ftkit && ~/ftkit/bin/pip install 'ftkit[train]'  # on the VM",
            "ftkit run gemma3-1b-dolly-lora  # there; it continues if the connection drops: 'ftkit logs last -f'",
        ),
    )  # fmt: skip


# --- Slurm on Google Cloud with the Cluster Toolkit: A3 Mega, A3 Ultra and A4 ------------------------

_TOOLKIT = "https://github.com/GoogleCloudPlatform/cluster-toolkit"
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
_QUOTA = "HighScaleSSDStorageGibPerRegion"


@dataclass(frozen=True)
class _Blueprint:
    """Differences between the toolkit's blueprints."""

    path: str
    prefix: str
    groups: tuple[str, ...]  # of the first phase; the last one builds the operating system's image
    nodeset: str  # id of the GPU nodes' module
    network: str  # id of the module of /home's network
    has_lustre: bool = True


_BLUEPRINTS = {
    "a3-megagpu-8g": _Blueprint("a3-megagpu-8g/a3mega-slurm-blueprint.yaml", "a3mega",
                                ("primary", "build_script", "slurm-build"), "a3mega_nodeset", "sysnet"),
    "a3-ultragpu-8g": _Blueprint("a3-ultragpu-8g/a3ultra-slurm-blueprint.yaml", "a3u", ("image-env", "image"),
                                 "a3_ultra_nodeset", "a3ultra-slurm-net-0"),
    "a4-highgpu-8g": _Blueprint("a4-highgpu-8g/a4high-slurm-blueprint.yaml", "a4h", ("image-env", "image"),
                                "a4high_nodeset", "a4high-slurm-net-0", has_lustre=False),
}  # fmt: skip


def _plan_gcp_slurm(name: str, kind: Kind, spec: GcpSlurmSpec) -> Provision:
    """Describe a Slurm cluster: an image once, then the cluster, each by the toolkit's `gcluster deploy`."""
    blueprint, project = _BLUEPRINTS[kind], f"--project={spec.project}"
    prefix = blueprint.prefix
    variables: dict[str, object] = {
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
        variables |= {
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
    deployment = {"terraform_backend_defaults": backend, "vars": variables}
    return Provision(
        name, kind,
        files={
            "deployment.yaml": json.dumps(deployment, indent=2) + "\n",  # YAML too, with every value quoted
            "changes.json": to_json(_changes(blueprint, spec)),
        },
        checks=(
            _ACCOUNT,
            Check(f"project {spec.project} is accessible",
                  f"gcloud projects describe {spec.project} '--format=value(projectId)'",
                  "check the project's id, and your account's permissions"),
            _TERRAFORM,
            Check("Packer is installed", "packer version", "install it: developer.hashicorp.com/packer"),
            Check("Go is installed, to build gcluster", "go version", "install it: go.dev/doc/install"),
            *([Check(f"quota {_QUOTA} in {spec.region}",
                     f"gcloud beta quotas info describe {_QUOTA} --service=file.googleapis.com {project} "
                     "'--format=json(dimensionsInfos)'", "ask for more, or set filestore_tier=BASIC_SSD",
                     lambda output: quota_problem(output, spec.region, spec.filestore_gib))]
              if spec.filestore_tier == "HIGH_SCALE_SSD" else []),
        ),
        steps=_gcp_slurm_steps(name, spec, blueprint),
        status=f"gcloud compute instances list {project} --filter=labels.ghpc_deployment={name} "
        "'--format=table(name,zone.basename(),status)'",
        cost="GPU nodes, login node, controller and /home cost money until 'ftkit cluster destroy', even when idle",
        advice={
            _OUT_OF_STOCK: f"{spec.zone} is out of {kind}: use "
            "another zone, a reservation, or flex_start=true, which waits for nodes",
            _OUT_OF_QUOTA: f"ask for more quota {_IN_CONSOLE}",
            "oauth2|reauth|could not find default credentials": "log in with: gcloud auth application-default login",
        },
        next_steps=(
            (f"gcloud compute ssh {project} --zone={spec.zone} --tunnel-through-iap "
             f"$(gcloud compute instances list {project} --filter='name~login' --format='value(name)')"),
            f"ftkit run --cluster {kind} --image olmo3:25.02 --nodes {spec.num_nodes}",
        ),
    )  # fmt: skip


def _changes(blueprint: _Blueprint, spec: GcpSlurmSpec) -> dict[str, object]:
    changes: dict[str, object] = {}
    if spec.reservation is None:  # nodes are allocated one by one: a compact placement would fail
        changes[blueprint.nodeset] = {"settings": {"enable_placement": False}}
    if spec.filestore_tier is not None:
        size = {"filestore_tier": spec.filestore_tier, "size_gb": spec.filestore_gib}
        changes["homefs"] = {"settings": size}
        if blueprint.has_lustre:
            protected = {"enabled": True, "reason": "ftkit cluster destroy disables it"}
            changes["homefs"] = {
                "source": "modules/file-system/filestore",
                "use": [blueprint.network],
                "settings": {**size, "local_mount": "/home", "deletion_protection": protected},
            }
    return changes


def quota_problem(output: str, region: str, wanted: int) -> str | None:
    """Return the shortfall of a quota, from the output of `gcloud beta quotas info describe`; None if it is enough."""
    try:
        infos = json.loads(output)["dimensionsInfos"]
        values = [int(each["details"]["value"]) for each in infos
                  if region in each.get("applicableLocations", [region])]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return "gcloud's answer can't be read"
    most = max(values, default=0)
    return None if -1 in values or most >= wanted else f"{most} GiB of the required {wanted} GiB"  # -1: unlimited


def _gcp_slurm_steps(name: str, spec: GcpSlurmSpec, blueprint: _Blueprint) -> tuple[Step, ...]:
    project, bucket, account = f"--project={spec.project}", f"gs://{spec.bucket}", spec.service_account
    python = f"{shlex.quote(sys.executable)} -m ftkit.provision.gcp_programs"
    own_state = f"{spec.bucket} {FOLDER}/blueprint.yaml {name}"  # the blueprint's name is a part of its path
    member = f"serviceAccount:{account}"
    binding = f"{spec.project} --member={member} --role=roles/{{}} --condition=None --format=none"
    roles = (
        Step(
            f"role-{role}", f"role {role} of the nodes' service account",
            f"gcloud projects add-iam-policy-binding {binding.format(role)}",
            existing=f"gcloud projects get-iam-policy {spec.project} '--flatten=bindings[].members' '--filter="
            f"bindings.role=roles/{role} AND bindings.members={member}' '--format=value(bindings.role)'",
            undo=(f"gcloud projects remove-iam-policy-binding {binding.format(role)}",),
            users=(
                (f"gcloud compute instances list {project} '--filter=serviceAccounts.email={account} "
                 f"AND NOT labels.ghpc_deployment={name}' '--format=value(selfLink.basename())'"),
                f"{python} state clusters {own_state}",
            ),
        )
        for role in _ROLES
    )  # fmt: skip
    gcluster = f"{FOLDER}/toolkit/gcluster"
    deploy = f"{gcluster} deploy --deployment-file deployment.yaml --auto-approve --overwrite-deployment blueprint.yaml"
    undo = f"{gcluster} destroy {FOLDER}/{name} --auto-approve"
    skip = f"--skip {blueprint.groups[-1]}"
    filestores = f"gcloud filestore instances {{}} {project}"
    protected = f"labels.ghpc_deployment={name} AND deletionProtectionEnabled=true"
    unprotect = shlex.join(["bash", "-c", (  # Filestores of the deployment; others can't be deleted while it is set
        f"set -o pipefail; {filestores.format('list')} '--filter={protected}' '--format=value(name.basename())' | "
        f"xargs -rI@ {filestores.format('update @')} --location={spec.zone} --no-deletion-protection"
    )])  # fmt: skip
    return (
        Step("services", "the project's APIs, enabled",
             f"gcloud services enable {project} " + " ".join(f"{each}.googleapis.com" for each in _SERVICES)),
        *roles,
        Step("bucket", f"bucket {bucket} for Terraform's state",
             f"gcloud storage buckets create {bucket} {project} --location={spec.region} --uniform-bucket-level-access",
             existing=f"gcloud storage buckets list {project} --filter=name={spec.bucket} '--format=value(name)'",
             undo=(f"gcloud storage buckets delete {bucket} {project} --quiet",),  # fails unless it is empty
             users=(f"{python} state others {own_state}",)),
        Step("toolkit", f"Cluster Toolkit {spec.toolkit_version}",
             f"git clone --quiet --depth=1 --branch={spec.toolkit_version} {_TOOLKIT} toolkit"),
        Step("gcluster", "the toolkit's program gcluster", "make -C toolkit gcluster", minutes=2),
        Step("blueprint", "the blueprint, with the changes in changes.json",
             f"{python} blueprint toolkit/examples/machine-learning/{blueprint.path} changes.json blueprint.yaml"),
        Step("state", "a place for this cluster's Terraform state in the bucket",
             f"{python} state claim {own_state}"),  # nothing to undo: where it fails, the state is another cluster's
        Step("image", "the nodes' operating system as an image", f"{deploy} --only {','.join(blueprint.groups)}",
             undo=(undo, f"{python} state remove {own_state}"), minutes=35, is_image=True),
        Step("cluster", f"networks, /home, controller, login node and {spec.num_nodes} GPU nodes",
             f"{deploy} {skip}", minutes=20,
             undo=(unprotect, f"{undo} {skip}")),
    )  # fmt: skip


# --- Slurm on Kubernetes at Nebius: Soperator, by Terraform -------------------------------------------

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

_RUN_TERRAFORM = """#!/usr/bin/env bash
# Runs Terraform in the installation's folder, with the environment that its .envrc sets up.
set -eo pipefail
export NEBIUS_TENANT_ID={spec.tenant_id}
export NEBIUS_PROJECT_ID={spec.project_id}
export NEBIUS_REGION={spec.region}
export TF_VAR_backups_password="${{TF_VAR_backups_password:-}}"
cd "$(dirname "$0")/{installation}"
source .envrc >&2
exec terraform "$@"
"""
"""The token, the subnet and the state bucket stay in the environment of that process."""


def _plan_soperator(name: str, spec: SoperatorSpec) -> Provision:
    """Describe a Soperator cluster: Terraform's variables, and a script that sets up its environment."""
    changes = f"-input=false -auto-approve -var-file={FOLDER}/ftkit.tfvars.json"
    return Provision(
        name, "soperator",
        files={
            "ftkit.tfvars.json": json.dumps(_variables(name, spec), indent=2) + "\n",
            "terraform.sh": _RUN_TERRAFORM.format(spec=spec, installation=_INSTALLATION),
            "claim.sh": (assets.SHELL / "soperator-claim.sh").read_text(encoding="utf-8"),
        },
        checks=(
            Check("a Nebius account is active", "nebius iam whoami", "log in with: nebius profile create"),
            _TERRAFORM,
            Check("jq is installed, for .envrc", "jq --version", "install it with the system's package manager"),
        ),
        steps=(
            Step("library", f"Nebius's solutions library {spec.release}",
                 f"git clone --quiet --depth=1 --branch={spec.release} {_LIBRARY} library"),
            Step("example", "the installation without the example's own variables",
                 f"rm -f {_INSTALLATION}/terraform.tfvars"),
            Step("init", "Terraform's providers and state",  # .envrc names one state for all clusters of the project
                 f"bash terraform.sh init -input=false -backend-config=key=ftkit/{name}.tfstate", minutes=2),
            Step("state", "this cluster's Terraform state, still empty", "bash claim.sh"),
            Step("cluster", f"Kubernetes, file systems and {sum(each.num_nodes for each in spec.workers)} GPU nodes",
                 f"bash terraform.sh apply {changes}", undo=(f"bash terraform.sh destroy {changes}",), minutes=40),
        ),
        status="bash terraform.sh output",
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


def _variables(name: str, spec: SoperatorSpec) -> dict[str, object]:
    def file_system(size_gib: int) -> dict[str, dict[str, int]]:
        return {"spec": {"size_gibibytes": size_gib, "block_size_kibibytes": 4}}

    workers = []
    for each in spec.workers:
        nodes = {
            "size": each.num_nodes,
            "nodes_per_nodegroup": next(size for size in (4, 3, 2, 1) if each.num_nodes % size == 0),
            "max_unavailable_percent": 50,
            "resource": {"platform": f"gpu-{each.gpu}-sxm", "preset": _PRESETS[each.gpu, each.gpus_per_node]},
            "boot_disk": {"type": "NETWORK_SSD", "size_gibibytes": 512, "block_size_kibibytes": 4},
        }
        workers.append(nodes if each.fabric is None else nodes | {"gpu_cluster": {"infiniband_fabric": each.fabric}})
    return {
        "company_name": name,
        "slurm_operator_version": spec.release.removeprefix("soperator-v").partition("-")[0],
        "filestore_jail": file_system(spec.jail_gib),
        "filestore_jail_submounts": [
            {"name": each.name, "mount_path": each.mount_path} | file_system(each.size_gib) for each in spec.submounts
        ],
        "filestore_controller_spool": file_system(128),
        "slurm_nodeset_workers": workers,
        "slurm_login_ssh_root_public_keys": list(spec.ssh_public_keys),
        "backups_enabled": "force_disable",
        "backups_schedule": "@daily-random",
        "backups_prune_schedule": "@daily-random",
        "backups_retention": {"keepDaily": 7},
    }
