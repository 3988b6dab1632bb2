"""`ftkit init`: set up a project on this machine, and write a first recipe for a model and data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from ftkit.cli.arguments import load_all, name_option, usage_error, yes_option
from ftkit.cli.commands import command, current_context
from ftkit.cli.doctor import check_here
from ftkit.cli.inference import require_packages
from ftkit.cli.terminal.console import Facts, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.cli.terminal.plan_view import plan_facts
from ftkit.config.context import PROJECT_FILE, Context, list_names
from ftkit.config.data_sources import DATA_FILE, expand_source
from ftkit.config.layers import Layers
from ftkit.config.load import load_cluster
from ftkit.config.request import load_settings
from ftkit.config.yaml_files import parse_override, read_yaml, to_yaml
from ftkit.data.readers import IN_FOLDERS, suffix_of
from ftkit.data.source_files import OTHER_SPLIT
from ftkit.errors import ConfigError, NoAnswerError, Problem
from ftkit.health.site import ProposedCluster, Site, detect_site, list_partitions, propose_cluster
from ftkit.launch.new_recipe import Choice, choose_recipe, find_splits
from ftkit.launch.resolve import RunArgs, load_place
from ftkit.paths import is_address, is_path
from ftkit.spec import as_name

_MARK = "Written by 'ftkit init'."
_HEAD = f"{_MARK} 'ftkit config' shows all settings; keys of a profile: docs/reference/cluster-profile.md"
_IMAGE: Final = "olmo3:25.02"
_MAX_SHOWN: Final = 3


@command(
    "init",
    "ftkit init",
    "ftkit init ./model chats.jsonl",
    "ftkit init ./model data/ --name mine",
    "ftkit init ./model chats.jsonl training.num_epochs=1 --name short",
    "ftkit init --yes --force",
)
@click.argument("model", required=False)
@click.argument("data", required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@name_option("that of the data")
@yes_option
@click.option("--force", is_flag=True, help="Change existing files. Other keys of ftkit.yaml stay.")
def init_command(
    model: str | None, data: str | None, overrides: tuple[str, ...], *, name: str | None, yes: bool, force: bool
) -> None:
    """Set up a project here; with MODEL and DATA, write a recipe for them.

    MODEL is a hub id or a folder; DATA is a file, a folder, a hub id, or an address. The recipe has the method that
    fits the GPUs, packs that hold 95% of the documents, and a batch, a learning rate and epochs for that much data,
    each with its reason; KEY=VALUE sets a key of the recipe yourself. It is planned before it is written.

    Alone, it inspects this machine and its Slurm, and writes ftkit.yaml into the current folder. It chooses a matching
    shipped profile, or writes a profile into clusters/ that extends one. Then it runs the checks of 'ftkit doctor'.
    """
    terminal, asks = Terminal(), not yes and sys.stdin.isatty()
    if model is not None and data is None and (Path(model).is_file() or DATA_FILE.search(model)):
        model, data = None, model
    found = [data] if data else _data_here()
    if model is None and data is None:
        _set_up_project(terminal, asks=asks, force=force)
        if found and not asks:
            terminal.say(f"A recipe for {found[0]}: ftkit init MODEL {found[0]}")
    if model is None and found and asks:
        question = f"Model to fine-tune on {found[0]}: a hub id or a folder"
        model = click.prompt(question, default=None if data else "", show_default=False, err=True) or None
    if model is None:
        if data is not None:
            raise usage_error(f"give the model too: ftkit init MODEL {data}")
        return
    if len(found) != 1:
        what = f"here are {', '.join(found[:_MAX_SHOWN])}" if found else "no data file is here"
        if not asks:
            raise usage_error(f"give the data too ({what}): ftkit init {model} DATA")
        found = [click.prompt(f"Data ({what}): a file, a folder, a hub id or an address", err=True)]
    ctx = current_context()
    if not load_settings(ctx).has_cluster and list_partitions(ctx.environment) != ():
        _set_up_project(terminal, asks=asks, force=force)
    _write_recipe(model, found[0], overrides, name, terminal, force=force)


def _data_here() -> list[str]:
    """Return the data files in the current folder; if there are none, the folder `data` if it has some."""
    files = sorted(each.name for each in Path.cwd().iterdir() if each.is_file() and suffix_of(each.name) in IN_FOLDERS)
    files = [name for name in files if not OTHER_SPLIT.match(name)] or files
    if files or not Path("data").is_dir():
        return files
    return ["data/"] if any(suffix_of(each.name) in IN_FOLDERS for each in Path("data").iterdir()) else []


def _write_recipe(
    model: str, data: str, overrides: Sequence[str], name: str | None, terminal: Terminal, *, force: bool
) -> None:
    """Choose the settings of a recipe for a model and data, plan it, and write it into the current folder."""
    require_packages("transformers", "tokenizers", "numpy")
    is_here = {
        each: not is_address(each) and bool(Path(each).exists() or DATA_FILE.search(each)) for each in (model, data)
    }
    model, data = (f"./{each}" if is_here[each] and not is_path(each) else each for each in (model, data))
    source, validation = find_splits(data)
    name = name or as_name(Path(data.rstrip("/*")).name.partition(".")[0], "recipe", 40)
    file = Path(f"{name}.yaml")
    if file.exists() and not force:
        what, fix = "already exists and was not changed.", "Change it with --force, or give another --name."
        raise ConfigError([Problem(str(file), "", what, fix)])
    with TemporaryDirectory() as folder:
        draft = Path(folder, f"{name}.yaml")
        given = [model, source, *([validation] if validation else [])]
        places = [str(Path.cwd() / Path(each).expanduser()) if is_path(each) else each for each in given]
        values = {"source": places[1], **({"validation": {"file": places[2]}} if validation else {})}
        draft.write_text(to_yaml({"model": places[0], "data": values}), encoding="utf-8")
        ctx = current_context()
        place = load_place(RunArgs(), ctx)
        image = None if place.image or place.cluster.runtime == "none" else _IMAGE
        try:
            plan, chosen = choose_recipe(draft, data, overrides, ctx, terminal.say, image)
        except ConfigError as error:  # about a file that is gone
            raise ConfigError([replace(each, where="") for each in error.problems]) from error
    if validation:
        chosen["data"].append(Choice("validation", {"file": validation}, "the split beside the training data"))
    terminal.facts(plan_facts(plan), is_data=False)
    layers = Layers()
    for override in overrides:
        layers = parse_override(override).over(layers)
    file.write_text(_with_reasons(name, model, source, chosen, layers.values), encoding="utf-8")
    terminal.say(Styled(f"\nwrote {file}", "bold"))
    with_image = f"{file} --image {image}" if image else file
    terminal.say(f"Inspect the data: ftkit data show {file}\nTrain:            ftkit run {with_image}")


def _with_reasons(
    name: str, model: str, data: str, chosen: Mapping[str, list[Choice]], given: Mapping[str, object]
) -> str:
    """Return a recipe as YAML, with each chosen setting's reason beside it, and the given settings."""
    document = CommentedMap(name=name, model=model, data=CommentedMap(source=data), training=CommentedMap())
    document.yaml_set_start_comment(f"{_MARK} All keys: docs/reference/recipe.md")
    for section, choices in chosen.items():
        for each in choices:
            value = each.value
            if isinstance(value, dict):
                value = CommentedMap(value)
                value.fa.set_flow_style()
            document[section][each.key] = value
            document[section].yaml_add_eol_comment(each.why, each.key, column=32)
    _set_keys(document, given)
    return to_yaml(document)


