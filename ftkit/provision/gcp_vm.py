"""One VM with a GPU on Google Cloud, accessible through Identity-Aware Proxy, without a public address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.provision.steps import ACCOUNT_CHECK, OUT_OF_QUOTA, OUT_OF_STOCK, Check, Provision, Step

if TYPE_CHECKING:
    from ftkit.provision.spec import GcpVmSpec
    from ftkit.provision.steps import Command

_COMPUTE = ("gcloud", "compute")
_IAP_RANGE = "35.235.240.0/20"
"""Addresses from which Identity-Aware Proxy connects."""
_GPU_CHECK = "for i in $(seq 60); do nvidia-smi && exit 0; sleep 10; done; exit 1"
"""The image installs its driver at the first start, which takes a few minutes."""


def plan_gcp_vm(name: str, spec: GcpVmSpec) -> Provision:
    """Describe a VM with its network; existing parts are used, and stay when it is destroyed."""
    project = f"--project={spec.project}"
    ssh = (*_COMPUTE, "ssh", name, project, f"--zone={spec.zone}", "--tunnel-through-iap")
    return Provision(
        name=name,
        kind="gcp-vm-l4",
        files={},
        checks=(
            ACCOUNT_CHECK,
            Check(
                f"zone {spec.zone} has {spec.machine_type}",
                (*_COMPUTE, "machine-types", "list", project, f"--zones={spec.zone}",
                 f"--filter=name={spec.machine_type}", "--format=value(name)"),
                f"choose another zone: {_list_zones(spec)}",
                lambda output: None if output.strip() else "not available there",
            ),
        ),
        steps=_steps(name, spec, ssh),
        status=(
            (*_COMPUTE, "instances", "list", project, f"--filter=name={name}",
             "--format=table(name,zone.basename(),machineType.basename(),status)"),
        ),
        cost=f"about {spec.price_per_hour:.2f} US dollars per hour, even idle, until 'ftkit cluster destroy {name}'",
        advice={
            OUT_OF_STOCK: f"{spec.zone} is out of stock: "
            f"destroy the cluster, and create it in another zone: {_list_zones(spec)}",
            OUT_OF_QUOTA: "ask for more quota (GPUS_ALL_REGIONS and the GPU's own) in the "
            "console, under IAM & Admin, Quotas; then repeat the command",
            "SERVICE_DISABLED|has not been used in project": f"gcloud services enable compute.googleapis.com "
            f"iap.googleapis.com --project={spec.project}",
        },
        next_steps=(
            " ".join(ssh),
            "python3 -m venv ~/ftkit && ~/ftkit/bin/pip install 'ftkit[train]'  # on the VM",
            "ftkit run gemma3-1b-dolly-lora  # there; it continues if the connection drops: 'ftkit logs last -f'",
        ),
    )  # fmt: skip


def _steps(name: str, spec: GcpVmSpec, ssh: Command) -> tuple[Step, ...]:
    project, region, zone = f"--project={spec.project}", f"--region={spec.region}", f"--zone={spec.zone}"
    network, router = f"{name}-net", f"{name}-router"

    def listed(kind: str, value: str) -> Command:
        return (*_COMPUTE, kind, "list", project, f"--filter=name={value}", "--format=value(name)")

    return (
        Step(
            "network", f"network {network}",
            (*_COMPUTE, "networks", "create", network, project, "--subnet-mode=auto"),
            existing=listed("networks", network),
            undo=((*_COMPUTE, "networks", "delete", network, project, "--quiet"),),
        ),
        Step(
            "firewall", "a rule that lets Identity-Aware Proxy reach SSH",
            (*_COMPUTE, "firewall-rules", "create", f"{name}-iap", project, f"--network={network}",
             "--direction=INGRESS", "--allow=tcp:22", f"--source-ranges={_IAP_RANGE}"),
            existing=listed("firewall-rules", f"{name}-iap"),
            undo=((*_COMPUTE, "firewall-rules", "delete", f"{name}-iap", project, "--quiet"),),
        ),
        Step(
            "router", f"router {router}",
            (*_COMPUTE, "routers", "create", router, project, region, f"--network={network}"),
            existing=listed("routers", router),
            undo=((*_COMPUTE, "routers", "delete", router, project, region, "--quiet"),),
        ),
        Step(
            "nat", "NAT, so that the VM reaches the internet",
            (*_COMPUTE, "routers", "nats", "create", f"{name}-nat", project, region, f"--router={router}",
             "--auto-allocate-nat-external-ips", "--nat-all-subnet-ip-ranges"),
            existing=(*_COMPUTE, "routers", "nats", "list", project, region, f"--router={router}",
                      f"--filter=name={name}-nat", "--format=value(name)"),
            undo=((*_COMPUTE, "routers", "nats", "delete", f"{name}-nat", project, region, f"--router={router}",
                   "--quiet"),),
        ),
        Step(
            "vm", f"VM {name}, {spec.machine_type}",
            (*_COMPUTE, "instances", "create", name, project, zone, f"--machine-type={spec.machine_type}",
             f"--image-family={spec.image_family}", "--image-project=deeplearning-platform-release",
             f"--boot-disk-size={spec.disk_gib}GB", "--boot-disk-type=pd-balanced", f"--network={network}",
             "--no-address", "--maintenance-policy=TERMINATE", "--scopes=storage-full,cloud-platform",
             "--metadata=install-nvidia-driver=True",
             *(("--provisioning-model=SPOT", "--instance-termination-action=STOP") if spec.spot else ())),
            existing=listed("instances", name),
            undo=((*_COMPUTE, "instances", "delete", name, project, zone, "--quiet"),),
            minutes=2,
        ),
        Step("gpu", "the GPU's driver", (*ssh, f"--command={_GPU_CHECK}"), minutes=5),
    )  # fmt: skip


def _list_zones(spec: GcpVmSpec) -> str:
    """Return the command that lists the zones with the VM's machine type."""
    return (
        f"gcloud compute machine-types list --project={spec.project} --filter='name={spec.machine_type}' "
        "--format='value(zone)'"
    )
