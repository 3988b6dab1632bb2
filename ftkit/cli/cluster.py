"""`ftkit cluster`: list profiles, install ftkit on a login node, and create or remove clusters."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ftkit import process
from ftkit.cli.arguments import complete_cluster, dry_run_option, file_option, json_option, load_all, yes_option
from ftkit.cli.commands import command
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.context import Context, list_names
from ftkit.config.load import load_cluster
from ftkit.config.request import load_settings
from ftkit.errors import ConfigError, Problem, ProvisionError, one_line, plural
from ftkit.provision.providers import plan_provision
from ftkit.provision.settings import KINDS, Kind, read_spec, restore_spec
from ftkit.provision.steps import (
    Provision,
    ProvisionState,
    begin_or_continue,
    clusters_folder,
    create,
    destroy,
    is_there,
    read_state,
    used_by,
    users_of,
    words_of,
)
from ftkit.remote.ssh import install, login_of
from ftkit.wheel import code_identity


@command("list", "ftkit cluster list", "ftkit cluster list --json")
@json_option
def list_command(*, as_json: bool) -> None:
    """List the cluster profiles of the project, of your configuration, and of ftkit."""
    terminal, ctx = Terminal(), Context.here()
    chosen = load_settings(ctx).settings.cluster
    profiles = load_all(list_names("cluster", ctx), lambda name: load_cluster(name, ctx), terminal)
    if as_json:
        terminal.json(
            [{"name": name, "is_default": name == chosen, **spec.model_dump(mode="json")} for name, spec in profiles]
        )
        return
    rows = [
        (
            Styled(f"{name} (default)", "bold") if name == chosen else name,
            profile.scheduler,
            {"auto": "auto", "cpu": "0"}.get(profile.device, str(profile.gpus_per_node)),
            profile.description,
        )
        for name, profile in profiles
    ]
    terminal.table(("NAME", "SCHEDULER", "#GPUS/NODE", "DESCRIPTION…"), rows)


@command("connect", "ftkit cluster connect mycluster", "ftkit cluster connect mycluster --extra train --extra report")
@click.argument("cluster", metavar="CLUSTER", shell_complete=complete_cluster)
@click.option(
    "--extra", "extras", metavar="NAME", multiple=True, help="Also install this extra of ftkit: train, images, …"
)
def connect_command(cluster: str, *, extras: tuple[str, ...]) -> None:
    """Install this ftkit, with exactly the code that runs here, on the login node of a cluster.

    It is installed into a virtual environment in 'login_folder' there (~/ftkit by default), with uv, or with Python
    3.11 or later. Repeat this after ftkit changes here: two different versions do not work together. A profile with
    runtime 'none' needs --extra train.
    """
    terminal = Terminal()
    login = login_of(load_cluster(cluster, Context.here()))
    if login is None:
        fix = "Add 'login: user@host' to the profile."
        raise ConfigError([Problem("", "login", f"the profile '{cluster}' sets none, or sets this machine.", fix)])
    terminal.say(f"installing ftkit {code_identity()} on {login.address}, in {login.folder}/venv …")
    install(login, extras)
    terminal.say(f"ready. Try: ftkit run demo --cluster {cluster}")


@command(
    "create",
    "ftkit cluster create vm --kind gcp-vm-l4 project=my-project zone=us-east1-b --dry-run",
    "ftkit cluster create a4 --kind a4-highgpu-8g --settings a4.yaml num_nodes=4",
)
@click.argument("name")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What to create.")
@file_option("--settings", "file", about="YAML file with settings.")
@dry_run_option("every file and command")
@yes_option
def create_command(
    name: str, overrides: tuple[str, ...], kind: Kind, file: Path | None, *, dry_run: bool, yes: bool
) -> None:
    """Create a cluster of a kind, with settings from a file and KEY=VALUE arguments.

    The provider's own tools create it: gcloud, Google's Cluster Toolkit, Terraform. Repeat the command after an
    interruption to continue.
    """
    terminal = Terminal()
    spec = read_spec(kind, file, overrides)
    provision, folder = plan_provision(name, kind, spec), clusters_folder() / name
    if dry_run:
        terminal.data(_script(provision, folder))
        return
    state = begin_or_continue(folder, ProvisionState(kind, spec.model_dump(mode="json")))
    left = len([step for step in provision.steps if state.outcome(step) not in ("made", "found")])
    minutes = sum(step.minutes for step in provision.steps)
    steps = f"{plural(left, 'step')}, about {minutes} minutes in total"
    facts = [("cluster", f"{name}, {kind}"), ("steps", steps), ("cost", provision.cost), ("folder", short_path(folder))]
    terminal.facts(facts, is_data=False)
    if not terminal.confirm("Create it?", yes=yes):
        return
    create(provision, state, folder, terminal.say)
    terminal.say(f"created {name}")
    for next_step in provision.next_steps:
        terminal.say(next_step, indent=2)


def _script(provision: Provision, folder: Path) -> str:
    def line(command: str) -> str:
        return shlex.join(words_of(command, folder)) + "\n"

    parts = [f"# {provision.name}: {provision.kind}; {provision.cost}\n"]
    for path, text in provision.files.items():
        parts.append(f"\n# file {folder / path}\n" + "".join(f"#   {each}\n" for each in text.splitlines()))
    parts += [f"\n# check: {check.title}\n{line(check.command)}" for check in provision.checks]
    for step in provision.steps:
        found = f"# skipped if this prints something: {line(step.existing)}" if step.existing else ""
        parts.append(f"\n# {step.title}\n{found}{line(step.command)}")
    parts.append("\n# removed by 'ftkit cluster destroy', in this order:\n")
    for step in reversed(provision.steps):
        parts += [f"# stays if this prints something: {line(users)}" for users in step.users]
        parts += [f"# {line(undo)}" for undo in step.undo]
    return "".join(parts)


@command("status", "ftkit cluster status train1", "ftkit cluster status train1 --json")
@click.argument("name")
@json_option
def status_command(name: str, *, as_json: bool) -> None:
    """Show the completed steps of a cluster, and its current state at the provider."""
    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    texts = {"found": "existed before", "made": "created", "begun": "started, not finished"}
    outcomes = {key: texts[each.outcome] for key, each in state.steps.items()}
    if as_json:
        steps = [{"id": step.id, "title": step.title, "outcome": outcomes.get(step.id)} for step in provision.steps]
        about = {"name": name, "kind": state.kind, "folder": str(folder), "settings": state.settings}
        terminal.json({**about, "steps": steps})
        return
    facts = [("cluster", f"{name}, {state.kind}"), ("cost", provision.cost), ("folder", short_path(folder))]
    terminal.facts(facts, is_data=True)
    rows = [(step.id, step.title, outcomes.get(step.id, "not yet")) for step in provision.steps]
    terminal.table(("STEP", "WHAT…", "OUTCOME"), rows)
    shown = process.run(words_of(provision.status, folder), timeout_seconds=120, cwd=folder)
    if shown.returncode:
        raise ProvisionError(
            f"can't show the current state at the provider: {one_line(shown.stderr or shown.stdout)}",
            meaning="the login has expired, the cluster does not exist yet or any more, or the network is down",
            fix="log in again; 'ftkit cluster create' continues an unfinished creation",
        )
    terminal.data(shown.stdout)


@command("destroy", "ftkit cluster destroy train1 --dry-run", "ftkit cluster destroy train1 --keep-image --yes")
@click.argument("name")
@click.option(
    "--keep-image", is_flag=True, help="Keep the nodes' operating system image, which takes longest to build."
)
@dry_run_option("what would be removed and what would stay")
@yes_option
def destroy_command(name: str, *, keep_image: bool, dry_run: bool, yes: bool) -> None:
    """Remove what 'ftkit cluster create' created, in reverse order. Resources that existed before stay.

    What another cluster uses stays too, such as the bucket of its Terraform state: repeat the command later.

    Everything on the cluster's disks is lost: copy runs and exports elsewhere first.
    """
    terminal, folder = Terminal(), clusters_folder() / name
    state = read_state(folder)
    provision = plan_provision(name, state.kind, restore_spec(state.kind, state.settings))
    steps = [step for step in reversed(provision.steps) if step.undo and state.outcome(step) in ("made", "begun")]
    if keep_image:
        steps = steps[: next((number for number, step in enumerate(steps) if step.is_image), len(steps))]
    answers: dict[str, str] = {}
    users = {step: users_of(step, folder, answers) for step in steps if step.users and is_there(step, folder)}
    removed = [step for step in steps if not users.get(step)]
    terminal.facts(
        [
            ("cluster", f"{name}, {state.kind}"),
            ("removed", "; ".join(step.title for step in removed) or "nothing"),
            *(("stays", f"{step.title}, {used_by(by)}") for step, by in users.items() if by),
            ("folder", short_path(folder)),
        ],
        is_data=dry_run,
    )
    if dry_run:
        for step in removed:
            for undo in step.undo:
                terminal.data(f"{shlex.join(words_of(undo, folder))}\n")
        return
    if not terminal.confirm("Remove it and everything on its disks?", yes=yes):
        return
    if destroy(provision, folder, terminal.say, keep_image=keep_image):
        terminal.say(f"removed {name}")
    else:
        terminal.say(f"removed {name}, except what is kept: repeat 'ftkit cluster destroy {name}' to remove that too")
