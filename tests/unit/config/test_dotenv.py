from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftkit
from ftkit.cli.forward import SECRETS
from ftkit.config.context import ALLOWED, load_dotenv, read_dotenv
from ftkit.errors import ConfigError


def read(folder: Path, text: str) -> dict[str, str]:
    (folder / ".env").write_text(text)
    return read_dotenv(folder)


def test_common_dotenv_syntax_is_parsed(tmp_path: Path) -> None:
    text = """
# of the hub
HF_TOKEN=hf_abc#def   # a comment
export WANDB_API_KEY = 'a "b" $c'
WANDB_NOTES="it's two words" # a comment
WANDB_NAME=two words # a comment
WANDB_MODE=
"""
    assert read(tmp_path, text) == {
        "HF_TOKEN": "hf_abc#def",
        "WANDB_API_KEY": 'a "b" $c',
        "WANDB_NOTES": "it's two words",
        "WANDB_NAME": "two words",
        "WANDB_MODE": "",
    }
    assert read(tmp_path, "\ufeffWANDB_NAME=1\r\nHF_TOKEN=2\r\n") == {"WANDB_NAME": "1", "HF_TOKEN": "2"}
    assert read_dotenv(tmp_path / "nowhere") == {}


def test_the_environment_overrides_dotenv(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=file\nWANDB_NAME=file\n")
    environment = {"HF_TOKEN": "shell"}
    load_dotenv(tmp_path, environment)
    assert environment == {"HF_TOKEN": "shell", "WANDB_NAME": "file"}


def test_all_invalid_lines_are_reported_without_their_values(tmp_path: Path) -> None:
    lines = [
        "HF_TOKEN=fine",
        "hf_secret1",
        "HF_TOKEN='hf_secret2",
        "WANDB_API_KEY=hf_$secret3",
        "LD_PRELOAD=/secret4.so",
        'WANDB_NAME="x" secret5',
    ]
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "\n".join(lines))
    assert [problem.where.rpartition(":")[2] for problem in raised.value.problems] == ["2", "3", "4", "5", "6"]
    assert "secret" not in str(raised.value)


NAMES = """
ALL_PROXY AWS_CA_BUNDLE AWS_CONFIG_FILE AWS_ENDPOINT_URL AWS_PROFILE BASH_ENV CC CUDA_HOME CURL_CA_BUNDLE CXX
DOCKER_CONFIG DOCKER_HOST ENROOT_CONFIG_PATH ENV FTKIT_CACHE_DIR FTKIT_CLUSTER FTKIT_GGUF_CONVERTER FTKIT_IMAGE
FTKIT_METRICS_PORT FTKIT_REGISTRY FTKIT_RUN_DIR FTKIT_WORKSPACE GIT_CONFIG_COUNT GIT_CONFIG_KEY_0 GIT_CONFIG_VALUE_0
GIT_DIR GIT_EXTERNAL_DIFF GIT_SSH_COMMAND GOOGLE_APPLICATION_CREDENTIALS HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_TOKEN_PATH
HOME HTTPS_PROXY HTTP_PROXY IFS LD_LIBRARY_PATH LD_PRELOAD MLFLOW_TRACKING_INSECURE_TLS MLFLOW_TRACKING_URI
NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NETRC NO_PROXY PAGER PATH PIP_INDEX_URL PYTHONPATH PYTHONSTARTUP REQUESTS_CA_BUNDLE
SBATCH_EXPORT SHELL SLURM_CONF SSL_CERT_FILE TMPDIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TRITON_PTXAS_PATH
WANDB_BASE_URL WANDB_CONFIG_DIR WANDB_DIR WANDB__EXECUTABLE XDG_CONFIG_HOME https_proxy hf_token Hf_Token OF_MY_OWN
"""
REFUSED = NAMES.split()


def test_variables_that_could_run_programs_or_redirect_connections_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "\n".join(f"export {name}=/secret" for name in REFUSED))
    expected = [(f"{tmp_path}/.env:{line}", name) for line, name in enumerate(REFUSED, 1)]
    assert [(problem.where, problem.key) for problem in raised.value.problems] == expected
    assert "secret" not in str(raised.value)


def test_nothing_of_a_file_with_a_refused_variable_is_set(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=a\nCC=/evil\n")
    environment: dict[str, str] = {}
    with pytest.raises(ConfigError):
        load_dotenv(tmp_path, environment)
    assert environment == {}


def test_credentials_and_settings_of_trackers_and_the_hub_are_accepted_and_documented(tmp_path: Path) -> None:
    assert read(tmp_path, "\n".join(f"{name}=x" for name in ALLOWED)).keys() == ALLOWED
    assert set(SECRETS) <= ALLOWED
    page = Path(ftkit.__file__).parents[1] / "docs/reference/security.md"
    assert ALLOWED - set(re.findall(r"`(\w+)`", page.read_text(encoding="utf-8"))) == set()


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r\0'")))
def test_single_quoted_values_are_literal(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / ".env").write_bytes(f"WANDB_NOTES='{value}'\n".encode())
    assert read_dotenv(folder) == {"WANDB_NOTES": value}
    (folder / ".env").unlink()
