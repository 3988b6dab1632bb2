# train1: soperator; nodes and file systems cost money until 'ftkit cluster destroy', even when idle

# file STATE/ftkit/clusters/train1/ftkit.tfvars.json
#   {
#     "company_name": "train1",
#     "slurm_operator_version": "1.20.1",
#     "filestore_jail": {
#       "spec": {
#         "size_gibibytes": 2048,
#         "block_size_kibibytes": 4
#       }
#     },
#     "filestore_jail_submounts": [
#       {
#         "name": "checkpoints",
#         "mount_path": "/mnt/checkpoints",
#         "spec": {
#           "size_gibibytes": 4096,
#           "block_size_kibibytes": 4
#         }
#       }
#     ],
#     "filestore_controller_spool": {
#       "spec": {
#         "size_gibibytes": 128,
#         "block_size_kibibytes": 4
#       }
#     },
#     "slurm_nodeset_workers": [
#       {
#         "size": 6,
#         "nodes_per_nodegroup": 3,
#         "max_unavailable_percent": 50,
#         "resource": {
#           "platform": "gpu-h200-sxm",
#           "preset": "8gpu-128vcpu-1600gb"
#         },
#         "boot_disk": {
#           "type": "NETWORK_SSD",
#           "size_gibibytes": 512,
#           "block_size_kibibytes": 4
#         },
#         "gpu_cluster": {
#           "infiniband_fabric": "fabric-5"
#         }
#       }
#     ],
#     "slurm_login_ssh_root_public_keys": [
#       "ssh-ed25519 AAAA me"
#     ],
#     "backups_enabled": "force_disable",
#     "backups_schedule": "@daily-random",
#     "backups_prune_schedule": "@daily-random",
#     "backups_retention": {
#       "keepDaily": 7
#     }
#   }

# file STATE/ftkit/clusters/train1/terraform.sh
#   #!/usr/bin/env bash
#   # Runs Terraform in the installation's folder, with the environment that its .envrc sets up.
#   set -eo pipefail
#   export NEBIUS_TENANT_ID=tenant-e00a
#   export NEBIUS_PROJECT_ID=project-e00b
#   export NEBIUS_REGION=eu-north1
#   export TF_VAR_backups_password="${TF_VAR_backups_password:-}"
#   cd "$(dirname "$0")/library/soperator/installations/example"
#   source .envrc >&2
#   exec terraform "$@"

# file STATE/ftkit/clusters/train1/claim.sh
#   #!/usr/bin/env bash
#   # Fails if resources are recorded under this cluster's name, such as those of another user's cluster.
#   set -eo pipefail
#   cd "$(dirname "$0")"
#   bash terraform.sh state pull | jq --slurp --exit-status 'all(.[]; .resources == [])' >/dev/null || {
#     echo "Terraform's state of this name can't be read, or has another cluster's resources: use another name" >&2
#     exit 1
#   }

# check: a Nebius account is active
nebius iam whoami

# check: Terraform is installed
terraform version

# check: jq is installed, for .envrc
jq --version

# Nebius's solutions library soperator-v1.20.1-2
git clone --quiet --depth=1 --branch=soperator-v1.20.1-2 https://github.com/nebius/nebius-solutions-library library

# the installation without the example's own variables
rm -f library/soperator/installations/example/terraform.tfvars

# Terraform's providers and state
bash terraform.sh init -input=false -backend-config=key=ftkit/train1.tfstate

# this cluster's Terraform state, still empty
bash claim.sh

# Kubernetes, file systems and 6 GPU nodes
bash terraform.sh apply -input=false -auto-approve -var-file=STATE/ftkit/clusters/train1/ftkit.tfvars.json

# removed by 'ftkit cluster destroy', in this order:
# bash terraform.sh destroy -input=false -auto-approve -var-file=STATE/ftkit/clusters/train1/ftkit.tfvars.json
