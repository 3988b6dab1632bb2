"""Recipes, cluster profiles, image definitions, settings and overrides."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

from ftkit import assets
from ftkit.config.yaml_files import parse_bytes, read_yaml
from fuzzing.area import Area, Case
from fuzzing.command_line import command_line
from fuzzing.mutate import ODD_VALUES, damaged_bytes, damaged_value, near_value

if TYPE_CHECKING:
    import random
    from pathlib import Path

_FILES = {
    "recipe.yaml": sorted([*assets.RECIPES.glob("*.yaml"), *assets.EXAMPLES.glob("*.yaml")]),
    "cluster.yaml": sorted(assets.CLUSTERS.glob("*.yaml")),
    "image.yaml": sorted(assets.CONTAINERS.glob("*/*/image.yaml")),
}
_SETTINGS = b"cluster: a3-ultragpu-8g\nworkspace: /shared/me\nregistry: ghcr.io/me\n"
_PIECES = tuple(
    piece.encode()
    for piece in (
        "a: ", "- ", "? ", "[", "]", "{", "}", "&x ", "*x", "<<: *x\n", "<<: &x {a: *x}\n", "!!int x", "!!python/x y",
        "|\n", "'", '"', '"\\U00110000"', '"\\ud800"', "#", "---\n", "%YAML 1.2\n", "\n", "\t", "\x07", "\x85",
        "9" * 4301, "a: [" * 90, ".inf", ".nan", "-1", "extends: demo\n", "~", "0o7", "1e400",
    )
)  # fmt: skip
_NAMES = ("training", "data", "model", "resources", "evaluation", "tracking", "name", "image", "x")


def _make(rng: random.Random) -> Case:
    kind = rng.choice((*_FILES, "recipe.yaml", "ftkit.yaml", "overrides"))
    words = [rng.choice(("demo", "olmo3-7b-full", "gemma3-12b-sql-qlora")), rng.choice(("slurm", "a3-ultragpu-8g"))]
    if kind == "overrides":
        overrides = [_override(rng) for _ in range(rng.choice((1, 1, 3)))]
        return {"words.json": json.dumps([*words, *overrides]).encode()}
    if kind == "ftkit.yaml":
        return {"words.json": json.dumps(words).encode(), kind: damaged_bytes(rng, _SETTINGS, _PIECES)}
    content = rng.choice(_FILES[kind]).read_bytes()
    if kind == "image.yaml":
        content = re.sub(rb"(?m)^name: .*\ntag: .*", b'name: odd\ntag: "1"', content)  # those of its folder
    if rng.random() < 0.5:
        return {"words.json": json.dumps(words).encode(), kind: damaged_bytes(rng, content, _PIECES)}
    values = parse_bytes(content, kind).values
    for _ in range(rng.choice((1, 1, 3))):
        values = damaged_value(rng, values)
    return {"words.json": json.dumps(words).encode(), kind: json.dumps(values).encode()}


def _override(rng: random.Random) -> str:
    layers = read_yaml(assets.EXAMPLES / "olmo3-7b-full.yaml")
    names = rng.choice([key for key in layers.origins if key])
    value = near_value(rng, layers.value(names)) if rng.random() < 0.5 else rng.choice(ODD_VALUES)
    if rng.random() < 0.2:
        names = tuple(rng.choices(_NAMES, k=rng.choice((1, 2, 99))))
    text = value if isinstance(value, str) else json.dumps(value)
    return ".".join(names) + rng.choice(("=", "=", "=", "=", "=", "", "==", ".=", "=[")) + text


def _run(case: Case, folder: Path) -> bool:
    recipe, cluster, *overrides = json.loads(case["words.json"])
    words = ["plan", recipe, "--cluster", cluster]
    project = folder / "project"
    with command_line(folder) as call:
        if "recipe.yaml" in case:
            _put(project / "recipes" / "odd.yaml", case["recipe.yaml"])
            assert call("config", "recipes")[0] == 0
            words[1] = "odd"
        if "cluster.yaml" in case:
            _put(project / "clusters" / "odd.yaml", case["cluster.yaml"])
            assert call("cluster", "list")[0] == 0
            words[3] = "odd"
        if "image.yaml" in case:
            shutil.copytree(assets.CONTAINERS / "olmo3" / "25.02", project / "containers" / "odd" / "1")
            _put(project / "containers" / "odd" / "1" / "image.yaml", case["image.yaml"])
            assert call("images")[0] == 0
            words += ["--image", "odd:1"]
        if "ftkit.yaml" in case:
            _put(project / "ftkit.yaml", case["ftkit.yaml"])
            return call("config")[0] == 0
        code, _ = call(*words, *overrides)
    assert not (folder / "workspace").exists(), "planning must not write files"
    return code == 0


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


SPECS = Area("specs", _make, _run)
