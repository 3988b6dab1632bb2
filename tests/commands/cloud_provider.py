"""Stand-ins for the providers' programs, which keep what they made below $MADE; their name selects one.

Messages, exit statuses, and paths of states are those of the real programs.
"""

# ruff: noqa: T201 - programs print
from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
from pathlib import Path

MADE = Path(os.environ["MADE"])
GS, S3 = MADE / "gs", MADE / "s3"
BLUEPRINT = """\
blueprint_name: a4high-slurm
deployment_groups:
- group: cluster
  modules:
  - id: a4high_nodeset
    source: modules/nodes
"""
ENVRC = """\
log() { echo "log: $*"; }
log Creating the override
cat > terraform_backend_override.tf <<EOF
bucket = "tfstate-$NEBIUS_PROJECT_ID"
key = "slurm-k8s.tfstate"
EOF
"""


def stored(name: str) -> dict[str, list[str]]:
    path = MADE / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def store(name: str, value: dict[str, list[str]]) -> None:
    (MADE / f"{name}.json").write_text(json.dumps(value))


def option(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def objects(pattern: str) -> list[Path]:
    """Objects of a pattern, in which * stays within a folder and ** does not."""
    bucket, _, rest = pattern.removeprefix("gs://").partition("/")
    if not (GS / bucket).is_dir():
        sys.exit(f"ERROR: (gcloud.storage) gs://{bucket} not found: 404.")
    found = [path for path in sorted((GS / bucket).rglob("*")) if path.is_file()]
    matches = [
        path for path in found
        if fnmatch.fnmatch(str(path.relative_to(GS / bucket)), rest)
        and (rest.endswith("**") or str(path.relative_to(GS / bucket)).count("/") == rest.count("/"))
    ]  # fmt: skip
    if not matches:
        sys.exit("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
    return matches


def gcloud(words: list[str]) -> None:  # noqa: C901, PLR0912 - one case per command
    match words:
        case ["auth", *_]:
            print("me@example.com")
        case ["projects", "describe", *_]:
            print("my-project")
        case ["projects", "get-iam-policy", *_]:
            role, member = option(words, "filter").removeprefix("bindings.role=").split(" AND bindings.members=")
            print(role if member in stored("roles").get(role, []) else "", end="")
        case ["projects", ("add-iam-policy-binding" | "remove-iam-policy-binding") as verb, *_]:
            roles, member = stored("roles"), option(words, "member")
            members = [each for each in roles.get(option(words, "role"), []) if each != member]
            store("roles", roles | {option(words, "role"): [*members, member] if verb.startswith("add") else members})
        case ["storage", "buckets", "list", *_]:
            name = option(words, "filter").removeprefix("name=")
            print(name if (GS / name).is_dir() else "", end="")
        case ["storage", "buckets", "create", url, *_]:
            (GS / url.removeprefix("gs://")).mkdir(parents=True)
        case ["storage", "buckets", "delete", url, *_]:
            if [path for path in (GS / url.removeprefix("gs://")).rglob("*") if path.is_file()]:
                sys.exit("ERROR: HTTPError 409: The bucket you tried to delete is not empty.")
            shutil.rmtree(GS / url.removeprefix("gs://"))
        case ["storage", "ls", pattern]:
            print("\n".join(f"gs://{path.relative_to(GS)}" for path in objects(pattern)))
        case ["storage", "rm", pattern]:
            for path in objects(pattern):
                path.unlink()
        case ["storage", "rm", "--recursive", url]:
            shutil.rmtree(GS / url.removeprefix("gs://"))
        case ["compute", "instances", "list", *_]:
            account, _, own = option(words, "filter").partition(" AND NOT labels.ghpc_deployment=")
            for name, (service_account, deployment) in stored("instances").items():
                if account == f"serviceAccounts.email={service_account}" and deployment != own:
                    print(name)


def gcluster(words: list[str]) -> None:
    if words[0] == "deploy":
        deployment = json.loads(Path("deployment.yaml").read_text())
        name = deployment["vars"]["deployment_name"]
        Path(name).mkdir(exist_ok=True)
        shutil.copy("deployment.yaml", name)
    else:
        deployment = json.loads((Path(words[1]) / "deployment.yaml").read_text())
        name = deployment["vars"]["deployment_name"]
    bucket = GS / deployment["terraform_backend_defaults"]["configuration"]["bucket"]
    groups = ["image-env"] if "--only" in words else ["image-env", "cluster"]
    if not bucket.is_dir():
        sys.exit("Error: Failed to get existing workspaces: querying Cloud Storage failed: bucket doesn't exist")
    for group in groups:
        state = bucket / "a4high-slurm" / name / group / "default.tfstate"
        made = [f"{name}-{group}"] if words[0] == "deploy" else []
        before = json.loads(state.read_text())["resources"] if state.exists() else []
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps({"resources": made}))
        instances = {key: value for key, value in stored("instances").items() if key not in before}
        if group == "cluster":
            instances |= {each: ["1-compute@developer.gserviceaccount.com", name] for each in made}
        store("instances", instances)


def terraform(words: list[str]) -> None:
    folder = Path(".terraform")
    if words[0] == "init":
        lines = dict(line.split(" = ") for line in Path("terraform_backend_override.tf").read_text().splitlines())
        lines |= dict(word.removeprefix("-backend-config=").split("=") for word in words if "backend-config" in word)
        folder.mkdir(exist_ok=True)
        (folder / "state").write_text(str(S3 / lines["bucket"].strip('"') / lines["key"].strip('"')))
        return
    if not folder.exists():
        return  # version
    state = Path((folder / "state").read_text())
    before = json.loads(state.read_text())["resources"] if state.exists() else []
    if words[:2] == ["state", "pull"]:
        print(state.read_text() if state.exists() else "")
        return
    name = json.loads(Path(words[-1].removeprefix("-var-file=")).read_text())["company_name"]
    made = [f"soperator-{name}"] if words[0] == "apply" else []
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps({"resources": made}))
    kept = {key: value for key, value in stored("instances").items() if key not in before}
    store("instances", kept | {each: ["", name] for each in made})


def git(words: list[str]) -> None:
    target = Path(words[-1])
    if target.exists():
        sys.exit(f"fatal: destination path '{target}' already exists and is not an empty directory.")
    blueprint = target / "examples/machine-learning/a4-highgpu-8g/a4high-slurm-blueprint.yaml"
    example = target / "soperator/installations/example/.envrc"
    for path, text in ((blueprint, BLUEPRINT), (example, ENVRC)):
        path.parent.mkdir(parents=True)
        path.write_text(text)


def main() -> None:
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    with (MADE / "calls").open("a") as calls:
        calls.write(f"{program} {' '.join(words)}\n")
    if (MADE / "fail").exists() and (MADE / "fail").read_text() in f"{program} {' '.join(words)}":
        sys.exit("ERROR: the network is down")
    match program:
        case "gcloud":
            gcloud(words)
        case "gcluster":
            gcluster(words)
        case "terraform":
            terraform(words)
        case "git":
            git(words)
        case "make":
            shutil.copy(sys.argv[0], Path(words[1]) / words[2])
        case "jq" if "--slurp" in words:
            text = sys.stdin.read().strip()
            sys.exit(bool(text and json.loads(text)["resources"]))


main()
