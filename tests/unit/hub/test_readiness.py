"""Access to the Hugging Face Hub, against a local HTTP server that responds like it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import huggingface_hub
import pytest

from ftkit.config.data_sources import HubSource
from ftkit.data.__main__ import main as prepare_data
from ftkit.data.prepared_data import PreparedData
from ftkit.errors import ConfigError, NotFoundError, PrerequisiteError
from ftkit.hub import readiness
from ftkit.hub.client import read_token
from ftkit.hub.readiness import check_data, find_commit
from ftkit.launch.model import pin_revision, resolve_model
from ftkit.launch.preflight import source_checks
from ftkit.models.architecture import ArchitecturePlan, ArchitectureSpec, ModelPlan, ModelSpec
from ftkit.models.weight_files import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import parse_plan, plan_to_json
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftkit.errors import FtkitError
    from ftkit.planning.plan import RunPlan

SHAPE = ArchitectureSpec(
    family="llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWERS = {
    "org/open": (307, ""),
    "org/small": (200, ""),
    "org/nowhere": (404, "RepoNotFound"),
    "org/private": (401, ""),
    "org/empty": (404, "EntryNotFound"),
    "org/broken": (503, ""),
}
RENAMED = {"org/old": "org/gated"}
NOWHERE = Path("/nowhere")


def check_weights(spec: ModelSpec, environment: dict[str, str], home: Path | None = None) -> str | None:
    return readiness.check_weights(spec, environment, home or Path(environment["HOME"], "empty"))


class Hub(BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012 - one server per test
    config = json.dumps(CONFIG).encode()

    def do_HEAD(self) -> None:
        token = self.headers.get("Authorization")
        self.asked.append((self.path, token))
        model, _, rest = self.path[1:].removeprefix("datasets/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        status, code = ANSWERS.get(model, (200, ""))
        if model == "org/gated" and token != "Bearer right":  # noqa: S105 - a test token
            status, code = (403 if token else 401), "GatedRepo"
        if revision == "gone":
            status, code = 404, "RevisionNotFound"
        if model == "org/pickled" and name != CONFIG_FILE:
            status, code = 404, "EntryNotFound"
        self.send_response(307 if model in RENAMED else status)
        if model in RENAMED:
            self.send_header("Location", self.path.replace(model, RENAMED[model]))
        if code:
            self.send_header("X-Error-Code", code)
        if status == 307:
            self.send_header("Location", "http://elsewhere.invalid/config.json")
        self._describe_file()

    def do_GET(self) -> None:
        self.send_response(200)
        self._describe_file()
        self.wfile.write(self.config)

    def _describe_file(self) -> None:
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(self.config).hexdigest()}"')  # noqa: S324 - git's object id
        self.send_header("Content-Length", str(len(self.config)))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    Hub.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HOME": str(tmp_path)}
    server.shutdown()
    thread.join()
    server.server_close()


def model(weights: str, revision: str | None = None) -> ModelSpec:
    return ModelSpec(weights=weights, revision=revision, architecture=SHAPE)


@pytest.mark.parametrize("weights", ["org/open", "org/small"])
def test_a_readable_model_passes_without_following_redirects(weights: str, environment: dict[str, str]) -> None:
    assert check_weights(model(weights), environment | {"HF_TOKEN": "secret"}) is None
    folder = f"/{weights}/resolve/main"
    assert set(Hub.asked) == {
        (f"{folder}/{name}", "Bearer secret") for name in (CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX)
    }


def test_a_renamed_model_is_requested_under_its_new_name_with_the_token(environment: dict[str, str]) -> None:
    assert check_weights(model("org/old"), environment | {"HF_TOKEN": "right"}) is None
    assert Hub.asked[1] == ("/org/gated/resolve/main/config.json", "Bearer right")
    with pytest.raises(PrerequisiteError, match="'org/old' is gated"):
        check_weights(model("org/old"), environment)


def test_a_gated_model_is_rejected_without_a_token_or_without_permission(environment: dict[str, str]) -> None:
    with pytest.raises(PrerequisiteError, match="'org/gated'") as caught:
        check_weights(model("org/gated"), environment)
    assert "--hf-token-file" in caught.value.fix
    with pytest.raises(PrerequisiteError, match="your token") as caught:
        check_weights(model("org/gated"), environment | {"HF_TOKEN": "wrong"})
    assert "wrong" not in str(caught.value)
    assert check_weights(model("org/gated"), environment | {"HF_TOKEN": "right"}) is None


@pytest.mark.parametrize(
    ("weights", "revision", "message"),
    [
        ("org/nowhere", None, "the hub has no model 'org/nowhere' that can be read without a token"),
        ("org/private", None, "the hub has no model 'org/private'"),
        ("org/empty", None, "'org/empty' has no config.json"),
        ("org/pickled", None, r"'org/pickled' has no model\.safetensors and no model\.safetensors\.index\.json"),
        ("org/open", "gone", "'org/open' has no revision 'gone'"),
    ],
)
def test_missing_weights_are_reported(
    weights: str, revision: str | None, message: str, environment: dict[str, str]
) -> None:
    with pytest.raises(NotFoundError, match=message):
        check_weights(model(weights, revision), environment)


def test_a_failing_or_unreachable_hub_is_a_warning(environment: dict[str, str]) -> None:
    assert "answered 503" in str(check_weights(model("org/broken"), environment))
    unreachable = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "'org/open'" in str(check_weights(model("org/open"), unreachable))


def test_cached_files_are_not_requested_and_are_required_offline(environment: dict[str, str], tmp_path: Path) -> None:
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    stored = tmp_path / "hub" / "models--org--gated"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "snapshots" / "abc" / CONFIG_FILE).write_text(json.dumps(CONFIG))
    with pytest.raises(NotFoundError, match=r"HF_HUB_OFFLINE.*'org/gated'"):
        check_weights(model("org/gated"), offline, tmp_path)
    assert "is not visible" in str(check_weights(model("org/gated"), offline, tmp_path / "on-a-node"))
    (stored / "snapshots" / "abc" / WEIGHTS_FILE).touch()
    assert check_weights(model("org/gated"), offline, tmp_path) is None
    assert check_weights(model("org/gated"), environment | {"HF_HOME": str(tmp_path)}) is None
    assert not Hub.asked


def test_a_shape_that_contradicts_the_configuration_on_the_hub_is_rejected(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = json.dumps(CONFIG | {"hidden_size": 64, "num_key_value_heads": 4}).encode()
    for number, config in enumerate((other, b"{" * 9999, b"[]", b"\xff")):
        home = tmp_path / str(number)
        monkeypatch.setattr(Hub, "config", config)
        if config[-1:] == b"}":
            with pytest.raises(ConfigError) as caught:
                check_weights(model("org/small"), environment, home)
            found = {problem.key for problem in caught.value.problems}
            assert found == {f"model.architecture.{key}" for key in ("hidden_size", "head_dim", "num_key_value_heads")}
            assert "32 in the recipe, 64" in str(caught.value)
        else:
            assert check_weights(model("org/small"), environment, home) is None


def test_a_shape_that_contradicts_the_local_configuration_is_rejected(
    environment: dict[str, str], tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / WEIGHTS_FILE).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (snapshot / CONFIG_FILE).write_text(json.dumps(CONFIG))
    other = {"num_key_value_heads": 4}
    for weights in ("org/model", str(snapshot)):
        with pytest.raises(ConfigError, match=r"architecture\.num_key_value_heads: 4 .*2 in"):
            check_weights(ModelSpec.model_validate({"weights": weights, "architecture": other}), environment, tmp_path)


def test_a_configuration_is_fetched_once_and_defines_the_shape(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "config", json.dumps(CONFIG).encode())
    named = ModelSpec(weights="org/small")
    workspace = Workspace(tmp_path)
    resolved = resolve_model(named, environment, workspace)
    assert resolved.architecture.head_dim == 8
    assert resolved.revision == COMMIT
    assert resolved.architecture.counts is not None
    Hub.asked.clear()
    assert resolve_model(named, environment | {"HF_HUB_OFFLINE": "1"}, workspace) == resolved
    assert not Hub.asked


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ("org/gated", PrerequisiteError, "'org/gated' is gated, and there is no token"),
        ("org/nowhere", NotFoundError, "the hub has no model 'org/nowhere'"),
        ("org/empty", NotFoundError, r"'org/empty' has no config\.json"),
        ("org/broken", ConfigError, "can't be read from here"),
    ],
)
def test_a_model_without_an_accessible_configuration_is_rejected_before_planning(
    weights: str, error: type[Exception], message: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        resolve_model(ModelSpec(weights=weights), environment, Workspace(tmp_path))


def test_a_revision_resolves_to_the_commit_of_the_hub_or_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    assert find_commit(model("org/small", "v1"), environment, tmp_path) == COMMIT
    assert find_commit(model("org/small", COMMIT), {}, tmp_path) == COMMIT
    assert find_commit(model("org/small"), environment | {"HF_HUB_OFFLINE": "1"}, tmp_path) is None
    assert find_commit(model("org/broken"), environment, tmp_path) is None
    with pytest.raises(NotFoundError, match="'gone'"):
        find_commit(model("org/small", "gone"), environment, tmp_path)


def test_a_run_is_submitted_with_the_commit_and_its_data_folder_is_unchanged(
    plan: RunPlan, environment: dict[str, str], tmp_path: Path
) -> None:
    named = ModelSpec(weights="org/small", revision="v1")
    recipe = plan.recipe.model_copy(
        update={"model": ModelPlan.extend(named, architecture=ArchitecturePlan.extend(SHAPE))}
    )
    pinned = pin_revision(replace(plan, recipe=recipe), environment)
    assert (pinned.recipe.model.revision, pinned.recipe.model.requested_revision) == (COMMIT, "v1")
    assert parse_plan(plan_to_json(pinned), "plan.json") == pinned
    assert build_manifest(pinned, ["ftkit"], tmp_path)["model"]["revision"] == COMMIT
    assert pin_revision(pinned, environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}) == pinned
    assert pin_revision(plan, environment) == plan  # random weights


def test_the_hub_is_not_queried_for_random_weights(environment: dict[str, str]) -> None:
    tokenizer = {"source": "trained", "vocab_size": 320}
    random = ModelSpec.model_validate({"weights": "random", "architecture": SHAPE, "tokenizer": tokenizer})
    assert check_weights(random, environment) is None
    assert not Hub.asked


def dataset(name: str, revision: str | None = None) -> HubSource:
    return HubSource(kind="hub", dataset=name, revision=revision)


@pytest.mark.parametrize("name", ["org/open", "org/small", "org/empty", "org/old"])
def test_a_readable_data_set_passes_with_or_without_a_card(name: str, environment: dict[str, str]) -> None:
    assert check_data(dataset(name, "v1"), environment | {"HF_TOKEN": "right"}, NOWHERE) is None
    assert Hub.asked[0] == (f"/datasets/{name}/resolve/v1/README.md", "Bearer right")


@pytest.mark.parametrize(
    ("name", "revision", "error", "message"),
    [
        ("org/gated", None, PrerequisiteError, "data.source.dataset: 'org/gated' is gated, and there is no token"),
        ("org/nowhere", None, NotFoundError, "the hub has no dataset 'org/nowhere' that can be read without a token"),
        ("org/private", None, NotFoundError, "the hub has no dataset 'org/private'"),
        ("org/open", "gone", NotFoundError, "data.source.revision: 'org/open' has no revision 'gone'"),
    ],
)
def test_an_inaccessible_data_set_is_rejected_like_weights(
    name: str, revision: str | None, error: type[FtkitError], message: str, environment: dict[str, str]
) -> None:
    with pytest.raises(error, match=message) as caught:
        check_data(dataset(name, revision), environment, NOWHERE)
    assert "model" not in str(caught.value)


def test_a_data_set_is_left_to_the_job_if_the_hub_does_not_respond(environment: dict[str, str]) -> None:
    assert "answered 503" in str(check_data(dataset("org/broken"), environment, NOWHERE))
    unreachable = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "'org/open'" in str(check_data(dataset("org/open"), unreachable, NOWHERE))


def test_a_cached_data_set_is_not_requested_and_is_required_offline(
    environment: dict[str, str], tmp_path: Path
) -> None:
    offline = environment | {"HF_DATASETS_OFFLINE": "1"}
    wanted = dataset("org/MyData")
    assert "is not visible" in str(check_data(wanted, offline, tmp_path))
    (tmp_path / "datasets").mkdir()
    with pytest.raises(NotFoundError, match=r"HF_DATASETS_OFFLINE.*'org/MyData'"):
        check_data(wanted, offline, tmp_path)
    (tmp_path / "datasets" / "org___my_data").mkdir()
    assert check_data(wanted, offline, tmp_path) is None
    assert check_data(wanted, environment | {"HF_HOME": str(tmp_path)}, NOWHERE) is None
    assert not Hub.asked


def test_the_hub_is_not_queried_for_data_from_elsewhere(plan: RunPlan, environment: dict[str, str]) -> None:
    assert check_data(plan.recipe.data.source, environment, NOWHERE) is None
    assert check_data(dataset("./folder"), environment, NOWHERE) is None
    assert not Hub.asked


def test_the_token_is_read_from_the_variable_or_from_the_librarys_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("kept\n")
    home = {"HF_HOME": str(tmp_path)}
    assert read_token(home) == "kept"
    assert read_token(home | {"HF_TOKEN": " given "}) == "given"
    (tmp_path / "other").write_text("other")
    assert read_token(home | {"HF_TOKEN_PATH": str(tmp_path / "other")}) == "other"
    assert read_token({"HOME": str(tmp_path / "nobody")}) is None
    assert read_token(home | {"HUGGING_FACE_HUB_TOKEN": "older"}) == "older"
    with pytest.raises(PrerequisiteError, match="HF_TOKEN") as caught:
        read_token({"HF_TOKEN": "two words"})
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("gated", ["model", "data"])
def test_the_first_stage_of_a_job_fails_on_gated_repositories(
    gated: str, plan: RunPlan, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in (environment | {"HF_TOKEN": "unwelcome", "HF_HUB_OFFLINE": "", "HF_HOME": ""}).items():
        monkeypatch.setenv(name, value)
    data = plan.recipe.data.model_copy(update={"source": dataset("org/gated")})
    change = {"model": model("org/gated")} if gated == "model" else {"data": data}
    refused = replace(plan, recipe=plan.recipe.model_copy(update=change))
    refused.layout.logs.mkdir(parents=True)
    refused.layout.plan.write_text(plan_to_json(refused))
    assert prepare_data(refused.layout.plan) == PrerequisiteError.exit_code
    assert "'org/gated' is gated" in capsys.readouterr().err
    assert "unwelcome" not in "".join(path.read_text() for path in refused.layout.root.rglob("*") if path.is_file())


def sources_of(plan: RunPlan, environment: Mapping[str, str]) -> list[str]:
    return [warning for check in source_checks(plan, environment) for warning in check()]


def test_data_is_checked_before_submission_unless_it_is_prepared(plan: RunPlan, environment: dict[str, str]) -> None:
    data = plan.recipe.data.model_copy(update={"source": dataset("org/gated")})
    gated = replace(plan, recipe=plan.recipe.model_copy(update={"data": data}))
    with pytest.raises(PrerequisiteError, match=r"data\.source\.dataset: 'org/gated' is gated"):
        sources_of(gated, environment)
    gated.data.root.mkdir(parents=True)
    PreparedData(gated.data.root).manifest_path.touch()
    assert sources_of(gated, environment) == []


def test_only_the_files_that_a_model_is_loaded_from_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.dumps({"weight_map": {"norm.weight": "model-1-of-1.safetensors"}})
    repository = {
        "config.json": "{}", WEIGHTS_INDEX: index, "model-1-of-1.safetensors": "", "consolidated.safetensors": "",
        "original/model.safetensors": "", "vocab.txt": "", "merges.txt": "", "qwen.tiktoken": "", "tekken.json": "{}",
        "tokenizer.model": "", "additional_chat_templates/tool_use.jinja": "", "pytorch_model.bin": "",
    }  # fmt: skip
    left_out = {"consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin"}

    def snapshot_download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        for name, content in repository.items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text(content)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert readiness.download_weights(ModelSpec(weights="org/model"), {}, NOWHERE) == tmp_path
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == repository.keys() - left_out
    repository[WEIGHTS_INDEX] = "half of"
    assert readiness.download_weights(ModelSpec(weights="org/model"), {}, NOWHERE) == tmp_path
