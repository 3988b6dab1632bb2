"""The texts of errors about clusters to create, as a user reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from error_texts import check_error_texts

from ftkit.provision.providers import plan_provision
from ftkit.provision.settings import read_spec
from ftkit.provision.steps import Check, ProvisionState, Step, begin_or_continue, create, is_there, read_state

if TYPE_CHECKING:
    from collections.abc import Callable

VM = ("project=my-project", "zone=us-central1-a")


def test_golden_error_texts(tmp_path: Path) -> None:
    spec = read_spec("gcp-vm-l4", None, VM)
    planned = plan_provision("vm", "gcp-vm-l4", spec)
    state = ProvisionState("gcp-vm-l4", spec.model_dump(mode="json"))
    failing = Check("a login is valid", "sh -c 'echo expired >&2; exit 1'", "log in again")
    broken = Step("vm", "the VM", "sh -c 'echo Quota GPUS exceeded; exit 3'")
    other = type(planned)(**{**vars(planned), "checks": (failing,)})
    stuck = type(planned)(**{**vars(planned), "checks": (), "steps": (broken,)})

    def repeat_with_other_settings() -> None:
        begin_or_continue(tmp_path / "stuck", ProvisionState("gcp-vm-l4", {**state.settings, "disk_gib": 500}))

    (tmp_path / "all" / "newer").mkdir(parents=True)
    (tmp_path / "all" / "newer" / "state.json").write_text('{"version": 3}', encoding="utf-8")
    failures: dict[str, Callable[[], object]] = {
        "missing settings": lambda: read_spec("gcp-vm-l4", None, ()),
        "wrong settings": lambda: read_spec("gcp-vm-l4", None, ("project=my-project", "zone=nowhere")),
        "a name for no provider": lambda: plan_provision("train-1", "gcp-vm-l4", spec),
        "unknown cluster": lambda: read_state(tmp_path / "nothing"),
        "a state of another version": lambda: read_state(tmp_path / "all" / "newer"),
        "failed check": lambda: create(other, state, tmp_path / "other", lambda _: None),
        "failed step": lambda: create(stuck, state, tmp_path / "stuck", lambda _: None),
        "other settings": repeat_with_other_settings,
        "silent provider": lambda: is_there(Step("vm", "the VM", "", existing="false"), tmp_path),
    }
    check_error_texts("provision", failures.items(), {str(tmp_path): "FOLDER"})
