from __future__ import annotations

import os
import re
from errno import EACCES, EDQUOT, ENOSPC, EROFS
from pathlib import Path

import pytest

import ftkit
from ftkit.errors import (
    EXIT_CODES,
    DataError,
    DiskFullError,
    FtkitError,
    NoAnswerError,
    NotFoundError,
    PrerequisiteError,
    SubmitError,
    TrainingError,
    UnfitMachineError,
    as_user_error,
    one_line,
)
from ftkit.files import open_regular, read_small

ROOT = Path(__file__).resolve().parents[2]


def test_each_kind_of_error_has_an_exit_code_of_its_own_which_the_documentation_explains() -> None:
    direct = [error for error in FtkitError.__subclasses__() if error.__module__ == "ftkit.errors"]
    codes = [error.exit_code for error in direct]
    assert len(set(codes)) == len(codes)
    assert {0, 1, 2, 130, NoAnswerError.exit_code, *codes} == EXIT_CODES.keys()
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    page = (ROOT / "docs" / "when-something-fails.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_no_error_borrows_the_exit_code_of_an_unrelated_one() -> None:
    """An error without a code of its own is in `ftkit.errors`, or derives from one that is."""
    borrowed = {
        str(path.relative_to(ROOT)): found
        for path in sorted(Path(ftkit.__file__).parent.rglob("*.py"))
        if (
            found := re.findall(
                r"^(?:class .*|    )\bexit_code ?= ?(?:\d+|\w+\.exit_code)\b", path.read_text(), re.MULTILINE
            )
        )
    }
    borrowed.pop("ftkit/errors.py")
    assert borrowed == {
        "ftkit/files.py": [
            "class PrivateFileError(DamagedFileError, exit_code=PrerequisiteError.exit_code"
        ],  # a permission is missing
        "ftkit/launch/scheduler.py": [
            "class InterruptedSubmitError(UncertainSubmitError, exit_code=130"
        ],  # sbatch was interrupted
    }


def test_job_scripts_end_with_the_codes_of_what_they_found() -> None:
    templates = [path for path in (ROOT / "sbatch").rglob("*.j2") if path.is_file()]
    codes = {int(code) for path in templates for code in re.findall(r"\bexit (\d+)", path.read_text())}
    terminated = 143
    assert codes - {0, terminated} == {
        error.exit_code for error in (NoAnswerError, NotFoundError, PrerequisiteError, SubmitError, UnfitMachineError)
    }


def caused_by(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except type(cause) as error:
            raise TrainingError("the checkpoint can't be written") from error
    except TrainingError as error:
        return error


def followed_by(cause: Exception) -> Exception:
    """Fail as torch does: closing a failed writer raises another error."""
    try:
        try:
            raise cause
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("number", [ENOSPC, EDQUOT])
def test_a_full_disk_is_recognized_in_any_exception(number: int) -> None:
    full = OSError(number, os.strerror(number), "/w/file")
    texts = RuntimeError(f"RANK 0: OSError: {full}\nRANK 1: the same")
    for error in (full, caused_by(full), followed_by(full), texts, ExceptionGroup("two", [ValueError("x"), full])):
        found = as_user_error(error)
        assert isinstance(found, DiskFullError), error
        assert found.can_resume
        assert "free space" in found.fix
    assert "can't write /w/file" in str(as_user_error(caused_by(full)))
    assert str(caused_by(full)) in str(as_user_error(caused_by(full)))
    assert as_user_error(found) is found


def test_a_file_where_a_folder_should_be_is_not_a_bug(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/x"):
        with pytest.raises(OSError, match="file") as caught:
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
        found = as_user_error(caught.value)
        assert isinstance(found, NotFoundError)
        assert str(tmp_path / "file") in found.what


def test_a_full_disk_has_its_exit_code_also_where_a_command_names_the_file() -> None:
    refused = PrerequisiteError("can't write /w/bundle.tar: no space")
    refused.__cause__ = OSError(ENOSPC, os.strerror(ENOSPC))
    told = PrerequisiteError(f"6 parts are not copied: {os.strerror(EDQUOT)}")
    for error in (refused, told):
        found = as_user_error(error)
        assert isinstance(found, DiskFullError)
        assert found.meaning == error.what
    other = PrerequisiteError("there is no docker")
    other.__context__ = OSError(ENOSPC, os.strerror(ENOSPC))  # handled before
    assert as_user_error(other) is other


def test_a_short_write_is_reported_as_a_full_disk() -> None:
    texts = ("373248 requested and 73696 written", "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    for text in texts:
        assert isinstance(as_user_error(OSError(text)), DiskFullError)


def test_a_missing_package_is_reported_with_the_extra_that_has_it() -> None:
    for name, extra in (("peft", "train"), ("docker", "images"), ("deepspeed", "deepspeed")):
        missing = ModuleNotFoundError(f"No module named '{name}'", name=name)
        for error in (missing, caused_by(missing)):
            found = as_user_error(error)
            assert isinstance(found, PrerequisiteError)
            assert found.fix == f"pip install 'ftkit[{extra}]'"
    ours = PrerequisiteError("needs peft", fix="ask")
    ours.__cause__ = missing
    handled = ValueError("another reason")
    handled.__context__ = missing
    for error in (ours, handled, ModuleNotFoundError("no", name="mine"), ImportError("no", name="peft.x")):
        assert as_user_error(error) is error


def test_a_denied_permission_is_reported_with_the_file() -> None:
    found = as_user_error(PermissionError(EACCES, os.strerror(EACCES), "/runs/of another/plan.json"))
    assert isinstance(found, PrerequisiteError)
    assert found.what == "permission denied: /runs/of another/plan.json"


def test_a_read_only_file_system_is_no_bug() -> None:
    found = as_user_error(OSError(EROFS, os.strerror(EROFS), "/runs/x/sync.json"))
    assert isinstance(found, PrerequisiteError)
    assert "/runs/x/sync.json" in found.what


def test_other_errors_are_unchanged() -> None:
    for error in (ValueError("no"), caused_by(OSError(EACCES, "no right")), FtkitError("no")):
        assert as_user_error(error) is error


def test_only_failures_outside_of_the_plan_can_be_resumed() -> None:
    assert PrerequisiteError("no torch").can_resume
    assert not TrainingError("wrong model").can_resume
    assert TrainingError("no checkpoint", fix="then: ftkit resume x").can_resume


def test_the_message_of_a_failed_import_is_that_of_its_cause() -> None:
    lazy = ModuleNotFoundError(
        "Could not import module 'LlamaConfig'. Are this object's requirements defined correctly?"
    )
    assert one_line(lazy) == str(lazy)
    lazy.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert one_line(lazy) == str(lazy.__cause__)


def test_the_parts_of_an_error_are_separated_on_one_line() -> None:
    assert one_line(DataError("no rows", fix="give a file")) == "no rows; give a file"


def test_a_file_that_cannot_be_read_for_what_it_is_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    for access in (
        lambda: (tmp_path / "a").resolve(strict=True),
        (tmp_path / ("x" * 5000)).open,
        tmp_path.open,
        lambda: read_small(tmp_path / "large"),
        lambda: open_regular(tmp_path / "pipe"),
        lambda: open_regular(tmp_path),
    ):
        with pytest.raises((OSError, RuntimeError)) as caught:
            access()
        assert isinstance(as_user_error(caught.value), NotFoundError)
