"""`ftkit runs checkpoints`, `sync`, `bundle` and `ftkit rm`: list, copy, bundle and remove the files of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.terminal.console import Cell, Facts, Styled, Terminal
from ftkit.cli.terminal.format import age, gib, short_path
from ftkit.config.context import Context
from ftkit.config.image_reference import NamedImage, parse_image
from ftkit.config.load import find_image
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError, SubmitError, TrainingError, plural
from ftkit.files import read_json_if_valid, sha256_of
from ftkit.images.image_store import find_removable, remove_all
from ftkit.launch.job_states import observe
from ftkit.launch.prune import find_dependents, find_prunable, folder_bytes, prune, remove_folder
from ftkit.launch.submission import check_removable
from ftkit.planning.plan import read_plan
from ftkit.runs import checkpoints
from ftkit.runs.checkpoints import DamagedCheckpointError, Marker, find_best, read_marker
from ftkit.runs.job import read_submitted
from ftkit.runs.repeat import write_bundle
from ftkit.runs.signing import sign
from ftkit.runs.sync import RunCopy

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


_Item = tuple[str, str, int, str]  # what can be removed: kind, name, bytes, and reason


@forwarded_command("checkpoints", "ftkit runs checkpoints last --verify", "ftkit runs checkpoints last --json")
@arguments.run_argument
@click.option("--verify", "verifies", is_flag=True, help="Read all files and compare their digests.")
@arguments.json_option
def checkpoints_command(reference: str, *, verifies: bool, as_json: bool) -> None:
    """List the complete checkpoints of a run, oldest first.

    --verify exits with code 9 if one is damaged. A run continues from its newest undamaged checkpoint. The best one (by
    evaluation.best of the recipe, or else by validation loss) is RUN@best in other commands.

    {RUN}
    """
    terminal, layout = Terminal(), arguments.get_run(reference).layout
    try:
        folders, best = layout.list_checkpoints(), find_best(layout)
    except OSError as error:
        raise TrainingError(
            f"the checkpoints of this run can't be listed: {error}",
            meaning="you lack permission to read them, or the file system is not reachable",
        ) from error
    listed: list[dict[str, object]] = []
    rows: list[list[Cell]] = []
    damaged = []
    for step, folder in folders:
        if verifies:
            terminal.say(f"reading {short_path(folder)}")
        marker, damage = _read_checkpoint(step, folder, verifies=verifies)
        size, world_size = (marker.size, marker.world_size) if marker else (None, None)
        reason = f"{best.metric} {best.value:.4g}" if best is not None and best.step == step else None
        written = folder.stat().st_mtime
        listed.append({"step": step, "path": str(folder), "size": size, "world_size": world_size, "written": written,
                       "damage": damage, "best": reason})  # fmt: skip
        is_best = f", best ({reason})" if reason else ""
        state: Cell = f"complete{is_best}" if damage is None else Styled(f"verified{is_best}", "green")
        if damage:
            damaged.append(f"step {step}")
            state = Styled(f"damaged: {', '.join(damage)}{is_best}", "red")
        weight = "?" if size is None else gib(size / 2**30)
        rows.append([str(step), weight, str(world_size or "?"), age(time.time() - written), state])
    if as_json:
        terminal.json(listed)
    elif rows:
        terminal.table(("#STEP", "#SIZE", "#PROCESSES", "#AGE", "STATE…"), rows)
    else:
        terminal.say(f"no checkpoints yet in {short_path(layout.checkpoints)}")
    if damaged:
        raise TrainingError(
            f"{plural(len(damaged), 'checkpoint')} of {len(listed)} damaged: {', '.join(damaged)}",
            meaning="the file system lost data, or files were changed or removed",
            fix=f"do nothing if an undamaged one is left: 'ftkit resume {layout.root.name}' uses the newest of them",
        )


def _read_checkpoint(step: int, folder: Path, *, verifies: bool) -> tuple[Marker | None, list[str] | None]:
    """Return a checkpoint's marker, and what is damaged; None if its files were not read, and none is missing."""
    try:
        marker = read_marker(folder, step)
    except DamagedCheckpointError as error:
        return None, [str(error)]
    if verifies:
        return marker, checkpoints.find_damage(folder, marker, sorted(marker.files))
    return marker, [name for name in marker.files if not (folder / name).is_file()] or None


