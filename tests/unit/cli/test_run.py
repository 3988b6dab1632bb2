from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ftkit
import ftkit.launch.submission  # keeps the real `render_job`, in place of the one of the first test
from ftkit import assets, process
from ftkit.config.image_reference import NamedImage
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import ConfigError, RunFailedError
from ftkit.launch.render import render_job
from ftkit.runs.failure import RankError, write_rank_error
from ftkit.runs.records import EvaluationRecord, Sample, StageRecord, StartRecord, to_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from conftest import FakePrograms, Result

    from ftkit.planning.layout import Workspace

PACKAGE = Path(ftkit.__file__).parent

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the script of every run."""

    def use(script: str) -> None:
        def render(*_: object, **__: object) -> str:
            return script

        monkeypatch.setattr("ftkit.cli.submit.render_job", render)

    return use


@pytest.fixture
def learning(records: Any) -> str:
    """A script that writes the files of a complete training run; its export is empty."""
    before = EvaluationRecord(1.0, 0, "before", 6.0, 812.5, (), scores={"sql": 0.0})
    right = Sample("How many ships are there?", "SELECT COUNT(*) FROM ships", "SELECT COUNT(*) FROM ships", True)
    wrong = Sample("Which is the oldest?", "SELECT name FROM ships", "SELECT age FROM ships", False)
    after = EvaluationRecord(3.0, 20, "after", 0.5, 1.62, (right, right, wrong), scores={"sql": 0.85})
    lines = [
        StageRecord(0.0, "packing"),
        StartRecord(0.5, 20, 0, 2, "fsdp2", "cpu", 951680, {}),
        before,
        records.step(10, 3.25, 20),
        records.step(20, 0.75, 20),
        after,
        records.end(number=20),
    ]
    text = "\n".join(to_line(record) for record in lines)
    return f"mkdir export; cat >metrics.jsonl <<'END'\n{text}\nEND\necho 0 >exit-code-$$\n"


def test_a_dry_run_prints_only_the_script_and_writes_nothing(
    ftkit: Callable[..., Result], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = []
    monkeypatch.setattr(
        "ftkit.launch.render.render_job", lambda *args, **how: scripts.append(render_job(*args, **how)) or scripts[-1]
    )
    batch = ("training.micro_batch_size=8", "training.global_batch_size=32", "training.sequence_length=256")
    result = ftkit("run", "demo", "--dry-run", *batch)
    assert result.code == 0
    assert result.out == scripts[0]
    assert result.out.startswith("#!")
    assert "8 packs × 2 processes × 2 accumulation" in result.err
    assert not workspace.root.exists()


def test_a_dry_run_names_each_part_of_the_script_that_the_project_overrides(ftkit: Callable[..., Result]) -> None:
    part = Path("sbatch/parts/cache.sh.j2")
    part.parent.mkdir(parents=True)
    part.write_text((assets.JOB_TEMPLATES / "parts/cache.sh.j2").read_text() + "echo overridden\n")
    Path("sbatch/other.sbatch").touch()
    result = ftkit("run", "demo", "--dry-run")
    assert result.code == 0
    assert "\necho overridden\n" in result.out
    assert str(part) in result.err
    assert "other.sbatch" not in result.err
    part.write_text("{{ plan.name }}\n")
    assert ftkit("run", "demo", "--dry-run").code == ConfigError.exit_code


def test_the_manifest_has_the_digest_of_each_overridden_part(
    ftkit: Callable[..., Result], job: Callable[[str], None], workspace: Workspace
) -> None:
    part = Path("sbatch/parts/cache.sh.j2")
    part.parent.mkdir(parents=True)
    part.write_text((assets.JOB_TEMPLATES / "parts/cache.sh.j2").read_text())
    job("echo 0 >exit-code-$$")
    assert str(part) in ftkit("run", "demo", "--no-follow").err
    (folder,) = workspace.runs.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["overridden_parts"] == {"parts/cache.sh.j2": hashlib.sha256(part.read_bytes()).hexdigest()}


def test_a_dry_run_of_a_sweep_prints_its_scripts_and_shows_its_plans(ftkit: Callable[..., Result]) -> None:
    result = ftkit("run", "demo", "training.seed=1,2", "--dry-run", "--no-follow")
    assert result.out.count("#!/") == 2
    assert [line.split()[:2] for line in result.err.splitlines()] == [["RUN", "SEED"], ["demo-1", "1"], ["demo-2", "2"]]


def test_a_sweep_on_this_machine_goes_on_after_a_run_that_fails(
    ftkit: Callable[..., Result], learning: str, job: Callable[[str], None]
) -> None:
    job(f"case $PWD in */demo-1-*) echo 9 >exit-code-$$; exit;; esac\n{learning}")
    result = ftkit("run", "demo", "training.seed=1,2", "--cluster", "local")
    assert result.code == RunFailedError.exit_code
    assert [run.rsplit("-", 2)[0] for run in result.out.split()] == ["demo-1", "demo-2"]
    assert "1 of 2 runs" in result.err
    job(f"case $PWD in */demo-1-*) touch canceled; echo 143 >exit-code-$$; exit;; esac\n{learning}")
    result = ftkit("run", "demo", "training.seed=3,4", "--cluster", "local")
    assert "demo-2-" not in result.err.partition("submitted")[2]


def test_a_sweep_on_slurm_is_submitted_as_the_job_array_that_its_dry_run_prints(
    ftkit: Callable[..., Result], programs: FakePrograms
) -> None:
    Path("clusters").mkdir()
    profile = "extends: slurm\nname: mine\ndescription: none\nruntime: none\ndevice: cpu\nprocesses_per_node: 1\n"
    Path("clusters/mine.yaml").write_text(profile)
    words = (
        "run",
        "demo",
        "training.seed=1,2",
        "--cluster",
        "mine",
        "--max-parallel",
        "1",
        "--prepare",
        "with-training",
    )
    printed = ftkit(*words, "--dry-run").out
    assert printed.count("#!/") == 3
    assert "exec bash " in printed
    programs.answer("sbatch", "8\n")
    result = ftkit(*words)
    assert programs.calls("sbatch") == ["sbatch --parsable --array=1-2%1 array.sbatch"]
    runs = result.out.split()
    assert [f"submitted {run} as 8_{number}" in result.err for number, run in enumerate(runs, start=1)] == [True, True]


def test_the_plan_says_how_many_documents_fit(ftkit: Callable[..., Result]) -> None:
    learn_tokenizer(["short", "0123456789"], 300, "chatml").save_pretrained("tokenizer")
    rows = [{"text": "short"}] * 3 + [{"text": "0123456789" * 30}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "demo", "--cluster", "local", "data.source=./rows.jsonl", "data.format=text", "evaluation.generation=null",
        "evaluation.every_steps=null", "data.too_long=drop",
        "model.tokenizer={source: ./tokenizer, vocab_size: null}",
    )  # fmt: skip
    (line,) = [each for each in ftkit("plan", *words).out.splitlines() if each.startswith("documents")]
    assert "3 of the first 4" in line
    found = json.loads(ftkit("plan", *words, "--json").out)["documents"]
    assert (found["num_read"], found["num_fitting"]) == (4, 3)
    assert found["longest"] > 256


def test_the_plan_shows_the_share_of_each_source(ftkit: Callable[..., Result], tmp_path: Path) -> None:
    for name in ("chats.jsonl", "code.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n' * 300)
    sources = f"[{{source: {tmp_path}/chats.jsonl, weight: 3}}, {{source: {tmp_path}/code.jsonl, weight: 1}}]"
    changes = (f"data.source={sources}", "data.format=text", "data.validation.count=9", "evaluation.generation=null")
    assert "chats.jsonl 75.0%, code.jsonl 25.0% of the rows" in ftkit("plan", "demo", *changes).out


def test_a_dry_run_prints_escape_sequences_and_non_ascii_text_as_submitted(
    ftkit: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "project" / "clusters").mkdir()
    profile = 'extends: local\nname: odd\nenvironment: {PROMPT: "\\e[31mé×\\e[0m"}\n'
    (tmp_path / "project" / "clusters" / "odd.yaml").write_text(profile)
    assert "PROMPT='\x1b[31mé×\x1b[0m'" in ftkit("run", "demo", "--cluster", "odd", "--dry-run").out


def test_a_dry_run_for_a_cluster_needs_no_slurm_and_no_image(
    ftkit: Callable[..., Result], workspace: Workspace, programs: FakePrograms
) -> None:
    result = ftkit("run", "--image", "olmo3:25.02", "--nodes", "2", "--cluster", "a4-highgpu-8g", "--dry-run")
    assert result.code == 0
    assert "#SBATCH --nodes=2" in result.out
    assert "world size 16" in result.err
    assert programs.calls() == []
    assert not workspace.root.exists()


def test_a_followed_run_shows_its_results(
    ftkit: Callable[..., Result], job: Callable[[str], None], learning: str
) -> None:
    job(learning)
    result = ftkit("run", "demo")
    assert (result.code, result.out) == (0, "")
    for part in (
        "packing",
        "training begins, 20 steps: 2 processes, cpu, fsdp2",
        "validation before training: perplexity 812.5, sql 0%",
        "step 10/20 loss 3.2500",
        "loss 3.2500 → 0.7500",
        "perplexity 812.5, sql 0% → perplexity 1.62, sql 85%",
        "question How many ships are there?",
        "expected SELECT name FROM ships",
        "/export ",
        "ftkit status demo-",
    ):
        assert part in " ".join(result.err.split())
    assert result.err.count("question") == 2


def test_a_run_that_is_not_followed_prints_only_its_id(
    ftkit: Callable[..., Result], job: Callable[[str], None], workspace: Workspace
) -> None:
    job("echo 0 >exit-code-$$")
    result = ftkit("run", "demo", "--name", "mine", "--no-follow")
    (folder,) = workspace.runs.iterdir()
    assert (result.code, result.out) == (0, f"{folder.name}\n")
    assert folder.name.startswith("mine-")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["command"] == ["ftkit", "run", "demo", "--name", "mine", "--no-follow"]


def test_a_plan_for_a_gpu_needs_no_profile(ftkit: Callable[..., Result]) -> None:
    plan = json.loads(ftkit("plan", "demo", "--gpu", "H100", "--gpus-per-node", "4", "--nodes", "2", "--json").out)
    place = plan["placement"]
    assert (plan["cluster"]["gpu"], place["num_nodes"], place["processes_per_node"]) == ("h100-80gb", 2, 4)
    both = ftkit("plan", "demo", "--gpu", "l4", "--cluster", "local")
    assert (both.code, "omit one" in both.err) == (2, True)


@pytest.mark.parametrize("name", ["../up", "a/b", "two words", "-x", "", "a" * 64])
def test_a_name_that_no_recipe_could_have_is_rejected(
    ftkit: Callable[..., Result], workspace: Workspace, name: str
) -> None:
    for command in ("run", "plan"):
        result = ftkit(command, "demo", f"--name={name}")
        assert result.code == 2
        assert "1 to 63 letters" in " ".join(result.err.split())
    assert not workspace.runs.exists()


def test_a_run_that_fails_shows_the_rank_that_failed_first(
    ftkit: Callable[..., Result], job: Callable[[str], None], workspace: Workspace
) -> None:
    job("while [ ! -e go ]; do sleep 0.01; done; echo 1 >exit-code-$$; exit 1")
    run = ftkit("run", "demo", "--no-follow").out.strip()
    layout = next(workspace.runs.iterdir())
    for rank, time in ((0, 9e9 + 2), (1, 9e9 + 1)):
        error = RankError(time, rank, "n7", "CudaError", "out of luck", f"Traceback of rank {rank}", 1)
        write_rank_error(layout / "logs" / f"error-{rank:05d}.json", error)
    (layout / "go").touch()
    result = ftkit("status", run, "--follow")
    assert result.code == 7
    assert "1 on n7 failed first: CudaError" in result.err
    assert "Traceback of rank 1" in result.err
    assert "Traceback of rank 0" not in result.err
    assert f"error: {run}: failed" in result.err


def test_a_run_that_fails_silently_shows_the_end_of_its_log(
    ftkit: Callable[..., Result], job: Callable[[str], None]
) -> None:
    job("echo disk is full; echo 3 >exit-code-$$; exit 3")
    result = ftkit("run", "demo")
    assert result.code == 7
    assert "disk is full" in result.err
    assert "ftkit resume" in result.err


def test_a_resumed_run_shows_only_new_records(
    ftkit: Callable[..., Result], job: Callable[[str], None], records: Any
) -> None:
    first, second = to_line(records.step(7, num_steps=9)), to_line(records.step(9, num_steps=9))
    end = to_line(records.end(number=9))
    job(
        f"if [ -e again ]; then printf '%s\\n' '{second}' '{end}' >>metrics.jsonl; echo 0 >exit-code-$$;"
        f" else touch again; echo '{first}' >metrics.jsonl; echo 1 >exit-code-$$; fi"
    )
    assert ftkit("run", "demo", "training.max_steps=9").code == 7
    result = ftkit("resume", "last")
    assert result.code == 0
    assert "step 7/9  loss" not in result.err
    assert "step 9/9  loss" in result.err
    assert ftkit("resume", "last").code == 6


def test_an_interrupt_does_not_stop_the_run_and_shows_how_to_follow_it(
    ftkit: Callable[..., Result],
    job: Callable[[str], None],
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    job("while [ ! -e go ]; do sleep 0.01; done")
    monkeypatch.setattr("ftkit.cli.follow.poll_states", interrupt)
    result = ftkit("run", "demo")
    (next(workspace.runs.iterdir()) / "go").touch()
    assert result.code == 130
    assert "continues; to follow it: ftkit status" in result.err
    assert "ftkit cancel demo-" in result.err


def test_a_running_run_is_canceled_by_name(ftkit: Callable[..., Result], job: Callable[[str], None]) -> None:
    job("exec sleep 3600")
    assert ftkit("run", "demo", "--no-follow").code == 0
    assert "canceled demo-" in ftkit("cancel", "demo").err
    assert "ended: canceled" in ftkit("cancel", "demo").err
    assert json.loads(ftkit("status", "demo", "--json").out)["state"] == "canceled"


def test_a_job_rejected_by_slurm_leaves_no_run(
    ftkit: Callable[..., Result], programs: FakePrograms, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.answer("sbatch", stderr="sbatch: error: invalid partition specified: x\n", code=1)
    image = workspace.image_file(NamedImage("olmo3:25.02"), "sqsh")
    image.parent.mkdir(parents=True)
    image.touch()
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("SBATCH_EXPORT", "ALL,MY_TOKEN=abc")
    result = ftkit("run", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g")
    assert result.code == 6
    assert "invalid partition" in result.err
    assert "SBATCH_PARTITION=x" in result.err
    assert "MY_TOKEN=***" in result.err
    assert list(workspace.runs.iterdir()) == []


def test_the_way_from_run_to_sbatch_is_the_ten_files_of_the_architecture_page(
    ftkit: Callable[..., Result], programs: FakePrograms, workspace: Workspace
) -> None:
    programs.answer("sbatch", "123\n")
    image = workspace.image_file(NamedImage("olmo3:25.02"), "sqsh")
    image.parent.mkdir(parents=True)
    image.touch()
    called: set[str] = set()
    on_the_stack: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not Path(code.co_filename).is_relative_to(PACKAGE):
            return
        if code.co_flags & inspect.CO_OPTIMIZED:  # neither a module nor the body of a class
            called.add(str(Path(code.co_filename).relative_to(PACKAGE)))
        if code is process.run.__code__ and Path(frame.f_locals["args"][0]).name == "sbatch":
            outer: FrameType | None = frame
            while outer is not None:
                on_the_stack.add(outer.f_code.co_filename)
                outer = outer.f_back

    sys.setprofile(note)
    try:
        result = ftkit("run", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g", "--no-follow")
    finally:
        sys.setprofile(None)
    assert result.code == 0
    page = (PACKAGE.parent / "docs" / "reference" / "architecture.md").read_text()
    section = page.partition("## The way of a run")[2].partition("## The way of a row")[0]
    listed = re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)
    stack = {str(Path(file).relative_to(PACKAGE)) for file in on_the_stack if Path(file).is_relative_to(PACKAGE)}
    assert stack - {*listed} == set()
    assert [file for file in listed if file not in called] == []
    assert len(listed) <= 10


def test_a_missing_image_is_reported_before_submission(
    ftkit: Callable[..., Result], programs: FakePrograms, workspace: Workspace
) -> None:
    result = ftkit("run", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g")
    assert result.code == 4
    assert str(workspace.image_file(NamedImage("olmo3:25.02"), "sqsh")) in result.err
    assert programs.calls() == []
    assert not workspace.runs.exists()


def test_the_job_gets_the_path_of_the_token_file_and_not_the_token(
    ftkit: Callable[..., Result], job: Callable[[str], None], workspace: Workspace, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "of-the-shell")
    (tmp_path / "token").write_text("of-the-file")
    job('echo "${HF_TOKEN-none} ${HUGGING_FACE_HUB_TOKEN-none} $HF_TOKEN_PATH"; echo 0 >exit-code-$$')
    result = ftkit("run", "demo", "--hf-token-file", str(tmp_path / "token"))
    (folder,) = workspace.runs.iterdir()
    assert (folder / "logs" / "job.log").read_text() == f"none none {tmp_path / 'token'}\n"
    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "of-the-file" not in written + result.out + result.err


@pytest.mark.parametrize("words", [("plan",), ("plan", "--json"), ("run",)])
def test_a_plan_exits_like_its_run(
    ftkit: Callable[..., Result], workspace: Workspace, words: tuple[str, ...], tmp_path: Path
) -> None:
    data = "data.source={kind: files, train: nowhere.jsonl, num_heldout: 100}"
    tokenizer = "model.tokenizer={source: model, vocab_size: null}"
    result = ftkit(*words, "demo", data, "evaluation.generation=null", f"model.weights={tmp_path}/no", tokenizer)
    assert result.code == 4
    assert "error: data.source.train: " in result.err
    assert f"error: model.weights: {tmp_path}/no does not exist" in result.err
    assert bool(result.out) == (words[0] == "plan")
    assert not workspace.root.exists()


def test_a_plan_warns_of_a_missing_image_and_an_unresponsive_hub(
    ftkit: Callable[..., Result], workspace: Workspace
) -> None:
    result = ftkit("plan", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g", "--nodes", "2")
    assert result.code == 0
    file = workspace.image_file(NamedImage("olmo3:25.02"), "sqsh")
    assert f"no file {file}" in result.err
    assert re.search("^warning: .*'allenai/Olmo-3-1125-32B'", result.err, re.MULTILINE)


def test_missing_weights_are_reported_before_submission(
    ftkit: Callable[..., Result], programs: FakePrograms, workspace: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    words = ("run", "olmo3-7b-full", "--image", "olmo3:25.02", "--cluster", "a4-highgpu-8g")
    result = ftkit(*words, f"model.weights={tmp_path / 'weights'}")
    assert result.code == 4
    assert "config.json and no model.safetensors" in result.err
    assert programs.calls() == []
    assert not workspace.runs.exists()


def test_max_parallel_is_refused_for_one_run(ftkit: Callable[..., Result]) -> None:
    for words in (("demo",), ("--script", __file__)):
        result = ftkit("run", *words, "--max-parallel", "2", "--no-follow")
        assert (result.code, "this is one run" in result.err) == (ConfigError.exit_code, True)
