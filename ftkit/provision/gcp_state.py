"""Terraform's state of one cluster in a bucket of several.

`python -m ftkit.provision.gcp_state claim|remove|others|clusters BUCKET BLUEPRINT NAME`
The toolkit keeps the state of a deployment's group in BUCKET/BLUEPRINT'S NAME/DEPLOYMENT/GROUP/default.tfstate.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ruamel.yaml import YAML

from ftkit import process

_NONE = ("matched no objects", "not found: 404")
"""What gcloud prints, with exit status 1, where a pattern has no object, and where there is no bucket."""


def main() -> None:
    """Claim or remove the cluster's state, or list the other objects or the states of other clusters."""
    verb, bucket, blueprint, name = sys.argv[1:]
    own = _prefix(bucket, Path(blueprint), name)
    if verb in {"others", "clusters"}:
        pattern = "**" if verb == "others" else "*/*/*/default.tfstate"
        found = _objects(f"gs://{bucket}/{pattern}")
        print("\n".join(each for each in found if own is None or not each.startswith(own)))  # noqa: T201 - a separate program
    elif own is None:
        sys.exit(f"{blueprint} is missing: repeat 'ftkit cluster create'")
    elif objects := _objects(f"{own}**"):
        if verb == "claim":
            sys.exit(f"{own} has the state of another cluster, or of one whose record is lost: use another name")
        removed = process.run(("gcloud", "storage", "rm", f"{own}**"), timeout_seconds=600)
        if removed.returncode != 0:
            sys.exit(removed.stderr)
        print("\n".join(f"removed {each}" for each in objects))  # noqa: T201 - a separate program


def _prefix(bucket: str, blueprint: Path, name: str) -> str | None:
    """Return the start of the names of the cluster's objects; None before the blueprint is written."""
    if not blueprint.exists():
        return None
    return f"gs://{bucket}/{YAML(typ='safe').load(blueprint)['blueprint_name']}/{name}/"


def _objects(pattern: str) -> list[str]:
    listed = process.run(("gcloud", "storage", "ls", pattern), timeout_seconds=110)
    if listed.returncode == 0:
        return listed.stdout.split("\n")[:-1]
    if any(each in listed.stderr for each in _NONE):
        return []
    sys.exit(listed.stderr)


if __name__ == "__main__":
    main()