def _set_keys(document: CommentedMap, given: Mapping[str, object]) -> None:
    """Set keys in a mapping and the mappings in it; a short form is expanded where one of its other keys is set."""
    for key, value in given.items():
        short = document.get(key)
        if isinstance(value, dict) and isinstance(short, str):
            document[key] = CommentedMap(weights=short) if key == "model" else CommentedMap(expand_source(short))
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _set_keys(document[key], value)
        else:
            document[key] = value


def _set_up_project(terminal: Terminal, *, asks: bool, force: bool) -> None:
    """Write ftkit.yaml, and a profile if no shipped one matches, and check the machine."""
    here = Context.here()
    folder = Path.cwd()
    ctx = replace(here, project=folder)
    site = detect_site(ctx.environment, ctx.root)
    if site.is_slurm_silent:
        raise NoAnswerError(
            "Slurm did not respond, and nothing was written",
            meaning="its programs are installed here; its controller is busy, restarting, or not reachable",
            fix=f"try again in a minute; to train on this machine alone, write 'cluster: local' into {PROJECT_FILE}",
        )
    # A profile that an earlier 'ftkit init' wrote may be overwritten.
    own = [
        path.stem for path in (folder / "clusters").glob("*.yaml")
        if path.read_text(encoding="utf-8", errors="replace").startswith(f"# {_MARK}")
    ]  # fmt: skip
    names = [name for name in list_names("cluster", ctx) if name not in own]
    profiles = load_all(names, lambda name: load_cluster(name, ctx), terminal)
    proposed = propose_cluster(site, (spec for _, spec in profiles))
    terminal.facts(_site_facts(site, proposed), is_data=False)
    files = _files(folder, proposed)
    existing = [short_path(path) for path in files if path.exists()]
    if existing and not force:
        if not asks:
            what, fix = "already exists and was not changed.", "Change it with --force."
            raise ConfigError([Problem(path, "", what, fix) for path in existing])
        click.confirm(f"Change existing {' and '.join(existing)}?", default=False, abort=True, err=True)
    elif asks:
        click.confirm(f"Write {', '.join(map(short_path, files))}?", default=True, abort=True, err=True)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        terminal.say(f"wrote {short_path(path)}")
    for each in (*site.unknown, *proposed.unknown):
        terminal.warn(f"not detected: {each}")
    terminal.say()
    written = Context.here()
    check_here(written, load_place(RunArgs(), written), terminal, site=site)
    command = "ftkit run demo"
    if proposed.values.get("runtime") != "none" and proposed.name != "local":
        nodes = "" if proposed.name == "docker" else f" --nodes {min(2, proposed.values.get('max_nodes', 2))}"
        command = f"ftkit run --image {_IMAGE}{nodes}"
    terminal.say(Styled(f"\nTry: {command}", "bold"))