@forwarded_command("rm", "ftkit rm demo --yes", "ftkit rm --unused", "ftkit rm --unused --dry-run")
@click.argument("references", metavar="[RUN]...", nargs=-1, shell_complete=arguments.complete_run)
@click.option("--unused", is_flag=True, help="Remove failed runs, and data and images that nothing uses.")
@click.option("--with-checkpoints", is_flag=True, help="With --unused: also failed runs that could be resumed.")
@arguments.dry_run_option("what would be removed")
@arguments.yes_option
@arguments.json_option
def rm_command(
    references: tuple[str, ...], *, unused: bool, with_checkpoints: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove runs with their checkpoints, exports, logs and metrics, after asking.

    Fails if a run may still be training, or if another run's adapters are for its model. Prepared data and images
    stay, since other runs may use them.

    --unused lists what the workspace no longer needs, and removes it after asking: runs that failed or were canceled
    before their first checkpoint, prepared data that no run uses and that is older than 24 hours, imported images that
    no name and no unfinished run refers to, leftovers of killed imports and removals, and older builds in the docker
    engine. With --json, nothing is removed without --yes.

    {RUN}
    """
    if bool(references) == unused or (with_checkpoints and not unused):
        raise arguments.usage_error("give the runs to remove, or --unused; --with-checkpoints requires --unused")
    terminal = Terminal()
    found, remove = (
        _find_unused(terminal, with_checkpoints=with_checkpoints) if unused else _find_runs(references, terminal)
    )
    if as_json:
        terminal.json([dict(zip(("kind", "name", "bytes", "reason"), each, strict=True)) for each in found])
    elif found and unused:
        rows = [(kind, name, gib(size / 2**30), why) for kind, name, size, why in found]
        terminal.table(("WHAT", "NAME…", "#SIZE", "WHY…"), rows)
    if not found:
        terminal.say("nothing to remove")
        return
    if dry_run or (as_json and not yes) or not terminal.confirm(f"Remove {plural(len(found), 'item')}?", yes=yes):
        return
    freed = gib(remove() / 2**30)  # an upper bound: images of the docker engine share layers
    names = ", ".join(name for _, name, _, _ in found)
    terminal.say(f"removed; this frees up to {freed}" if unused else f"removed {names}")


def _find_runs(references: Sequence[str], terminal: Terminal) -> tuple[list[_Item], Callable[[], int]]:
    items, folders = [], {folder.id: folder for folder in map(arguments.get_run, references)}
    dependents = find_dependents(arguments.current_workspace(), folders)
    for folder in folders.values():
        check_removable(folder)
        if needed := dependents.get(folder.id):
            raise SubmitError(
                f"{folder.id} is not removed: {', '.join(needed)} started from its model and can't be used without it",
                fix=f"remove them with it; or, to keep their results: ftkit export {needed[0]} --merge",
                name="run-needed",
            )
        layout, size = folder.layout, folder_bytes(folder.layout.root)
        facts: Facts = [("run", folder.id), ("run folder", f"{short_path(layout.root)}, {gib(size / 2**30)}")]
        if layout.export.is_dir():
            facts.append(("export", f"{short_path(layout.export)} is also removed"))
        terminal.facts(facts, is_data=False)
        items.append(("run", folder.id, size, ""))

    def remove() -> int:
        for folder in folders.values():
            remove_folder(folder.layout.root)
        return sum(size for _, _, size, _ in items)

    return items, remove


def _find_unused(terminal: Terminal, *, with_checkpoints: bool) -> tuple[list[_Item], Callable[[], int]]:
    found = find_prunable(arguments.current_workspace(), with_checkpoints=with_checkpoints)
    for warning in found.warnings:
        terminal.warn(warning)
    images = find_removable(arguments.image_store(), found.images)
    items = [(str(each.kind), each.path.name, each.size_bytes, each.reason) for each in found.items]
    items += [("image", each.name, each.size, each.reason) for each in images]
    return items, lambda: remove_all(images) + prune(found.items)


@command("sync", "ftkit runs sync last ./copies", "ftkit runs sync demo ./copies --watch")
@arguments.run_argument
@click.argument("destination", metavar="[DEST]", required=False)
@click.option("--watch", "watches", is_flag=True, help="Keep copying until the run has ended.")
def sync_command(reference: str, destination: str | None, *, watches: bool) -> None:
    """Copy a run's complete checkpoints and exports to DEST/RUN, with what 'ftkit resume RUN --from DEST' needs.

    DEST is s3://bucket/prefix, gs://bucket/prefix or a folder; default: the recipe's 'sync'. Existing files are not
    copied again. Each file is compared with the original by digest. Nothing is deleted there.

    {RUN}
    """
    terminal, run = Terminal(), arguments.get_run(reference)
    destination = destination or read_plan(run.layout).recipe.sync
    if destination is None:
        raise arguments.usage_error(f"give DEST: the recipe of {run.id} has no 'sync'")
    submitted = read_submitted(run.layout)
    copy = RunCopy(run.layout, destination, terminal.say)

    def is_over() -> bool:
        return not watches or submitted is None or observe(submitted).is_final

    status = copy.follow(is_over, time.sleep)
    if status.error:
        raise PrerequisiteError(
            f"{len(status.waiting)} of {len(status.waiting) + len(status.done)} parts are not copied: {status.error}",
            fix=f"repeat the command: ftkit runs sync {run.id} {destination}",
        )
    if run.layout.is_script:
        terminal.warn(f"checkpoints of {run.id} were not copied: a script's run can't be continued from a copy")
    terminal.data(f"{status.destination}\n")


@forwarded_command("bundle", "ftkit runs bundle demo", "ftkit runs bundle demo -o demo.tar")
@arguments.run_argument
@arguments.output_option
@arguments.signing_options("the signature is a file next to the bundle.")
def bundle_command(reference: str, *, output: Path | None, signs: bool, key: Path | None) -> None:
    """Write one file from which a run can be repeated and compared, on any cluster.

    It has manifest, resolved recipe, plan, job script, metrics, report, the image's lock, the data's manifest, and
    local changes to ftkit, but not image, weights and data. The same run gives the same bytes. Prints the file's path.

    {RUN}
    """
    private_key = arguments.signing_key(signs=signs, key=key)
    terminal, layout = Terminal(), arguments.get_run(reference).layout
    path = output or Path(f"{layout.root.name}.tar")
    members = write_bundle(layout, path, _find_lock(layout))
    terminal.say(f"{', '.join(members)}")
    if layout.report.name not in members:
        terminal.warn(f"the bundle has no report; to write one first: ftkit report {layout.root.name}")
    terminal.data(f"{short_path(path.absolute())}\n")
    if private_key:
        terminal.say(f"signed: {short_path(sign(path, private_key, 'ftkit-bundle').absolute())}")


def _find_lock(layout: RunLayout) -> Path | None:
    """Return the lock of a run's image if its definition is on this machine and matches that image."""
    manifest, ctx = read_json_if_valid(layout.manifest, dict[str, object]) or {}, Context.here()
    with suppress(ConfigError, NotFoundError, FileNotFoundError):
        image = parse_image(str(manifest["image"]), ctx.project) if manifest.get("image") else None
        if isinstance(image, NamedImage):
            lock = find_image(image.reference, ctx).lock_file
            digest = sha256_of(lock)
            return lock if manifest.get("image_lock_sha256", digest) == digest else None
    return None
