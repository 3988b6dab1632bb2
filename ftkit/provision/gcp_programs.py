"""Programs of the steps on Google Cloud, which run where gcloud, Terraform and gcluster run.

`python -m ftkit.provision.gcp_programs PROGRAM ARGUMENT...` with one of these:

    blueprint BLUEPRINT CHANGES OUTPUT             edit a blueprint of the Cluster Toolkit
    state claim|remove|others|clusters BUCKET BLUEPRINT NAME
                                                   Terraform's state of one cluster in a bucket of several

The toolkit keeps the state of a deployment's group in BUCKET/BLUEPRINT'S NAME/DEPLOYMENT/GROUP/default.tfstate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path

from ruamel.yaml import YAML

from ftkit import process

_UNUSED = "test_deployment_variable_not_used"
_NO_OBJECT = ("matched no objects", "not found: 404")
"""What gcloud prints, with exit status 1, where a pattern has no object, and where there is no bucket."""


def change_blueprint(text: str, changes: Mapping[str, Mapping[str, object]]) -> str:
    """Return a blueprint with changed fields of some modules; comments and everything else stay."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000
    blueprint = yaml.load(text)
    modules = {module["id"]: module for group in blueprint["deployment_groups"] for module in group["modules"]}
    # A changed source may leave variables of the blueprint unused, which the toolkit would refuse.
    if any("source" in fields for fields in changes.values()):
        validators = blueprint.setdefault("validators", [])
        if not any(each["validator"] == _UNUSED for each in validators):
            validators.append({"validator": _UNUSED, "inputs": {}, "skip": True})
    for name, fields in changes.items():
        if name not in modules:
            raise ValueError(f"the blueprint has no module '{name}': this release of the toolkit names it differently")
        module = modules[name]
        for key, value in fields.items():
            if key == "settings" and "source" not in fields:
                module.setdefault("settings", {}).update(value)
            else:
                module[key] = value
    output = StringIO()
    yaml.dump(blueprint, output)
    return output.getvalue()


def _blueprint(source: str, changes: str, target: str) -> None:
    try:
        changed = change_blueprint(Path(source).read_text(encoding="utf-8"), json.loads(Path(changes).read_bytes()))
    except ValueError as error:
        sys.exit(str(error))
    Path(target).write_text(changed, encoding="utf-8")


def _state(verb: str, bucket: str, blueprint: str, name: str) -> None:
    """Claim or remove the cluster's state, or list the other objects or the states of other clusters."""
    own = None  # before the blueprint is written
    if Path(blueprint).exists():
        own = f"gs://{bucket}/{YAML(typ='safe').load(Path(blueprint))['blueprint_name']}/{name}/"
    if verb in {"others", "clusters"}:
        pattern = "**" if verb == "others" else "*/*/*/default.tfstate"
        found = _objects(f"gs://{bucket}/{pattern}")
        sys.stdout.writelines(f"{each}\n" for each in found if own is None or not each.startswith(own))
    elif own is None:
        sys.exit(f"{blueprint} is missing: repeat 'ftkit cluster create'")
    elif objects := _objects(f"{own}**"):
        if verb == "claim":
            sys.exit(f"{own} has the state of another cluster, or of one whose record is lost: use another name")
        removed = process.run(("gcloud", "storage", "rm", f"{own}**"), timeout_seconds=600)
        if removed.returncode != 0:
            sys.exit(removed.stderr)
        sys.stdout.writelines(f"removed {each}\n" for each in objects)


def _objects(pattern: str) -> list[str]:
    listed = process.run(("gcloud", "storage", "ls", pattern), timeout_seconds=110)
    if listed.returncode == 0:
        return listed.stdout.split("\n")[:-1]
    if any(each in listed.stderr for each in _NO_OBJECT):
        return []
    sys.exit(listed.stderr)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"blueprint": _blueprint, "state": _state}
    programs[sys.argv[1]](*sys.argv[2:])
