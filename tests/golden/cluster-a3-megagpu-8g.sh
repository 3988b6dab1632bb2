# train1: a3-megagpu-8g; GPU nodes, login node, controller and /home cost money until 'ftkit cluster destroy', even when idle

# file STATE/ftkit/clusters/train1/deployment.yaml
#   {
#     "terraform_backend_defaults": {
#       "type": "gcs",
#       "configuration": {
#         "bucket": "my-state"
#       }
#     },
#     "vars": {
#       "enable_slurm_auth": true,
#       "deployment_name": "train1",
#       "project_id": "my-project",
#       "region": "us-central1",
#       "zone": "us-central1-a",
#       "a3mega_cluster_size": 2,
#       "a3mega_reservation_name": "",
#       "a3mega_dws_flex_enabled": true,
#       "a3mega_enable_spot_vm": false,
#       "slurm_cluster_name": "train1",
#       "network_name_system": "train1-sysnet",
#       "subnetwork_name_system": "train1-sysnet-sub",
#       "final_image_family": "train1-slurm",
#       "enable_ops_agent": true,
#       "enable_nvidia_dcgm": true,
#       "enable_nvidia_persistenced": true,
#       "disk_size_gb": 200
#     }
#   }

# file STATE/ftkit/clusters/train1/changes.json
#   {
#     "a3mega_nodeset": {
#       "settings": {
#         "enable_placement": false
#       }
#     },
#     "homefs": {
#       "source": "modules/file-system/filestore",
#       "use": [
#         "sysnet"
#       ],
#       "settings": {
#         "filestore_tier": "BASIC_SSD",
#         "size_gb": 2560,
#         "local_mount": "/home",
#         "deletion_protection": {
#           "enabled": true,
#           "reason": "ftkit cluster destroy disables it"
#         }
#       }
#     }
#   }

# check: a Google Cloud account is active
gcloud auth list --filter=status:ACTIVE '--format=value(account)'

# check: project my-project is accessible
gcloud projects describe my-project '--format=value(projectId)'

# check: Terraform is installed
terraform version

# check: Packer is installed
packer version

# check: Go is installed, to build gcluster
go version

# the project's APIs, enabled
gcloud services enable --project=my-project cloudresourcemanager.googleapis.com compute.googleapis.com file.googleapis.com iam.googleapis.com iap.googleapis.com logging.googleapis.com lustre.googleapis.com monitoring.googleapis.com secretmanager.googleapis.com servicenetworking.googleapis.com storage.googleapis.com

# role compute.instanceAdmin.v1 of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/compute.instanceAdmin.v1 AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.instanceAdmin.v1 --condition=None --format=none

# role compute.networkAdmin of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/compute.networkAdmin AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.networkAdmin --condition=None --format=none

# role compute.securityAdmin of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/compute.securityAdmin AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.securityAdmin --condition=None --format=none

# role file.editor of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/file.editor AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/file.editor --condition=None --format=none

# role iam.serviceAccountUser of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/iam.serviceAccountUser AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/iam.serviceAccountUser --condition=None --format=none

# role iap.tunnelResourceAccessor of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/iap.tunnelResourceAccessor AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/iap.tunnelResourceAccessor --condition=None --format=none

# role logging.logWriter of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/logging.logWriter AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/logging.logWriter --condition=None --format=none

# role monitoring.metricWriter of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/monitoring.metricWriter AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/monitoring.metricWriter --condition=None --format=none

# role storage.objectAdmin of the nodes' service account
# skipped if this prints something: gcloud projects get-iam-policy my-project '--flatten=bindings[].members' '--filter=bindings.role=roles/storage.objectAdmin AND bindings.members=serviceAccount:1-compute@developer.gserviceaccount.com' '--format=value(bindings.role)'
gcloud projects add-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/storage.objectAdmin --condition=None --format=none

# bucket gs://my-state for Terraform's state
# skipped if this prints something: gcloud storage buckets list --project=my-project --filter=name=my-state '--format=value(name)'
gcloud storage buckets create gs://my-state --project=my-project --location=us-central1 --uniform-bucket-level-access

# Cluster Toolkit v1.95.0
git clone --quiet --depth=1 --branch=v1.95.0 https://github.com/GoogleCloudPlatform/cluster-toolkit toolkit

# the toolkit's program gcluster
make -C toolkit gcluster

# the blueprint, with the changes in changes.json
python3 -m ftkit.provision.gcp_programs blueprint toolkit/examples/machine-learning/a3-megagpu-8g/a3mega-slurm-blueprint.yaml changes.json blueprint.yaml

# a place for this cluster's Terraform state in the bucket
python3 -m ftkit.provision.gcp_programs state claim my-state STATE/ftkit/clusters/train1/blueprint.yaml train1

# the nodes' operating system as an image
STATE/ftkit/clusters/train1/toolkit/gcluster deploy --deployment-file deployment.yaml --auto-approve --overwrite-deployment blueprint.yaml --only primary,build_script,slurm-build

# networks, /home, controller, login node and 2 GPU nodes
STATE/ftkit/clusters/train1/toolkit/gcluster deploy --deployment-file deployment.yaml --auto-approve --overwrite-deployment blueprint.yaml --skip slurm-build

# removed by 'ftkit cluster destroy', in this order:
# bash -c 'set -o pipefail; gcloud filestore instances list --project=my-project '"'"'--filter=labels.ghpc_deployment=train1 AND deletionProtectionEnabled=true'"'"' '"'"'--format=value(name.basename())'"'"' | xargs -rI@ gcloud filestore instances update @ --project=my-project --location=us-central1-a --no-deletion-protection'
# STATE/ftkit/clusters/train1/toolkit/gcluster destroy STATE/ftkit/clusters/train1/train1 --auto-approve --skip slurm-build
# STATE/ftkit/clusters/train1/toolkit/gcluster destroy STATE/ftkit/clusters/train1/train1 --auto-approve
# python3 -m ftkit.provision.gcp_programs state remove my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state others my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud storage buckets delete gs://my-state --project=my-project --quiet
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/storage.objectAdmin --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/monitoring.metricWriter --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/logging.logWriter --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/iap.tunnelResourceAccessor --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/iam.serviceAccountUser --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/file.editor --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.securityAdmin --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.networkAdmin --condition=None --format=none
# stays if this prints something: gcloud compute instances list --project=my-project '--filter=serviceAccounts.email=1-compute@developer.gserviceaccount.com AND NOT labels.ghpc_deployment=train1' '--format=value(selfLink.basename())'
# stays if this prints something: python3 -m ftkit.provision.gcp_programs state clusters my-state STATE/ftkit/clusters/train1/blueprint.yaml train1
# gcloud projects remove-iam-policy-binding my-project --member=serviceAccount:1-compute@developer.gserviceaccount.com --role=roles/compute.instanceAdmin.v1 --condition=None --format=none
