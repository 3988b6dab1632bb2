"""Disable the deletion protection of a deployment's Filestores, so that it can be destroyed.

`python -m ftkit.provision.unprotect PROJECT ZONE DEPLOYMENT`
"""

from __future__ import annotations

import sys

from ftkit import process


def main() -> None:
    """List the Filestores of a deployment, and unprotect each."""
    project, zone, deployment = sys.argv[1:]
    place = (f"--project={project}", f"--location={zone}")
    listed = process.run(
        ("gcloud", "filestore", "instances", "list", f"--project={project}",
         f"--filter=labels.ghpc_deployment={deployment} AND deletionProtectionEnabled=true",
         "--format=value(name.basename())"),
        timeout_seconds=120,
    )  # fmt: skip
    if listed.returncode != 0:
        sys.exit(listed.stderr)
    for name in listed.stdout.split():
        print(f"disabling the deletion protection of Filestore {name}")  # noqa: T201 - a separate program
        changed = process.run(
            ("gcloud", "filestore", "instances", "update", name, *place, "--no-deletion-protection"),
            timeout_seconds=600,
        )
        if changed.returncode != 0:
            sys.exit(changed.stderr)


if __name__ == "__main__":
    main()
