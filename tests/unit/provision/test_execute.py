"""Creation and destruction of clusters, with fakes of the provider's programs."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ftkit.cli.groups import cluster_command as cluster
from ftkit.errors import ConfigError, NotFoundError, ProvisionError, UnusableFileError
from ftkit.provision.steps import Step, users_of

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

WORDS = ("project=my-project", "zone=us-central1-a")
GCLOUD = r"""#!/bin/bash
# Keeps what it made as files of $MADE, and fails where $MADE/fail holds a pattern of its words.
echo "$*" >>"$MADE/calls"
if [[ -f $MADE/fail ]] && grep -qf "$MADE/fail" <<<"$*"; then echo "ERROR: ZONE_RESOURCE_POOL_EXHAUSTED" >&2; exit 1; fi
case "$*" in
  auth*) echo me@example.com ;;
  *machine-types*) echo g2-standard-4 ;;
  *list*) name=$(grep -o 'filter=name=[^ ]*' <<<"$*"); cat "$MADE/has-${name##*=}" 2>/dev/null || true ;;
  *delete*) rm "$MADE/has-$(grep -oE '(small[^ ]*)' <<<"$*" | head -1)" ;;
  *create*) name=$(grep -oE 'create [^ ]*' <<<"$*"); echo "${name#create }" >"$MADE/has-${name#create }" ;;
esac
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs, made = tmp_path / "bin", tmp_path / "made"
    for folder in (programs, made):
        folder.mkdir()
    program = programs / "gcloud"
    program.write_text(GCLOUD, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("MADE", str(made))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(cluster, [*words], catch_exceptions=True)


def calls(made: Path, verb: str) -> list[str]:
    lines = (made / "calls").read_text(encoding="utf-8").splitlines()
    return [
        next(word for word in shlex.split(line) if word.startswith("small")) for line in lines if f" {verb} " in line
    ]


def things(made: Path) -> set[str]:
    return {path.name.removeprefix("has-") for path in made.glob("has-*")}


def test_created_resources_are_removed_in_reverse_order_and_existing_ones_are_kept(made: Path) -> None:
    (made / "has-small-net").write_text("small-net\n", encoding="utf-8")
    done = run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    assert done.exit_code == 0, done.output
    assert calls(made, "create") == ["small-iap", "small-router", "small-nat", "small"]
    shown = run("status", "small").stdout
    assert "existed before" in shown
    assert things(made) == {"small-net", "small-iap", "small-router", "small-nat", "small"}
    done = run("destroy", "small", "--yes")
    assert done.exit_code == 0, done.output
    assert calls(made, "delete") == ["small", "small-nat", "small-router", "small-iap"]
    assert things(made) == {"small-net"}
    assert isinstance(run("status", "small").exception, NotFoundError)


def test_a_state_that_the_provider_does_not_tell_is_an_error(made: Path) -> None:
    assert run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes").exit_code == 0
    (made / "fail").write_text("instances list", encoding="utf-8")
    done = run("status", "small")
    assert "small-net" in done.stdout
    assert isinstance(done.exception, ProvisionError)
    assert "ZONE_RESOURCE_POOL_EXHAUSTED" in str(done.exception)


def test_a_missing_program_is_reported_with_the_checks_advice(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(made))
    done = run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    assert isinstance(done.exception, ProvisionError)
    assert "gcloud" in str(done.exception)
    assert done.exception.fix


def test_a_zone_that_is_out_of_stock_is_reported_and_the_same_command_continues(made: Path) -> None:
    (made / "fail").write_text("instances create", encoding="utf-8")
    failed = run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    assert isinstance(failed.exception, ProvisionError)
    assert "out of stock" in (failed.exception.fix or "")
    assert "started, not finished" in run("status", "small").stdout
    (made / "fail").unlink()
    assert run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes").exit_code == 0
    assert calls(made, "create").count("small-net") == 1
    other = run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "disk_gib=500", "--yes")
    assert isinstance(other.exception, ConfigError)


def test_a_started_but_missing_resource_needs_no_removal(made: Path) -> None:
    (made / "fail").write_text("instances create", encoding="utf-8")
    run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    assert run("destroy", "small", "--yes").exit_code == 0
    assert "small" not in calls(made, "delete")
    assert things(made) == set()


@pytest.mark.parametrize("check", ["auth list", "machine-types"])
def test_nothing_is_created_after_a_failed_check_and_so_nothing_is_to_be_destroyed(
    check: str, made: Path, tmp_path: Path
) -> None:
    (made / "fail").write_text(check, encoding="utf-8")
    failed = run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    assert isinstance(failed.exception, ProvisionError)
    assert "destroy" not in str(failed.exception)
    assert not (tmp_path / "state").exists()


def test_nothing_is_created_without_confirmation(made: Path) -> None:
    done = CliRunner().invoke(cluster, ["create", "small", "--kind", "gcp-vm-l4", *WORDS], input="n\n")
    assert "nothing was changed" in done.output
    assert not (made / "calls").exists()


def test_resources_of_an_unresponsive_provider_are_recorded(made: Path) -> None:
    run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    (made / "fail").write_text("instances list", encoding="utf-8")
    assert isinstance(run("destroy", "small", "--yes").exception, ProvisionError)
    (made / "fail").unlink()
    assert run("destroy", "small", "--yes").exit_code == 0
    assert things(made) == set()


@pytest.mark.parametrize("version", [None, 1, 3, "damaged"])
def test_a_state_file_of_another_version_is_refused_and_nothing_is_removed(
    version: int | str | None, made: Path, tmp_path: Path
) -> None:
    run("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")
    state = tmp_path / "state/ftkit/clusters/small/state.json"
    values = json.loads(state.read_bytes())
    values.pop("version")
    text = "{" if version == "damaged" else json.dumps(values if version is None else {**values, "version": version})
    state.write_text(text, encoding="utf-8")
    before = things(made)
    for words in (("destroy", "small", "--yes"), ("create", "small", "--kind", "gcp-vm-l4", *WORDS, "--yes")):
        refused = run(*words).exception
        assert isinstance(refused, UnusableFileError)
        assert "small" in str(refused)
        assert str(state) in str(refused)
    assert things(made) == before
    assert state.read_text(encoding="utf-8") == text


def test_resources_are_not_removed_if_another_clusters_state_is_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "state/ftkit/clusters/other"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"version": 3}', encoding="utf-8")
    step = Step("bucket", "the bucket", "true", undo=("true",), users=("true",))
    with pytest.raises(UnusableFileError, match="other"):
        users_of(step, folder.with_name("small"), {})