def _site_facts(site: Site, proposed: ProposedCluster) -> Facts:
    facts: Facts = []
    if site.has_slurm:
        names = list(dict.fromkeys(each.name for each in site.partitions))
        facts.append(("Slurm", f"{site.slurm_version}, partitions {', '.join(names)}"))
    programs = {"enroot": site.enroot, "Apptainer": site.apptainer, "docker": site.docker}
    found = [*(["pyxis"] if site.has_pyxis else []), *(f"{key} {value}" for key, value in programs.items() if value)]
    facts.append(("containers", ", ".join(found) or "none found"))
    if not site.has_slurm:
        facts.append(("GPUs here", str(site.num_gpus)))
    if site.shared_folders:
        facts.append(("shared", ", ".join(site.shared_folders)))
    chosen = f"{proposed.name}, which extends {proposed.extends}" if proposed.extends else proposed.name
    facts.append(("cluster", Styled(f"{chosen}: {proposed.reason}", "bold")))
    facts += [(f"  {key}", str(value)) for key, value in proposed.values.items() if key != "description"]
    return facts


def _files(folder: Path, proposed: ProposedCluster) -> dict[Path, str]:
    """Return the files to write, with their content; an existing ftkit.yaml keeps its other keys and its comments."""
    path, settings = folder / PROJECT_FILE, CommentedMap()
    if path.is_file():
        read_yaml(path)  # raises ftkit's error for invalid YAML
        settings = YAML().load(path.read_text(encoding="utf-8")) or settings
    else:
        settings.yaml_set_start_comment(_HEAD)
    settings["cluster"] = proposed.name
    files = {path: to_yaml(settings)}
    if proposed.extends:
        profile = CommentedMap({"name": proposed.name, "extends": proposed.extends, **proposed.values})
        profile.yaml_set_start_comment("\n".join([_HEAD, *(f"Not detected: {each}" for each in proposed.unknown)]))
        files[folder / "clusters" / f"{proposed.name}.yaml"] = to_yaml(profile)
    return files
