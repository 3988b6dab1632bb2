"""Documentation pages: links resolve, code blocks parse, and the site builds without warnings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from ruamel.yaml import YAML
from waiting import PATIENCE_SECONDS

from ftkit.models.families import FAMILIES, MEASURED

CHECKOUT = Path(__file__).parents[2]
REFERENCE = CHECKOUT / "docs" / "reference"
PAGES = [*CHECKOUT.glob("*.md"), *sorted((CHECKOUT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

NOT_IN_A_CHECKOUT = {"ftkit.yaml", "ftkit.run", "containers/NAME/TAG", "docs/_build"}
"""A project's files, a tag of MLflow's, and what is built."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST generate them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_internal_links_resolve_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = page.parent / unquote(path) if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


@every_page
def test_code_blocks_can_be_parsed(page: Path) -> None:
    for indent, kind, text in FENCE.findall(page.read_text()):
        body = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
        if kind == "python":
            compile(body, str(page), "exec")
        elif kind == "json":
            json.loads(body)
        elif kind == "yaml":
            YAML(typ="safe").load(body)
        else:
            assert kind.startswith("{") or kind in {"console", "text"}, f"a block of an unknown kind: {body}"


def spans(page: Path) -> list[str]:
    """Return the inline code of a page's sentences and tables, without the changelog of past releases."""
    current = re.split(r"^## \[\d", FENCE.sub("", page.read_text()), maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"`([^`\n]+)`", current)


def alternatives(path: str) -> list[str]:
    """Expand `a/{b,c}.py` as bash does."""
    found = re.search(r"\{([^}]*)\}", path)
    return [path.replace(found[0], part) for part in found[1].split(",")] if found else [path]


@every_page
def test_files_and_modules_mentioned_on_a_page_exist(page: Path) -> None:
    for span in spans(page):
        word = span.split()[0].removeprefix("./").rstrip("/")
        if word in NOT_IN_A_CHECKOUT:
            continue
        if re.fullmatch(r"ftkit(\.[a-z]\w*)+", word):
            path = CHECKOUT / word.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"`{span}`: there is no such module"
        elif re.fullmatch(r"(ftkit|tests|benchmarks|scripts|sbatch|docs|containers)/[\w./{},-]*\w", word):
            for path in alternatives(word):
                assert (CHECKOUT / path).exists(), f"`{span}`: there is no {path}"


KEY = re.compile(r"((model|data|training|evaluation|tracking|profile|resources)(\.[a-z]\w*)+)(?=$|[=: ])")


@every_page
def test_commands_and_recipe_keys_mentioned_on_a_page_exist(page: Path) -> None:
    commands = set(re.findall(r"^## ftkit (.+)$", (REFERENCE / "cli.md").read_text(), re.MULTILINE))
    keys = set(re.findall(r"^\| `([\w.]+)` \|", (REFERENCE / "recipe.md").read_text(), re.MULTILINE))
    for span in spans(page):
        command, key = re.match(r"ftkit ([a-z][\w-]*)\b", span), KEY.match(span)
        assert not command or command[1] in commands, f"`{span}`: there is no such command"
        assert not key or key[1] in keys, f"`{span}`: a recipe has no such key"


def test_the_families_page_lists_all_supported_families() -> None:
    measured, counted, *_ = re.findall(
        r"^\| (?:memory and speed|parameters counted).*?\| (.+) \|$",
        (REFERENCE / "families.md").read_text(),
        re.MULTILINE,
    )
    assert re.findall(r"`(\w+)`", measured) == sorted(MEASURED)
    assert sorted(re.findall(r"`(\w+)`", counted)) == sorted(
        name for name, family in FAMILIES.items() if family.has_formula and name not in MEASURED
    )


@every_page
def test_a_page_begins_with_its_title(page: Path) -> None:
    assert page.read_text().startswith(("# ", "```{include}"))


@pytest.mark.docs
def test_the_site_builds_without_warnings_and_search_covers_every_page(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, CHECKOUT / "scripts" / "docs", "--build", site],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (site / "searchindex.js").read_text()
    for page in (CHECKOUT / "docs").rglob("*.md"):
        name = page.relative_to(CHECKOUT / "docs").with_suffix("")
        assert (site / f"{name}.html").is_file()
        assert f'"{name}"' in index
    for picture in (CHECKOUT / "docs" / "pictures").iterdir():
        assert any(picture.name in html.read_text() for html in site.rglob("*.html")), f"no page shows {picture.name}"
