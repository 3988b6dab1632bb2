"""Edit a Cluster Toolkit blueprint: `python -m ftkit.provision.blueprint BLUEPRINT CHANGES OUTPUT`."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_UNUSED = "test_deployment_variable_not_used"


def change_blueprint(text: str, changes: dict[str, dict[str, Any]]) -> str:
    """Return a blueprint with changed fields of some modules; comments and everything else stay.

    `settings` are merged, unless the module's `source` also changes; other fields are replaced. A changed source may
    leave variables of the blueprint unused, which the toolkit would refuse, so that validator is disabled.

    Raises:
        ValueError: a module is not in the blueprint.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000
    blueprint = yaml.load(text)
    modules = {module["id"]: module for group in blueprint["deployment_groups"] for module in group["modules"]}
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


def main() -> None:
    """Edit the blueprint given on the command line."""
    source, changes, target = map(Path, sys.argv[1:])
    text = source.read_text(encoding="utf-8")
    try:
        changed = change_blueprint(text, json.loads(changes.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(str(error))
    target.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
