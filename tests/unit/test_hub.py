"""The hub is a real server on this machine, which answers as Hugging Face's does."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.hub import check_weights, read_token
from ftkit.specs.model import ArchitectureSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPE = ArchitectureSpec(
    family="llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
ANSWERS = {
    "org/open": (307, ""),
    "org/small": (200, ""),
    "org/nowhere": (404, "RepoNotFound"),
    "org/private": (401, ""),
    "org/empty": (404, "EntryNotFound"),
    "org/broken": (503, ""),
}


class Hub(BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012 - one server a test

    def do_HEAD(self) -> None:
        token = self.headers.get("Authorization")
        self.asked.append((self.path, token))
        model, revision = self.path[1:].removesuffix("/config.json").split("/resolve/")
        status, code = ANSWERS.get(model, (200, ""))
        if model == "org/gated" and token != "Bearer right":  # noqa: S105 - a test's
            status, code = (403 if token else 401), "GatedRepo"
        if revision == "gone":
            status, code = 404, "RevisionNotFound"
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 307:
            self.send_header("Location", "http://elsewhere.invalid/config.json")
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
def test_a_model_that_may_be_read_is_passed_and_no_redirect_is_followed(
    weights: str, environment: dict[str, str]
) -> None:
    assert check_weights(model(weights), environment | {"HF_TOKEN": "secret"}, is_here=True) is None
    assert Hub.asked == [(f"/{weights}/resolve/main/config.json", "Bearer secret")]


def test_a_gated_model_is_refused_without_a_token_and_with_one_that_has_no_right(environment: dict[str, str]) -> None:
    with pytest.raises(PrerequisiteError, match="'org/gated' is gated, and there is no token") as caught:
        check_weights(model("org/gated"), environment, is_here=True)
    assert "--hf-token-file" in caught.value.fix
    with pytest.raises(PrerequisiteError, match="your token may not read it") as caught:
        check_weights(model("org/gated"), environment | {"HF_TOKEN": "wrong"}, is_here=True)
    assert "wrong" not in str(caught.value)
    assert check_weights(model("org/gated"), environment | {"HF_TOKEN": "right"}, is_here=True) is None


@pytest.mark.parametrize(
    ("weights", "revision", "message"),
    [
        ("org/nowhere", None, "the hub has no model 'org/nowhere' that can be read without a token"),
        ("org/private", None, "the hub has no model 'org/private'"),
        ("org/empty", None, "'org/empty' has no config.json"),
        ("org/open", "gone", "'org/open' has no revision 'gone'"),
    ],
)
def test_what_is_not_there_is_named(
    weights: str, revision: str | None, message: str, environment: dict[str, str]
) -> None:
    with pytest.raises(NotFoundError, match=message):
        check_weights(model(weights, revision), environment, is_here=True)


def test_a_hub_that_is_out_of_order_or_out_of_reach_is_a_warning(environment: dict[str, str]) -> None:
    assert "answered 503" in str(check_weights(model("org/broken"), environment, is_here=True))
    unreachable = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "can't ask the hub" in str(check_weights(model("org/open"), unreachable, is_here=True))


def test_nobody_is_asked_offline_or_for_random_weights(environment: dict[str, str]) -> None:
    assert check_weights(model("org/nowhere"), environment | {"HF_HUB_OFFLINE": "1"}, is_here=True) is None
    tokenizer = {"source": "trained", "vocab_size": 320}
    random = ModelSpec.model_validate({"weights": "random", "architecture": SHAPE, "tokenizer": tokenizer})
    assert check_weights(random, environment, is_here=True) is None
    assert not Hub.asked


def test_a_folder_must_hold_a_configuration_and_weights(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    assert "not to be seen from here" in str(check_weights(model(str(folder)), {}, is_here=False))
    with pytest.raises(NotFoundError, match=r"has no config\.json and no safetensors files"):
        check_weights(model(str(folder)), {}, is_here=True)
    folder.mkdir()
    (folder / "config.json").touch()
    with pytest.raises(NotFoundError, match="has no safetensors files"):
        check_weights(model(str(folder)), {}, is_here=False)
    (folder / "model.safetensors").touch()
    assert check_weights(model(str(folder)), {}, is_here=True) is None


def test_the_token_comes_from_the_variable_or_from_the_file_that_the_library_keeps(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("kept\n")
    home = {"HF_HOME": str(tmp_path)}
    assert read_token(home) == "kept"
    assert read_token(home | {"HF_TOKEN": " given "}) == "given"
    (tmp_path / "other").write_text("other")
    assert read_token(home | {"HF_TOKEN_PATH": str(tmp_path / "other")}) == "other"
    assert read_token({"HOME": str(tmp_path / "nobody")}) is None
