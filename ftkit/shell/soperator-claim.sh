#!/usr/bin/env bash
# Fails if resources are recorded under this cluster's name, such as those of another user's cluster.
set -eo pipefail
cd "$(dirname "$0")"
bash terraform.sh state pull | jq --slurp --exit-status 'all(.[]; .resources == [])' >/dev/null || {
  echo "Terraform's state of this name can't be read, or has another cluster's resources: use another name" >&2
  exit 1
}
