"""The base of an image is pinned by digest and the same for each build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.config.context import Context
from ftkit.config.image_reference import Digest, parse_reference
from ftkit.config.load import ImageDefinition, find_image
from ftkit.errors import ConfigError, ImageError, NotFoundError
from ftkit.images.build import BaseRequest, SelectedBase, current_digest_if_moved, record, select_base
from ftkit.images.events import ignore_progress

if TYPE_CHECKING:
    from pathlib import Path

    from fuzzing.internet import Internet

BASE = "registry.example.com/team/x:1"
OLD = Digest("sha256:" + "1" * 64)
IMAGE = """name: mine
tag: "1"
description: MadeFile for a test
base: {{reference: {base}}}
families: [qwen3]
default_recipe: demo
"""


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    folder = tmp_path / "project" / "containers" / "mine" / "1"
    folder.mkdir(parents=True)
    (folder / "image.yaml").write_text(IMAGE.format(base=BASE))
    return Context(tmp_path / "project", tmp_path / "config", {})


def mine(ctx: Context) -> ImageDefinition:
    return find_image("mine:1", ctx)


def test_an_unpinned_base_is_resolved_once_and_stays_pinned(internet: Internet, ctx: Context) -> None:
    pushed = internet.image()
    chosen = select_base(mine(ctx), BaseRequest(), ignore_progress)
    assert chosen == SelectedBase(parse_reference(f"{BASE}@{pushed.digest}"), is_to_be_recorded=True)
    lock = record(mine(ctx), chosen.image)
    assert lock == ctx.project / "containers" / "mine" / "1" / "bases.lock"

    internet.image(files={"moved": b""})
    assert mine(ctx).spec.base.digest == pushed.digest
    held = select_base(mine(ctx), BaseRequest(), ignore_progress)
    assert held == SelectedBase(chosen.image, is_recorded=True)


def test_a_moved_tag_is_reported_and_used_on_request(internet: Internet, ctx: Context) -> None:
    record(mine(ctx), parse_reference(f"{BASE}@{OLD}"))
    pushed = internet.image()
    assert current_digest_if_moved(select_base(mine(ctx), BaseRequest(), ignore_progress)) == pushed.digest
    anew = select_base(mine(ctx), BaseRequest(repin=True), ignore_progress)
    assert (anew.image.digest, anew.is_to_be_recorded) == (pushed.digest, True)
    record(mine(ctx), anew.image)
    assert mine(ctx).spec.base.digest == pushed.digest
    assert current_digest_if_moved(anew) is None


def test_a_recorded_base_is_used_if_the_registry_does_not_respond(internet: Internet, ctx: Context) -> None:
    record(mine(ctx), parse_reference(f"{BASE}@{OLD}"))
    chosen = select_base(mine(ctx), BaseRequest(), ignore_progress)
    assert internet.asked == []
    assert current_digest_if_moved(chosen) is None
    assert len(internet.asked) == 1


def test_an_unpinned_base_unknown_to_the_registry_is_rejected(internet: Internet, ctx: Context) -> None:
    with pytest.raises(NotFoundError, match="does not resolve") as caught:
        select_base(mine(ctx), BaseRequest(), ignore_progress)
    assert "--allow-unpinned" in caught.value.fix
    internet.asked.clear()
    assert select_base(mine(ctx), BaseRequest(from_docker=True), ignore_progress).image.digest is None
    assert internet.asked == []


def test_each_base_is_recorded_under_its_own_name(internet: Internet, ctx: Context) -> None:
    internet.image()
    other = internet.image("2", files={"other": b""})
    wanted_base = BaseRequest("registry.example.com/team/x:2")
    record(mine(ctx), select_base(mine(ctx), wanted_base, ignore_progress).image)
    internet.image("2", files={"moved": b""})
    assert select_base(mine(ctx), wanted_base, ignore_progress).image.digest == other.digest
    assert mine(ctx).spec.base.digest is None


@pytest.mark.parametrize("wanted_base", [BaseRequest(repin=True), BaseRequest(f"{BASE}@{OLD}", repin=True)])
def test_a_recorded_digest_is_not_resolved_again(ctx: Context, wanted_base: BaseRequest) -> None:
    file = mine(ctx).base_file
    file.write_text(file.read_text().replace(BASE, f"{BASE}, digest: {OLD}"))
    with pytest.raises(ConfigError, match="a fixed digest"):
        select_base(mine(ctx), wanted_base, ignore_progress)


@pytest.mark.parametrize("base", [f"{BASE}@{OLD}", f"{BASE}, digest: '{OLD}'"])
def test_a_digest_in_the_definition_takes_precedence_over_a_recorded_one(ctx: Context, base: str) -> None:
    record(mine(ctx), parse_reference(f"{BASE}@sha256:{'2' * 64}"))
    file = mine(ctx).base_file
    file.write_text(IMAGE.format(base=f"'{base}'" if "digest" not in base else base))
    assert select_base(mine(ctx), BaseRequest(), ignore_progress) == SelectedBase(parse_reference(f"{BASE}@{OLD}"))


def test_digests_of_shipped_bases_are_recorded_in_the_users_configuration(tmp_path: Path) -> None:
    ctx = Context(tmp_path, tmp_path / "config" / "ftkit", {})
    shipped = find_image("olmo3:25.02", ctx)
    assert shipped.spec.base.digest is None
    lock = record(shipped, parse_reference(f"{shipped.spec.base.reference}@{OLD}"))
    assert lock == tmp_path / "config" / "ftkit" / "bases.lock"
    assert find_image("olmo3:25.02", ctx).spec.base.digest == OLD
    assert find_image("qwen3:25.02", ctx).spec.base.digest == OLD  # on the same base
    assert find_image("olmo3:26.05", ctx).spec.base.digest is None


def test_a_read_only_lock_is_not_shadowed(ctx: Context, tmp_path: Path) -> None:
    definition = mine(ctx)
    record(definition, parse_reference(f"{BASE}@{OLD}"))
    elsewhere = definition._replace(base_locks=(tmp_path / "none" / "bases.lock", definition.base_locks[0]))
    assert record(elsewhere, parse_reference(f"{BASE}@{OLD}")) == definition.base_locks[0]
    shipped = find_image("olmo3:25.02", ctx)
    blocked = shipped._replace(base_locks=(definition.base_locks[0], tmp_path / "none" / "bases.lock"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        with pytest.raises(ImageError, match=r"bases\.lock"):
            record(blocked, parse_reference(f"{BASE}@sha256:{'2' * 64}"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [(BASE, "no digest"), (f"{BASE}@sha256:12", "sha256:12"), ("no such/x", "no such/x"), ("\x00", "x00")],
)
def test_an_invalid_lock_is_rejected_with_its_line(ctx: Context, line: str, reason: str) -> None:
    lock = mine(ctx).base_locks[0]
    lock.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        mine(ctx)
    assert "bases.lock:3" in str(caught.value)


def test_an_unreadable_lock_is_rejected(ctx: Context) -> None:
    lock = mine(ctx).base_locks[0]
    lock.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        mine(ctx)
